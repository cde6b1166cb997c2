"""Products of few queries with many keys on a CPU, in the layout that keys and values come in, `[B, L, Hkv, D]`.

XLA's matrix products want the keys of each head side by side, and copy all of them first: that takes several times as
long as to read them. Products number by number need no copy. Added piece by piece they stay vectors on every core, and
there are too few of them for a matrix product to be faster.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.attention.call import Call

# queries for each key; with more of them, matrix products gain what the copies cost
_MOST = 4


def pays(call: Call) -> bool:
    """Whether there are so few queries, and no blocks are asked for."""
    sizes = (call.queries, call.keys, call.key_dim)
    known = all(isinstance(each, int) and each > 0 for each in sizes)
    if not known or call.block_sizes is not None:
        return False
    # where all weights are held at once, several queries a key make up for copies of a short cache
    short = call.return_weights and call.keys < 8192
    return call.groups * call.queries <= (1 if short else _MOST)


def on_cpu(product: Callable[[Array, Array], Array], plain: Callable[[Array, Array, Any], Array]) -> Any:
    """`plain(x, y, seen)`, linear in `x` and `y`: on a CPU it is `product(x, bits(y))`, its derivatives are not."""

    @jax.custom_jvp
    def run(x: Array, y: Array, seen: Array | None) -> Array:
        return lax.platform_dependent(x, y, seen, cpu=lambda x, y, _: product(x, bits(y)), default=plain)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        x, y, seen = primals
        dx, dy, _ = tangents
        return run(x, y, seen), plain(dx, y, seen) + plain(x, dy, seen)

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
    query, key = query.astype(call.wide)[:, None], key[:, :, :, None, None]

    def products(first: int, last: int) -> Array:
        return query[..., first:last] * _numbers(call, key[..., first:last])  # [B, L, Hkv, G, S, D]

    found = _sum(products, call.key_dim, axis=-1, pieces=2)
    # the largest and the weights would each compute them
    return lax.optimization_barrier(jnp.moveaxis(found, 1, -1))


def weighted(call: Call, weights: Array, value: Array) -> Array:
    """The sum of values, as bits `[B, L, Hkv, Dv]`, by weights `[B, Hkv, G, S, L]`, `[B, Hkv, G, S, Dv]`.

    Values without weight have no part in it, even if they are NaN.
    """
    # each serves many values, and would be computed anew for every one
    weights = lax.optimization_barrier(jnp.moveaxis(weights.astype(call.wide), -1, 1))[..., None]
    value = value[:, :, :, None, None]

    def products(first: int, last: int) -> Array:
        weight = weights[:, first:last]
        return jnp.where(weight == 0, 0, weight * _numbers(call, value[:, first:last]))  # [B, L, Hkv, G, S, Dv]

    # what is left of the pieces goes through memory, once for every query
    pieces = 8 if call.groups * call.queries == 1 else 16
    return _sum(products, value.shape[1], axis=1, pieces=pieces)


def _sum(part: Callable[[int, int], Array], size: int, axis: int, pieces: int) -> Array:
    """The sum over an axis of that size, of which `part(first, last)` is a part; so many pieces at a time."""
    rest: list[Array] = []
    while size > 1:
        pieces = min(pieces, size)
        length = size // pieces
        rest += [part(i, i + 1) for i in range(pieces * length, size)]
        added = _added([part(i * length, (i + 1) * length) for i in range(pieces)])
        part, size = lambda first, last, x=added: lax.slice_in_dim(x, first, last, axis=axis), length  # type: ignore
    return jnp.squeeze(_added([part(0, 1), *rest]), axis)


def _added(parts: Sequence[Array]) -> Array:
    """Their sum, by pairs."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return _added(parts[:half]) + _added(parts[half:])
