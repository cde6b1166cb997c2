"""One token a sequence: the state is read, decayed, written and queried in one pass."""

import jax

from ejkernel.kernels.chunks.first_gates import beside_states, decayed
from ejkernel.kernels.chunks.token_walk import of_heads, read
from ejkernel.kernels.linear_recurrence.call import Call


def step(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` for `T = 1`; a donated `state` is updated in place."""
    if state is not None:
        a = log_decay if log_decay is None or call.decay == "constant" else log_decay[:, 0]
        b = None if value_log_decay is None else value_log_decay[:, 0]
        state = decayed(state.astype(call.state_dtype), *beside_states(call, a, b))
    state = written(call, key, value, state)
    return read(call, query, state), state


def written(call: Call, key: jax.Array, value: jax.Array, kept: jax.Array | None) -> jax.Array:
    """The state after a token that finds `kept` of what was there, or nothing."""
    # no einsum, whose gradients would be products too small to be worth it
    state = of_heads(call, key)[..., :, None] * of_heads(call, value)[..., None, :]
    return state if kept is None else kept + state
