"""Gradients of queries and keys that many heads with one gate each share, added up before they are written.

The states before every chunk are stored first. A program then has one chunk and goes through the heads, instead of one
head and the chunks. Kept by its 16 % on `simple_gla` with gradients at Mamba-2's heads, 64 of `K128 V64` on one query
and key.
"""

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.linear_recurrence.triton.gates import Gates
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher, device
from ejkernel.kernels.linear_recurrence.triton.walks import walk

# From so many heads that share a query and key this is faster than a walk for each of them.
FEWEST = 32
_TILE = Tile(128, stages=2)


def applies(launcher: Launcher, query: jax.Array, key: jax.Array) -> bool:
    """Whether this computes the gradients of a call whose gates have one: for calls that were timed on a GPU."""
    call, plan = launcher.call, launcher.plan
    shared = query.shape[2] == key.shape[2] and call.heads >= FEWEST * key.shape[2]
    timed = call.decay == "head" and launcher.by_token and call.value_dim <= 64 and not plan.segmented(call)
    timed = timed and not call.segmented
    return shared and timed and launcher.blocks(plan.config.chunk) * key.shape[2] >= plan.config.fill


def gradients(
    launcher: Launcher,
    x: Inputs,
    gates: Gates,
    first: jax.Array | None,
    d_output: jax.Array,
    d_final: jax.Array | None,
    ended: jax.Array,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """Gradients of query and key, their row dots, and ⟨S, dS⟩ at the ends of groups, as walks with row dots store them.

    `ended` are the gradients of the states that chunks end with.
    """
    tile = launcher.config.segments or launcher.config.output
    forward = walk(launcher, "segment", None, x.key, x.value, gates, first, tile=tile, last=True, every_chunk=True)
    of_query = {"x": d_output, "y": x.value, "z": x.key, "w": x.query, "state": forward.border}
    of_key = {"x": x.value, "y": d_output, "z": x.query, "w": x.key, "state": ended}
    d_query, query_dots = _add(launcher, gates, of_query)
    d_key, key_dots = _add(launcher, gates, of_key, reverse=True)
    product = _product(launcher, forward.border, ended, forward.final, d_final)
    return d_query, d_key, (query_dots, key_dots), product


def _add(
    launcher: Launcher, gates: Gates, operands: dict[str, jax.Array], reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gradient of the query or, in reverse, of the key, and each head's row dots."""
    call, chunk, heads = launcher.call, launcher.config.chunk, operands["z"].shape[2]
    output, dots = launcher.launch(
        device("across_heads").add_across_heads,
        operands | {"within": gates.within},
        {
            "output": shape(call.batch, call.tokens, heads, call.key_dim, dtype=call.dtype),
            "row_dots": shape(call.batch, call.tokens, 1, call.heads),
        },
        programs=launcher.blocks(chunk) * heads,
        tile=_TILE,
        length=chunk,
        key_heads=heads,
        key_block=padded(call.key_dim),
        value_block=padded(call.value_dim),
        reverse=reverse,
    )
    return output, dots


def _product(
    launcher: Launcher, began: jax.Array, ended: jax.Array, final: jax.Array, d_final: jax.Array | None
) -> jax.Array:
    """⟨S, dS⟩ at the later end of each group, unscaled, as the gradients of states are."""
    call, group = launcher.call, launcher.plan.group
    began, ended = (each.reshape(call.batch, -1, *each.shape[1:]) for each in (began, ended))
    inner = (began[:, group::group].astype(F32) * ended[:, group - 1 : -1 : group].astype(F32)).sum((3, 4))
    outer = jnp.zeros_like(inner[:, :1]) if d_final is None else ((final * d_final).sum((2, 3)) / call.scale)[:, None]
    return jnp.concatenate([inner, outer], 1).reshape(-1, call.heads, 1)
