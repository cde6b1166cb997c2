"""Inverses of unit triangular matrices: small blocks by substitution, larger ones by products of smaller ones.

Not by the series `(I - N)(I + N²)(I + N⁴)…`: it is exact on paper, but with keys that resemble each other its terms
grow before they cancel.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.delta_rule.pallas.device.parts import by_parts
from ejkernel.kernels.linear_recurrence.pallas.device.products import F32, index, rows

BASE = 16  # rows of blocks that are found one after the other


def inverse(below: jax.Array, exact: bool) -> jax.Array:
    """`(I + below)⁻¹` for strictly lower triangular `below [C, C]` in float32, `C` a power of two from `BASE`.

    Products have all digits of float32 if `exact`, and else those of two bfloat16.
    """
    product: Callable[..., jax.Array] = rows if exact else by_parts
    C = len(below)
    row, column = index((C, C), 0), index((C, C), 1)
    found, size = _by_rows(below, 3 if exact else 2), BASE
    while size < C:
        # [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]], of all pairs of blocks at once
        corners = ((row ^ column) < 2 * size) & (row & size != 0) & (column & size == 0)
        blocks = [found[start : start + size] for start in range(0, C, size)]
        second = jnp.concatenate(blocks[1::2], 0)
        second = second - product(product(second, jnp.where(corners, below, 0)), found)
        blocks[1::2] = [second[start : start + size] for start in range(0, C // 2, size)]
        found = jnp.concatenate(blocks, 0)
        size *= 2
    return found


def _by_rows(below: jax.Array, parts: int) -> jax.Array:
    """The inverse of the blocks along the diagonal, by forward substitution; they lie side by side meanwhile."""
    C = len(below)
    beside = index((BASE, C), 1)
    starts = range(0, C, BASE)

    def of_block(x: jax.Array, start: int) -> jax.Array:
        return jnp.where((beside >= start) & (beside < start + BASE), x, 0)

    packed = sum((of_block(below[start : start + BASE], start) for start in starts), jnp.zeros((BASE, C), F32))
    # column s of each block in all its columns; products with ones, which a matrix unit spreads faster than lanes move
    inside = beside & (BASE - 1)
    picked = jnp.concatenate([jnp.where(inside == s, packed, 0) for s in range(BASE - 1)], 0)
    same = (index((C, C), 0) ^ index((C, C), 1)) < BASE
    spread = by_parts(picked, jnp.where(same, 1.0, 0.0).astype(jnp.bfloat16), parts)
    found = jnp.where(inside == index((BASE, C), 0), 1.0, 0.0)
    for s in range(BASE - 1):
        # row s is found: the rows below it take it off, and those above have nothing of it
        found = found - spread[s * BASE : (s + 1) * BASE] * found[s : s + 1]
    return jnp.concatenate([of_block(found, start) for start in starts], 0)
