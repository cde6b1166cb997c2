"""A recurrence token by token: a single one to decode, and all of them on a CPU, where small states stay in its caches.

`write(call, token, state)` is a recurrence's own: the state after a token, whose arrays are `[B, 1, heads, ·]`, from
the decayed state before it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.first_gates import Inputs, decayed, initial_states
from ejkernel.kernels.chunks.segments import runs
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


def segments(call: Call, write: Write, arrays: Arrays, inputs: Inputs, ids: jax.Array, block: int) -> Results:
    """The results of rows that hold several sequences, as `segment_walk.forward` gives them.

    JAX can differentiate it any number of times: `block` tokens at a time are computed again for a gradient, so that
    states of all tokens are never there at once.
    """
    marks = _marks(call, inputs, ids)
    arrays = _select(arrays, marks)

    def visit(state: jax.Array, each: tuple[Arrays, jax.Array, jax.Array]) -> Results:
        token, reset, valid = each
        reset, valid = (x[:, None, None, None] for x in (reset, valid))
        output, following = step(call, write, token, jnp.where(reset, 0, state))
        return jnp.where(valid, following, state), jnp.where(valid, output, 0)

    def of_block(state: jax.Array, block: Any) -> Results:
        return lax.scan(visit, state, block, reverse=call.reverse)

    T = call.tokens
    blocks = -(-T // block)

    def by_blocks(x: jax.Array) -> jax.Array:
        """`[B, T, ...]` as `[blocks, block, B, ...]`, with zeros behind, which are padding."""
        x = jnp.pad(x, ((0, 0), (0, blocks * block - T), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x, 1, 0).reshape(blocks, block, x.shape[0], *x.shape[2:])

    each = jax.tree.map(by_blocks, (jax.tree.map(lambda x: x[:, :, None], arrays), marks.reset, marks.valid))
    final, output = lax.scan(jax.checkpoint(of_block), initial_states(call, inputs), each, reverse=call.reverse)
    return jnp.moveaxis(output.reshape(blocks * block, *output.shape[2:])[:T, :, 0], 0, 1), final


def _beside(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags of tokens `[B, T]` as they broadcast to `x [B, T, ...]`."""
    return flags.reshape(*flags.shape, *(1,) * (x.ndim - 2))


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
            state = write(call, token, _decayed_at(at, state, token))
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


def forward_of_segments(call: Call, write: Write, arrays: Arrays, inputs: Inputs, ids: jax.Array) -> Results:
    """The results of rows that hold several sequences, as `segment_walk.forward` gives them."""
    marks = _marks(call, inputs, ids)
    output = jnp.zeros_like(arrays.query, call.dtype, shape=(call.batch, call.tokens, call.heads, call.value_dim))

    def visit(i: jax.Array, carry: Results) -> Results:
        before, output = carry
        at = call.tokens - 1 - i if call.reverse else i
        token, mark = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, 1, 1), (arrays, marks))
        token = map_gates(lambda x: x.astype(call.state_dtype), _select(token, mark))
        reset, valid = (x[:, :, None, None] for x in (mark.reset, mark.valid))
        state = write(call, token, _decayed_at(at, jnp.where(reset, 0, before), token))
        state = jnp.where(valid, state, before)
        read = jnp.where(valid, _read(call, token.query, state), 0)
        return state, lax.dynamic_update_slice_in_dim(output, read, at, 1)

    return lax.fori_loop(0, call.tokens, visit, (initial_states(call, inputs), output))[::-1]


class _Marks(NamedTuple):
    """What tokens are in rows that hold several sequences, `[B, T]` each."""

    valid: jax.Array  # no padding
    reset: jax.Array  # starts from nothing
    without_gate: jax.Array  # its gate has no effect


def _marks(call: Call, inputs: Inputs, ids: jax.Array) -> _Marks:
    sequences = runs(ids)
    first, of_row = sequences.first_visited(call), sequences.first_of_row(call)
    reset = first & ~of_row
    return _Marks(sequences.valid, reset, ~sequences.valid | (first if inputs.initial_state is None else reset))


def _select(arrays: Arrays, marks: _Marks) -> Arrays:
    """Arrays of tokens with 0 for what has no effect: selected, not multiplied, as it may be anything."""
    arrays = jax.tree.map(lambda x: jnp.where(_beside(marks.valid, x), x, 0), arrays)
    return map_gates(lambda x: jnp.where(_beside(marks.without_gate, x), 0, x), arrays)


def _decayed_at(at: jax.Array, state: jax.Array, token: Arrays) -> jax.Array:
    """`state` after the gates of the token at this place, in the fastest way."""
    for gate in _beside_states(token):
        factor = jnp.exp(_dithered(gate, at))
        # what is 0 stays so, even if a factor overflows; its tangent decays as any other
        state = jnp.where((state == 0) & (factor == jnp.inf), state, factor * state)
    return state


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
    # under `jax.disable_jit` the place is a number of Python's
    part = (jnp.asarray(at).astype(np.uint32) * np.uint32(2654435769)).astype(np.float32) * np.float32(
        2**-32
    ) - np.float32(0.5)
    return gate + part * jnp.where(gate > 0, np.float32(2**-23), np.float32(2**-24))
