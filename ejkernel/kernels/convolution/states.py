"""Initial and final states of a convolution: gathers and scatters of `W - 1` tokens per sequence."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.convolution.call import Call
from ejkernel.kernels.convolution.places import Places


def initial_states(call: Call, initial_state: jax.Array | None, rows: int | None = None) -> jax.Array:
    """The initial states `[N, W - 1, D]` in the call's dtype; zeros, for so many `rows` or `N`, if there are none."""
    if initial_state is None:
        return jnp.zeros((call.sequences if rows is None else rows, call.history, call.channels), call.dtype)
    return initial_state.astype(call.dtype)


def take(call: Call, x: jax.Array, at: jax.Array, there: jax.Array) -> jax.Array:
    """The tokens of `x [B, T, D]` at the indices `at [N, W - 1]`, and 0 for those that are not `there`."""
    index = jnp.clip(at, 0, call.tokens - 1).reshape(x.shape[0], -1, 1)
    tokens = jnp.take_along_axis(x, index, 1).reshape(*at.shape, x.shape[-1])
    return jnp.where(there[..., None], tokens, 0)


def put(call: Call, x: jax.Array, at: jax.Array, there: jax.Array, tokens: jax.Array, add: bool = False) -> jax.Array:
    """`x [B, T, D]` with `tokens [N, W - 1, D]` at the indices `at`, or added there; none that are not `there`."""
    index = jnp.where(there, at, call.tokens).reshape(x.shape[0], -1)

    def row(x: jax.Array, index: jax.Array, tokens: jax.Array) -> jax.Array:
        return x.at[index].add(tokens, mode="drop") if add else x.at[index].set(tokens, mode="drop")

    return jax.vmap(row)(x, index, tokens.reshape(*index.shape, x.shape[-1]))


def final_states(call: Call, where: Places | None, x: jax.Array, initial_state: jax.Array | None) -> jax.Array:
    """The last `W - 1` inputs of each sequence, `[N, W - 1, D]`; inputs before its first are from the initial state."""
    if where is None:
        states = initial_states(call, initial_state)
        return jnp.concatenate([states[:, call.tokens :], x[:, max(call.tokens - call.history, 0) :]], 1)
    tails = take(call, x, *where.tails(call))
    if initial_state is None:
        return tails
    row, older = where.carried(call)
    index = jnp.clip(row, 0, max(call.history - 1, 0))[..., None]
    return jnp.where(older[..., None], jnp.take_along_axis(initial_states(call, initial_state), index, 1), tails)


def final_gradient(
    call: Call, where: Places | None, d_final: jax.Array, d_x: jax.Array, d_states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`d_x` and `d_states`, the cotangent of the initial states, plus the contributions of the final states'."""
    to_x, to_states = d_final.astype(d_x.dtype), d_final.astype(d_states.dtype)
    if where is None:
        before = max(call.history - call.tokens, 0)
        d_x = d_x.at[:, max(call.tokens - call.history, 0) :].add(to_x[:, before:])
        return d_x, d_states + jnp.pad(to_states[:, :before], ((0, 0), (call.history - before, 0), (0, 0)))
    at, there = where.tails(call)
    row, older = where.carried(call)
    d_x = put(call, d_x, at, there, to_x, add=True)
    index = jnp.where(older, row, call.history)
    return d_x, jax.vmap(lambda x, index, each: x.at[index].add(each, mode="drop"))(d_states, index, to_states)
