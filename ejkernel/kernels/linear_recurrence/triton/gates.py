"""Gates on their way to the walks and back: the launches that fold them, and those that give their gradient."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher, device
from ejkernel.xla_utils.utils import cdiv

# Heads that a program of bounded gates goes through, where any is flagged and programs are many: fewer heads fill the
# chip more evenly, more are fewer programs that find nothing to do.
HEADS_OF_BOUNDED = 4


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


def _of_bounded(launcher: Launcher, tile: Tile, length: int, parts: bool = False) -> tuple[int, dict[str, int]]:
    """Programs of a kernel of bounded gates over blocks of `length` tokens, and how it is cut.

    That is key dims at once, which make `parts` with programs of their own or not; dims of each row that a thread has,
    which are two at least, as Triton would give threads tokens first; and heads.
    """
    call, config = launcher.call, launcher.config
    width = min(tile.rows, padded(call.key_dim))
    programs = launcher.blocks(length) * call.heads * (cdiv(call.key_dim, width) if parts else 1)
    heads = math.gcd(call.heads, HEADS_OF_BOUNDED) if programs >= 4 * HEADS_OF_BOUNDED * config.fill else 1
    dims = max(2, config.chunk * width // (32 * tile.warps * 8))
    return programs // heads, {"key_block": width, "dims": dims, "log_rows": 3, "heads_at_once": heads}


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
    gates = Gates(factors=found.factors, late=found.late, flag=found.flag, any_flag=found.any_flag)
    if limit:
        return found.q_hat, found.k_hat, gates
    scores = {**hats, "score": launcher.kept(chunk, dtype=dtype)}
    programs, cut = _of_bounded(launcher, config.bounded, chunk)
    bounded = launcher.launch(
        device("bounded_key_gates").bounded_scores,
        given | {"any_flag": found.any_flag},
        {**scores, "factors": shape(*found.factors.shape), "flag": launcher.flags()},
        programs=programs,
        tile=config.bounded,
        in_place={name: getattr(found, name) for name in ("q_hat", "k_hat", "factors", "flag")},
        **cut,
        **shared,
    )
    exact = launcher.launch(
        device("strong_key_gates").exact_scores,
        given | {"flag": bounded.flag, "any_flag": found.any_flag},
        scores,
        programs=chunks * heads // _heads_at_once(heads),
        tile=config.exact,
        in_place={name: getattr(bounded, name) for name in scores},
        heads_at_once=_heads_at_once(heads),
        bounded=True,
        **_rows(launcher, config.exact, 4),
        **shared,
    )
    gates = replace(gates, within=exact.score, factors=bounded.factors, flag=bounded.flag)
    return exact.q_hat, exact.k_hat, gates


def _exact_gradients(
    launcher: Launcher,
    x: Inputs,
    gates: Gates,
    d_output: jax.Array,
    hats: Hats,
    outputs: dict[str, jax.ShapeDtypeStruct],
    bounded: Any = None,
) -> Any:
    """Summands of the gates' gradient, in place of dq̂, and gradients of query and key, all of flagged chunks alone.

    Of the bounded ones among them `bounded` may have them, and then this completes it.
    """
    call, config = launcher.call, launcher.config
    chunk, heads = config.chunk, _heads_at_once(call.heads)
    programs = launcher.blocks(chunk) * call.heads // heads
    # three tiles are added up at once, where the scores are one
    tile = Tile(config.exact.rows, warps=2 * config.exact.warps)
    before = {"summand": hats.d_query}
    if bounded:
        before = {name: getattr(bounded, name) for name in ("summand", "d_query", "d_key")}
    return launcher.launch(
        device("strong_key_gates").exact_gradients,
        _given(x, gates, d_output, hats._replace(d_query=before["summand"])),
        # and where each program keeps the gradients of a chunk's scores
        outputs | {"d_score": shape(programs, chunk, chunk)},
        programs=programs,
        tile=tile,
        length=chunk,
        in_place=before,
        heads_at_once=heads,
        bounded=bounded is not None,
        **_sizes(launcher, x, d_output, hats),
        **_rows(launcher, tile, 2),
    )


def _bounded_gradients(
    launcher: Launcher,
    x: Inputs,
    gates: Gates,
    d_output: jax.Array,
    hats: Hats,
    outputs: dict[str, jax.ShapeDtypeStruct],
) -> Any:
    """What `_exact_gradients` gives, of bounded chunks alone, and gates' gradients where a group has no others."""
    tile, length = launcher.config.bounded_gradients, launcher.config.chunk * launcher.plan.group
    programs, cut = _of_bounded(launcher, tile, length, parts=True)
    assert x.log_decay is not None
    return launcher.launch(
        device("bounded_key_gates").bounded_gradients,
        _given(x, gates, d_output, hats) | {"met": hats.met},
        outputs | {"d_gate": shape(*x.log_decay.shape, dtype=x.log_decay.dtype)},
        programs=programs,
        tile=tile,
        length=length,
        in_place={"summand": hats.d_query},
        met_parts=hats.met.shape[2],
        **cut,
        **_sizes(launcher, x, d_output, hats),
    )


def _given(x: Inputs, gates: Gates, d_output: jax.Array, hats: Hats) -> dict[str, Any]:
    """What gradients of flagged chunks are made of."""
    return {
        **{"query": x.query, "key": x.key, "value": x.value, "gate": x.log_decay, "d_output": d_output},
        **{"flag": gates.flag, "any_flag": gates.any_flag, "dq_hat": hats.d_query, "dk_hat": hats.d_key},
    }


def _sizes(launcher: Launcher, x: Inputs, d_output: jax.Array, hats: Hats) -> dict[str, Any]:
    """The sizes of that, and how much of it is loaded at once."""
    return {
        "parts": hats.d_query.shape[-1] // launcher.call.key_dim,
        "query_heads": x.query.shape[2],
        "key_heads": x.key.shape[2],
        "value_heads": x.value.shape[2],
        "output_heads": d_output.shape[2],
        "start": x.initial_state is not None,
        "value_block": min(2 * launcher.config.exact.rows, padded(launcher.call.value_dim)),
    }


def unfold_queries(
    launcher: Launcher, x: Inputs, gates: Gates, d_output: jax.Array, dq_hat: jax.Array, k_hat: jax.Array
) -> jax.Array:
    """The gradient of the query alone, from that of the folded query; of what the query is, nothing is used."""
    result = shape(*dq_hat.shape, dtype=launcher.call.dtype)
    outputs = {"summand": shape(*dq_hat.shape), "d_query": result, "d_key": result}
    # anything may stand for what is of the key
    hats = Hats(k_hat, k_hat, dq_hat, k_hat, k_hat)
    exact = _exact_gradients(launcher, x, gates, d_output, hats, outputs)
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
    outputs = {"summand": shape(*hats.d_query.shape), "d_query": d_query, "d_key": d_key}
    bounded = _bounded_gradients(launcher, x, gates, d_output, hats, outputs)
    exact = _exact_gradients(launcher, x, gates, d_output, hats, outputs, bounded)
    flagged = {"d_query": exact.d_query, "d_key": exact.d_key, "d_gate": bounded.d_gate}
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
    """Gradients of query, key and gates; of flagged chunks they may be there."""
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
        bounded=flagged is not None,
    )
