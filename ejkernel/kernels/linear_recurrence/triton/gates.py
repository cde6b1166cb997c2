"""Gates on their way to the walks and back: the launches that fold them, and those that give their gradient."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher, device
from ejkernel.xla_utils.utils import cdiv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gates:
    """The decays as the walks read them; which are there depends on the kind of decay."""

    within: jax.Array | None = None  # constant: gates [N, H]; head: weights [chunks, H, C, 4]; key: scores [.., C, C]
    factors: jax.Array | None = None  # decays of a state through each chunk [chunks, H, 2], or both ways [.., 4, K]
    flag: jax.Array | None = None  # whether a chunk's gates are too strong for one reference [chunks, H]
    any_flag: jax.Array | None = None  # of listed chunks, by where they begin [chunks, H]
    late: jax.Array | None = None  # key: log decay of each chunk's later half [chunks, H, K]


class Hats(NamedTuple):
    """Queries and keys with their gates folded in, their gradients, and ⟨S, dS⟩ of key dims at the ends of groups."""

    query: jax.Array
    key: jax.Array
    d_query: jax.Array
    d_key: jax.Array
    met: jax.Array


def fold_head_gates(launcher: Launcher, log_decay: jax.Array) -> Gates:
    """One gate a head as the walks read it."""
    config, heads = launcher.config, launcher.call.heads
    chunk, chunks = config.chunk, launcher.blocks(config.chunk)
    block = min(4, 1 << (heads - 1).bit_length())
    found = launcher.launch(
        device("head_gates").fold_head_gates,
        {"gate": log_decay},
        {
            "weights": launcher.kept(4),
            "factors": shape(chunks, heads, 2),
            "flag": launcher.flags(),
            "any_flag": launcher.any_flags(),
        },
        programs=chunks * cdiv(heads, block),
        tile=Tile(block, warps=1),
        length=chunk,
        head_block=block,
        limit=config.limit,
    )
    return Gates(found.weights, found.factors, found.flag, any_flag=found.any_flag)


def head_gate_gradient(
    launcher: Launcher,
    log_decay: jax.Array,
    query_dots: jax.Array,
    key_dots: jax.Array,
    met: jax.Array,
    first: jax.Array | None,
) -> jax.Array:
    """The gradient of one gate a head and token, from what the walks of query and key leave."""
    call, length = launcher.call, launcher.config.chunk * launcher.plan.group
    block = min(4, 1 << (call.heads - 1).bit_length())
    dtype = log_decay.dtype if call.decay == "head" else F32
    (d_gate,) = launcher.launch(
        device("head_gates").sum_head_gates,
        {"gate": log_decay, "query_dots": query_dots, "key_dots": key_dots, "border": met, "first": first},
        {"d_gate": shape(call.batch, call.tokens, call.heads, dtype=dtype)},
        programs=launcher.blocks(length) * cdiv(call.heads, block),
        tile=Tile(block, warps=8),
        length=length,
        head_block=block,
        parts=query_dots.shape[2],
        fine=call.decay == "constant" and call.dtype == F32,
        start=first is not None,
    )
    return d_gate


def _columns(dim: int, most: int = 128) -> tuple[int, int]:
    """Dims that a program of one warp streams, and how many such programs a head has."""
    width = min(most, padded(dim))
    return width, cdiv(dim, width)


def _heads_at_once(heads: int) -> int:
    """Heads that one program of the exact path looks after."""
    return math.gcd(heads, 8)


def _rows(launcher: Launcher, tile: Tile, dims: int) -> dict[str, int]:
    """Key dims that the exact path takes at once, and log₂ of the rows that a thread has, with so many dims of each."""
    width = min(tile.rows, padded(launcher.call.key_dim))
    rows = max(1, launcher.config.chunk * width // (32 * tile.warps * dims))
    return {"key_block": width, "log_rows": rows.bit_length() - 1}


def fold_key_gates(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array | None,
    start: bool,
    limit: float | None = None,
) -> tuple[jax.Array, jax.Array, Gates]:
    """Queries and keys with their gates folded in, and what is left of the gates.

    With `limit` stronger ones are flagged and nothing more.
    """
    call, config = launcher.call, launcher.config
    chunk, chunks, heads, dim = config.chunk, launcher.blocks(config.chunk), call.heads, call.key_dim
    # float16 has too small a range for folded gates
    dtype = F32 if call.dtype == jnp.float16 else call.dtype
    hats = {"q_hat": launcher.rows(dim, dtype), "k_hat": launcher.rows(dim, dtype)}
    given = {"query": query, "key": key, "gate": log_decay}
    shared: dict[str, Any] = {"length": chunk, "start": start}
    shared |= {"query_heads": query.shape[2], "key_heads": key.shape[2]}
    found = launcher.launch(
        device("key_gates").fold_gates,
        given,
        {
            **hats,
            # of listed chunks, also 1 for those that leave a state as it is
            "factors": shape(chunks, heads, 4 + launcher.call.segmented, dim),
            # listed chunks may be more than what states are kept of, and sum it up themselves
            "late": None if launcher.call.segmented else shape(chunks, heads, dim),
            "flag": launcher.flags(),
            "any_flag": launcher.any_flags(),
        },
        programs=chunks * heads,
        tile=Tile(padded(dim), warps=max(1, padded(dim) // 128)),
        key_block=padded(dim),
        limit=limit or config.limit,
        **shared,
    )
    gates = {"factors": found.factors, "late": found.late, "flag": found.flag, "any_flag": found.any_flag}
    if limit:
        return found.q_hat, found.k_hat, Gates(**gates)
    exact = launcher.launch(
        device("strong_key_gates").exact_scores,
        given | {"flag": found.flag, "any_flag": found.any_flag},
        {**hats, "score": launcher.kept(chunk, dtype=dtype)},
        programs=chunks * heads // _heads_at_once(heads),
        tile=config.exact,
        in_place={"q_hat": found.q_hat, "k_hat": found.k_hat},
        heads_at_once=_heads_at_once(heads),
        **_rows(launcher, config.exact, 4),
        **shared,
    )
    return exact.q_hat, exact.k_hat, Gates(within=exact.score, **gates)


def _exact_gradients(
    launcher: Launcher,
    x: Inputs,
    gates: Gates,
    d_output: jax.Array,
    dq_hat: jax.Array,
    dk_hat: jax.Array,
    d_query: jax.ShapeDtypeStruct,
    d_key: jax.ShapeDtypeStruct,
) -> Any:
    """Summands of the gates' gradient, in place of dq̂, and gradients of query and key, all of flagged chunks alone."""
    call, config = launcher.call, launcher.config
    chunk, heads = config.chunk, _heads_at_once(call.heads)
    programs = launcher.blocks(chunk) * call.heads // heads
    # three tiles are added up at once, where the scores are one
    tile = Tile(config.exact.rows, warps=2 * config.exact.warps)
    return launcher.launch(
        device("strong_key_gates").exact_gradients,
        {
            **{"query": x.query, "key": x.key, "value": x.value, "gate": x.log_decay, "d_output": d_output},
            **{"flag": gates.flag, "any_flag": gates.any_flag, "dq_hat": dq_hat, "dk_hat": dk_hat},
        },
        {
            "summand": shape(*dq_hat.shape),
            "d_query": d_query,
            "d_key": d_key,
            # where each program keeps the gradients of a chunk's scores
            "d_score": shape(programs, chunk, chunk),
        },
        programs=programs,
        tile=tile,
        length=chunk,
        in_place={"summand": dq_hat},
        heads_at_once=heads,
        parts=dq_hat.shape[-1] // call.key_dim,
        query_heads=x.query.shape[2],
        key_heads=x.key.shape[2],
        value_heads=x.value.shape[2],
        output_heads=d_output.shape[2],
        start=x.initial_state is not None,
        value_block=min(2 * config.exact.rows, padded(call.value_dim)),
        **_rows(launcher, tile, 2),
    )


