"""The short convolution over tokens that published layers put before their recurrence."""

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel.layers._dtypes import matching, wide
from ejkernel.layers._lags import lagged
from ejkernel.layers._projection import Made


class ShortConvolution(nnx.Module):
    """Each channel mixed with its own last `size - 1` tokens: `silu(Σ_l kernel[size - 1 - l] · x_{t-l} + bias)`."""

    def __init__(self, size: int, channels: int, made: Made, *, bias: bool = False) -> None:
        self.size, self.channels = size, channels
        bound = size**-0.5
        self.kernel = nnx.Param(
            jax.random.uniform(made.rngs.params(), (size, channels), made.param_dtype, -bound, bound)
        )
        self.bias = nnx.Param(jnp.zeros(channels, made.param_dtype)) if bias else None

    def __call__(
        self, x: jax.Array, recent: jax.Array | None, cu_seqlens: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The mixed `x`, and its last `size - 1` tokens, which as `recent` continue the sequence."""
        delayed, recent = lagged(x, self.size - 1, recent, cu_seqlens)
        taps = self.kernel[...][::-1]
        first, *others = [matching(tap, each) * each for tap, each in zip(taps, map(wide, delayed), strict=True)]
        mixed = sum(others, first)
        if self.bias is not None:
            mixed = mixed + matching(self.bias[...], mixed)
        return jax.nn.silu(mixed).astype(x.dtype), recent
