"""Vectors divided by their norm, of any size that their dtype holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def normalized(x: jax.Array, epsilon: float) -> jax.Array:
    """`x / sqrt(sum(x²) + epsilon)` over the last axis, in the dtype of `x`."""
    return _normalized(x, epsilon)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalized(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """`x / norm` and `1 / norm`."""
    exponents = np.finfo(x.dtype).maxexp
    small, most = (np.asarray(2.0**power, x.dtype) for power in (-3 * exponents // 4, 15 * exponents // 16))
    # independent sums, which take one pass: squares of large numbers overflow, and made small others are lost
    squares, small_squares = ((each * each).sum(-1, keepdims=True) for each in (x, x * small))
    fits, one = squares < most, np.asarray(1.0, x.dtype)
    inverse = jax.lax.rsqrt(jnp.where(fits, squares + np.asarray(epsilon, x.dtype), small_squares))
    # the inverse norm itself may be too small a number
    scale = jnp.where(fits, one, small)
    return (x * scale) * inverse, inverse * scale


@_normalized.defjvp
def _normalized_jvp(
    epsilon: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    # not left to JAX: the norm's third power leaves the range of numbers long before the norm does
    unit, inverse = _normalized(*primals, epsilon)
    along = (unit * tangents[0]).sum(-1, keepdims=True)
    return (unit, inverse), (inverse * (tangents[0] - unit * along), -inverse * (inverse * along))
