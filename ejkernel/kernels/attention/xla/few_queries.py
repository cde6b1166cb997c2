"""Products of few queries with many keys on a CPU, in the layout that keys and values come in, `[B, L, Hkv, D]`.

XLA's matrix products want the keys of each head side by side, and copy all of them first: that takes several times as
long as to read them. Two ways need no copy. One query for each key is multiplied number by number: added piece by piece
these products stay vectors on every core. More queries are multiplied with the keys of all heads, in one matrix product
over the cache as it lies, of which each head takes its own part. Where that part is too small, two thousand keys at a
time are copied after all, head by head, into memory that stays in the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import alike

# queries of all heads; with more of them, products with other heads' keys cost more than copies
_MOST = 32
# with more of them than this, and so many key heads, such products cost more than copies of blocks of keys
_FEW, _MANY_HEADS, _BLOCK = 16, 4, 2048


def pays(call: Call) -> bool:
    """Whether there are so few queries, and no blocks are asked for."""
    sizes = (call.queries, call.keys, call.key_dim)
    known = all(isinstance(each, int) and each > 0 for each in sizes)
    if not known or call.block_sizes is not None:
        return False
    return call.groups * call.queries == 1 or call.heads * call.queries <= _MOST


def on_cpu(product: Callable[[Array, Array], Array], plain: Callable[[Array, Array, Any], Array]) -> Any:
    """`plain(x, y, seen)`, linear in `x` and `y`: on a CPU it is `product(x, bits(y))`, its derivatives are not."""

    @jax.custom_jvp
    def run(x: Array, y: Array, seen: Array | None) -> Array:
        return lax.platform_dependent(x, y, seen, cpu=lambda x, y, _: product(x, bits(y)), default=plain)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        seen = primals[2]
        return run(*primals), jax.jvp(lambda x, y: plain(x, y, seen), primals[:2], tangents[:2])[1]

    return run


def lengths(call: Call) -> list[int]:
    """For how many keys there is a program each, fewest first: a cache is seldom full."""
    found = [call.keys]
    while found[0] >= 4096:
        found.insert(0, found[0] // 4)
    return found


def bits(x: Array) -> Array:
    """`x` as pieces of it may be taken: the CPU's compiler makes all of a bfloat16 array float32 before it does."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _numbers(call: Call, x: Array) -> Array:
    if x.dtype == jnp.uint16:
        x = lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(call.wide)


def scores(call: Call, query: Array, key: Array) -> Array:
    """Of queries `[B, Hkv, G, S, D]` and the bits of keys `[B, L, Hkv, D]`, `[B, Hkv, G, S, L]`."""
    if call.groups * call.queries > 1:
        return _scores_of_all_heads(call, query, key)
    query, key = query.astype(call.wide)[:, None], key[:, :, :, None, None]

    def products(pieces: slice) -> Array:
        return query[..., pieces] * _numbers(call, key[..., pieces])  # [B, L, Hkv, G, S, D]

    found = _sum(products, call.key_dim, axis=-1, pieces=2)
    # the largest and the weights would each compute them
    return lax.optimization_barrier(jnp.moveaxis(found, 1, -1))


def weighted(call: Call, weights: Array, value: Array) -> Array:
    """The sum of values, as bits `[B, L, Hkv, Dv]`, by weights `[B, Hkv, G, S, L]`, `[B, Hkv, G, S, Dv]`.

    Values without weight have no part in it, even if they are NaN.
    """
    if call.groups * call.queries > 1:
        return _weighted_of_all_heads(call, weights, value)
    # each serves many values, and would be computed anew for every one
    weights = lax.optimization_barrier(jnp.moveaxis(weights.astype(call.wide), -1, 1))[..., None]
    value = value[:, :, :, None, None]

    def products(pieces: slice) -> Array:
        weight = weights[:, pieces]
        return jnp.where(weight == 0, 0, weight * _numbers(call, value[:, pieces]))  # [B, L, Hkv, G, S, Dv]

    # with more pieces of bits the compiler would copy all of them first
    return _sum(products, value.shape[1], axis=1, pieces=8 if value.dtype == jnp.uint16 else 16)


def _by_head(call: Call, x: Array) -> bool:
    # JAX 0.10 makes all of a bfloat16 array float32 before the loop
    return call.heads * call.queries > _FEW and x.shape[2] >= _MANY_HEADS and x.dtype.itemsize > 2


