"""A call's forward and backward, as passes over its tokens."""

from typing import Any, NamedTuple

import jax

from ejkernel.kernels.chunks.first_gates import decayed, of_first_tokens
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, Plan, device
from ejkernel.kernels.delta_rule.xla.decode import beside_states
from ejkernel.kernels.linear_recurrence.triton.launcher import F32, shape
from ejkernel.kernels.linear_recurrence.triton.plan import cdiv, padded

# Sequences of so few tokens are walked one token at a time.
FEW_TOKENS = 8


class Folded(NamedTuple):
    """Queries and keys as states see them, decayed if every key dim has a gate."""

    query: jax.Array  # since a chunk's start [B, T, H, K]
    key: jax.Array  # since a chunk's start [B, T, H, K]
    write: jax.Array | None = None  # keys until a chunk's end [B, T, H, K], or the same as keys
    total: jax.Array | None = None  # what is left of a state at a chunk's end [chunks, H, K]


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    added: jax.Array  # what tokens add to the state [B, T, H, V]
    reads: jax.Array  # what queries read of what corrections are asked for [chunks, H, C, C]
    transposed: jax.Array  # inverses of the chunks' systems, transposed [chunks, H, C, C]
    weights: jax.Array  # beta, decays since a chunk's start and until its end [chunks, H, 3, C]
    folded: Folded | None
    states: jax.Array  # that chunks begin with, transposed [chunks, H, V, K]


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
    if state is None:
        return None
    gates = None if log_decay is None else of_first_tokens(call, log_decay, cu_seqlens)
    return decayed(state.astype(F32), *beside_states(call, gates))


def _walk(
    launcher: Launcher, keep: bool, inputs: list[Any], start: jax.Array | None
) -> tuple[jax.Array, jax.Array, Kept | None]:
    query, key, value, beta, log_decay = inputs[:5]
    call, config = launcher.call, launcher.config
    chunk, dtype = config.chunk, call.dtype
    keyed = call.decay == "key"
    hat = launcher.rows(call.key_dim, dtype) if keyed else None
    total = launcher.chunked(call.key_dim) if keyed else None
    reads, inverse, transposed, weights, *folds = launcher.launch(
        device("key_gates").solve_keyed if keyed else device("system").solve,
        *(query, key, beta, log_decay),
        outputs=[
            launcher.chunked(chunk, chunk, dtype=dtype),
            launcher.chunked(chunk, chunk),
            launcher.chunked(chunk, chunk) if keep else None,
            launcher.chunked(3, chunk),
            *([hat, hat, hat, total] if keyed else []),
        ],
        programs=launcher.blocks(chunk) * call.heads,
        tile=config.system,
        length=chunk,
        BK=min(config.system.block, padded(call.key_dim)) if keyed else padded(call.key_dim),
        KEEP=keep,
        **(launcher.gates() if keyed else {}),
    )
    folded = Folded(*folds) if keyed else Folded(query, key)
    output, added, states, last = launcher.walk(
        device("walk").forward,
        *(folded.query, folded.key, folded.write, value, reads, inverse, weights, folded.total, start),
        outputs=[
            launcher.rows(call.value_dim, dtype),
            launcher.rows(call.value_dim, dtype) if keep else None,
            launcher.chunked(call.value_dim, call.key_dim, dtype=dtype) if keep else None,
            launcher.states(),
        ],
        tile=config.forward,
        START=start is not None,
        KEEP=keep,
    )
    if not keep:
        return output, last, None
    return output, last, Kept(added, reads, transposed, weights, folded if keyed else None, states)


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
    config, dtype, chunk = launcher.config, call.dtype, launcher.config.chunk
    folded = kept.folded or Folded(query, key)
    dr, dstates, dstart = launcher.walk(
        device("walk").backward,
        *(
            folded.query,
            folded.key,
            folded.write,
            doutput,
            kept.reads,
            kept.transposed,
            kept.weights,
            folded.total,
            dlast,
        ),
        outputs=[
            launcher.rows(call.value_dim, dtype),
            launcher.chunked(call.value_dim, call.key_dim, dtype=dtype),
            launcher.states() if pull is not None else None,
        ],
        tile=config.backward,
        START=dlast is not None,
        LAST=pull is not None,
    )
    block = min(config.gradients.block, padded(call.value_dim))
    parts = cdiv(call.value_dim, block)
    keyed = call.decay == "key"
    small = shape(call.batch, call.tokens, call.heads, parts)
    dquery, dkey, dvalue, dbeta, dgate = launcher.launch(
        device("key_gradients").gradients_keyed if keyed else device("gradients").gradients,
        *(query, key, beta, log_decay, doutput, kept.added, dr, kept.states, dstates),
        outputs=[
            launcher.parts(parts, query),
            launcher.parts(parts, key),
            launcher.rows(call.value_dim, value.dtype if value.shape[2] == call.heads else F32),
            small,
            launcher.parts(parts, log_decay) if keyed else small if log_decay is not None else None,
        ],
        programs=launcher.blocks(chunk) * call.heads * parts,
        tile=config.gradients,
        length=chunk,
        BK=min(config.system.block if keyed else config.key_block, padded(call.key_dim)),
        BV=block,
        **(launcher.gates() if keyed else {}),
    )
    dvalue = dvalue[..., None, :]
    found = [_sum_parts(x, like) for x, like in ((dquery, query), (dkey, key), (dvalue, value))]
    dlog_decay = dstate = None
    if log_decay is not None:
        dlog_decay = _sum_parts(dgate, log_decay) if keyed else dgate.sum(-1).astype(log_decay.dtype)
    if pull is not None:
        of_first, dstate = pull(dstart)
        dlog_decay = None if dlog_decay is None else dlog_decay + of_first
    return (*found, dbeta.sum(-1).astype(beta.dtype), dlog_decay, dstate)


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
