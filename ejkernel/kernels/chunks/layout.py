"""Where a call's chunks lie: each inside one sequence, none longer than the chunk size, in the order of the tokens."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.xla_utils.utils import prepare_chunk_indices, prepare_chunk_offsets, prepare_sequence_ids

LARGEST_CHUNK = 64

# Chunks visited in one step are computed together as long as an array of theirs has no more numbers than this: then
# XLA's price for starting an operation, and not the operation, is what small ones cost on a CPU.
TOGETHER = 65536


class Call(Protocol):
    """What the layout needs to know of a recurrence's call."""

    @property
    def batch(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def packed(self) -> bool: ...
    @property
    def reverse(self) -> bool: ...


class Chunks(NamedTuple):
    """A slice of `size` tokens for each chunk, `[chunks]` each; tokens outside `low … high - 1` are not the chunk's.

    Slices never reach past the last token: near the end one starts early instead, so inputs need no padding.
    """

    sequence: jax.Array
    start: jax.Array
    low: jax.Array
    high: jax.Array


def chunk_size(call: Call) -> int:
    """A power of two, at most the tokens there are and not far above the mean length of a packed sequence."""
    size = 1 << (min(call.tokens, LARGEST_CHUNK).bit_length() - 1)
    if call.packed:
        mean = -(-call.tokens // call.sequences)
        size = min(size, 1 << (mean - 1).bit_length())
    return size


def together(call: Call) -> int:
    """How many chunks are visited in one step, a power of two."""
    C = chunk_size(call)
    numbers = call.batch * call.heads * C * max(call.key_dim, call.value_dim)
    most = min(-(-call.tokens // C), TOGETHER // numbers, 8)
    return 1 << (max(most, 1).bit_length() - 1)


def whole(call: Call) -> bool:
    """Whether the slices of every step are full of their own chunks' tokens, so that nothing needs masking."""
    return not call.packed and call.tokens % (together(call) * chunk_size(call)) == 0


def chunks(call: Call, cu_seqlens: jax.Array | None) -> Chunks:
    """The chunks of a call, a multiple of those of a step; for packed ones a bound. Those past the end are empty."""
    C, step = chunk_size(call), together(call) * chunk_size(call)
    if cu_seqlens is None:
        low = jnp.minimum(jnp.arange(0, -(-call.tokens // step) * step, C, dtype=np.int32), call.tokens)
        return Chunks(jnp.zeros_like(low), jnp.minimum(low, call.tokens - C), low, jnp.minimum(low + C, call.tokens))
    cu_seqlens = jnp.minimum(cu_seqlens, call.tokens)
    bound = -(-(call.tokens // C + call.sequences) // together(call)) * together(call)
    sequence, index = prepare_chunk_indices(cu_seqlens, C, total_chunks=bound).T
    exists = sequence < call.sequences
    sequence = jnp.minimum(sequence, call.sequences - 1)
    low = jnp.where(exists, cu_seqlens[sequence] + index * C, call.tokens)
    high = jnp.where(exists, jnp.minimum(low + C, cu_seqlens[sequence + 1]), low)
    return Chunks(sequence, jnp.minimum(low, call.tokens - C), low, high)


def cut(call: Call, chunk: Chunks, x: jax.Array, size: int) -> jax.Array:
    """The `size` tokens of a slice of `x [B, T, ...]` in the order they are visited, 0 where one is not its own."""
    x = lax.dynamic_slice_in_dim(x, chunk.start, size, axis=1)
    x = jnp.flip(x, 1) if call.reverse else x
    return x if whole(call) else jnp.where(visited(call, chunk, size).reshape(1, -1, *(1,) * (x.ndim - 2)), x, 0)


def visited(call: Call, chunk: Chunks, size: int) -> jax.Array:
    """Which of the `size` tokens of the slice are the chunk's own, in the order they are visited."""
    if whole(call):
        return jnp.ones(size, bool)
    token = chunk.start + jnp.arange(size, dtype=chunk.start.dtype)
    own = (token >= chunk.low) & (token < chunk.high)
    return jnp.flip(own) if call.reverse else own


def put_together(call: Call, where: Chunks, cu_seqlens: jax.Array | None, pieces: jax.Array) -> jax.Array:
    """Undoes `cut` for all chunks at once: `[chunks, B, C, ...]` to `[B, T, ...]`, 0 for tokens of no sequence."""
    C, T = chunk_size(call), call.tokens
    if call.reverse:
        pieces = jnp.flip(pieces, 2)
    if cu_seqlens is None:
        rest, pieces = T % C, pieces[: -(-T // C)]
        last = pieces[-1][:, C - rest :] if rest else pieces[-1]
        full = jnp.moveaxis(pieces[:-1] if rest else pieces, 0, 1)
        full = full.reshape(call.batch, -1, *pieces.shape[3:])
        return jnp.concatenate([full, last], 1) if rest else full
    token = jnp.arange(T, dtype=cu_seqlens.dtype)
    sequence = prepare_sequence_ids(cu_seqlens, total_tokens=T)
    real = sequence < call.sequences
    sequence = jnp.minimum(sequence, call.sequences - 1)
    chunk = prepare_chunk_offsets(cu_seqlens, C)[sequence] + (token - cu_seqlens[sequence]) // C
    chunk = jnp.where(real, chunk, 0)
    row = jnp.clip(token - where.start[chunk], 0, C - 1)
    taken = pieces[chunk, 0, row]
    return jnp.where(real.reshape(T, *(1,) * (taken.ndim - 1)), taken, 0)[None]
