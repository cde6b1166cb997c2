"""The triangular systems of a call's chunks: the launches that solve them, and decay queries and keys on the way."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from ejkernel.kernels._launch import Tile, padded
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, device
from ejkernel.xla_utils.utils import cdiv

# How many numbers each row of a chunk has, which the device code's `decays` lists.
SCALARS = 5
# Where gates are bounded: key dims that a program takes at once, and heads that it visits one after the other. More
# heads make fewer programs that have nothing to do in other calls.
BOUNDED_DIMS = 64
HEADS_OF_BOUNDED = 4


class Folded(NamedTuple):
    """Queries and keys as the walks read them.

    With one gate a key dim, decays are folded into them, relative to the chunk's middle or its ends. Otherwise they
    are the call's own, and the walks apply the decays of the rows.
    """

    query_since: jax.Array  # decayed since the reference [B, T, H, K]
    key_since: jax.Array  # decayed since the reference [B, T, H, K]
    key_until: jax.Array | None = None  # decayed until the reference [B, T, H, K]
    state_decays: jax.Array | None = None  # up to the reference, between references, after it [chunks, H, 3, K]
    strength: jax.Array | None = None  # of a chunk's gates, as the device code's `gate_strength` has it [chunks, H]
    any_strong: jax.Array | None = None  # of listed chunks: whether any that begins here has strong gates


class Systems(NamedTuple):
    """Solutions of the chunks' systems `I + M`."""

    solved_scores: jax.Array  # P (I + M)⁻¹ [chunks, H, C, C]
    inverse: jax.Array | None  # (I + M)⁻¹ [chunks, H, C, C]
    inverse_transposed: jax.Array  # for the backward [chunks, H, C, C]
    row_scalars: jax.Array  # as the device code's `decays` lists them [chunks, H, 5, C]
    row_squares: jax.Array | None = None  # sums of squares of M's rows, which tell where keys coincide [chunks, H, C]
    weak: jax.Array | None = None  # with one gate a head: whether gates are so weak that keys may coincide [chunks, H]
    any_weak: jax.Array | None = None  # of listed chunks: whether any that begins here has weak gates
    system_roundoff: jax.Array | None = None  # what rounding took off the first two, as one matrix [chunks, H, C, C]


def solve(
    launcher: Launcher, keep: bool, query: jax.Array, key: jax.Array, beta: jax.Array, log_decay: jax.Array | None
) -> tuple[Systems, Folded]:
    """The systems' solutions, and queries and keys as the walks read them; `keep` stores what the backward needs."""
    inputs = {"query": query, "key": key, "beta": beta, "gate": log_decay}
    if launcher.call.decay == "key":
        return _solve_keyed(launcher, keep, inputs)
    chunk, heads = launcher.config.chunk, launcher.call.heads
    rows = None if log_decay is None else _prepare_rows(launcher, beta, log_decay)
    # residuals take the registers that further heads would need, and so does the place of a listed chunk
    each = 1 if keep or launcher.call.segmented else launcher.heads_per_program()
    outputs = _outputs(launcher, keep)
    if rows is not None:
        outputs["row_squares"] = None
    solved = launcher.launch(
        device("system").solve,
        inputs | {"head_scalars": None if rows is None else rows.row_scalars},
        outputs | {"row_scalars": launcher.row_scalars(SCALARS) if rows is None else None},
        programs=launcher.blocks(chunk) * heads // each,
        tile=launcher.config.system,
        length=chunk,
        residuals=keep,
        key_block=padded(launcher.call.key_dim),
        heads_per_program=each,
    )
    if rows is None:
        return _systems(solved, solved), Folded(query, key)
    return _systems(solved, rows)._replace(weak=rows.weak, any_weak=rows.any_weak), Folded(query, key)


def _outputs(launcher: Launcher, keep: bool) -> dict[str, Any]:
    """The outputs of all kernels that solve systems."""
    chunk = launcher.config.chunk
    matrix = launcher.kept(chunk)
    return {
        "solved_scores": launcher.kept(chunk, dtype=launcher.call.dtype),
        "inverse": matrix,
        "inverse_transposed": matrix if keep else None,
        "row_squares": launcher.kept() if launcher.constants.keys_may_coincide else None,
    }


