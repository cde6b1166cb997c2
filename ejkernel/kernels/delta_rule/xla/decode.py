"""One token a sequence: the state is read, decayed, corrected and queried in one pass."""

import jax

from ejkernel.kernels.chunks.first_gates import beside_states, decayed
from ejkernel.kernels.chunks.scores import Einsum
from ejkernel.kernels.chunks.token_walk import of_heads, read
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
    state = corrected(call, key, value, beta, decayed(state, *beside_states(call, gates)), einsum)
    return read(call, query, state), state


def corrected(
    call: Call, key: jax.Array, value: jax.Array, beta: jax.Array, kept: jax.Array, einsum: Einsum
) -> jax.Array:
    """The state after a token that finds `kept` of the one before it."""
    k, v, b = (of_heads(call, x) for x in (key, value, beta))
    error = b[..., None] * (v - einsum("bhk,bhkv->bhv", k, kept))
    return kept + k[..., :, None] * error[..., None, :]
