"""The triangular systems of a call's chunks: the launches that solve them, and queries and keys as states see them."""

from typing import Any, NamedTuple

import jax

from ejkernel.kernels._launch import Tile, padded
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, device
from ejkernel.xla_utils.utils import cdiv

# As many numbers are kept of every row of a chunk as `device.decays` says.
WEIGHTS = 5
# Key dims that chunks of bounded gates are taken by.
BOUNDED_DIMS = 128


class Folded(NamedTuple):
    """Queries and keys as states see them, decayed if every key dim has a gate."""

    query: jax.Array  # from where a chunk meets its state, which is its middle or its start [B, T, H, K]
    key: jax.Array  # from there as well [B, T, H, K]
    write: jax.Array | None = None  # keys up to there or to a chunk's end [B, T, H, K], or the same as keys
    factors: jax.Array | None = None  # of states: until there, until they are written to, and then [chunks, H, 3, K]
    kinds: jax.Array | None = None  # of chunks, by how strong gates are, as device code's `kinds` has them [chunks, H]
    any_strong: jax.Array | None = None  # whether strong ones are among listed ones, by where these begin [chunks, H]


class Systems(NamedTuple):
    """Solutions of the chunks' systems."""

    reads: jax.Array  # what queries read of what corrections are asked for [chunks, H, C, C]
    inverse: jax.Array | None  # [chunks, H, C, C]
    transposed: jax.Array  # inverses, for the way back [chunks, H, C, C]
    squares: jax.Array | None = None  # of systems' rows, by which keys coincide [chunks, H, C]
    weak: jax.Array | None = None  # with one gate a head, where that may be so, and where there are squares [chunks, H]
    any_weak: jax.Array | None = None  # the same of listed chunks, by where they begin [chunks, H]
    rests: jax.Array | None = None  # what rounding has taken off reads and inverses there [chunks, H, C, C]


def solve(
    launcher: Launcher, keep: bool, query: jax.Array, key: jax.Array, beta: jax.Array, log_decay: jax.Array | None
) -> tuple[Systems, jax.Array, Folded]:
    """The systems' solutions, the rows' weights, and queries and keys."""
    given = {"query": query, "key": key, "beta": beta, "gate": log_decay}
    if launcher.call.decay == "key":
        return _solve_keyed(launcher, keep, given)
    chunk, heads = launcher.config.chunk, launcher.call.heads
    known = None if log_decay is None else _weigh(launcher, beta, log_decay)
    # what is kept takes the registers, and so does where a listed chunk lies
    each = 1 if keep or launcher.call.segmented else launcher.heads_a_program()
    outputs = _systems(launcher, keep)
    if known is not None:
        outputs["squares"] = None
    found = launcher.launch(
        device("system").solve,
        given | {"known": None if known is None else known.weights},
        outputs | {"weights": launcher.weights(WEIGHTS) if known is None else None},
        programs=launcher.blocks(chunk) * heads // each,
        tile=launcher.config.system,
        length=chunk,
        keep=keep,
        key_block=padded(launcher.call.key_dim),
        each=each,
    )
    weighed = known or found
    weak = {} if known is None else {"weak": known.weak, "any_weak": known.any_weak}
    systems = Systems(found.reads, found.inverse, found.transposed, weighed.squares, **weak)
    return systems, weighed.weights, Folded(query, key)


def _systems(launcher: Launcher, keep: bool) -> dict[str, Any]:
    """What queries read, the systems' inverses, if to be kept, these transposed, and squares of the systems' rows."""
    chunk = launcher.config.chunk
    square = launcher.kept(chunk)
    return {
        "reads": launcher.kept(chunk, dtype=launcher.call.dtype),
        "inverse": square,
        "transposed": square if keep else None,
        "squares": launcher.kept() if launcher.constants.keys_may_coincide else None,
    }


def _solve_keyed(launcher: Launcher, keep: bool, given: dict[str, Any]) -> tuple[Systems, jax.Array, Folded]:
    """`solve` where key dims have gates."""
    call, config = launcher.call, launcher.config
    chunk, blocks = config.chunk, launcher.blocks(config.chunk)
    hat, weights = launcher.rows(call.key_dim, call.dtype), launcher.weights(WEIGHTS)
    systems = _systems(launcher, keep)
    squares = {"squares": systems.pop("squares")}
    # of listed chunks, also 1 for those that leave a state as it is
    folds = {"folded_query": hat, "recall": hat, "write": hat}
    folds["factors"] = launcher.chunked(3 + call.segmented, call.key_dim)
    cut: dict[str, Any] = {"length": chunk, "keep": keep}
    exact = cut | {"tile": config.gated, "key_block": min(config.gated.rows, padded(call.key_dim))}
    kernel = device("key_gates").solve_keyed
    if not launcher.constants.middle:
        found = launcher.launch(
            kernel, given, {**systems, **folds, "weights": weights}, programs=blocks * call.heads, **exact
        )
        solved = Systems(found.reads, found.inverse, found.transposed)
        return solved, found.weights, Folded(found.folded_query, found.recall, found.write, found.factors)
    folded = launcher.launch(
        device("folding").solve_folded,
        given,
        {
            **{**systems, **squares, **folds, "weights": weights},
            **{"kinds": launcher.flags(), "any_strong": launcher.any_flags()},
        },
        programs=blocks * call.heads,
        tile=Tile(padded(call.key_dim)),
        key_block=padded(call.key_dim),
        part_block=min(BOUNDED_DIMS, padded(call.key_dim)),
        **cut,
    )
    found = launcher.launch(
        kernel,
        given | {"kinds": folded.kinds, "any_strong": folded.any_strong},
        {**systems, **folds},
        programs=blocks,
        in_place={name: each for name in (*systems, *folds) if (each := getattr(folded, name)) is not None},
        look=padded(call.heads),
        strong=True,
        **exact,
    )
    kinds = folded.kinds, folded.any_strong
    hats = Folded(found.folded_query, found.recall, found.write, found.factors, *kinds)
    solved = Systems(found.reads, found.inverse, found.transposed, folded.squares)
    return solved, folded.weights, hats


def _weigh(launcher: Launcher, beta: jax.Array, log_decay: jax.Array) -> Any:
    """`WEIGHTS` of chunks' rows, as device code lists them, where gates of heads are weak, and room for squares."""
    heads, chunk, coincide = launcher.call.heads, launcher.config.chunk, launcher.constants.keys_may_coincide
    block = min(16, padded(heads))
    return launcher.launch(
        device("decays").weigh,
        {"beta": beta, "gate": log_decay},
        {
            "weights": launcher.weights(WEIGHTS),
            "weak": launcher.flags() if coincide else None,
            "any_weak": launcher.any_flags() if coincide else None,
            "squares": launcher.kept() if coincide else None,
        },
        programs=launcher.blocks(chunk) * cdiv(heads, block),
        tile=Tile(block),
        length=chunk,
        head_block=block,
    )
