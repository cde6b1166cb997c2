"""Where sequences begin and end in their rows, as far as a convolution that spans `W` tokens needs to know."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.convolution.call import Call, Inputs


class Places(NamedTuple):
    """Places of tokens and states. Arrays of states are `[rows, states]`: `[1, N]` if packed, else `[B, 1]`.

    Attributes:
        position: `[B, T]`, how many tokens of the same sequence precede each token, at most `W - 1`; -1 for padding.
        first: `[rows, states]`, the first token of the sequence that starts from the initial state.
        length: `[rows, states]`, how many tokens that sequence has, at most `W - 1`.
        last: `[rows, states]`, the last token of the sequence that the final state belongs to.
        reach: `[rows, states]`, the position of that token, -1 if there is none.
        continues: `[rows, states]`, whether initial and final state belong to the same sequence. May be wrong for
            sequences of `W` tokens or more.
    """

    position: jax.Array
    first: jax.Array
    length: jax.Array
    last: jax.Array
    reach: jax.Array
    continues: jax.Array

    def heads(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Indices of the first `W - 1` tokens after each initial state, and whether they exist; both `[N, W - 1]`."""
        order = _order(call)
        return _by_state(call, self.first[..., None] + order), _by_state(call, order < self.length[..., None])

    def tails(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Indices of the last `W - 1` tokens before each final state, and whether they exist; both `[N, W - 1]`."""
        back = _order(call)[..., ::-1]
        return _by_state(call, self.last[..., None] - back), _by_state(call, back <= self.reach[..., None])

    def used(self, call: Call, has_states: bool) -> jax.Array:
        """Which tokens `[B, T]` are not padding and, if the call `has_states`, do not read an initial state."""
        used = self.position >= 0
        if not has_states:
            return used
        if call.layout == "packed":
            return used & (self.position >= call.history)
        token = jnp.arange(call.tokens, dtype=jnp.int32)[None]
        return used & ((token < self.first) | (token >= self.first + self.length))

    def carried(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """For each row of the final states, the row of the initial state it may be, and whether it is; `[N, W - 1]`."""
        back = _order(call)[..., ::-1]
        reach = self.reach[..., None]
        older = (back > reach) & self.continues[..., None]
        return _by_state(call, call.history + reach - back), _by_state(call, older)


def _order(call: Call) -> jax.Array:
    return jnp.arange(call.history, dtype=jnp.int32)[None, None]


def _by_state(call: Call, x: jax.Array) -> jax.Array:
    return x.reshape(call.sequences, call.history)


def places(call: Call, inputs: Inputs) -> Places | None:
    """The places of a call; `None` if each row is one sequence."""
    if call.layout == "packed":
        assert inputs.cu_seqlens is not None
        return _packed(call, inputs.cu_seqlens.astype(jnp.int32))
    if call.layout == "segments":
        assert inputs.segment_ids is not None
        return _segments(call, inputs.segment_ids)
    return None


def _packed(call: Call, borders: jax.Array) -> Places:
    token = jnp.arange(call.tokens, dtype=jnp.int32)
    is_first = jnp.zeros(call.tokens, bool).at[borders].set(True, mode="drop")
    position = _positions(call, (~is_first & (token > 0))[None], (token < borders[-1])[None])
    length = jnp.diff(borders)[None]
    return Places(
        position,
        first=borders[None, :-1],
        length=jnp.minimum(length, call.history),
        last=borders[None, 1:] - 1,
        reach=jnp.minimum(length - 1, call.history),
        continues=jnp.ones_like(length, bool),
    )


def _segments(call: Call, ids: jax.Array) -> Places:
    used = ids >= 0
    same = used[:, 1:] & (ids[:, 1:] == ids[:, :-1])
    position = _positions(call, jnp.pad(same, ((0, 0), (1, 0))), used)
    some = used.any(1, keepdims=True)
    first, back = (jnp.argmax(each, 1, keepdims=True).astype(jnp.int32) for each in (used, used[:, ::-1]))
    last = call.tokens - 1 - back
    reach = jnp.where(some, jnp.take_along_axis(position, last, 1), -1)
    # tokens at positions 0, 1, 2, … after `first` belong to the first sequence, others to later ones
    order = jnp.arange(min(call.history, call.tokens), dtype=first.dtype)[None]
    there = jnp.minimum(first + order, call.tokens - 1)
    of_first = (first + order < call.tokens) & (jnp.take_along_axis(position, there, 1) == order)
    length = jnp.where(some, of_first.sum(1, keepdims=True, dtype=jnp.int32), 0)
    return Places(position, first, length, last, reach, ~some | (last - reach == first))


def _positions(call: Call, follows: jax.Array, used: jax.Array) -> jax.Array:
    """`Places.position`, given which tokens follow one of the same sequence, and which are not padding; `[B, T]`."""
    position, unbroken = jnp.zeros(follows.shape, jnp.int32), follows
    for distance in range(1, call.taps):
        position += unbroken.astype(jnp.int32)
        unbroken &= jnp.pad(follows, ((0, 0), (distance, 0)))[:, : call.tokens]
    return jnp.where(used, position, -1)
