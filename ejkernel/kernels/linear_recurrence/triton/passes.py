"""A call's forward and backward, as passes over its tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import F32, padded, shape
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import across_heads
from ejkernel.kernels.linear_recurrence.triton.gates import (
    Gates,
    fold_head_gates,
    fold_key_gates,
    head_gate_gradient,
    unfold_key_gates,
)
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher, device
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.kernels.linear_recurrence.triton.walks import Segments, scan, segments, starts, walk
from ejkernel.xla_utils.utils import cdiv

# Sequences of so few tokens are walked one token at a time.
FEW_TOKENS = 8


def forward(keep: bool, call: Call, plan: Plan, *arrays: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Output, final states, and what the backward can use again (nothing after the token-by-token kernel)."""
    launcher = Launcher.of(call, plan, arrays[5])
    if has_few_tokens(call):
        query, key, value, log_decay, initial_state = arrays[:5]
        return (*step(launcher, query, key, value, log_decay, None, initial_state), None)
    prepared = _prepare(launcher, *arrays[:5])
    query, key, gates, first = prepared
    operands = (query, key, arrays[2], gates, first)
    done = walk(launcher, "output", *operands, tile=plan.config.output, dtype=call.dtype, last=True)
    return done.output, done.last, prepared if keep else None


def has_few_tokens(call: Call) -> bool:
    """Whether a call is walked one token at a time."""
    return call.tokens <= (3 * call.sequences if call.packed else FEW_TOKENS)


def begin(call: Call, plan: Plan, *arrays: Any) -> tuple[Any, Segments, jax.Array]:
    """What needs no initial state: folded operands, what time segments do, and the states that all of them add."""
    query, key, value, log_decay, cu_seqlens = arrays
    launcher = Launcher.of(call, plan, cu_seqlens)
    folded = _fold(launcher, query, key, log_decay, start=True)
    own = segments(launcher, folded[1], value, folded[2], last=True)
    return folded, own, scan(launcher, own, None, last=True)[1]


def finish(
    call: Call,
    plan: Plan,
    value: jax.Array,
    start: jax.Array,
    cu_seqlens: jax.Array | None,
    folded: Any,
    own: Segments,
) -> tuple[jax.Array, Any]:
    """The output, and what the backward can use again, from what `begin` has found."""
    launcher = Launcher.of(call, plan, cu_seqlens)
    query, key, gates = folded
    first = starts(launcher, key, value, gates, start, own=own)
    done = walk(launcher, "output", query, key, value, gates, first, tile=plan.config.output, dtype=call.dtype)
    return done.output, (*folded, first)


def begin_back(
    call: Call, plan: Plan, cu_seqlens: jax.Array | None, prepared: Any, doutput: jax.Array
) -> tuple[Segments, jax.Array]:
    """What needs no cotangent of the final states: what time segments do, and what comes of the initial states'."""
    launcher = Launcher.of(call, plan, cu_seqlens)
    qhat, _, gates, _ = prepared
    own = segments(launcher, qhat, doutput, gates, reverse=True, last=True)
    return own, scan(launcher, own, None, reverse=True, last=True, last_scale=call.scale)[1]