def _solve_keyed(launcher: Launcher, keep: bool, inputs: dict[str, Any]) -> tuple[Systems, Folded]:
    """`solve` with one gate a key dim."""
    call, config = launcher.call, launcher.config
    blocks = launcher.blocks(config.chunk)
    outputs = _outputs(launcher, keep)
    row_squares, row_scalars = outputs.pop("row_squares"), launcher.row_scalars(SCALARS)
    folded = dict.fromkeys(("query_since", "key_since", "key_until"), launcher.rows(call.key_dim, call.dtype))
    # listed chunks also have a row of ones, for those that pass no state on
    folded["state_decays"] = launcher.chunked(3 + call.segmented, call.key_dim)
    options: dict[str, Any] = {"length": config.chunk, "residuals": keep}
    exact = options | {"tile": config.gated, "key_block": min(config.gated.rows, padded(call.key_dim))}
    kernel = device("key_gates").solve_keyed
    if not launcher.constants.middle:
        every = outputs | folded | {"row_scalars": row_scalars}
        solved = launcher.launch(kernel, inputs, every, programs=blocks * call.heads, **exact)
        return _systems(solved, solved), _folded(solved)
    # mild gates first, then the chunks whose gates are bounded, then those whose gates are too strong for that
    strength = {"strength": launcher.flags(), "any_strong": launcher.any_flags()}
    bounded = options | {"part_block": min(BOUNDED_DIMS, padded(call.key_dim))}
    first = launcher.launch(
        device("folding").solve_folded,
        inputs,
        outputs | {"row_squares": row_squares} | folded | {"row_scalars": row_scalars} | strength,
        programs=blocks * call.heads,
        tile=Tile(padded(call.key_dim)),
        key_block=padded(call.key_dim),
        **bounded,
    )
    solved = first
    if not launcher.constants.blackwell_safe:
        heads = math.gcd(call.heads, HEADS_OF_BOUNDED)
        solved = launcher.launch(
            device("bounded_gates").solve_bounded,
            inputs | {"row_scalars": first.row_scalars},
            outputs | folded | strength,
            programs=blocks * (call.heads // heads),
            in_place=_present(first, (*outputs, *folded, *strength)),
            tile=Tile(64),
            heads_per_program=heads,
            **bounded,
        )
    known = {name: getattr(solved, name) for name in strength}
    solved = launcher.launch(
        kernel,
        inputs | known,
        outputs | folded,
        programs=blocks,
        in_place=_present(solved, (*outputs, *folded)),
        flags=padded(call.heads),
        strong=True,
        **exact,
    )
    return _systems(solved, first), _folded(solved)._replace(**known)


def _present(arrays: Any, names: Iterable[str]) -> dict[str, jax.Array]:
    return {name: x for name in names if (x := getattr(arrays, name)) is not None}


def _systems(solved: Any, rows: Any) -> Systems:
    row_squares = getattr(rows, "row_squares", None)
    return Systems(solved.solved_scores, solved.inverse, solved.inverse_transposed, rows.row_scalars, row_squares)


def _folded(solved: Any) -> Folded:
    return Folded(solved.query_since, solved.key_since, solved.key_until, solved.state_decays)


def _prepare_rows(launcher: Launcher, beta: jax.Array, log_decay: jax.Array) -> Any:
    """The rows' scalars with one gate a head, which chunks have weak gates, and memory for their `row_squares`."""
    heads, chunk, coincide = launcher.call.heads, launcher.config.chunk, launcher.constants.keys_may_coincide
    block = min(16, padded(heads))
    return launcher.launch(
        device("decays").prepare_rows,
        {"beta": beta, "gate": log_decay},
        {
            "row_scalars": launcher.row_scalars(SCALARS),
            "weak": launcher.flags() if coincide else None,
            "any_weak": launcher.any_flags() if coincide else None,
            "row_squares": launcher.kept() if coincide else None,
        },
        programs=launcher.blocks(chunk) * cdiv(heads, block),
        tile=Tile(block),
        length=chunk,
        head_block=block,
    )
