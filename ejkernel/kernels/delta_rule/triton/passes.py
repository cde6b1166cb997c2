"""A call's forward and backward, as passes over its tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, Plan, device
from ejkernel.kernels.linear_recurrence.triton.configs import Tile
from ejkernel.kernels.linear_recurrence.triton.launcher import F32
from ejkernel.kernels.linear_recurrence.triton.plan import cdiv, padded

# As many numbers are kept of every row of a chunk as `device.decays` says.
WEIGHTS = 5
# Sequences of so few tokens are walked one token at a time.
FEW_TOKENS = 8


class Folded(NamedTuple):
    """Queries and keys as states see them, decayed if every key dim has a gate."""

    query: jax.Array  # from where a chunk meets its state, which is its middle or its start [B, T, H, K]
    key: jax.Array  # from there as well [B, T, H, K]
    write: jax.Array | None = None  # keys up to there or to a chunk's end [B, T, H, K], or the same as keys
    factors: jax.Array | None = None  # of states: until there, until they are written to, and then [chunks, H, 3, K]
    strong: jax.Array | None = None  # which chunks have gates too strong to meet states in their middle [chunks, H]


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    added: jax.Array  # what tokens add to the state [B, T, H, V]
    reads: jax.Array  # what queries read of what corrections are asked for [chunks, H, C, C]
    transposed: jax.Array  # inverses of the chunks' systems, transposed [chunks, H, C, C]
    weights: jax.Array  # of a chunk's rows, as device code's `WEIGHTS` lists them [chunks, H, 5, C]
    folded: Folded | None
    states: jax.Array  # that chunks begin with, transposed [chunks, H, V, K]
    transitions: jax.Array | None  # what time segments make of states, by the key dims of these [segments, H, K, K]


def forward(keep: bool, call: Call, plan: Plan, *arrays: Any) -> tuple[jax.Array, jax.Array, Kept | None]:
    """Output, final states and, if to be kept, what the backward needs (nothing after the token-by-token kernel)."""
    *inputs, cu_seqlens = arrays
    launcher = Launcher.of(call, plan, inputs, cu_seqlens)
    if call.tokens <= (3 * call.sequences if call.packed else FEW_TOKENS):
        output, last = _step(launcher, *inputs)
        return output, last, None
    return _walk(launcher, keep, inputs, _entering(call, cu_seqlens, *inputs[4:]))


def _entering(
    call: Call, cu_seqlens: jax.Array | None, log_decay: jax.Array | None, state: jax.Array | None
) -> jax.Array | None:
    """The states that sequences are entered with, after their first tokens' gates."""
    return None if state is None else entering_states(call, state, (log_decay, None), cu_seqlens)


def _walk(
    launcher: Launcher, keep: bool, inputs: list[Any], start: jax.Array | None
) -> tuple[jax.Array, jax.Array, Kept | None]:
    query, key, value, beta, log_decay = inputs[:5]
    call, config = launcher.call, launcher.config
    dtype = call.dtype
    keyed = call.decay == "key"
    solve = _solve_keyed if keyed else _solve
    reads, inverse, transposed, weights, folded = solve(launcher, keep, query, key, beta, log_decay)
    walked = folded.query, folded.key, folded.write, value, reads, inverse, weights, folded.factors, folded.strong
    time, transitions = "whole", None
    if launcher.plan.segmented(call):
        *_, transitions, effects = launcher.walk(
            device("walk").forward,
            *(*walked, start),
            outputs=[None, None, launcher.segments(call.key_dim), launcher.segments(call.value_dim)],
            tile=config.effects,
            further=call.key_dim,
            START=start is not None,
            KEEP=False,
            TIME="effects",
        )
        time, start = "segments", _scan_segments(launcher, effects, transitions, start, back=False)
    output, added, states, last = launcher.walk(
        device("walk").forward,
        *(*walked, start),
        outputs=[
            launcher.rows(call.value_dim, dtype),
            launcher.rows(call.value_dim, dtype) if keep else None,
            launcher.chunked(call.value_dim, call.key_dim, dtype=dtype) if keep else None,
            launcher.states(),
        ],
        tile=config.forward if keep or keyed else config.alone,
        START=start is not None,
        KEEP=keep,
        TIME=time,
    )
    if not keep:
        return output, last, None
    return output, last, Kept(added, reads, transposed, weights, folded if keyed else None, states, transitions)


