"""One token a sequence: the state is read, decayed, corrected and queried in one pass."""

import jax

from ejkernel.kernels.chunks.first_gates import beside_states, decayed
from ejkernel.kernels.chunks.scores import Einsum
from ejkernel.kernels.chunks.token_walk import of_heads
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
    q, k, v, b = (of_heads(call, x) for x in (query, key, value, beta))
    error = b[..., None] * (v - einsum("bhk,bhkv->bhv", k, kept))
    state = kept + k[..., :, None] * error[..., None, :]
    output = call.scale * einsum("bhk,bhkv->bhv", q, state)
    return output[:, None].astype(call.dtype), state
