"""A call's forward and backward, as passes over its tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.triton.launching import F32, Tile, padded
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, Plan, device
from ejkernel.kernels.delta_rule.triton.systems import Folded, Systems, solve
from ejkernel.xla_utils.utils import cdiv

# Sequences of so few tokens are walked one token at a time.
FEW_TOKENS = 8


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    added: jax.Array  # what tokens add to the state [B, T, H, V]
    added_rest: jax.Array | None  # what rounding has taken off it, where keys are alike [B, T, H, V]
    systems: Systems
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
    systems, weights, folded = solve(launcher, keep, query, key, beta, log_decay)
    walked = (
        *(folded.query, folded.key, folded.write, value, systems.reads, systems.inverse),
        *(weights, folded.factors, folded.strong, systems.weak, query, key),
    )
    time, transitions = "whole", None
    rests = launcher.chunked(config.chunk, config.chunk, dtype=dtype)
    if launcher.plan.segmented(call):
        _, _, transitions, effects, *_ = launcher.walk(
            device("walk").forward,
            *(*walked, start),
            outputs=[None, None, launcher.segments(call.key_dim), launcher.segments(call.value_dim)],
            changed=[systems.squares],
            more=[None, rests],
            tile=config.effects,
            further=call.key_dim,
            START=start is not None,
            KEEP=False,
            TIME="effects",
        )
        time, start = "segments", _scan_segments(launcher, effects, transitions, start, back=False)
    output, added, states, last, squares, added_rest, rests = launcher.walk(
        device("walk").forward,
        *(*walked, start),
        outputs=[
            launcher.rows(call.value_dim, dtype),
            launcher.rows(call.value_dim, dtype) if keep else None,
            launcher.chunked(call.value_dim, call.key_dim, dtype=dtype) if keep else None,
            launcher.states(),
        ],
        changed=[systems.squares],
        more=[launcher.rows(call.value_dim, dtype) if keep else None, rests],
        tile=config.forward if keep or keyed else config.alone,
        START=start is not None,
        KEEP=keep,
        TIME=time,
    )
    if not keep:
        return output, last, None
    # the inverse has been used
    systems = systems._replace(inverse=None, squares=squares, rests=rests)
    kept = Kept(added, added_rest, systems, weights, folded if keyed else None, states, transitions)
    return output, last, kept


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
        *(kept.systems.reads, kept.systems.transposed, kept.weights, folded.factors, folded.strong),
        *(kept.systems.weak, kept.systems.squares, kept.systems.rests),
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
    given = query, key, beta, log_decay, doutput, kept.added, kept.added_rest, dr, kept.states, dstates
    weak, squares = kept.systems.weak, kept.systems.squares
    if call.decay == "key":
        dquery, dkey, dvalue, dbeta, dgate = _key_gradients(launcher, *given, strong=folded.strong, squares=squares)
    else:
        dquery, dkey, dvalue, dbeta, dgate = _gradients(launcher, *given, kept.weights, weak=weak, squares=squares)
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


def _gradients(launcher: Launcher, *arrays: Any, weak: jax.Array | None, squares: jax.Array | None) -> list[Any]:
    """Of query, key, value, beta and log decay, all but the value's in parts `[B, T, H, parts, ·]`."""
    query, key, _, log_decay = arrays[:4]
    small, heads, cut = launcher.token_parts(), launcher.call.heads, launcher.by_parts()
    outputs = [
        launcher.parts(query),
        launcher.parts(key),
        launcher.values(),
        small,
        small if log_decay is not None else None,
    ]
    kernel, look = device("gradients").gradients, padded(heads)
    found = launcher.launch(kernel, *arrays, *[None] * 7, outputs=outputs, ALIKE=False, LOOK=look, **cut)
    if squares is None:
        return found
    return launcher.launch(
        kernel,
        *(*arrays, weak, squares, *found),
        outputs=outputs,
        aliases={len(arrays) + 2 + i: i for i, each in enumerate(outputs) if each is not None},
        ALIKE=True,
        LOOK=look,
        **cut | {"programs": cut["programs"] // heads},
    )


def _key_gradients(launcher: Launcher, *arrays: Any, strong: jax.Array | None, squares: jax.Array | None) -> list[Any]:
    """`_gradients` where key dims have gates; a second kernel is for those that are too strong for the first."""
    query, key, _, log_decay = arrays[:4]
    call, cut = launcher.call, launcher.by_parts()
    flags = launcher.chunked(1 if strong is not None else cdiv(call.key_dim, cut["BK"]), dtype=jnp.int32)
    moving: list[Any] = [launcher.parts(each) for each in (query, key, log_decay)]
    kernel = device("key_gradients").gradients_keyed
    constants = launcher.gates() | {"LOOK": padded(call.heads * flags.shape[-1])}
    *found, dvalue, dbeta, flagged = launcher.launch(
        kernel,
        *(*arrays, strong, *[None] * 6),
        outputs=[*moving, launcher.values(), launcher.token_parts(), flags if strong is None else None],
        STRONG=False,
        ALIKE=False,
        **cut,
        **constants,
    )
    strong = flagged if strong is None else strong
    rare: dict[str, Any] = cut | constants | {"programs": cut["programs"] // call.heads}
    places = {len(arrays) + 2 + i: i for i in range(5)}
    *found, _, _, _ = launcher.launch(
        kernel,
        *(*arrays, strong, squares, *found, None, None),
        outputs=[*moving, None, None, None],
        aliases={at: i for at, i in places.items() if i < 3},
        STRONG=True,
        ALIKE=False,
        **rare,
    )
    if squares is not None:
        *found, dvalue, dbeta, _ = launcher.launch(
            kernel,
            *(*arrays, strong, squares, *found, dvalue, dbeta),
            outputs=[*moving, launcher.values(), launcher.token_parts(), None],
            aliases=places,
            STRONG=False,
            ALIKE=True,
            **rare,
        )
    dquery, dkey, dgate = found
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
