"""A recurrence token by token: a single one to decode, and all of them on a CPU, where small states stay in its caches.

`write(call, token, state)` is a recurrence's own: the state after a token, whose arrays are `[B, 1, heads, ·]`, from
the decayed state before it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.first_gates import Inputs, decayed
from ejkernel.kernels.chunks.walk import Arrays, einsum_of, map_gates, zero_states

Write = Callable[[Any, Any, jax.Array], jax.Array]
Results = tuple[jax.Array, jax.Array]

# The most numbers in a head's state: up to here a CPU is faster token by token, by a half on average. It is up to four
# times as many with packed sequences, which fill few of their chunks, and with value gates, whose chunks cost more.
LARGEST_STATE = 64 * 64


def applies(call: Call, inputs: Inputs) -> bool:
    """Whether a CPU is faster token by token at a call without gradients."""
    costly = call.packed or inputs.gates[1] is not None
    return call.key_dim * call.value_dim <= (4 if costly else 1) * LARGEST_STATE


def step(call: Call, write: Write, token: Arrays, state: jax.Array) -> Results:
    """The results of a call of one token; a donated `state` is updated in place."""
    state = write(call, token, decayed(state, *_beside_states(token)))
    return _read(call, token.query, state), state


def forward(
    call: Call, write: Write, arrays: Arrays, starts: jax.Array | None, cu_seqlens: jax.Array | None
) -> Results:
    """The results, as `walk.forward` gives them."""
    output = jnp.zeros_like(arrays.query, call.dtype, shape=(call.batch, call.tokens, call.heads, call.value_dim))
    first = zero_states(call, arrays.query) if starts is None else starts

    def sequence(state: jax.Array, output: jax.Array, low: Any, high: Any) -> Results:
        """The final state of one sequence, or of each row, and the output with its tokens written."""

        def visit(i: jax.Array, carry: Results) -> Results:
            state, output = carry
            at = low + high - 1 - i if call.reverse else i
            token = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, 1, 1, allow_negative_indices=False), arrays)
            # the first gates are in the state already
            token = map_gates(lambda x: jnp.where(i == low, 0, x.astype(call.state_dtype)), token)
            for gate in _beside_states(token):
                factor = jnp.exp(_dithered(gate, at))
                # what is 0 stays so, even if a factor overflows; its tangent decays as any other
                state = jnp.where((state == 0) & (factor == jnp.inf), state, factor * state)
            state = write(call, token, state)
            read = _read(call, token.query, state)
            return state, lax.dynamic_update_slice_in_dim(output, read, at, 1, allow_negative_indices=False)

        return lax.fori_loop(low, high, visit, (state, output))

    if cu_seqlens is None:
        return sequence(first, output, 0, call.tokens)[::-1]

    def visit(output: jax.Array, each: tuple[jax.Array, ...]) -> Results:
        low, high, start = each
        state, output = sequence(start, output, low, high)
        return output, state[0]

    ends = jnp.minimum(cu_seqlens, call.tokens)
    return lax.scan(visit, output, (ends[:-1], ends[1:], first[:, None]))


def of_heads(call: Call, x: jax.Array) -> jax.Array:
    """One token's `[B, 1, heads, ...]` for all heads, `[B, H, ...]` in the dtype of the states."""
    x = x[:, 0].astype(call.state_dtype)
    return jnp.repeat(x, call.heads // x.shape[1], axis=1)


def _read(call: Call, query: jax.Array, state: jax.Array) -> jax.Array:
    """The output `[B, 1, H, V]` of a token, from the state after it."""
    output = call.scale * einsum_of(call)("bhk,bhkv->bhv", of_heads(call, query), state)
    return output[:, None].astype(call.dtype)


def _beside_states(token: Arrays) -> list[jax.Array]:
    """One token's log decays, `[B, 1, H, 1 or K]` and `[B, 1, H, V]`, as they multiply states `[B, H, K, V]`."""
    gates = [] if token.log_decay is None else [token.log_decay[:, 0, :, :, None]]
    by_value = getattr(token, "value_log_decay", None)
    return gates if by_value is None else [*gates, by_value[:, 0, :, None, :]]


def _dithered(gate: jax.Array, at: jax.Array) -> jax.Array:
    """`gate`, moved so that its `exp` is rounded up at some tokens and down at others.

    A factor just below 1 is off by up to 3e-8 of it once it is rounded. Equal gates would have equal errors, which over
    a hundred thousand tokens would add up to a few thousandths. So the gate is moved by a part of the distance between
    numbers there, another part at each token: multiples of the golden ratio leave no gaps.
    """
    if gate.dtype != np.float32:
        return gate
    part = (at.astype(np.uint32) * np.uint32(2654435769)).astype(np.float32) * np.float32(2**-32) - np.float32(0.5)
    return gate + part * jnp.where(gate > 0, np.float32(2**-23), np.float32(2**-24))
