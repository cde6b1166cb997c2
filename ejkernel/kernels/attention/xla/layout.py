"""The interval of keys that position lets each query see, and queries in blocks of one packed sequence each."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call

_FAR = 2**30


def seen_keys(call: Call, cu: Array | None, cu_kv: Array | None, offset: Array) -> tuple[Array, Array]:
    """The first and one past the last key that position allows each query, `[1 or B, S]`; both 0 where there is none.

    Causality, windows, packing, padding and `query_offset` all come down to this one interval a query.
    """
    token = jnp.arange(call.queries, dtype=jnp.int32)[None]
    if cu is None or cu_kv is None:
        first, last = jnp.zeros_like(token), jnp.full_like(token, call.keys)
        shift = offset.reshape(-1, 1)
    else:
        sequence, inside = (each[None] for each in _sequences(cu, call.queries))
        first, last = cu_kv[sequence], jnp.where(inside, cu_kv[sequence + 1], 0)
        token = token - cu[sequence] + first
        shift = jnp.broadcast_to(offset, (cu.shape[0] - 1,))[sequence]
    # offsets of any size: what is more than 2**30 away is out of sight of every query, and sums stay within int32
    start, stop = first, last
    if call.left is not None:
        lowest = jnp.minimum(jnp.maximum(shift, call.left - _FAR) - call.left, _FAR)
        start = jnp.maximum(first, token + lowest)
    if call.right is not None:
        highest = jnp.maximum(jnp.minimum(shift, _FAR - 1 - call.right) + call.right, -_FAR)
        stop = jnp.minimum(last, token + highest + 1)
    start, stop = jnp.broadcast_arrays(start, stop)
    return jnp.where(start < stop, start, 0), jnp.where(start < stop, stop, 0)


@dataclass(frozen=True)
class Layout:
    """Tokens in `count` blocks of `size`; for packed sequences, `source` and `place` map blocks to tokens and back."""

    size: int
    count: int
    source: Array | None  # [count, size]: the token at each place of a block, past the end for none
    place: Array | None  # [S]: each token's place in the blocks, one after another; past the end for none

    def split(self, x: Array, axis: int) -> Array:
        """`[…, S, …]` to `[count, …, size, …]`, 0 at places without a token."""
        if self.source is None:
            padding = [(0, 0)] * x.ndim
            padding[axis] = (0, self.count * self.size - x.shape[axis])
            x = jnp.pad(x, padding)
        else:
            x = jnp.take(x, self.source.reshape(-1), axis, mode="fill", fill_value=0)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :]), axis, 0)

    def join(self, x: Array, axis: int, tokens: int) -> Array:
        """The inverse of `split`; tokens in no block get 0."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], self.count * self.size, *x.shape[axis + 2 :])
        if self.place is None:
            return jnp.take(x, jnp.arange(tokens), axis) if tokens < x.shape[axis] else x
        return jnp.take(x, self.place, axis, mode="fill", fill_value=0)


def layout(call: Call, size: int, cu: Array | None) -> Layout:
    """Blocks of `size` queries; packed, each block belongs to one sequence."""
    if cu is None:
        return Layout(size, -(-call.queries // size), None, None)
    count = call.queries // size + cu.shape[0] - 1
    blocks = jnp.concatenate([jnp.zeros(1, cu.dtype), jnp.cumsum(-(-jnp.diff(cu) // size), dtype=cu.dtype)])
    block = jnp.arange(count, dtype=cu.dtype)
    owner, real = _sequences(blocks, count)
    source = (cu[owner] + (block - blocks[owner]) * size)[:, None] + jnp.arange(size, dtype=cu.dtype)[None]
    source = jnp.where(real[:, None] & (source < cu[owner + 1][:, None]), source, call.queries)
    token = jnp.arange(call.queries, dtype=cu.dtype)
    owner, real = _sequences(cu, call.queries)
    return Layout(size, count, source, jnp.where(real, blocks[owner] * size + token - cu[owner], count * size))


def _sequences(borders: Array, count: int) -> tuple[Array, Array]:
    """Which of the sequences between `borders` holds each of `count` positions, and whether any does.

    It counts the sequences' ends up to each position: a table of positions and sequences would grow with both.
    """
    ends = jnp.zeros(count, borders.dtype).at[borders[1:]].add(1, mode="drop")
    sequence = jnp.cumsum(ends, dtype=borders.dtype)
    last = borders.shape[0] - 2
    return jnp.minimum(sequence, last), sequence <= last
