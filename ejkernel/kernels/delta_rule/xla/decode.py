"""One token a sequence: the state is read, decayed, corrected and queried in one pass."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks import layout
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

    def of_heads(x: jax.Array) -> jax.Array:
        x = x[:, 0].astype(call.state_dtype)
        return jnp.repeat(x, call.heads // x.shape[1], axis=1)

    q, k, v, b = (of_heads(x) for x in (query, key, value, beta))
    gates = None if log_decay is None else log_decay[:, 0]
    state = decayed(state, *beside_states(call, gates))
    error = b[..., None] * (v - einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., :, None] * error[..., None, :]
    output = call.scale * einsum("bhk,bhkv->bhv", q, state)
    return output[:, None].astype(call.dtype), state


def beside_states(call: Call, log_decay: jax.Array | None) -> list[jax.Array]:
    """The gate of a token, `[N, H]` or `[N, H, K]` by `call.decay`, beside states; nothing if there is none."""
    if log_decay is None:
        return []
    return [log_decay[..., None] if call.decay == "key" else log_decay[..., None, None]]


def pays(call: Call) -> bool:
    """Whether a CPU is faster token by token than by chunks, without gradients; measured.

    For few tokens only: rounding a decay just below 1 once a token would make states drift in the long run.
    """
    # states that stay in a core's own cache
    small = layout.likely_rows(call) * call.heads * call.key_dim * call.value_dim <= 262144
    return not call.packed and call.tokens <= (32 if small else 4)
