"""Where a call's chunks lie: each inside one sequence, none longer than the chunk size, in the order of the tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ejkernel.kernels.chunks.call import Call
from ejkernel.xla_utils.utils import prepare_chunk_indices, prepare_chunk_offsets, prepare_sequence_ids

LARGEST_CHUNK = 64
LARGEST_STEP = 65536  # numbers in an array of the chunks that are computed together; measured on CPUs


class Chunks(NamedTuple):
    """A slice of `size` tokens for each chunk, `[chunks]` each; tokens outside `low … high - 1` are not the chunk's.

    Slices never reach past the last token: near the end one starts early instead, so inputs need no padding. Chunks of
    a sequence follow one another, and those that hold nothing count as the last one's.
    """

    sequence: jax.Array
    start: jax.Array
    low: jax.Array
    high: jax.Array
    begin: jax.Array  # which token of its sequence is the first to be visited
    first: jax.Array  # whether no other chunk of its sequence is visited before it
    last: jax.Array  # and none after it
    # where rows hold several sequences: whether it is the first and the last of its row, which `sequence` then numbers
    row_first: jax.Array | None = None
    row_last: jax.Array | None = None


def chunk_size(call: Call) -> int:
    """A power of two, at most the tokens there are and not far above the mean length of a packed sequence."""
    size = 1 << (min(call.tokens, call.largest_chunk, LARGEST_CHUNK).bit_length() - 1)
    if call.packed:
        mean = -(-call.tokens // call.sequences)
        size = min(size, 1 << (mean - 1).bit_length())
    return size


def together(call: Call) -> int:
    """How many chunks are visited in one step, a power of two.

    An array of theirs has at most `LARGEST_STEP` numbers: below that, an operation on a CPU costs little more than to
    start it.
    """
    C = chunk_size(call)
    # a batch that is known only when the program runs counts as 1
    rows = 1 if export.is_symbolic_dim(call.batch) else call.batch
    numbers = rows * call.heads * call.devices * C * max(call.key_dim, call.value_dim)
    most = min(-(-call.tokens // C), LARGEST_STEP // numbers, 8)
    return 1 << (max(most, 1).bit_length() - 1)


def whole(call: Call) -> bool:
    """Whether the slices of every step are full of their own chunks' tokens, so that nothing needs masking."""
    return not call.packed and call.tokens % (together(call) * chunk_size(call)) == 0


def chunks(call: Call, cu_seqlens: jax.Array | None) -> Chunks:
    """The chunks of a call, a multiple of those of a step; for packed ones a bound. Those past the end are empty."""
    C, step = chunk_size(call), together(call) * chunk_size(call)
    if cu_seqlens is None:
        low = jnp.minimum(jnp.arange(0, -(-call.tokens // step) * step, C, dtype=np.int32), call.tokens)
        sequence, high = jnp.zeros_like(low), jnp.minimum(low + C, call.tokens)
        begin = jnp.full_like(low, call.tokens - 1 if call.reverse else 0)
    else:
        cu_seqlens = jnp.minimum(cu_seqlens, call.tokens)
        # each sequence but an empty one may leave up to C - 1 places of its last chunk free
        most = (call.tokens + min(call.sequences, call.tokens) * (C - 1)) // C
        bound = -(-most // together(call)) * together(call)
        sequence, index = prepare_chunk_indices(cu_seqlens, C, total_chunks=bound).T
        exists = sequence < call.sequences
        sequence = jnp.minimum(sequence, call.sequences - 1)
        low = jnp.where(exists, cu_seqlens[sequence] + index * C, call.tokens)
        high = jnp.where(exists, jnp.minimum(low + C, cu_seqlens[sequence + 1]), low)
        begin = cu_seqlens[sequence + 1] - 1 if call.reverse else cu_seqlens[sequence]
    change, end = sequence[1:] != sequence[:-1], np.ones(1, bool)
    ends = jnp.concatenate([end, change]), jnp.concatenate([change, end])
    start = jnp.minimum(low, call.tokens - C)
    return Chunks(sequence, start, low, high, begin, *(ends[::-1] if call.reverse else ends))


def cut(call: Call, step: Chunks, x: jax.Array) -> jax.Array:
    """The tokens of a step's chunks, of `x [B, T, ...]`: `[chunks, B, C, ...]`, 0 where one is not its chunk's own."""
    C, G = chunk_size(call), len(step.start)
    if whole(call):
        x = lax.dynamic_slice_in_dim(x, step.start[0], G * C, axis=1)
        return jnp.moveaxis(x.reshape(x.shape[0], G, C, *x.shape[2:]), 1, 0)
    x = jnp.stack([lax.dynamic_slice_in_dim(x, step.start[i], C, axis=1) for i in range(G)])
    return jnp.where(visited(call, step).reshape(G, 1, C, *(1,) * (x.ndim - 3)), x, 0)


def _tokens(call: Call, step: Chunks) -> jax.Array:
    return step.start[:, None] + jnp.arange(chunk_size(call), dtype=step.start.dtype)[None]


def visited(call: Call, step: Chunks) -> jax.Array:
    """Which tokens of the slices are their chunk's own, `[chunks, C]`."""
    token = _tokens(call, step)
    return (token >= step.low[:, None]) & (token < step.high[:, None])


def first_visited(call: Call, step: Chunks) -> jax.Array:
    """Which tokens of the slices are the first of their sequence to be visited, `[chunks, C]`."""
    return _tokens(call, step) == step.begin[:, None]


def put(call: Call, step: Chunks, x: jax.Array, pieces: jax.Array) -> jax.Array:
    """`x [1, T, ...]` with the tokens of a step's chunks replaced by those of `pieces [chunks, 1, C, ...]`."""
    C, own = chunk_size(call), visited(call, step)
    for i, start in enumerate(step.start):
        before = lax.dynamic_slice_in_dim(x, start, C, axis=1)
        piece = jnp.where(own[i].reshape(1, C, *(1,) * (x.ndim - 2)), pieces[i], before)
        x = lax.dynamic_update_slice_in_dim(x, piece, start, axis=1)
    return x


def put_together(call: Call, where: Chunks, cu_seqlens: jax.Array | None, pieces: jax.Array) -> jax.Array:
    """Undoes `cut` for all chunks at once: `[chunks, B, C, ...]` to `[B, T, ...]`, 0 for tokens of no sequence."""
    C, T = chunk_size(call), call.tokens
    if cu_seqlens is None:
        remainder, pieces = T % C, pieces[: -(-T // C)]
        last = pieces[-1][:, C - remainder :] if remainder else pieces[-1]
        full = jnp.moveaxis(pieces[:-1] if remainder else pieces, 0, 1)
        full = full.reshape(call.batch, full.shape[1] * C, *pieces.shape[3:])
        return jnp.concatenate([full, last], 1) if remainder else full
    token = jnp.arange(T, dtype=cu_seqlens.dtype)
    sequence = prepare_sequence_ids(cu_seqlens, total_tokens=T)
    real = sequence < call.sequences
    sequence = jnp.minimum(sequence, call.sequences - 1)
    chunk = prepare_chunk_offsets(cu_seqlens, C)[sequence] + (token - cu_seqlens[sequence]) // C
    chunk = jnp.where(real, chunk, 0)
    row = jnp.clip(token - where.start[chunk], 0, C - 1)
    taken = pieces[chunk, 0, row]
    return jnp.where(real.reshape(T, *(1,) * (taken.ndim - 1)), taken, 0)[None]
