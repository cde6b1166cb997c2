"""One token a sequence: the state is read, decayed, written and queried in one pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks import layout
from ejkernel.kernels.chunks.first_gates import decayed
from ejkernel.kernels.chunks.scores import Einsum
from ejkernel.kernels.chunks.steps import by_tokens
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
    dtype = call.state_dtype
    q, k, v = (jnp.repeat(x[:, 0].astype(dtype), call.heads // x.shape[2], axis=1) for x in (query, key, value))
    written = k[..., :, None] * v[..., None, :]  # [B, H, K, V]
    if state is not None:
        a = log_decay if log_decay is None or call.decay == "constant" else log_decay[:, 0]
        b = None if value_log_decay is None else value_log_decay[:, 0]
        written = decayed(state.astype(dtype), *beside_states(call, a, b)) + written
    output = call.scale * einsum("bhk,bhkv->bhv", q, written)
    return output[:, None].astype(call.dtype), written


def beside_states(call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None) -> list[jax.Array]:
    """The gates that there are of a token, `[N, H]` or `[N, H, K]` by `call.decay` and `[N, H, V]`, beside states."""
    found = []
    if log_decay is not None:
        found.append(log_decay[..., None] if call.decay == "key" else log_decay[..., None, None])
    if value_log_decay is not None:
        found.append(value_log_decay[..., None, :])
    return found


def pays(call: Call) -> bool:
    """Whether a CPU is faster token by token than by chunks, without gradients; measured.

    For few tokens only: rounding a decay just below 1 once a token would make states drift in the long run.
    """
    if call.packed or call.tokens > 64:
        return False
    # states that stay in the fastest cache
    small = layout.likely_rows(call) * call.heads * call.key_dim * call.value_dim < 65536
    return call.tokens < (32 if small else 16) or call.value_decay or (call.decay == "key" and small)


def steps(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    state: jax.Array,
    einsum: Einsum,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent` for few tokens that are not packed, one `step` after the other."""
    one, constant = replace(call, tokens=1), call.decay == "constant"
    arrays = query, key, value, None if constant else log_decay, value_log_decay

    def visit(token: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, a, b = token
        return step(one, q, k, v, log_decay if constant else a, b, state, einsum)

    return by_tokens(visit, arrays, state, call.reverse)
