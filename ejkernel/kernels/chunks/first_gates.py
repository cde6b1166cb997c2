"""Initial states as the first tokens' gates leave them. The walk then takes these gates for 0.

So no factor reaches back beyond a sequence's first token: without a state there, or with zeros, a gate whose `exp` is
infinite would give 0 · inf.
"""

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.layout import Call


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
