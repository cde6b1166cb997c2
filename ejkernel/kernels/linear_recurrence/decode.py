"""One token a sequence: the state is read, decayed, written and queried in one pass."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.linear_recurrence._call import Call


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
