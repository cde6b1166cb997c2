"""Products of few queries with many keys on a CPU, in the layout that keys and values come in, `[B, L, Hkv, D]`.

Kept for the CPU page's rows of one query, in shapes of Whisper base (8 heads of 64) and Qwen3-30B-A3B (32 query and 4
key heads of 128): it takes at most half the time of code that copies the cache.

XLA's matrix products want the keys of each head side by side, and copy all of them first: that takes several times as
long as to read them. There are three ways around that:

- one query for each key head: products number by number, added piece by piece, so that they are vectors on all cores;
- more queries: one matrix product with the keys of all heads in place, from which each head takes its own part;
- so many queries and key heads that other heads' keys would cost more than copies: blocks of `_BLOCK` keys, copied
  head by head into memory that stays in the processor's cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.xla.products import narrow, product

# the most queries of all heads together; with more, products with other heads' keys cost more than a copy of all keys
_MOST = 32
# with more queries than this, and at least so many key heads, they cost more than copies of blocks of keys
_FEW, _MANY_HEADS, _BLOCK = 16, 4, 2048


def applies(call: Call) -> bool:
    """Whether a call's queries are few enough, and the caller leaves the block sizes to the library."""
    sizes = (call.queries, call.keys, call.key_dim)
    known = all(isinstance(each, int) and each > 0 for each in sizes)
    if not known or call.block_sizes is not None:
        return False
    return call.groups * call.queries == 1 or call.heads * call.queries <= _MOST


def on_cpu(cpu: Callable[[Array, Array], Array], plain: Callable[[Array, Array, Any], Array]) -> Any:
    """`plain(x, y, live)`, bilinear in `x` and `y`; on CPUs `cpu(x, bits(y))`, with the derivatives of `plain`."""

    @jax.custom_jvp
    def run(x: Array, y: Array, live: Array | None) -> Array:
        return lax.platform_dependent(x, y, live, cpu=lambda x, y, _: cpu(x, bits(y)), default=plain)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        live = primals[2]
        return run(*primals), jax.jvp(lambda x, y: plain(x, y, live), primals[:2], tangents[:2])[1]

    return run