def unfold_queries(
    launcher: Launcher, x: Inputs, gates: Gates, d_output: jax.Array, dq_hat: jax.Array, k_hat: jax.Array
) -> jax.Array:
    """The gradient of the query alone, from that of the folded query; of what the query is, nothing is used."""
    result = shape(*dq_hat.shape, dtype=launcher.call.dtype)
    # anything may stand for the gradient of the key
    exact = _exact_gradients(launcher, x, gates, d_output, dq_hat, k_hat, result, result)
    return unfold_rows(launcher, x.log_decay, gates, exact.summand, exact.d_query)


def unfold_rows(
    launcher: Launcher, log_decay: jax.Array | None, gates: Gates, dq_hat: jax.Array, d_query: jax.Array | None = None
) -> jax.Array:
    """The gradient of the query from that of the folded query; `d_query` is that of flagged chunks, if there are."""
    call, chunk = launcher.call, launcher.config.chunk
    width, parts = _columns(call.key_dim)
    (found,) = launcher.launch(
        device("key_gates").unfold_rows,
        {"gate": log_decay, "hat": dq_hat, "late": gates.late, "flag": gates.flag},
        {"d_query": shape(*dq_hat.shape, dtype=call.dtype)},
        programs=launcher.blocks(chunk) * call.heads * parts,
        tile=Tile(width, warps=1),
        length=chunk,
        in_place=None if d_query is None else {"d_query": d_query},
        key_block=width,
    )
    return found


def unfold_key_gates(launcher: Launcher, x: Inputs, gates: Gates, d_output: jax.Array, hats: Hats, dtype: Any) -> Any:
    """Gradients of query, key and key gates from those of the folded query and key."""
    d_query = d_key = launcher.rows(launcher.call.key_dim, dtype)
    exact = _exact_gradients(launcher, x, gates, d_output, hats.d_query, hats.d_key, d_query, d_key)
    flagged = {"d_query": exact.d_query, "d_key": exact.d_key}
    return unfold_all(launcher, x.log_decay, gates, hats._replace(d_query=exact.summand), d_query, d_key, flagged)


def unfold_all(
    launcher: Launcher,
    log_decay: jax.Array | None,
    gates: Gates,
    hats: Hats,
    d_query: jax.ShapeDtypeStruct,
    d_key: jax.ShapeDtypeStruct,
    flagged: dict[str, jax.Array] | None = None,
) -> Any:
    """Gradients of query, key and gates; those of query and key may be there of flagged chunks."""
    call, config = launcher.call, launcher.config
    assert log_decay is not None
    group = config.chunk * launcher.plan.group
    groups = launcher.blocks(group) * call.heads
    # few programs have too little of memory on its way at once
    width, parts = _columns(call.key_dim, config.unfold if groups * cdiv(call.key_dim, 128) < 8 * config.fill else 128)
    return launcher.launch(
        device("key_gates").unfold_gates,
        {
            **{"gate": log_decay, "late": gates.late, "flag": gates.flag, "factors": gates.factors},
            **{"q_hat": hats.query, "k_hat": hats.key, "dq_hat": hats.d_query, "dk_hat": hats.d_key, "met": hats.met},
        },
        {"d_query": d_query, "d_key": d_key, "d_gate": shape(*d_query.shape, dtype=log_decay.dtype)},
        programs=groups * parts,
        tile=Tile(width, warps=1),
        length=group,
        in_place=flagged,
        key_block=width,
        parts=hats.d_query.shape[-1] // call.key_dim,
        met_parts=hats.met.shape[2],
    )
