"""One token a sequence: the state is read, decayed, written and queried in one pass."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.chunks import layout
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
        a = log_decay if log_decay is None or call.decay == "constant" else log_decay[:, 0]
        b = None if value_log_decay is None else value_log_decay[:, 0]
        written = decayed(call, state, a, b) + written
    output = call.scale * jnp.einsum("bhk,bhkv->bhv", q, written, precision=precision)
    return output[:, None].astype(call.dtype), written


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def decayed(call: Call, state: jax.Array, log_decay: jax.Array | None, value_log_decay: jax.Array | None) -> jax.Array:
    """`state [N, H, K, V]` after one token's gates, `[N, H]` or `[N, H, K]` by `call.decay`, and `[N, H, V]`."""
    state = state.astype(call.state_dtype)
    for gates in _beside_states(call, log_decay, value_log_decay):
        state = _scaled(state, gates)
    return state


@decayed.defjvp
def _(call: Call, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # a gate's derivative is what it leaves of the state: taken factor by factor it could be 0 · inf
    left, moved = decayed(call, *primals), decayed(call, tangents[0], *primals[1:])
    for moving in _beside_states(call, *tangents[1:]):
        moved = moved + left * moving
    return left, moved


def _beside_states(call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None) -> list[jax.Array]:
    """The gates that there are, in the dtype and the rank of the states."""
    found = []
    if log_decay is not None:
        found.append(log_decay[..., None] if call.decay == "key" else log_decay[..., None, None])
    if value_log_decay is not None:
        found.append(value_log_decay[..., None, :])
    return [gates.astype(call.state_dtype) for gates in found]


def _scaled(state: jax.Array, log_decay: jax.Array) -> jax.Array:
    """`state · exp(log_decay)`, in two factors where `exp` has no number for one: so a zero stays zero."""
    largest = 88.0 if state.dtype == jnp.float32 else 709.0
    within = log_decay < largest
    beyond = jnp.where(within, 0, jnp.minimum(log_decay - largest, largest))
    return state * jnp.exp(jnp.where(within, log_decay, largest)) * jnp.exp(beyond)


def pays(call: Call) -> bool:
    """Whether a CPU is faster token by token than by chunks, without gradients; measured.

    For few tokens only: rounding a decay just below 1 once a token would make states drift in the long run.
    """
    if call.packed or call.tokens > 64:
        return False
    small = (
        layout.likely_rows(call) * call.heads * call.key_dim * call.value_dim < 65536
    )  # states that stay in the fastest cache
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
