"""Gates on their way to the walks and back: the launches that fold them, and those that give their gradient."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import F32, Tile, padded, shape
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher, device
from ejkernel.xla_utils.utils import cdiv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gates:
    """The decays as the walks read them; which are there depends on the kind of decay."""

    within: jax.Array | None = None  # constant: gates [N, H]; head: weights [chunks, H, C, 4]; key: scores [.., C, C]
    factor: jax.Array | None = None  # decays of a state through each chunk [chunks, H, 2], or both ways [.., 4, K]
    flag: jax.Array | None = None  # whether a chunk's gates are too strong for one reference [chunks, H]
    late: jax.Array | None = None  # key: log decay of each chunk's later half [chunks, H, K]


def fold_head_gates(launcher: Launcher, log_decay: jax.Array) -> Gates:
    """One gate a head as the walks read it."""
    call, config = launcher.call, launcher.config
    chunk, chunks, heads = config.chunk, launcher.blocks(config.chunk), call.heads
    block = min(4, 1 << (heads - 1).bit_length())
    weight, factor, flag = launcher.launch(
        device("head_gates").fold_head_gates,
        log_decay,
        outputs=[
            shape(chunks, heads, chunk, 4),
            shape(chunks, heads, 2),
            shape(chunks, heads, dtype=jnp.int32),
        ],
        programs=chunks * cdiv(heads, block),
        tile=Tile(block, 1, 1),
        length=chunk,
        H=heads,
        BH=block,
        C=chunk,
        DECAY=call.decay,
        LIMIT=config.limit,
        FLIP=call.reverse,
    )
    return Gates(flag=flag, factor=factor, within=weight)


def head_gate_gradient(
    launcher: Launcher,
    log_decay: jax.Array,
    query_dots: jax.Array,
    key_dots: jax.Array,
    met: jax.Array,
    first: jax.Array | None,
) -> jax.Array:
    """The gradient of one gate a head and token, from what the walks of query and key leave."""
    call, config = launcher.call, launcher.config
    length = config.chunk * launcher.plan.group
    groups = launcher.blocks(length)
    block = min(4, 1 << (call.heads - 1).bit_length())
    (dgate,) = launcher.launch(
        device("head_gates").sum_head_gates,
        *(log_decay, query_dots, key_dots, met, first),
        outputs=[shape(call.batch, call.tokens, call.heads, dtype=log_decay.dtype if call.decay == "head" else F32)],
        programs=groups * cdiv(call.heads, block),
        tile=Tile(block, 8, 1),
        length=length,
        H=call.heads,
        BH=block,
        NZ=query_dots.shape[2],
        C=config.chunk,
        G=launcher.plan.group,
        DECAY=call.decay,
        SCALE=float(call.scale),
        FINE=call.decay == "constant" and call.dtype == F32,
        START=first is not None,
        FLIP=call.reverse,
    )
    return dgate


def _columns(dim: int, most: int = 128) -> tuple[int, int]:
    """Dims that a program of one warp streams, and how many such programs a head has."""
    width = min(most, padded(dim))
    return width, cdiv(dim, width)


def _heads_at_once(heads: int) -> int:
    """Heads that one program of the exact path looks after."""
    return math.gcd(heads, 8)


def _rows(launcher: Launcher, tile: Tile, dims: int) -> tuple[int, int]:
    """Key dims that the exact path takes at once, and log₂ of the rows that a thread has, with so many dims of each."""
    width = min(tile.block, padded(launcher.call.key_dim))
    rows = max(1, launcher.config.chunk * width // (32 * tile.warps * dims))
    return width, rows.bit_length() - 1


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
    folded = F32 if call.dtype == jnp.float16 else call.dtype
    hat = shape(call.batch, call.tokens, heads, dim, dtype=folded)
    shared: dict[str, Any] = {
        "length": chunk,
        "H": heads,
        "HQ": query.shape[2],
        "HK": key.shape[2],
        "K": dim,
        "C": chunk,
        "START": start,
        "FLIP": call.reverse,
    }
    qhat, khat, factor, late, flag = launcher.launch(
        device("key_gates").fold_gates,
        *(query, key, log_decay),
        outputs=[
            hat,
            hat,
            shape(chunks, heads, 4, dim),
            shape(chunks, heads, dim),
            shape(chunks, heads, dtype=jnp.int32),
        ],
        programs=chunks * heads,
        tile=Tile(padded(dim), max(1, padded(dim) // 128), 1),
        BK=padded(dim),
        LIMIT=limit or config.limit,
        **shared,
    )
    if limit:
        return qhat, khat, Gates(factor=factor, late=late, flag=flag)
    width, rows = _rows(launcher, config.exact, 4)
    qhat, khat, score = launcher.launch(
        device("strong_key_gates").exact_scores,
        *(query, key, log_decay, flag, qhat, khat),
        outputs=[hat, hat, shape(chunks, heads, chunk, chunk, dtype=folded)],
        programs=chunks * heads // _heads_at_once(heads),
        tile=config.exact,
        aliases={4: 0, 5: 1},
        HEADS=_heads_at_once(heads),
        LEVELS=chunk.bit_length() - 1,
        LR=rows,
        BK=width,
        WIDE=call.dtype == jnp.float16,
        PRECISION=config.precision,
        **shared,
    )
    return qhat, khat, Gates(factor=factor, late=late, flag=flag, within=score)


def _exact_gradients(
    launcher: Launcher, arrays: Any, gates: Gates, doutput: jax.Array, dqhat: jax.Array, dkhat: jax.Array, given: Any
) -> list[jax.Array]:
    """Summands of the gates' gradient, in place of dq̂, and gradients of query and key, all of flagged chunks alone."""
    call, config = launcher.call, launcher.config
    query, key, value, log_decay = arrays[:4]
    chunk, heads = config.chunk, _heads_at_once(call.heads)
    programs = launcher.blocks(chunk) * call.heads // heads
    # three tiles are added up at once, where the scores are one
    tile = Tile(config.exact.block, 2 * config.exact.warps, 1)
    width, rows = _rows(launcher, tile, 2)
    *results, _ = launcher.launch(
        device("strong_key_gates").exact_gradients,
        *(query, key, value, log_decay, doutput, gates.flag, dqhat, dkhat),
        # the last is where each program keeps the gradients of a chunk's scores
        outputs=[shape(*dqhat.shape), *given, shape(programs, chunk, chunk)],
        programs=programs,
        tile=tile,
        length=chunk,
        HEADS=heads,
        PARTS=dqhat.shape[-1] // call.key_dim,
        aliases={6: 0},
        LEVELS=chunk.bit_length() - 1,
        LR=rows,
        H=call.heads,
        HQ=query.shape[2],
        HK=key.shape[2],
        HV=value.shape[2],
        HO=doutput.shape[2],
        K=call.key_dim,
        V=call.value_dim,
        C=chunk,
        SCALE=float(call.scale),
        FLIP=call.reverse,
        START=arrays[4] is not None,
        BK=width,
        BV=min(2 * config.exact.block, padded(call.value_dim)),
        WIDE=call.dtype == jnp.float16,
        PRECISION=config.precision,
    )
    return results