def _solve(
    launcher: Launcher, keep: bool, query: jax.Array, key: jax.Array, beta: jax.Array, log_decay: jax.Array | None
) -> tuple[Any, ...]:
    """What queries read, the systems' inverses, these transposed, the rows' weights, and queries and keys."""
    chunk, heads = launcher.config.chunk, launcher.call.heads
    known = None if log_decay is None else _weigh(launcher, beta, log_decay)
    # what is kept takes the registers
    each = 1 if keep else launcher.heads_a_program()
    *found, weights = launcher.launch(
        device("system").solve,
        *(query, key, beta, known),
        outputs=[*_systems(launcher, keep), launcher.chunked(WEIGHTS, chunk) if known is None else None],
        programs=launcher.blocks(chunk) * heads // each,
        tile=launcher.config.system,
        length=chunk,
        KEEP=keep,
        BK=padded(launcher.call.key_dim),
        EACH=each,
    )
    return (*found, weights if known is None else known, Folded(query, key))


def _systems(launcher: Launcher, keep: bool) -> list[Any]:
    """What queries read, the systems' inverses and, if to be kept, these transposed."""
    chunk = launcher.config.chunk
    square = launcher.chunked(chunk, chunk)
    return [launcher.chunked(chunk, chunk, dtype=launcher.call.dtype), square, square if keep else None]


def _solve_keyed(launcher: Launcher, keep: bool, *arrays: Any) -> tuple[Any, ...]:
    """`_solve` where key dims have gates."""
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
            outputs=[*systems, *folds, weights],
            programs=blocks * call.heads,
            LOOK=1,
            STRONG=False,
            **exact,
        )
        return (*found[:3], weighed, Folded(*found[3:]))
    reads, inverse, transposed, weighed, *folded, strong = launcher.launch(
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
        outputs=[*systems, *folds, None],
        programs=blocks,
        aliases={len(arrays) + 1 + i: i for i in range(7) if keep or i != 2},
        LOOK=padded(call.heads),
        STRONG=True,
        **exact,
    )
    return (*found[:3], weighed, Folded(*found[3:])._replace(strong=strong))


def _weigh(launcher: Launcher, beta: jax.Array, log_decay: jax.Array) -> jax.Array:
    """Of a chunk's rows, as device code's `WEIGHTS` lists them, where heads have gates."""
    heads, chunk = launcher.call.heads, launcher.config.chunk
    block = min(16, padded(heads))
    (found,) = launcher.launch(
        device("decays").weigh,
        *(beta, log_decay),
        outputs=[launcher.chunked(WEIGHTS, chunk)],
        programs=launcher.blocks(chunk) * cdiv(heads, block),
        tile=Tile(block, 4, 1),
        length=chunk,
        BH=block,
    )
    return found


def _scan_segments(
    launcher: Launcher, effects: jax.Array, transitions: jax.Array, start: jax.Array | None, back: bool
) -> jax.Array:
    """What time segments are entered with, `[segments, H, V, K]`, sequences with `start`."""
    call, block = launcher.call, 16
    (found,) = launcher.launch(
        device("segments").scan_segments,
        *(effects, transitions, start),
        outputs=[launcher.segments(call.value_dim)],
        programs=call.sequences * call.heads * cdiv(call.value_dim, block),
        tile=Tile(block, 4, 1),
        length=launcher.plan.segment,
        segment=True,
        BK=padded(call.key_dim),
        BC=min(32, padded(call.key_dim)),
        BV=block,
        BACK=back,
        START=start is not None,
    )
    return found


