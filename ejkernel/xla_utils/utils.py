"""Packed sequences: lengths, borders, and what token or chunk belongs to which sequence.

`cu_seqlens = [0, l1, l1+l2, …]` holds the borders of `N` sequences that lie one after the other on a single time axis.
They count in int32 or int64, and so do results; any other integer dtype is read as int32 (uint64 as int64).
"""

import functools
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ejkernel import _checks, _sharding


@overload
def cdiv(a: int, b: int) -> int: ...
@overload
def cdiv(a: np.ndarray, b: np.ndarray | int) -> np.ndarray: ...
@overload
def cdiv(a: jax.Array, b: jax.Array | int) -> jax.Array: ...
@overload
def cdiv(a: int, b: jax.Array) -> jax.Array: ...
def cdiv(a: Any, b: Any) -> Any:
    """Ceiling division `⌈a / b⌉` of integers or integer arrays.

    Examples:
        >>> cdiv(9, 4)
        3
        >>> cdiv(jnp.array([0, 8, 9]), 4)
        Array([0, 2, 3], dtype=int32)
    """
    if any(jnp.issubdtype(getattr(each, "dtype", int), jnp.unsignedinteger) for each in (a, b)):
        # what is unsigned has no negative
        return a // b + (a % b).clip(max=1)
    # not (a + b - 1) // b, which overflows near an integer type's end
    return -(-a // b)


def prepare_lens(cu_seqlens: _checks.Borders) -> jax.Array:
    """`[N]` lengths of the sequences.

    Examples:
        >>> prepare_lens(jnp.array([0, 3, 5, 9]))
        Array([3, 2, 4], dtype=int32)
    """
    return _lens(_checks.cu_seqlens(cu_seqlens))


def prepare_lens_from_mask(mask: ArrayLike) -> jax.Array:
    """`[B]` int32: how many entries of each row of `mask [B, T]` are True.

    Examples:
        >>> prepare_lens_from_mask(jnp.array([[True, True, False], [False, False, False]]))
        Array([2, 0], dtype=int32)
    """
    return jnp.sum(_checks.token_mask(mask), axis=1, dtype=jnp.int32)


def prepare_cu_seqlens_from_mask(mask: ArrayLike, out_dtype: DTypeLike = jnp.int32) -> jax.Array:
    """`[B+1]` borders of the sequences left when each row of `mask [B, T]` keeps its True entries.

    Examples:
        >>> prepare_cu_seqlens_from_mask(jnp.array([[True, True, False], [True, False, False]]))
        Array([0, 2, 3], dtype=int32)
    """
    out_dtype = _checks.integer_dtype("out_dtype", out_dtype)
    return _running_total(prepare_lens_from_mask(mask).astype(out_dtype))


def prepare_cu_seqlens_from_segment_ids(ids: ArrayLike, sequences: int) -> jax.Array:
    """`[sequences+1]` int32 borders in the flattened stream of rows `ids [B, T]`, which say whose each token is.

    A sequence is a run of equal ids within a row, whatever the ids are: padding between sequences is one more of them,
    and two of the same id that touch are one. `sequences` is how many there is room for; borders that are not needed
    repeat the end. More runs than that are an error if the ids are known when tracing; if not, those without room are
    padding, past the last border.

    Examples:
        >>> prepare_cu_seqlens_from_segment_ids(jnp.array([[1, 1, 2], [3, 3, 3]]), 4)
        Array([0, 2, 3, 6, 6], dtype=int32)
    """
    ids, sequences = _checks.segment_ids(ids, sequences)
    return _run_borders(ids, sequences)


def prepare_sequence_ids(cu_seqlens: _checks.Borders, *, total_tokens: int | None = None) -> jax.Array:
    """`[T]` which sequence each token belongs to.

    `total_tokens` is the number of rows, `cu_seqlens[-1]` by default; a traced `cu_seqlens` needs it. Rows past the
    last sequence get id `N`.

    Examples:
        >>> prepare_sequence_ids(jnp.array([0, 2, 2, 3]))
        Array([0, 0, 2], dtype=int32)
        >>> prepare_sequence_ids(jnp.array([0, 2, 2, 3]), total_tokens=5)
        Array([0, 0, 2, 3, 3], dtype=int32)
    """
    cu = _checks.cu_seqlens(cu_seqlens)
    return _owners(cu, _checks.static_total("total_tokens", total_tokens, cu_seqlens, np.sum))


def prepare_position_ids(cu_seqlens: _checks.Borders, *, total_tokens: int | None = None) -> jax.Array:
    """`[T]` index of each token within its sequence.

    `total_tokens` is as for `prepare_sequence_ids`; rows past the last sequence count up from 0, like one more
    sequence.

    Examples:
        >>> prepare_position_ids(jnp.array([0, 3, 5, 9]))
        Array([0, 1, 2, 0, 1, 0, 1, 2, 3], dtype=int32)
    """
    return prepare_token_indices(cu_seqlens, total_tokens=total_tokens)[:, 1]


def prepare_token_indices(cu_seqlens: _checks.Borders, *, total_tokens: int | None = None) -> jax.Array:
    """`[T, 2]` rows (sequence, position in it): `prepare_sequence_ids` beside `prepare_position_ids`.

    Examples:
        >>> prepare_token_indices(jnp.array([0, 2, 3]))
        Array([[0, 0],
               [0, 1],
               [1, 0]], dtype=int32)
    """
    cu = _checks.cu_seqlens(cu_seqlens)
    return _rows(cu, _checks.static_total("total_tokens", total_tokens, cu_seqlens, np.sum))


def prepare_chunk_offsets(cu_seqlens: _checks.Borders, chunk_size: int) -> jax.Array:
    """`[N+1]` cumulative number of chunks: sequence `n` has chunks `offsets[n]` to `offsets[n+1]`.

    Examples:
        >>> prepare_chunk_offsets(jnp.array([0, 3, 5, 9]), 2)
        Array([0, 2, 3, 5], dtype=int32)
    """
    cu = _checks.cu_seqlens(cu_seqlens)
    return _chunk_offsets(cu, _checks.positive_int("chunk_size", chunk_size))


def prepare_chunk_indices(
    cu_seqlens: _checks.Borders, chunk_size: int, *, total_chunks: int | None = None
) -> jax.Array:
    """`[chunks, 2]` rows (sequence, chunk in it); each sequence is cut from its own start, an empty one has no chunk.

    `total_chunks` is the number of rows, the number of chunks by default; a traced `cu_seqlens` needs it, and
    `T // chunk_size + N` is always enough. Rows past the last chunk are (`N`, 0), (`N`, 1), ….

    Examples:
        >>> prepare_chunk_indices(jnp.array([0, 3, 5]), 2, total_chunks=4)
        Array([[0, 0],
               [0, 1],
               [1, 0],
               [2, 0]], dtype=int32)
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    total = _checks.static_total("total_chunks", total_chunks, cu_seqlens, lambda lens: cdiv(lens, chunk_size).sum())
    return _rows(offsets, total)


def identity_dtype_convert(dtype: DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """A function that returns its argument and, on the way back, hands on the cotangent in `dtype`.

    Put it where a cotangent of the wrong precision would arrive, usually with the argument's own dtype. A `dtype`
    other than the argument's is passed on as it is: functions with a gradient rule of their own and the caller of
    `jax.grad` receive it, while most of JAX's own operations want a cotangent in their result's dtype and say so.

    Examples:
        >>> half = identity_dtype_convert(jnp.bfloat16)
        >>> jax.grad(lambda x: 3.0 * half(x))(jnp.float32(2.0)).dtype
        dtype(bfloat16)
    """
    dtype = _checks.floating_dtype("dtype", dtype)

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        return (cotangent.astype(dtype),)

    identity.defvjp(forward, backward)
    return identity


def _compiled(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`run(array, *sizes)` compiled whole, since a plain call would compile each of its small steps.

    Where shardings are part of types, what comes back is the same on all devices.
    """

    @functools.partial(jax.jit, static_argnums=1)
    def compiled(array: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        return _sharding.partitioned(lambda array: run(array, *sizes), jax.P(), array)

    return functools.wraps(run)(lambda array, *sizes: compiled(array, sizes))


_lens = _compiled(jnp.diff)


@_compiled
def _run_borders(ids: jax.Array, sequences: int) -> jax.Array:
    # a row's first token has no neighbour to be equal to
    starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return jnp.flatnonzero(starts, size=sequences + 1, fill_value=ids.size).astype(jnp.int32)


@_compiled
def _running_total(counts: jax.Array) -> jax.Array:
    return jnp.pad(jnp.cumsum(counts, dtype=counts.dtype), (1, 0))


@_compiled
def _chunk_offsets(cu: jax.Array, chunk_size: int) -> jax.Array:
    return _running_total(cdiv(jnp.diff(cu), chunk_size))


@_compiled
def _owners(offsets: jax.Array, total: int) -> jax.Array:
    """`[total]` the `n` with `offsets[n] <= row < offsets[n+1]`, skipping empty ones; `N` past the end."""
    # by counting the borders up to there: JAX cannot search where values vary over a shard_map's axes. All of them, the
    # first as well, since XLA's partitioner counts what it pads a sharded `offsets[1:]` with
    borders = jnp.zeros(total, offsets.dtype).at[offsets].add(1, mode="drop")
    return jnp.cumsum(borders, dtype=offsets.dtype) - 1


@_compiled
def _rows(offsets: jax.Array, total: int) -> jax.Array:
    owner = _owners(offsets, total)
    return jnp.stack([owner, jnp.arange(total, dtype=offsets.dtype) - offsets[owner]], axis=1)
