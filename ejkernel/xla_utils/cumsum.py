"""Cumulative sums along time that restart at chunk and sequence borders.

A sum that restarts is a scan which *selects* at each border, so what came before cannot leak past it, not even a NaN.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.typing import ArrayLike, DTypeLike

from ejkernel import _checks, _sharding
from ejkernel.xla_utils.utils import cdiv, prepare_position_ids

# A step of the scan should touch this many numbers, or starting it costs more than its additions.
_STEP = 1024


def chunk_local_cumsum(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: ArrayLike | None = None,
    cu_seqlens: _checks.Borders | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Cumulative sum along time that restarts every `chunk_size` tokens.

        out[t] = softmax_scale · Σ g[s],  s from the start of t's chunk to t  (reverse: from t to its end)

    Half precision is accumulated in float32. A packed stream's chunks are counted from each sequence's start; its
    tokens past `cu_seqlens[-1]` are padding, with result 0 and gradient 0.

    Args:
        g: `[B, T, H]` or `[B, T, H, S]`; with `head_first`, `[B, H, T]` or `[B, H, T, S]`.
        chunk_size: A power of two; it need not divide `T`.
        reverse: Sum from the right.
        softmax_scale: What to multiply the result by; `None` is 1.
        cu_seqlens: `[N+1]` borders of packed sequences (batch 1); may be traced.
        head_first: Whether heads come before time.
        output_dtype: The result's dtype; `None` is `g`'s.
        **kwargs: Ignored.

    Raises:
        ValueError: `chunk_size` is not a power of two, the rank is neither 3 nor 4, or `cu_seqlens` comes with a batch
            other than 1.

    Examples:
        >>> g = jnp.ones((1, 5, 1))
        >>> chunk_local_cumsum(g, 2).ravel()
        Array([1., 2., 1., 2., 1.], dtype=float32)
        >>> chunk_local_cumsum(g, 2, cu_seqlens=jnp.array([0, 3, 5])).ravel()
        Array([1., 2., 1., 1., 2.], dtype=float32)
    """
    chunk_size = _checks.power_of_two("chunk_size", chunk_size)
    return _checked("g", g, (3, 4), chunk_size, reverse, cu_seqlens, softmax_scale, head_first, output_dtype)


