"""One token a sequence: the state is read, decayed, written and queried in one pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.linear_recurrence.call import Call


def step(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    state: jax.Array | None,
    precision: lax.Precision,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` for `T = 1`; a donated `state` is updated in place."""
    dtype, groups = call.state_dtype, call.heads // call.kv_heads
    q = query[:, 0].astype(dtype)  # [B, H, K]
    k, v = (jnp.repeat(x[:, 0].astype(dtype), groups, axis=1) for x in (key, value))
    written = k[..., :, None] * v[..., None, :]  # [B, H, K, V]
    if state is not None:
        kept = state.astype(dtype)
        if log_decay is not None:
            a = log_decay if call.decay == "constant" else log_decay[:, 0]
            decay = jnp.exp(a.astype(dtype))
            kept = kept * (decay[..., None] if call.decay == "key" else decay[..., None, None])
        if value_log_decay is not None:
            kept = kept * jnp.exp(value_log_decay[:, 0].astype(dtype))[..., None, :]
        written = kept + written
    output = call.scale * jnp.einsum("bhk,bhkv->bhv", q, written, precision=precision)
    return output[:, None].astype(call.dtype), written


def pays(call: Call) -> bool:
    """Whether a CPU is faster token by token than by chunks, without gradients; measured.

    For few tokens only: rounding a decay just below 1 once a token would make states drift in the long run.
    """
    if call.packed or call.tokens > 64:
        return False
    small = call.batch * call.heads * call.key_dim * call.value_dim < 65536  # states that stay in the fastest cache
    return call.tokens < (32 if small else 16) or call.value_decay or (call.decay == "key" and small)


def steps(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    state: jax.Array,
    precision: lax.Precision,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` for few tokens that are not packed, one `step` after the other."""
    one, constant = replace(call, tokens=1), call.decay == "constant"
    arrays = query, key, value, None if constant else log_decay, value_log_decay

    def visit(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a, b = jax.tree.map(lambda x: x[:, None], token)
        output, state = step(one, q, k, v, log_decay if constant else a, b, state, precision)
        return state, output[:, 0]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
    state, output = lax.scan(visit, state, tokens, reverse=call.reverse)
    return jnp.moveaxis(output, 0, 1), state
