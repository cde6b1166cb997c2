"""One token a sequence: the state is read, decayed, corrected and queried in one pass."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.first_gates import decayed
from ejkernel.kernels.chunks.scores import Einsum
from ejkernel.kernels.delta_rule.call import Call


def step(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    einsum: Einsum,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule for `T = 1`; a donated `state` is updated in place."""
    gates = None if log_decay is None else log_decay[:, 0]
    return corrected(call, query, key, value, beta, decayed(state, *beside_states(call, gates)), einsum)


def corrected(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    kept: jax.Array,
    einsum: Einsum,
) -> tuple[jax.Array, jax.Array]:
    """The output `[B, 1, H, V]` and the state after a token that finds `kept` of the one before it."""

    def of_heads(x: jax.Array) -> jax.Array:
        x = x[:, 0].astype(call.state_dtype)
        return jnp.repeat(x, call.heads // x.shape[1], axis=1)

    q, k, v, b = (of_heads(x) for x in (query, key, value, beta))
    error = b[..., None] * (v - einsum("bhk,bhkv->bhv", k, kept))
    state = kept + k[..., :, None] * error[..., None, :]
    output = call.scale * einsum("bhk,bhkv->bhv", q, state)
    return output[:, None].astype(call.dtype), state


def beside_states(call: Call, log_decay: jax.Array | None) -> list[jax.Array]:
    """The gate of a token, `[N, H]` or `[N, H, K]` by `call.decay`, beside states; nothing if there is none."""
    if log_decay is None:
        return []
    return [log_decay[..., None] if call.decay == "key" else log_decay[..., None, None]]