def _over_blocks(length: int, visit: Callable[[Any, int, Array], Array], found: Array) -> Array:
    """`found` after `visit(start, size, found)` of all blocks."""
    rest = length % _BLOCK
    if length >= _BLOCK:
        found = lax.fori_loop(0, length // _BLOCK, lambda i, found: visit(i * _BLOCK, _BLOCK, found), found)
    return visit(length - rest, rest, found) if rest else found


def _scores_by_head(call: Call, query: Array, key: Array) -> Array:
    """Of queries `[B, Hkv, rows, D]`, `[B, Hkv, rows, L]`."""

    def visit(start: Any, size: int, found: Array) -> Array:
        keys = lax.dynamic_slice_in_dim(key, start, size, 1)
        own = [_matmul(call, "bqd,bkd->bqk", query[:, n], keys[:, :, n]) for n in range(key.shape[2])]
        return lax.dynamic_update_slice_in_dim(found, jnp.stack(own, 1), start, 3)

    found = jnp.zeros_like(key, call.wide, shape=(*query.shape[:-1], key.shape[1]))
    return _over_blocks(key.shape[1], visit, found)


def _weighted_by_head(call: Call, weights: Array, value: Array) -> Array:
    """By weights `[B, Hkv, rows, L]`, `[B, Hkv, rows, Dv]`."""

    def visit(start: Any, size: int, found: Array) -> Array:
        values = lax.dynamic_slice_in_dim(value, start, size, 1)
        shares = lax.dynamic_slice_in_dim(weights, start, size, 3)
        own = [_matmul(call, "bql,blx->bqx", shares[:, n], values[:, :, n]) for n in range(value.shape[2])]
        return found + jnp.stack(own, 1)

    found = jnp.zeros_like(value, call.wide, shape=(*weights.shape[:-1], value.shape[-1]))
    return _over_blocks(value.shape[1], visit, found)


def _scores_of_all_heads(call: Call, query: Array, key: Array) -> Array:
    B, L, N, D = key.shape
    rows = call.groups * call.queries
    if _by_head(call, key):
        return _scores_by_head(call, query.reshape(B, N, rows, D), key).reshape(*query.shape[:-1], L)
    found = _matmul(call, "bqd,bkd->bqk", query.reshape(B, N * rows, D), _halves(key).reshape(B, L * N, D))
    return _of_own_head(found.reshape(B, N, rows, L, N), -1).reshape(*query.shape[:-1], L)


def _weighted_of_all_heads(call: Call, weights: Array, value: Array) -> Array:
    B, L, N, D = value.shape
    rows = call.groups * call.queries

    def product(value: Array) -> Array:
        if _by_head(call, value):
            return _weighted_by_head(call, weights.reshape(B, N, rows, L), value).reshape(*weights.shape[:-1], D)
        # half-precision values keep their half-precision matmul, summed in float32
        shares = weights.astype(value.dtype) if value.dtype.itemsize == 2 else weights
        found = _matmul(call, "bql,blx->bqx", shares.reshape(B, N * rows, L), value.reshape(B, L, N * D))
        return _of_own_head(found.reshape(B, N, rows, N, D), -2).reshape(*weights.shape[:-1], D)

    def carefully(found: Array) -> Array:
        real = jnp.isfinite(value)
        bad = ~real.all(-1).swapaxes(1, 2)[:, :, None, None]  # [B, Hkv, 1, 1, L]
        own = ((weights != 0) & bad).any(-1, keepdims=True)
        return jnp.where(finite | own, found, product(jnp.where(real, value, 0)))

    value = _halves(value)
    found = product(value)
    # 0 times what nobody sees is not 0 if that is NaN; a copy without it is made only then, for the rows it spoiled
    finite = jnp.isfinite(found).all(-1, keepdims=True)
    return lax.cond(finite.all(), lambda found: found, carefully, found)


def _halves(x: Array) -> Array:
    """Undoes `bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _matmul(call: Call, product: str, rows: Array, columns: Array) -> Array:
    return jnp.einsum(product, *alike(rows, columns), preferred_element_type=call.wide, precision=call.precision)


def _of_own_head(x: Array, axis: int) -> Array:
    """Of `x [B, Hkv, …]`, where `axis` has the heads whose keys were multiplied, what each head's own ones gave."""
    return jnp.stack([jnp.take(x[:, n], n, axis) for n in range(x.shape[1])], 1)


def _sum(part: Callable[[slice], Array], size: int, axis: int, pieces: int) -> Array:
    """The sum over an axis of that size, of which `part(which)` is a part; so many pieces at a time.

    On the last axis a piece is a run of numbers, to be added as vectors. On others each takes one of every few
    neighbours, so that memory is read in the order in which it lies.
    """
    rest: list[Array] = []
    while size > 1:
        pieces = min(pieces, size)
        length, end = size // pieces, size - size % pieces
        rest += [part(slice(i, i + 1)) for i in range(end, size)]
        runs = [slice(i * length, (i + 1) * length) for i in range(pieces)]
        apart = [slice(i, end, pieces) for i in range(pieces)]
        added = _added([part(each) for each in (runs if axis == -1 else apart)])
        part, size = lambda which, x=added: _cut(x, which, axis), length  # type: ignore
    return jnp.squeeze(_added([part(slice(0, 1)), *rest]), axis)


def _cut(x: Array, which: slice, axis: int) -> Array:
    return lax.slice_in_dim(x, which.start, which.stop, which.step or 1, axis)


def _added(parts: Sequence[Array]) -> Array:
    """Their sum, by pairs."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return _added(parts[:half]) + _added(parts[half:])
