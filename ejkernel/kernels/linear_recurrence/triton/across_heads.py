"""Gradients of queries and keys that many heads with one gate each share, added up before they are written.

The states of every chunk are stored first. A chunk is then a program, which goes through the heads instead of the time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import F32, Tile, padded, shape
from ejkernel.kernels.linear_recurrence.triton.gates import Gates
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher, device
from ejkernel.kernels.linear_recurrence.triton.walks import Shape, walk

# Heads that share a query and key, from which on this is faster than a walk for each of them.
FEWEST = 32
_TILE = Tile(128, 4, 2)


def pays(launcher: Launcher, query: jax.Array, key: jax.Array) -> bool:
    """Whether the gradients of a call, that of its gates among them, are taken here: where it was timed on a GPU."""
    call, plan = launcher.call, launcher.plan
    shared = query.shape[2] == key.shape[2] and call.heads >= FEWEST * key.shape[2]
    timed = call.decay == "head" and launcher.by_token and call.value_dim <= 64 and not plan.segmented(call)
    return shared and timed and launcher.blocks(plan.config.chunk) * key.shape[2] >= plan.config.fill


def gradients(
    launcher: Launcher,
    arrays: Any,
    gates: Gates,
    first: jax.Array | None,
    doutput: jax.Array,
    dlast: jax.Array | None,
    ended: jax.Array,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """Gradients of query and key, their row dots, and ⟨S, dS⟩ at the ends of groups, as walks with row dots leave them.

    `ended` are the gradients of the states that chunks end with.
    """
    query, key, value = arrays[:3]
    tile = launcher.config.segments or launcher.config.output
    forward = walk(launcher, "segment", None, key, value, gates, first, tile=tile, last=True, every_chunk=True)
    dquery, query_dots = _add(launcher, doutput, value, key, query, gates, forward.borders)
    dkey, key_dots = _add(launcher, value, doutput, query, key, gates, ended, reverse=True)
    return dquery, dkey, (query_dots, key_dots), _meet(launcher, forward.borders, ended, forward.last, dlast)


def _add(
    launcher: Launcher,
    x: jax.Array,
    y: jax.Array,
    z: jax.Array,
    w: jax.Array,
    gates: Gates,
    states: jax.Array,
    reverse: bool = False,
) -> list[jax.Array]:
    """Gradient of the query or, in reverse, of the key, and each head's row dots."""
    call, chunk, heads = launcher.call, launcher.config.chunk, z.shape[2]
    sizes = Shape(
        heads=call.heads,
        x_heads=x.shape[2],
        y_heads=y.shape[2],
        z_heads=heads,
        w_heads=heads,
        x_dim=call.value_dim,
        z_dim=call.key_dim,
        x_block=padded(call.value_dim),
        z_block=padded(call.key_dim),
        chunk=chunk,
        group=1,
        whole=launcher.whole,
        segmented=False,
        flip=call.reverse,
    )
    return launcher.launch(
        device("across_heads").add_across_heads,
        *(x, y, z, w, gates.within, states),
        outputs=[
            shape(call.batch, call.tokens, heads, call.key_dim, dtype=call.dtype),
            shape(call.batch, call.tokens, 1, call.heads),
        ],
        programs=launcher.blocks(chunk) * heads,
        tile=_TILE,
        length=chunk,
        SHAPE=sizes,
        SCALE=float(call.scale),
        REVERSE=reverse,
    )


def _meet(
    launcher: Launcher, began: jax.Array, ended: jax.Array, last: jax.Array, dlast: jax.Array | None
) -> jax.Array:
    """⟨S, dS⟩ at the later end of each group, in units of the scale, as the gradients of states are stored."""
    call, group = launcher.call, launcher.plan.group
    began, ended = (each.reshape(call.batch, -1, *each.shape[1:]) for each in (began, ended))
    inner = (began[:, group::group].astype(F32) * ended[:, group - 1 : -1 : group].astype(F32)).sum((3, 4))
    outer = jnp.zeros_like(inner[:, :1]) if dlast is None else ((last * dlast).sum((2, 3)) / call.scale)[:, None]
    return jnp.concatenate([inner, outer], 1).reshape(-1, call.heads, 1)
