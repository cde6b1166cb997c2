"""Initial states multiplied by the gates of sequences' first tokens. The walk over tokens then takes these gates for 0.

So no decay factor inside a walk reaches back beyond a sequence's first token. If it did, a gate whose `exp` overflows
would multiply a state of zeros there: 0 · inf.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.segments import first_tokens
from ejkernel.kernels.chunks.walk import zero_states

Gates = tuple[jax.Array | None, jax.Array | None]


class Inputs(Protocol):
    """What is read here of a call's named arrays."""

    @property
    def query(self) -> jax.Array: ...
    @property
    def gates(self) -> Gates:
        """Log decays of key dims, `[N, H]`, `[B, T, H]` or `[B, T, H, K]` by `call.decay`, and of value dims."""
        ...

    @property
    def initial_state(self) -> jax.Array | None: ...


def initial_states(call: Call, inputs: Inputs) -> jax.Array:
    """Initial states `[N, H, K, V]`, or zeros."""
    if inputs.initial_state is None:
        return zero_states(call, inputs.query)
    return inputs.initial_state.astype(call.state_dtype)


def start_states(call: Call, inputs: Inputs, sequences: jax.Array | None) -> jax.Array | None:
    """The states that sequences start from, after their first gates, or `None` without initial states.

    `sequences` here and below is `cu_seqlens` or `segment_ids`, see `Call`; where rows hold several sequences, these
    are the states and gates of each row's first.
    """
    if inputs.initial_state is None:
        return None
    return entering_states(call, inputs.initial_state, inputs.gates, sequences)


def entering_states(call: Call, states: jax.Array, gates: Gates, sequences: jax.Array | None) -> jax.Array:
    """Initial states `[N, H, K, V]` after the gates of their sequences' first tokens."""
    by_key, by_value = gates
    if by_key is not None:
        constant = call.decay == "constant"
        of_first = where_there_are_tokens if constant else of_first_tokens
        by_key = of_first(call, by_key, sequences)
    if by_value is not None:
        by_value = of_first_tokens(call, by_value, sequences)
    return decayed(states.astype(call.state_dtype), *beside_states(call, by_key, by_value))


def beside_states(call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None = None) -> list[jax.Array]:
    """One token's log decays, `[N, H]` or `[N, H, K]` by `call.decay` and `[N, H, V]`, as they multiply states."""
    gates = []
    if log_decay is not None:
        gates.append(log_decay[..., None] if call.decay == "key" else log_decay[..., None, None])
    if value_log_decay is not None:
        gates.append(value_log_decay[..., None, :])
    return gates


def of_first_tokens(call: Call, gates: jax.Array, sequences: jax.Array | None) -> jax.Array:
    """The gates `[N, ...]` of each sequence's first token, from `[B, T, ...]`; 0 for sequences without tokens."""
    if sequences is None:
        return gates[:, -1 if call.reverse else 0]
    if call.segmented:
        at, _ = first_tokens(call, sequences)
        gates = jnp.take_along_axis(gates, at.reshape(-1, *(1,) * (gates.ndim - 1)), 1, mode="promise_in_bounds")[:, 0]
    else:
        at = sequences[1:] - 1 if call.reverse else sequences[:-1]
        gates = gates[0].at[jnp.clip(at, 0, call.tokens - 1)].get(mode="promise_in_bounds")
    return where_there_are_tokens(call, gates, sequences)


def where_there_are_tokens(call: Call, gates: jax.Array, sequences: jax.Array | None) -> jax.Array:
    """`gates [N, ...]`, 0 for sequences without tokens."""
    if sequences is None:
        return gates
    some = first_tokens(call, sequences)[1] if call.segmented else sequences[1:] > sequences[:-1]
    return jnp.where(some.reshape(-1, *(1,) * (gates.ndim - 1)), gates, 0)


@jax.custom_jvp
def decayed(state: jax.Array, *gates: jax.Array) -> jax.Array:
    """`state [N, H, K, V]` after one token's gates, each of which broadcasts to it."""
    for each in gates:
        state = _scaled(state, each.astype(state.dtype))
    return state


@decayed.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # the derivative by a gate is the decayed state itself: taken factor by factor it could be 0 · inf
    state, d_state = decayed(*primals), decayed(tangents[0], *primals[1:])
    for d_gate in tangents[1:]:
        d_state = d_state + state * d_gate.astype(state.dtype)
    return state, d_state


def _scaled(state: jax.Array, log_decay: jax.Array) -> jax.Array:
    """`state · exp(log_decay)`, in two factors where one would overflow: so a zero stays zero."""
    largest = 88.0 if state.dtype == jnp.float32 else 709.0
    beyond = jnp.clip(log_decay - largest, 0, largest)
    return state * jnp.exp(jnp.minimum(log_decay, largest)) * jnp.exp(beyond)
