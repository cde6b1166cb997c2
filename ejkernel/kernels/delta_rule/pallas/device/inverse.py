"""Inverses of unit triangular matrices: small blocks by substitution, larger ones by products of smaller ones.

Not by the series `(I - N)(I + N²)(I + N⁴)…`: it is exact on paper, but with keys that resemble each other its terms
grow before they cancel.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.pallas.device.products import F32, index, matmul
from ejkernel.kernels.delta_rule.pallas.device.parts import split_product

BASE = 16  # rows of the blocks that are inverted by substitution


def inverse(below: jax.Array, exact: bool) -> jax.Array:
    """`(I + below)⁻¹` for strictly lower triangular `below [C, C]` in float32, `C` a power of two from `BASE`.

    Products have all digits of float32 if `exact`, and else those of two bfloat16.
    """
    product: Callable[..., jax.Array] = matmul if exact else split_product
    C = len(below)
    row, column = index((C, C), 0), index((C, C), 1)
    result, size = _diagonal_blocks(below, 3 if exact else 2), BASE
    while size < C:
        # [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]], of all pairs of blocks at once
        corners = ((row ^ column) < 2 * size) & (row & size != 0) & (column & size == 0)
        blocks = [result[start : start + size] for start in range(0, C, size)]
        second = jnp.concatenate(blocks[1::2], 0)
        second = second - product(product(second, jnp.where(corners, below, 0)), result)
        blocks[1::2] = [second[start : start + size] for start in range(0, C // 2, size)]
        result = jnp.concatenate(blocks, 0)
        size *= 2
    return result


def _diagonal_blocks(below: jax.Array, parts: int) -> jax.Array:
    """The inverse of the blocks along the diagonal, by forward substitution in all of them at once, side by side."""
    C = len(below)
    beside = index((BASE, C), 1)
    starts = range(0, C, BASE)

    def only_block(x: jax.Array, start: int) -> jax.Array:
        return jnp.where((beside >= start) & (beside < start + BASE), x, 0)

    packed = sum((only_block(below[start : start + BASE], start) for start in starts), jnp.zeros((BASE, C), F32))
    # column s of each block in all of its columns, by products with ones: faster than to move it along the lanes
    inside = beside & (BASE - 1)
    picked = jnp.concatenate([jnp.where(inside == s, packed, 0) for s in range(BASE - 1)], 0)
    same = (index((C, C), 0) ^ index((C, C), 1)) < BASE
    columns = split_product(picked, jnp.where(same, 1.0, 0.0).astype(jnp.bfloat16), parts)
    result = jnp.where(inside == index((BASE, C), 0), 1.0, 0.0)
    for s in range(BASE - 1):
        # row s is done: it is subtracted from the rows below it
        result = result - columns[s * BASE : (s + 1) * BASE] * result[s : s + 1]
    return jnp.concatenate([only_block(result, start) for start in starts], 0)
