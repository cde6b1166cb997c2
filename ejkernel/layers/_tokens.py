"""The tokens that a layer is called with: checks, padding, and positions in their sequences."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel import _checks, _sharding
from ejkernel.kernels.chunks.segments import runs
from ejkernel.layers._serving import RaggedBatch
from ejkernel.xla_utils.utils import prepare_lens, prepare_token_indices


class Sequences(NamedTuple):
    """Which sequences the tokens of a call belong to, as arguments of ops. At most one is given.

    Without either, each row is one sequence.
    """

    cu_seqlens: jax.Array | None = None  # [N + 1]
    segment_ids: jax.Array | None = None  # [B, T]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of ops."""
        return self._asdict()


def layer_input(
    dims: _checks.Dims, x: Any, cu_seqlens: Any, segment_ids: Any, dtype: DTypeLike | None
) -> tuple[jax.Array, Sequences, RaggedBatch | None]:
    """`x` checked, cast to `dtype` and with zeros for padding; its sequences; and the batch if a batch is served."""
    batch = cu_seqlens if isinstance(cu_seqlens, RaggedBatch) else None
    x, *given = _checks.layer_input(dims, x, cu_seqlens if batch is None else batch.cu_seqlens, segment_ids)
    sequences = Sequences(*given)
    return without_padding(x if dtype is None else x.astype(dtype), sequences), sequences, batch


def without_padding(x: jax.Array, sequences: Sequences) -> jax.Array:
    """`x [..., T, width]` with zeros for padding, which may be NaN and has no gradient."""
    cu_seqlens, ids = sequences
    if ids is not None:
        used = (ids >= 0)[..., None]
    elif cu_seqlens is not None:
        used = jnp.arange(x.shape[-2], dtype=cu_seqlens.dtype) < cu_seqlens[-1]
        used = used.reshape(*[1] * (x.ndim - 2), x.shape[-2], 1)
    else:
        return x
    return jnp.where(used, x, jnp.zeros((), x.dtype))


def positions(x: jax.Array, start: jax.Array | None, sequences: Sequences) -> jax.Array:
    """The positions of tokens `x […, T, width]` in their sequences: `[T]`, or `[B, T]` if they differ between rows.

    Sequences start at positions `start [B]` (packed: `[N]`), or at 0. If rows hold several sequences, only the first of
    a row starts at `start`.
    """
    T = x.shape[-2]
    cu_seqlens, ids = sequences
    if ids is not None:
        where = runs(ids)
        position = jnp.arange(T, dtype=where.begin.dtype)[None] - where.begin
        if start is None:
            return position
        return position + jnp.where(where.begin == where.row_begin, start[:, None].astype(position.dtype), 0)
    if cu_seqlens is None:
        return jnp.arange(T) if start is None else start[:, None] + jnp.arange(T, dtype=start.dtype)[None]
    sequence, position = prepare_token_indices(cu_seqlens, total_tokens=T).T
    if start is None or not start.shape[0]:
        return position
    # padding belongs to no sequence
    return position.astype(start.dtype) + start.at[sequence].get(mode="fill", fill_value=0)


def next_position(x: jax.Array, start: jax.Array | None, sequences: Sequences) -> jax.Array:
    """The position of the next token of each row or packed sequence: `start` plus its tokens in `x`.

    If rows hold several sequences, it is the next position of the last sequence.
    """
    cu_seqlens, ids = sequences
    if cu_seqlens is not None:
        lengths = prepare_lens(cu_seqlens).astype(jnp.int32)
        return lengths if start is None else start + lengths.astype(start.dtype)
    start = jnp.zeros(x.shape[0], jnp.int32) if start is None else start
    if ids is None or not x.shape[1]:
        return start + x.shape[1]
    where = runs(ids)
    last = jnp.maximum(where.row_end - 1, 0)
    begin = jnp.take_along_axis(where.begin, last, 1)
    has_tokens, continues = where.row_end > 0, begin == where.row_begin
    count = jnp.where(has_tokens, where.row_end - begin, 0).astype(start.dtype)
    return jnp.where(has_tokens & ~continues, count, start[:, None] + count)[:, 0]


def stored(cache: jax.Array, tokens: jax.Array, at: jax.Array, fits: jax.Array) -> jax.Array:
    """`cache [B, capacity, …]` with `tokens [B, T, …]` stored at positions `at [B, T]`, those that `fits` says.

    On a mesh with `Explicit` axes the result is sharded as the tokens are.
    """

    def write(cache: jax.Array, tokens: jax.Array, at: jax.Array, fits: jax.Array) -> jax.Array:
        # a negative index would count from the end; one past the capacity is dropped
        place = (jnp.arange(len(at), dtype=at.dtype)[:, None], jnp.where(fits, at, cache.shape[1]))
        return cache.at[place].set(tokens.astype(cache.dtype), mode="drop")

    return _sharding.partitioned(write, _sharding.spec_of(tokens), cache, tokens, at, fits)