def unfold_queries(
    launcher: Launcher, arrays: Any, gates: Gates, doutput: jax.Array, dqhat: jax.Array, khat: jax.Array
) -> jax.Array:
    """The gradient of the query alone, from that of the folded query; of what the query is, nothing is used."""
    result = shape(*dqhat.shape, dtype=launcher.call.dtype)
    # anything may stand for the gradient of the key
    dqhat, dquery, _ = _exact_gradients(launcher, arrays, gates, doutput, dqhat, khat, [result, result])
    return unfold_rows(launcher, arrays[3], gates, dqhat, dquery)


def unfold_rows(
    launcher: Launcher, log_decay: jax.Array, gates: Gates, dqhat: jax.Array, dquery: jax.Array | None = None
) -> jax.Array:
    """The gradient of the query from that of the folded query; `dquery` is that of flagged chunks, if there are any."""
    call, chunk = launcher.call, launcher.config.chunk
    width, parts = _columns(call.key_dim)
    (found,) = launcher.launch(
        device("key_gates").unfold_rows,
        *(log_decay, dqhat, gates.late, gates.flag, dquery),
        outputs=[shape(*dqhat.shape, dtype=call.dtype)],
        programs=launcher.blocks(chunk) * call.heads * parts,
        tile=Tile(width, 1, 1),
        length=chunk,
        aliases=None if dquery is None else {4: 0},
        H=call.heads,
        K=call.key_dim,
        BK=width,
        C=chunk,
        FLIP=call.reverse,
    )
    return found


def unfold_key_gates(
    launcher: Launcher, arrays: Any, gates: Gates, doutput: jax.Array, hats: Any, dtypes: Any
) -> list[jax.Array]:
    """Gradients of query, key and key gates from those of the folded query and key."""
    call = launcher.call
    qhat, khat, dqhat, dkhat, met = hats
    gradients = [shape(call.batch, call.tokens, call.heads, call.key_dim, dtype=each) for each in dtypes]
    summand, *found = _exact_gradients(launcher, arrays, gates, doutput, dqhat, dkhat, gradients)
    return unfold_all(launcher, arrays[3], gates, (qhat, khat, summand, dkhat, met), gradients, found)


def unfold_all(
    launcher: Launcher,
    log_decay: jax.Array,
    gates: Gates,
    hats: Any,
    gradients: list[Any],
    flagged: list[jax.Array] | None,
) -> list[jax.Array]:
    """Gradients of query, key and gates; those of query and key may be there of flagged chunks."""
    call, config = launcher.call, launcher.config
    qhat, khat, summand, dkhat, met = hats
    group = config.chunk * launcher.plan.group
    groups = launcher.blocks(group) * call.heads
    # few programs have too little of memory on its way at once
    width, parts = _columns(call.key_dim, config.unfold if groups * cdiv(call.key_dim, 128) < 8 * config.fill else 128)
    return launcher.launch(
        device("key_gates").unfold_gates,
        *(
            log_decay,
            qhat,
            khat,
            summand,
            dkhat,
            gates.late,
            gates.flag,
            gates.factor,
            met,
            *(flagged or (None, None)),
        ),
        outputs=[*gradients, shape(*gradients[0].shape, dtype=log_decay.dtype)],
        programs=groups * parts,
        tile=Tile(width, 1, 1),
        length=group,
        aliases={9: 0, 10: 1} if flagged else None,
        H=call.heads,
        K=call.key_dim,
        BK=width,
        C=config.chunk,
        G=launcher.plan.group,
        PARTS=summand.shape[-1] // call.key_dim,
        MET=met.shape[2],
        SCALE=float(call.scale),
        FLIP=call.reverse,
    )
