"""The triangular systems of a call's chunks: the launches that solve them, and queries and keys as states see them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import Tile, padded
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, device
from ejkernel.xla_utils.utils import cdiv

# As many numbers are kept of every row of a chunk as `device.decays` says.
WEIGHTS = 5


class Folded(NamedTuple):
    """Queries and keys as states see them, decayed if every key dim has a gate."""

    query: jax.Array  # from where a chunk meets its state, which is its middle or its start [B, T, H, K]
    key: jax.Array  # from there as well [B, T, H, K]
    write: jax.Array | None = None  # keys up to there or to a chunk's end [B, T, H, K], or the same as keys
    factors: jax.Array | None = None  # of states: until there, until they are written to, and then [chunks, H, 3, K]
    strong: jax.Array | None = None  # which chunks have gates too strong to meet states in their middle [chunks, H]


class Systems(NamedTuple):
    """Solutions of the chunks' systems."""

    reads: jax.Array  # what queries read of what corrections are asked for [chunks, H, C, C]
    inverse: jax.Array | None  # [chunks, H, C, C]
    transposed: jax.Array  # inverses, for the way back [chunks, H, C, C]
    squares: jax.Array | None = None  # of systems' rows, by which keys are alike [chunks, H, C]
    weak: jax.Array | None = None  # with one gate a head, where that may be so, and where there are squares [chunks, H]
    rests: jax.Array | None = None  # what rounding has taken off reads and inverses there [chunks, H, C, C]


def solve(
    launcher: Launcher, keep: bool, query: jax.Array, key: jax.Array, beta: jax.Array, log_decay: jax.Array | None
) -> tuple[Systems, jax.Array, Folded]:
    """The systems' solutions, the rows' weights, and queries and keys."""
    if launcher.call.decay == "key":
        return _solve_keyed(launcher, keep, query, key, beta, log_decay)
    chunk, heads = launcher.config.chunk, launcher.call.heads
    known, weak, squares = [None] * 3 if log_decay is None else _weigh(launcher, beta, log_decay)
    # what is kept takes the registers
    each = 1 if keep else launcher.heads_a_program()
    *found, weights = launcher.launch(
        device("system").solve,
        *(query, key, beta, known),
        outputs=[
            *_systems(launcher, keep),
            launcher.chunked(WEIGHTS, chunk) if known is None else None,
        ],
        programs=launcher.blocks(chunk) * heads // each,
        tile=launcher.config.system,
        length=chunk,
        KEEP=keep,
        BK=padded(launcher.call.key_dim),
        EACH=each,
    )
    systems = Systems(*found[:3])
    if launcher.facts.alike:
        systems = systems._replace(squares=found[3] if known is None else squares, weak=weak)
    return systems, weights if known is None else known, Folded(query, key)


def _systems(launcher: Launcher, keep: bool) -> list[Any]:
    """What queries read, the systems' inverses, if to be kept, these transposed, and squares of the systems' rows."""
    chunk = launcher.config.chunk
    square = launcher.chunked(chunk, chunk)
    squares = launcher.chunked(chunk) if launcher.facts.alike else None
    return [launcher.chunked(chunk, chunk, dtype=launcher.call.dtype), square, square if keep else None, squares]


def _solve_keyed(launcher: Launcher, keep: bool, *arrays: Any) -> tuple[Systems, jax.Array, Folded]:
    """`solve` where key dims have gates."""
    call, config = launcher.call, launcher.config
    chunk, blocks = config.chunk, launcher.blocks(config.chunk)
    hat, weights = launcher.rows(call.key_dim, call.dtype), launcher.chunked(WEIGHTS, chunk)
    systems, folds = _systems(launcher, keep), [hat, hat, hat, launcher.chunked(3, call.key_dim)]
    cut: dict[str, Any] = {"length": chunk, "KEEP": keep}
    exact = cut | {"tile": config.gated, "BK": min(config.gated.block, padded(call.key_dim)), **launcher.gates()}
    if not launcher.facts.middle:
        *found, weighed = launcher.launch(
            device("key_gates").solve_keyed,
            *(*arrays, *[None] * 8),
            outputs=[*systems[:3], *folds, weights],
            programs=blocks * call.heads,
            LOOK=1,
            STRONG=False,
            **exact,
        )
        return Systems(*found[:3]), weighed, Folded(*found[3:])
    reads, inverse, transposed, squares, weighed, *folded, strong = launcher.launch(
        device("folding").solve_folded,
        *arrays,
        outputs=[*systems, weights, *folds, launcher.chunked(dtype=jnp.int32)],
        programs=blocks * call.heads,
        tile=Tile(padded(call.key_dim), 4, 1),
        BK=padded(call.key_dim),
        LIMIT=exact["LIMIT"],
        **cut,
    )
    *found, _ = launcher.launch(
        device("key_gates").solve_keyed,
        *(*arrays, strong, reads, inverse, transposed, *folded),
        outputs=[*systems[:3], *folds, None],
        programs=blocks,
        aliases={len(arrays) + 1 + i: i for i in range(7) if keep or i != 2},
        LOOK=padded(call.heads),
        STRONG=True,
        **exact,
    )
    solved = Systems(*found[:3])._replace(squares=squares)
    return solved, weighed, Folded(*found[3:])._replace(strong=strong)


def _weigh(launcher: Launcher, beta: jax.Array, log_decay: jax.Array) -> list[jax.Array]:
    """`WEIGHTS` of chunks' rows, as device code lists them, where gates of heads are weak, and room for squares."""
    heads, chunk = launcher.call.heads, launcher.config.chunk
    block = min(16, padded(heads))
    return launcher.launch(
        device("decays").weigh,
        *(beta, log_decay),
        outputs=[
            launcher.chunked(WEIGHTS, chunk),
            launcher.chunked(dtype=jnp.int32) if launcher.facts.alike else None,
            launcher.chunked(chunk) if launcher.facts.alike else None,
        ],
        programs=launcher.blocks(chunk) * cdiv(heads, block),
        tile=Tile(block, 4, 1),
        length=chunk,
        BH=block,
    )
