"""Products of float32 matrices in parts of bfloat16, which matrix units multiply: as many as the result needs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_recurrence.pallas.device.products import F32, rows

Product = Callable[[jax.Array, jax.Array], jax.Array]


def _parts(x: jax.Array, number: int) -> list[jax.Array]:
    """`x` as a sum of bfloat16, largest first."""
    if x.dtype != F32:
        return [x]
    found = []
    for _ in range(number):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(F32)
    return found


def by_parts(x: jax.Array, y: jax.Array, number: int = 2, product: Product = rows) -> jax.Array:
    """The product of `x` and `y`, either of bfloat16 or so many parts of it, but for what is too small to matter."""
    pairs = [(a, b) for i, a in enumerate(_parts(x, number)) for j, b in enumerate(_parts(y, number)) if i + j < number]
    first, *rest = (product(a, b) for a, b in pairs)
    return first + sum(rest, jnp.zeros_like(first))


def fine(x: jax.Array, y: jax.Array, exact: bool, product: Product = rows) -> jax.Array:
    """The product of `x` and `y`, of which most may cancel: with more digits than bfloat16 has."""
    return product(x.astype(F32), y.astype(F32)) if exact else by_parts(x, y, product=product)
