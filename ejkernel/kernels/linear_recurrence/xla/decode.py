"""One token a sequence: the state is read, decayed, written and queried in one pass."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.first_gates import decayed
from ejkernel.kernels.chunks.scores import Einsum
from ejkernel.kernels.linear_recurrence.call import Call


def step(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    state: jax.Array | None,
    einsum: Einsum,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` for `T = 1`; a donated `state` is updated in place."""
    if state is not None:
        a = log_decay if log_decay is None or call.decay == "constant" else log_decay[:, 0]
        b = None if value_log_decay is None else value_log_decay[:, 0]
        state = decayed(state.astype(call.state_dtype), *beside_states(call, a, b))
    return written(call, query, key, value, state, einsum)


def written(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, kept: jax.Array | None, einsum: Einsum
) -> tuple[jax.Array, jax.Array]:
    """The output `[B, 1, H, V]` and the state after a token that finds `kept` of what was there, or nothing."""
    dtype = call.state_dtype
    q, k, v = (jnp.repeat(x[:, 0].astype(dtype), call.heads // x.shape[2], axis=1) for x in (query, key, value))
    state = einsum("bhk,bhv->bhkv", k, v)
    state = state if kept is None else kept + state
    output = call.scale * einsum("bhk,bhkv->bhv", q, state)
    return output[:, None].astype(call.dtype), state


def beside_states(call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None) -> list[jax.Array]:
    """The gates that there are of a token, `[N, H]` or `[N, H, K]` by `call.decay` and `[N, H, V]`, beside states."""
    found = []
    if log_decay is not None:
        found.append(log_decay[..., None] if call.decay == "key" else log_decay[..., None, None])
    if value_log_decay is not None:
        found.append(value_log_decay[..., None, :])
    return found
