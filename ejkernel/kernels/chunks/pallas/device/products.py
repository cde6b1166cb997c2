"""Matrix products and cumulative sums, as a TPU has them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

F32 = jnp.float32
TILE = 8  # rows of float32 in a register
# Gates from here down forget everything: `exp` is exactly 0, whatever it is multiplied by. Sums of infinities are NaN.
LOWEST = -200.0


def _dot(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    # float32 operands are multiplied as such, in six passes of bfloat16 parts
    precision = lax.Precision.HIGHEST if x.dtype == F32 else lax.Precision.DEFAULT
    contracted = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(x, y, contracted, precision=precision, preferred_element_type=F32)


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x y`."""
    return _dot(x, y, (1, 0))


def matmul_nt(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x yᵀ`."""
    return _dot(x, y, (1, 1))


def matmul_tn(x: jax.Array, y: jax.Array) -> jax.Array:
    """`xᵀ y`."""
    return _dot(x, y, (0, 0))


Matmul = Callable[[jax.Array, jax.Array], jax.Array]


class Digits(NamedTuple):
    """How many digits products of float32 matrices have."""

    product: Callable[[jax.Array, jax.Array, Matmul], jax.Array]  # the third says which of the functions above
    split: Callable[[jax.Array, int], list[jax.Array]] | None = (
        None  # a matrix in so many parts, if `product` does that
    )


def rounded(dtype: jax.typing.DTypeLike) -> Digits:
    """Those of `dtype`."""
    return Digits(lambda x, y, product: product(x.astype(dtype), y.astype(dtype)))


def index(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Each element's place along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def cumsum_tiles(x: jax.Array, reverse: bool) -> jax.Array:
    """Inclusive sums down the rows of each `TILE` of `x [C, D]`, or up them."""
    C, shift = x.shape[0], 1
    row = index(x.shape, 0) & (TILE - 1)
    while shift < TILE:
        inside = row < TILE - shift if reverse else row >= shift
        x = x + jnp.where(inside, pltpu.roll(x, C - shift if reverse else shift, 0), 0)
        shift *= 2
    return x


def cumsum_rows(x: jax.Array, reverse: bool) -> jax.Array:
    """Inclusive sums down the rows of `x [C, D]`, or up them."""
    sums = cumsum_tiles(x, reverse)
    tiles = [sums[start : start + TILE] for start in range(0, len(sums), TILE)]
    order = range(len(tiles))[::-1] if reverse else range(len(tiles))
    before = None
    for i in order:
        if before is not None:
            tiles[i] = tiles[i] + before
        before = tiles[i][:1] if reverse else tiles[i][TILE - 1 :]
    return jnp.concatenate(tiles, 0)


def cumsum_lanes(x: jax.Array, reverse: bool) -> jax.Array:
    """Inclusive sums along the last axis of `x [rows, C]`, or against it."""
    C = x.shape[1]
    column, shift = index(x.shape, 1), 1
    while shift < C:
        inside = column < C - shift if reverse else column >= shift
        x = x + jnp.where(inside, pltpu.roll(x, C - shift if reverse else shift, 1), 0)
        shift *= 2
    return x


def cumsum_from(begins: jax.Array, x: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """Inclusive sums of `x` along an axis, or against it, that begin anew where `begins` is above 0.

    No bit of what comes before is in them.
    """
    size, shift = x.shape[axis], 1
    place, begun = index(x.shape, axis), begins
    while shift < size:
        inside, by = place < size - shift if reverse else place >= shift, size - shift if reverse else shift
        x = x + jnp.where(inside & (begun <= 0), pltpu.roll(x, by, axis), 0)
        begun = jnp.maximum(begun, jnp.where(inside, pltpu.roll(begun, by, axis), 0))
        shift *= 2
    return x


def sums_to_end(gates: jax.Array, x: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """Inclusive sums of `x` from each token to the last before a gate that forgets everything, or to the chunk's."""
    forgets, size = jnp.where(gates <= LOWEST, 1.0, 0.0), gates.shape[axis]
    return cumsum_from(pltpu.roll(forgets, 1 if reverse else size - 1, axis), x, axis, not reverse)
