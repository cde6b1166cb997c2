"""The short convolution over tokens that published layers put before their recurrence."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel import _checks
from ejkernel.convolution import causal_conv1d
from ejkernel.layers._parameters import ParamInit
from ejkernel.layers._tokens import Sequences


class ShortConvolution(nnx.Module):
    """Each channel mixed with its own last `size - 1` tokens: `silu(Σ_l kernel[size - 1 - l] · x_{t-l} + bias)`.

    `widths` are the channels of the arrays that it is called with, which stand side by side in its kernel.
    """

    def __init__(self, size: int, widths: Sequence[int], init: ParamInit, *, bias: bool = False) -> None:
        self.size, self.widths = _checks.positive_int("convolution", size), tuple(widths)
        bound, shape = self.size**-0.5, (self.size, self.channels)
        self.kernel = nnx.Param(init.uniform(shape, -bound, bound, init.param_dtype))
        self.bias = nnx.Param(jnp.zeros(self.channels, init.param_dtype)) if bias else None

    @property
    def channels(self) -> int:
        return sum(self.widths)

    def __call__(
        self, parts: Sequence[jax.Array], recent: jax.Array | None, sequences: Sequences
    ) -> tuple[list[jax.Array], jax.Array]:
        """The mixed `parts`, and the last `size - 1` tokens, which as `recent` continue the sequence."""
        bias = None if self.bias is None else self.bias[...]
        x = jnp.concatenate(parts, -1)
        mixed, recent = causal_conv1d(x, self.kernel[...], bias, "silu", recent, **sequences.keywords)
        return jnp.split(mixed, np.cumsum(self.widths[:-1]), -1), recent
