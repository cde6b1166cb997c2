"""Products of float32 matrices in parts of bfloat16, which matrix units multiply: as many as the result needs."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.pallas.device.products import F32, Digits, Matmul, matmul


def split(x: jax.Array, number: int) -> list[jax.Array]:
    """`x` as a sum of bfloat16, largest first."""
    if x.dtype != F32:
        return [x]
    parts = []
    for _ in range(number):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(F32)
    return parts


def split_product(x: jax.Array, y: jax.Array, number: int = 2, product: Matmul = matmul) -> jax.Array:
    """The product of `x` and `y`, float32 operands as so many parts; products of small parts are left out."""
    pairs = [(a, b) for i, a in enumerate(split(x, number)) for j, b in enumerate(split(y, number)) if i + j < number]
    first, *others = (product(a, b) for a, b in pairs)
    return first + sum(others, jnp.zeros_like(first))


def precise(x: jax.Array, y: jax.Array, exact: bool, product: Matmul = matmul) -> jax.Array:
    """The product of `x` and `y` with more digits than bfloat16 has, for results that cancel; float32's if `exact`."""
    return product(x.astype(F32), y.astype(F32)) if exact else split_product(x, y, product=product)


def digits(exact: bool) -> Digits:
    """Those of `precise`."""
    return Digits(lambda x, y, product: precise(x, y, exact, product), None if exact else split)
