"""Initial states as the first tokens' gates leave them. The walk then takes these gates for 0.

So no factor reaches back beyond a sequence's first token: without a state there, or with zeros, a gate whose `exp` is
infinite would give 0 · inf.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks.walk import Call

Gates = tuple[jax.Array | None, jax.Array | None]


class Inputs(Protocol):
    """What is read here of a call's arrays."""

    @property
    def query(self) -> jax.Array: ...
    @property
    def gates(self) -> Gates:
        """Of keys, by `call.decay` `[N, H]` if constant, else `[B, T, H]` or `[B, T, H, K]`, and of values."""
        ...

    @property
    def initial_state(self) -> jax.Array | None: ...


def initial_states(call: Call, inputs: Inputs) -> jax.Array:
    """Initial states `[N, H, K, V]`."""
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(call.state_dtype)
    shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
    return _varying.like(jnp.zeros(shape, call.state_dtype), inputs.query)


def entered(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[jax.Array | None, jax.Array]:
    """What sequences are entered with, if there are initial states, and that or zeros."""
    first = initial_states(call, inputs)
    if inputs.initial_state is None:
        return None, first
    starts = entering_states(call, first, inputs.gates, cu_seqlens)
    return starts, starts


def entering_states(call: Call, states: jax.Array, gates: Gates, cu_seqlens: jax.Array | None) -> jax.Array:
    """What sequences with these initial states are entered with."""
    by_key, by_value = gates
    if by_key is not None:
        constant = call.decay == "constant"
        by_key = where_there_are_tokens(by_key, cu_seqlens) if constant else of_first_tokens(call, by_key, cu_seqlens)
    if by_value is not None:
        by_value = of_first_tokens(call, by_value, cu_seqlens)
    return decayed(states.astype(call.state_dtype), *beside_states(call, by_key, by_value))


def through_first_gates(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, d_gates: Gates, d_entering: jax.Array
) -> tuple[Gates, jax.Array | None]:
    """Cotangents of all gates and of initial states, from those of the other gates and of `entering_states`."""
    state = inputs.initial_state
    if state is None:
        return d_gates, None
    _, pull = jax.vjp(lambda state, gates: entering_states(call, state, gates, cu_seqlens), state, inputs.gates)
    d_state, d_first = pull(d_entering)
    return jax.tree.map(jnp.add, d_first, d_gates), d_state


def beside_states(call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None = None) -> list[jax.Array]:
    """The gates that there are of a token, `[N, H]` or `[N, H, K]` by `call.decay` and `[N, H, V]`, beside states."""
    found = []
    if log_decay is not None:
        found.append(log_decay[..., None] if call.decay == "key" else log_decay[..., None, None])
    if value_log_decay is not None:
        found.append(value_log_decay[..., None, :])
    return found


def of_first_tokens(call: Call, gates: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The gates `[B, T, ...]` of the token that each sequence begins with, `[N, ...]`; 0 where it has none."""
    if cu_seqlens is None:
        return gates[:, -1 if call.reverse else 0]
    at = cu_seqlens[1:] - 1 if call.reverse else cu_seqlens[:-1]
    gates = gates[0].at[jnp.clip(at, 0, call.tokens - 1)].get(mode="promise_in_bounds")
    return where_there_are_tokens(gates, cu_seqlens)


def where_there_are_tokens(gates: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """`gates [N, ...]`, 0 for sequences without tokens."""
    if cu_seqlens is None:
        return gates
    some = cu_seqlens[1:] > cu_seqlens[:-1]
    return jnp.where(some.reshape(-1, *(1,) * (gates.ndim - 1)), gates, 0)


@jax.custom_jvp
def decayed(state: jax.Array, *gates: jax.Array) -> jax.Array:
    """`state [N, H, K, V]` after one token's gates, each of which broadcasts to it."""
    for each in gates:
        state = _scaled(state, each.astype(state.dtype))
    return state


@decayed.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # a gate's derivative is what it leaves of the state: taken factor by factor it could be 0 · inf
    left, moved = decayed(*primals), decayed(tangents[0], *primals[1:])
    for moving in tangents[1:]:
        moved = moved + left * moving.astype(left.dtype)
    return left, moved


def _scaled(state: jax.Array, log_decay: jax.Array) -> jax.Array:
    """`state · exp(log_decay)`, in two factors where `exp` has no number for one: so a zero stays zero."""
    largest = 88.0 if state.dtype == jnp.float32 else 709.0
    within = log_decay < largest
    beyond = jnp.where(within, 0, jnp.minimum(log_decay - largest, largest))
    return state * jnp.exp(jnp.where(within, log_decay, largest)) * jnp.exp(beyond)
