"""One token a sequence: the state is read, decayed, written and queried in one pass."""

import jax

from ejkernel.kernels.chunks.first_gates import beside_states, decayed
from ejkernel.kernels.chunks.scores import Einsum
from ejkernel.kernels.chunks.token_walk import of_heads
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
    q, k, v = (of_heads(call, x) for x in (query, key, value))
    state = einsum("bhk,bhv->bhkv", k, v)
    state = state if kept is None else kept + state
    output = call.scale * einsum("bhk,bhkv->bhv", q, state)
    return output[:, None].astype(call.dtype), state
