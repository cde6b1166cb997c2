"""Inverses of unit lower triangular matrices, by forward substitution in small blocks and products of blocks.

Not by the series `(I - N)(I + N²)(I + N⁴)…`: it is exact on paper, but with keys that resemble each other its terms
grow before they cancel.
"""

import functools

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks.scores import Einsum, corners, diagonal_blocks

# Blocks up to this size are inverted row by row, larger ones by products of smaller ones. With 16 on a CPU the rows
# would take a third of a chunk's time.
BASE = 8


def inverse(below: jax.Array, einsum: Einsum) -> jax.Array:
    """`(I + below)⁻¹` for strictly lower triangular `below [..., C, C]`, `C` a power of two."""
    return _inverse(below, einsum, min(BASE, below.shape[-1]))


# traced once for the forward, the one that keeps states, and the backward: it is a third of what there is to trace
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@functools.partial(jax.jit, static_argnums=(1, 2))
def _inverse(below: jax.Array, einsum: Einsum, size: int) -> jax.Array:
    C = below.shape[-1]
    blocks = _by_rows(diagonal_blocks(below, size))
    while size < C:
        # [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = einsum("...ts,...su->...tu", corners(below, size), first)
        corner = -einsum("...ts,...su->...tu", second, corner)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        size *= 2
    return blocks[..., 0, :, :]


@_inverse.defjvp
def _(einsum: Einsum, size: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # two products, where the derivative of the substitution would be several times as long as itself
    found = _inverse(*primals, einsum, size)
    return found, -einsum("...ts,...su->...tu", einsum("...ts,...su->...tu", found, tangents[0]), found)


def _by_rows(below: jax.Array) -> jax.Array:
    """Forward substitution: a row of the inverse is the unit row less a combination of the rows above."""
    size = below.shape[-1]
    unit = _varying.like(jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape), below)
    rows = unit[..., :1, :]
    for t in range(1, size):
        taken = (below[..., t, :t, None] * rows).sum(-2, keepdims=True)
        rows = jnp.concatenate([rows, unit[..., t : t + 1, :] - taken], -2)
    return rows