def chunk_global_cumsum(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: _checks.Borders | None = None,
    softmax_scale: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Cumulative sum along the whole of time, or of each packed sequence.

        out[t] = softmax_scale · Σ s[u],  u from the start of t's sequence to t  (reverse: from t to its end)

    Arguments, layouts and padding are those of `chunk_local_cumsum`.

    Examples:
        >>> s = jnp.ones((1, 5, 1))
        >>> chunk_global_cumsum(s, reverse=True).ravel()
        Array([5., 4., 3., 2., 1.], dtype=float32)
        >>> chunk_global_cumsum(s, cu_seqlens=jnp.array([0, 3, 5])).ravel()
        Array([1., 2., 3., 1., 2.], dtype=float32)
    """
    return _checked("s", s, (3, 4), None, reverse, cu_seqlens, softmax_scale, head_first, output_dtype)


def chunk_local_cumsum_scalar(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """`chunk_local_cumsum` of one number a head: `[B, T, H]` or, with `head_first`, `[B, H, T]`.

    Examples:
        >>> chunk_local_cumsum_scalar(jnp.ones((1, 1, 3)), 2, head_first=True)
        Array([[[1., 2., 1.]]], dtype=float32)
    """
    chunk_size = _checks.power_of_two("chunk_size", chunk_size)
    return _checked("g", g, (3,), chunk_size, reverse, None, softmax_scale, head_first, output_dtype)


def chunk_local_cumsum_vector(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """`chunk_local_cumsum` of a vector a head: `[B, T, H, S]` or, with `head_first`, `[B, H, T, S]`.

    Examples:
        >>> chunk_local_cumsum_vector(jnp.ones((1, 3, 1, 2)), 2)[0, :, 0]
        Array([[1., 1.],
               [2., 2.],
               [1., 1.]], dtype=float32)
    """
    chunk_size = _checks.power_of_two("chunk_size", chunk_size)
    return _checked("g", g, (4,), chunk_size, reverse, None, softmax_scale, head_first, output_dtype)


def chunk_global_cumsum_scalar(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: _checks.Borders | None = None,
    softmax_scale: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """`chunk_global_cumsum` of one number a head: `[B, T, H]` or, with `head_first`, `[B, H, T]`.

    Examples:
        >>> chunk_global_cumsum_scalar(jnp.ones((1, 1, 3)), head_first=True)
        Array([[[1., 2., 3.]]], dtype=float32)
    """
    return _checked("s", s, (3,), None, reverse, cu_seqlens, softmax_scale, head_first, output_dtype)


def chunk_global_cumsum_vector(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: _checks.Borders | None = None,
    softmax_scale: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """`chunk_global_cumsum` of a vector a head: `[B, T, H, S]` or, with `head_first`, `[B, H, T, S]`.

    Examples:
        >>> chunk_global_cumsum_vector(jnp.ones((1, 2, 1, 2)), softmax_scale=0.5)[0, :, 0]
        Array([[0.5, 0.5],
               [1. , 1. ]], dtype=float32)
    """
    return _checked("s", s, (4,), None, reverse, cu_seqlens, softmax_scale, head_first, output_dtype)


def _checked(
    argument: str,
    x: Any,
    ranks: tuple[int, ...],
    chunk: int | None,
    reverse: bool,
    cu_seqlens: Any,
    scale: Any,
    head_first: bool,
    output_dtype: Any,
) -> jax.Array:
    head_first, reverse = _checks.flag("head_first", head_first), _checks.flag("reverse", reverse)
    x = _checks.time_series(argument, x, ranks, head_first)
    axis = 2 if head_first else 1
    _checks.known_size(argument, x.shape[axis], "tokens")
    if cu_seqlens is not None:
        cu_seqlens = _checks.cu_seqlens(cu_seqlens, x.shape[axis])
        _checks.one_row(x.shape[0])
    dtype = x.dtype if output_dtype is None else _checks.floating_dtype("output_dtype", output_dtype)
    scale = None if scale is None else _checks.factor("softmax_scale", scale)
    return _cumsum(x, cu_seqlens, scale, axis=axis, chunk=chunk, reverse=reverse, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("axis", "chunk", "reverse", "dtype"))
def _cumsum(x: jax.Array, cu_seqlens: jax.Array | None, scale: ArrayLike | None, **how: Any) -> jax.Array:
    return _sharding.partitioned(functools.partial(_sum, **how), _sharding.spec_of(x), x, cu_seqlens, scale)


def _sum(
    x: jax.Array,
    cu_seqlens: jax.Array | None,
    scale: ArrayLike | None,
    *,
    axis: int,
    chunk: int | None,
    reverse: bool,
    dtype: Any,
) -> jax.Array:
    shape = x.shape
    if x.size == 0:
        return jnp.zeros(shape, dtype)
    rows, time, lanes = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    x = x.astype(jnp.float64 if jnp.float64 in (x.dtype, dtype) else jnp.float32)
    # a reshape moves nothing; the scan only cares what lies before and after time
    x = x.reshape(rows, time, lanes)
    # one number a head, heads first: a step would gather numbers `time` apart
    narrow = axis == 2 and lanes == 1 != rows
    if narrow:
        x = x.transpose(2, 1, 0)
    if cu_seqlens is not None:
        x = jnp.where((jnp.arange(time, dtype=cu_seqlens.dtype) < cu_seqlens[-1])[None, :, None], x, 0)
    out = _restarting_sum(
        x, _first(time, cu_seqlens, chunk, reverse), None if cu_seqlens is not None else chunk, reverse
    )
    if narrow:
        out = out.transpose(2, 1, 0)
    if scale is not None:
        out = out * jnp.asarray(scale, out.dtype)
    return out.astype(dtype).reshape(shape)


def _first(time: int, cu_seqlens: jax.Array | None, chunk: int | None, reverse: bool) -> jax.Array | None:
    """`[T]` bool: whether a sum restarts at this token, the first of its chunk or sequence that the scan visits."""
    if cu_seqlens is None and (chunk is None or chunk >= time):
        return None
    position = jnp.arange(time) if cu_seqlens is None else prepare_position_ids(cu_seqlens, total_tokens=time)
    start = position == 0 if chunk is None else position % chunk == 0
    return _next(start) if reverse else start


def _next(flags: jax.Array) -> jax.Array:
    return jnp.concatenate([flags[1:], jnp.ones_like(flags[:1])])


def _previous(flags: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.ones_like(flags[:1]), flags[:-1]])


def _shifted(x: jax.Array, reverse: bool) -> jax.Array:
    """What `x [A, T, D]` held one step earlier in the scan's order, 0 at its start."""
    if reverse:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def _restarting_sum(x: jax.Array, first: jax.Array | None, period: int | None, reverse: bool) -> jax.Array:
    """The running sum of `x [A, T, D]` along time, restarting where `first`; every `period` tokens if that is given.

    It is the inverse of taking differences, and saying so gives it all derivatives: the tangent is the same sum, the
    cotangent the sum in the other direction.
    """
    if first is None:
        last = None
    else:
        last = _previous(first) if reverse else _next(first)

    def differences(y: jax.Array) -> jax.Array:
        before = _shifted(y, reverse)
        return y - (before if first is None else jnp.where(first[None, :, None], 0, before))

    return lax.custom_linear_solve(
        differences,
        x,
        solve=lambda _, b: _scan(b, first, period, reverse),
        transpose_solve=lambda _, b: _scan(b, last, period, not reverse),
    )


def _scan(x: jax.Array, first: jax.Array | None, period: int | None, reverse: bool) -> jax.Array:
    """`_restarting_sum` without derivatives: a loop reads and writes memory once, a tree has few steps to launch."""
    return lax.platform_dependent(
        x,
        cpu=lambda x: _loop(x, first, period, reverse),
        default=lambda x: _tree(x, first, reverse),
    )


def _tree(x: jax.Array, first: jax.Array | None, reverse: bool) -> jax.Array:
    """`_restarting_sum` in `log T` steps over pairs of neighbours."""
    if first is None:
        return lax.associative_scan(jnp.add, x, reverse=reverse, axis=1)

    def join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    return lax.associative_scan(join, (first[None, :, None], x), reverse=reverse, axis=1)[1]


def _loop(x: jax.Array, first: jax.Array | None, period: int | None, reverse: bool) -> jax.Array:
    """`_restarting_sum` step by step in time, in several blocks of time at once if `x` is narrow."""
    rows, time, lanes = x.shape
    width = 1 if export.is_symbolic_dim(rows * lanes) else rows * lanes  # a batch not known yet counts as narrow
    blocks = min(cdiv(_STEP, width), math.isqrt(time))
    length = cdiv(time, blocks)
    if period is not None:
        length = min(cdiv(length, period) * period, time)
    blocks = cdiv(time, length)
    missing = blocks * length - time
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(rows, blocks, length, lanes)
    if first is not None:
        first = jnp.pad(first, (0, missing)).reshape(blocks, length)

    def add(i: jax.Array | int, total: jax.Array, x: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(x, i, 1, axis=2)
        if first is None:
            return total + row
        return jnp.where(lax.dynamic_slice_in_dim(first, i, 1, axis=1)[None, :, :, None], row, total + row)

    def at(step: jax.Array | int) -> jax.Array | int:
        return length - 1 - step if reverse else step

    total = lax.dynamic_slice_in_dim(x, at(0), 1, axis=2)  # [A, blocks, 1, D]
    if blocks > 1 and period is None:
        ends = lax.fori_loop(1, length, lambda step, total: add(at(step), total, x), total)
        cut = None if first is None else first.any(axis=1)
        sums = _loop(ends[:, :, 0], cut, None, reverse)
        total = add(at(0), _shifted(sums, reverse)[:, :, None], x)
        x = lax.dynamic_update_slice_in_dim(x, total, at(0), axis=2)

    def step(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, total = state
        total = add(at(step), total, out)
        return lax.dynamic_update_slice_in_dim(out, total, at(step), axis=2), total

    out, _ = lax.fori_loop(1, length, step, (x, total))
    return out.reshape(rows, blocks * length, lanes)[:, :time]