def backward(
    call: Call, plan: Plan, arrays: Any, kept: Kept | None, doutput: jax.Array, dlast: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, beta, log decay and initial state."""
    *inputs, cu_seqlens = arrays
    query, key, value, beta, log_decay, initial_state = inputs
    launcher = Launcher.of(call, plan, inputs, cu_seqlens)
    start, pull = _entering(call, cu_seqlens, log_decay, initial_state), None
    if initial_state is not None:
        start, pull = jax.vjp(lambda *x: _entering(call, cu_seqlens, *x), log_decay, initial_state)
    if kept is None:
        kept = _walk(launcher, True, inputs, start)[2]
        assert kept is not None
    config, dtype = launcher.config, call.dtype
    folded = kept.folded or Folded(query, key)
    walked = (
        *(folded.query, folded.key, folded.write, doutput),
        *(kept.reads, kept.transposed, kept.weights, folded.factors, folded.strong),
    )
    time = "whole"
    if kept.transitions is not None:
        *_, effects = launcher.walk(
            device("walk").backward,
            *(*walked, dlast),
            outputs=[None, None, launcher.segments(call.value_dim)],
            tile=config.backward,
            START=dlast is not None,
            LAST=False,
            TIME="effects",
        )
        time, dlast = "segments", _scan_segments(launcher, effects, kept.transitions, dlast, back=True)
    dr, dstates, dstart = launcher.walk(
        device("walk").backward,
        *(*walked, dlast),
        outputs=[
            launcher.rows(call.value_dim, dtype),
            launcher.chunked(call.value_dim, call.key_dim, dtype=dtype),
            launcher.states() if pull is not None else None,
        ],
        tile=config.backward,
        START=dlast is not None,
        LAST=pull is not None,
        TIME=time,
    )
    given = query, key, beta, log_decay, doutput, kept.added, dr, kept.states, dstates
    if call.decay == "key":
        dquery, dkey, dvalue, dbeta, dgate = _key_gradients(launcher, *given, strong=folded.strong)
    else:
        dquery, dkey, dvalue, dbeta, dgate = _gradients(launcher, *given, kept.weights)
    dvalue = dvalue[..., None, :]
    found = [_sum_parts(x, like) for x, like in ((dquery, query), (dkey, key), (dvalue, value))]
    dlog_decay = dstate = None
    if log_decay is not None:
        keyed = call.decay == "key"
        dlog_decay = _sum_parts(dgate, log_decay) if keyed else dgate.sum(-1).astype(log_decay.dtype)
    if pull is not None:
        of_first, dstate = pull(dstart)
        dlog_decay = None if dlog_decay is None else dlog_decay + of_first
    return (*found, dbeta.sum(-1).astype(beta.dtype), dlog_decay, dstate)


def _gradients(launcher: Launcher, *arrays: Any) -> list[Any]:
    """Of query, key, value, beta and log decay, all but the value's in parts `[B, T, H, parts, ·]`."""
    query, key, _, log_decay = arrays[:4]
    small = launcher.token_parts()
    return launcher.launch(
        device("gradients").gradients,
        *arrays,
        outputs=[
            launcher.parts(query),
            launcher.parts(key),
            launcher.values(),
            small,
            small if log_decay is not None else None,
        ],
        **launcher.by_parts(),
    )


def _key_gradients(launcher: Launcher, *arrays: Any, strong: jax.Array | None) -> list[Any]:
    """`_gradients` where key dims have gates; a second kernel is for those that are too strong for the first."""
    query, key, _, log_decay = arrays[:4]
    call, cut = launcher.call, launcher.by_parts()
    flags = launcher.chunked(1 if strong is not None else cdiv(call.key_dim, cut["BK"]), dtype=jnp.int32)
    moving: list[Any] = [launcher.parts(each) for each in (query, key, log_decay)]
    kernel = device("key_gradients").gradients_keyed
    constants = launcher.gates() | {"LOOK": padded(call.heads * flags.shape[-1])}
    *found, dvalue, dbeta, flagged = launcher.launch(
        kernel,
        *(*arrays, strong, None, None, None),
        outputs=[*moving, launcher.values(), launcher.token_parts(), flags if strong is None else None],
        STRONG=False,
        **cut,
        **constants,
    )
    dquery, dkey, dgate, *_ = launcher.launch(
        kernel,
        *(*arrays, flagged if strong is None else strong, *found),
        outputs=[*moving, None, None, None],
        aliases={len(arrays) + 1 + i: i for i in range(3)},
        STRONG=True,
        **cut | {"programs": cut["programs"] // call.heads},
        **constants,
    )
    return [dquery, dkey, dvalue, dbeta, dgate]


def _sum_parts(x: jax.Array, like: jax.Array) -> jax.Array:
    """Adds up the parts of a gradient of `like`, `[B, T, H, parts, ·]`, and the heads that share one of its own."""
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3).astype(like.dtype)


def _step(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array | None,
) -> list[jax.Array]:
    call, tile = launcher.call, launcher.config.step
    block = min(tile.block, padded(call.value_dim))
    return launcher.launch(
        device("step").step,
        *(query, key, value, beta, log_decay, state),
        outputs=[launcher.rows(call.value_dim, call.dtype), launcher.states()],
        # packed streams have one more sequence: the padding behind the last
        programs=(call.sequences + call.packed) * call.heads * cdiv(call.value_dim, block),
        tile=tile,
        aliases={5: 1} if state is not None and state.dtype == F32 else None,
        BK=padded(call.key_dim),
        BV=block,
        START=state is not None,
    )