def lengths(call: Call) -> list[int]:
    """The numbers of keys that there is a program for, least first: a cache is seldom full."""
    sizes = [call.keys]
    while sizes[0] >= 4096:
        sizes.insert(0, sizes[0] // 4)
    return sizes


def bits(x: Array) -> Array:
    """`x` as an array to slice: of bfloat16 the bits, as the CPU's compiler makes all of a sliced one float32 first."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _numbers(call: Call, x: Array) -> Array:
    if x.dtype == jnp.uint16:
        x = lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(call.wide)


def scores(call: Call, query: Array, key: Array) -> Array:
    """The products `[B, Hkv, G, S, L]` of queries `[B, Hkv, G, S, D]` and the bits of keys `[B, L, Hkv, D]`."""
    if call.groups * call.queries > 1:
        return _scores_of_all_heads(call, query, key)
    query, key = query.astype(call.wide)[:, None], key[:, :, :, None, None]

    def products(pieces: slice) -> Array:
        return query[..., pieces] * _numbers(call, key[..., pieces])  # [B, L, Hkv, G, S, D]

    summed = _sum(products, call.key_dim, axis=-1, pieces=2)
    # else the maximum and the weights would each compute the scores
    return lax.optimization_barrier(jnp.moveaxis(summed, 1, -1))


def weighted(call: Call, weights: Array, value: Array) -> Array:
    """The sums `[B, Hkv, G, S, Dv]` of values by weights `[B, Hkv, G, S, L]`; `value` are their bits `[B, L, Hkv, Dv]`.

    Values with weight 0 have no effect, even if they are NaN.
    """
    if call.groups * call.queries > 1:
        return _weighted_of_all_heads(call, weights, value)
    # else each weight would be computed again for every dim of its value
    weights = lax.optimization_barrier(jnp.moveaxis(weights.astype(call.wide), -1, 1))[..., None]
    value = value[:, :, :, None, None]

    def products(pieces: slice) -> Array:
        weight = weights[:, pieces]
        return jnp.where(weight == 0, 0, weight * _numbers(call, value[:, pieces]))  # [B, L, Hkv, G, S, Dv]

    # with more pieces of bits the compiler would copy all of them first
    return _sum(products, value.shape[1], axis=1, pieces=8 if value.dtype == jnp.uint16 else 16)


def _copies_blocks(call: Call, x: Array) -> bool:
    # JAX 0.10 makes all of a bfloat16 array float32 before the loop
    return call.heads * call.queries > _FEW and x.shape[2] >= _MANY_HEADS and x.dtype.itemsize > 2


def _over_blocks(length: int, visit: Callable[[Any, int, Array], Array], carry: Array) -> Array:
    """`carry` after `visit(start, size, carry)` of all blocks of `length` keys."""
    remainder = length % _BLOCK
    if length >= _BLOCK:
        carry = lax.fori_loop(0, length // _BLOCK, lambda i, carry: visit(i * _BLOCK, _BLOCK, carry), carry)
    return visit(length - remainder, remainder, carry) if remainder else carry


def _scores_by_blocks(call: Call, query: Array, key: Array) -> Array:
    """The products `[B, Hkv, rows, L]` of queries `[B, Hkv, rows, D]` and keys `[B, L, Hkv, D]`."""

    def visit(start: Any, size: int, scores: Array) -> Array:
        keys = lax.dynamic_slice_in_dim(key, start, size, 1)
        block = [product(call, "bqd,bkd->bqk", query[:, n], keys[:, :, n]) for n in range(key.shape[2])]
        return lax.dynamic_update_slice_in_dim(scores, jnp.stack(block, 1), start, 3)

    zeros = jnp.zeros_like(key, call.wide, shape=(*query.shape[:-1], key.shape[1]))
    return _over_blocks(key.shape[1], visit, zeros)


def _weighted_by_blocks(call: Call, weights: Array, value: Array) -> Array:
    """The sums `[B, Hkv, rows, Dv]` of values `[B, L, Hkv, Dv]` by weights `[B, Hkv, rows, L]`."""

    def visit(start: Any, size: int, sums: Array) -> Array:
        values = lax.dynamic_slice_in_dim(value, start, size, 1)
        block = lax.dynamic_slice_in_dim(weights, start, size, 3)
        added = [product(call, "bql,blx->bqx", block[:, n], values[:, :, n]) for n in range(value.shape[2])]
        return sums + jnp.stack(added, 1)

    zeros = jnp.zeros_like(value, call.wide, shape=(*weights.shape[:-1], value.shape[-1]))
    return _over_blocks(value.shape[1], visit, zeros)


def _scores_of_all_heads(call: Call, query: Array, key: Array) -> Array:
    B, L, N, D = key.shape
    rows = call.groups * call.queries
    if _copies_blocks(call, key):
        return _scores_by_blocks(call, query.reshape(B, N, rows, D), key).reshape(*query.shape[:-1], L)
    scores = product(call, "bqd,bkd->bqk", query.reshape(B, N * rows, D), _from_bits(key).reshape(B, L * N, D))
    return _of_own_head(scores.reshape(B, N, rows, L, N), -1).reshape(*query.shape[:-1], L)


def _weighted_of_all_heads(call: Call, weights: Array, value: Array) -> Array:
    B, L, N, D = value.shape
    rows = call.groups * call.queries

    def weighted(value: Array) -> Array:
        if _copies_blocks(call, value):
            return _weighted_by_blocks(call, weights.reshape(B, N, rows, L), value).reshape(*weights.shape[:-1], D)
        rows_of_weights = narrow(weights, value).reshape(B, N * rows, L)
        sums = product(call, "bql,blx->bqx", rows_of_weights, value.reshape(B, L, N * D))
        return _of_own_head(sums.reshape(B, N, rows, N, D), -2).reshape(*weights.shape[:-1], D)

    def without_unseen_nan(sums: Array) -> Array:
        value_is_finite = jnp.isfinite(value)
        bad = ~value_is_finite.all(-1).swapaxes(1, 2)[:, :, None, None]  # [B, Hkv, 1, 1, L]
        sees_bad = ((weights != 0) & bad).any(-1, keepdims=True)
        return jnp.where(is_finite | sees_bad, sums, weighted(jnp.where(value_is_finite, value, 0)))

    value = _from_bits(value)
    sums = weighted(value)
    # 0 times a NaN that nobody sees is not 0: only then are the values copied without it, for the rows that it spoiled
    is_finite = jnp.isfinite(sums).all(-1, keepdims=True)
    return lax.cond(is_finite.all(), lambda sums: sums, without_unseen_nan, sums)


def _from_bits(x: Array) -> Array:
    """Undoes `bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _of_own_head(x: Array, axis: int) -> Array:
    """From products `x [B, Hkv, …]` of each head's queries with all heads' keys, counted by `axis`, its own keys'."""
    return jnp.stack([jnp.take(x[:, n], n, axis) for n in range(x.shape[1])], 1)


def _sum(part: Callable[[slice], Array], size: int, axis: int, pieces: int) -> Array:
    """The sum over an axis of `size` numbers, where `part(slice)` gives some of them, so many `pieces` at a time.

    On the last axis a piece is a run of numbers, to be added as vectors. On others each takes one of every few
    neighbours, so that memory is read in the order in which it lies.
    """
    remainders: list[Array] = []
    while size > 1:
        pieces = min(pieces, size)
        length, end = size // pieces, size - size % pieces
        remainders += [part(slice(i, i + 1)) for i in range(end, size)]
        runs = [slice(i * length, (i + 1) * length) for i in range(pieces)]
        strided = [slice(i, end, pieces) for i in range(pieces)]
        added = _added([part(each) for each in (runs if axis == -1 else strided)])
        part, size = lambda which, x=added: _cut(x, which, axis), length  # type: ignore
    return jnp.squeeze(_added([part(slice(0, 1)), *remainders]), axis)


def _cut(x: Array, which: slice, axis: int) -> Array:
    return lax.slice_in_dim(x, which.start, which.stop, which.step or 1, axis)


def _added(parts: Sequence[Array]) -> Array:
    """The sum of `parts`, by pairs."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return _added(parts[:half]) + _added(parts[half:])