def backward(
    wanted: bool,
    call: Call,
    plan: Plan,
    arrays: Any,
    prepared: Any,
    doutput: jax.Array,
    dlast: jax.Array | None,
    own: Segments | None = None,
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay (zeros unless `wanted`) and initial state.

    `own` is what `begin_back` has found, if it was asked before.
    """
    query, key, value, log_decay, initial_state, cu_seqlens = arrays
    launcher = Launcher.of(call, plan, cu_seqlens)
    qhat, khat, gates, first = prepared or _prepare(launcher, *arrays[:5])
    config = plan.config
    is_key = call.decay == "key"
    wanted = wanted or is_key
    scale = 1.0 / call.scale
    tile = config.dots or config.gradient if wanted and not is_key else config.gradient
    ends = starts(launcher, qhat, doutput, gates, dlast, reverse=True, scale=scale, own=own)
    start_scale = 1.0 if plan.segmented(call) else scale
    across = wanted and across_heads.pays(launcher, query, key)
    by_query, by_key, by_value = (_dtype_of_gradient(call, x) for x in (query, key, value))
    of_value = walk(
        *(launcher, "dvalue", khat, qhat, doutput, gates, ends),
        tile=config.output,
        dtype=by_value,
        last=initial_state is not None,
        start_scale=start_scale,
        last_scale=call.scale,
        every_chunk=across,
    )
    if across:
        dquery, dkey, dots, met = across_heads.gradients(
            launcher, arrays, gates, first, doutput, dlast, of_value.borders
        )
    else:
        if wanted and call.decay == "constant" and gates.flag is None and launcher.by_token:
            # the kernel whose rows are tokens knows gates of each token alone
            gates = fold_head_gates(launcher, log_decay)
        of_key = walk(
            *(launcher, "dkey", value, doutput, qhat, gates, ends),
            tile=tile,
            dtype=F32 if is_key else by_key,
            start_scale=start_scale,
            gate_gradient=key if wanted else None,
            in_parts=is_key,
        )
        of_query = walk(
            *(launcher, "dquery", doutput, value, khat, gates, first),
            tile=config.meeting or tile if is_key else tile,
            dtype=F32 if is_key else by_query,
            gate_gradient=query if wanted else None,
            meets=of_key.borders if wanted else None,
            in_parts=is_key,
        )
        dquery, dkey, met = of_query.output, of_key.output, of_query.borders
        dots = of_query.rowdots, of_key.rowdots
    dvalue, dstart = of_value.output, of_value.last
    dgate = None
    if is_key:
        hats = (qhat, khat, dquery, dkey, met)
        dquery, dkey, dgate = unfold_key_gates(launcher, arrays, gates, doutput, hats, (by_query, by_key))
    elif wanted:
        start = None if initial_state is None else _met(initial_state.astype(F32), dstart)
        dgate = head_gate_gradient(launcher, log_decay, *dots, met, start)
        if call.decay == "constant":
            dgate = _sum_tokens(call, dgate, cu_seqlens)
            dgate = jnp.where(jnp.isneginf(log_decay), 0, dgate).astype(log_decay.dtype)
    elif log_decay is not None:
        dgate = jnp.zeros_like(log_decay)
    dquery, dkey, dvalue = (sum_shared(call, x, dx) for x, dx in ((query, dquery), (key, dkey), (value, dvalue)))
    return dquery, dkey, dvalue, dgate, None if initial_state is None else dstart.astype(initial_state.dtype)


def _met(state: jax.Array, dstate: jax.Array) -> jax.Array:
    """⟨S, dS⟩ of each head; the gradient of nothing may be infinite."""
    return jnp.where(state == 0, 0, state * dstate).sum((2, 3))


def _dtype_of_gradient(call: Call, x: jax.Array) -> Any:
    """What each head's gradient of `x` comes in, before heads that share it are added up in float32.

    Of many heads that share, these are most of what is written and read; float16 might not have the range.
    """
    return F32 if x.shape[2] != call.heads and call.dtype == jnp.float16 else call.dtype


def sum_shared(call: Call, x: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of `x` from each head's: heads that share it are added up."""
    if x.shape[2] == call.heads:
        return dx
    return dx.reshape(*x.shape[:3], -1, x.shape[-1]).sum(3).astype(call.dtype)


def _sum_tokens(call: Call, dgate: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The gradient of one gate a sequence and head from one a token: `[B, T, H]` to `[N, H]`."""
    if cu_seqlens is None:
        return dgate.sum(1)
    token = jnp.arange(call.tokens)[None, :, None]
    inside = (token >= cu_seqlens[:-1, None, None]) & (token < cu_seqlens[1:, None, None])
    return jnp.where(inside, dgate, 0).sum(1)


def _prepare(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array, Gates, jax.Array | None]:
    """Queries and keys with key gates folded in, the gates as walks read them, and the segments' first states."""
    query, key, gates = _fold(launcher, query, key, log_decay, start=initial_state is not None)
    return query, key, gates, starts(launcher, key, value, gates, initial_state)


def _fold(
    launcher: Launcher, query: jax.Array, key: jax.Array, log_decay: jax.Array | None, start: bool
) -> tuple[jax.Array, jax.Array, Gates]:
    """Queries and keys with key gates folded in, and the gates as walks read them."""
    if launcher.call.decay == "key":
        return fold_key_gates(launcher, query, key, log_decay, start=start)
    if launcher.call.decay == "constant" and launcher.whole:
        return query, key, Gates(within=log_decay)
    return query, key, Gates() if log_decay is None else fold_head_gates(launcher, log_decay)


def step(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and final states, one token after the other."""
    call, tile = launcher.call, launcher.config.step
    # as much of a state as the registers hold
    block = min(tile.block, padded(call.value_dim), 16384 // padded(call.key_dim))
    in_place = initial_state is not None and initial_state.dtype == F32
    state = (call.sequences, call.heads, call.key_dim, call.value_dim)
    output, last = launcher.launch(
        device("step").step,
        *(query, key, value, log_decay, value_log_decay, initial_state),
        outputs=[shape(call.batch, call.tokens, call.heads, call.value_dim, dtype=call.dtype), shape(*state)],
        # packed streams have one more sequence: the padding behind the last
        programs=(call.sequences + call.packed) * call.heads * cdiv(call.value_dim, block),
        tile=tile,
        aliases={5: 1} if in_place else None,
        H=call.heads,
        HQ=query.shape[2],
        HK=key.shape[2],
        HV=value.shape[2],
        K=call.key_dim,
        V=call.value_dim,
        BK=padded(call.key_dim),
        BV=block,
        DECAY=call.decay,
        VALUE_DECAY=value_log_decay is not None,
        SCALE=float(call.scale),
        FLIP=call.reverse,
        START=initial_state is not None,
    )
    return output, last
