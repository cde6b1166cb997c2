"""Root mean square norms, in float32 whatever the layer computes in."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers._dtypes import matching, wide


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x²) + epsilon) * scale` over the last axis, in at least float32."""

    def __init__(self, dims: int, epsilon: float, param_dtype: DTypeLike) -> None:
        self.epsilon = _checks.positive("epsilon", epsilon)
        self.scale = nnx.Param(jnp.ones(dims, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = wide(x)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return x * matching(self.scale[...], x)
