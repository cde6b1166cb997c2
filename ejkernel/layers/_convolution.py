"""The short convolution that published layers apply before their recurrence."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel import _checks
from ejkernel.convolution import causal_conv1d, unit_conv1d
from ejkernel.layers._parameters import ParamInit
from ejkernel.layers._tokens import Sequences


class ShortConvolution(nnx.Module):
    """A depthwise convolution over tokens: `silu(Σ_l kernel[size - 1 - l] · x_{t-l} + bias)`.

    It is called with several arrays, such as queries, keys and values. `widths` are their numbers of channels, which
    are concatenated in the kernel.
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
        self, parts: Sequence[jax.Array], recent: Any, sequences: Sequences, unit_dim: int = 0
    ) -> tuple[list[jax.Array], jax.Array]:
        """The convolved `parts`, and the last `size - 1` tokens of each sequence, which as `recent` continue it.

        With a `unit_dim`, the first two parts, queries and keys, have heads of so many channels, which are divided by
        their norms, unless `recent` is a pool of states: then the recurrence has to normalise them.
        """
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        if isinstance(recent, _checks.Pool):
            # a pool is one array that is updated in place, so the parts have to be one array too
            pool: Any = recent
            output, pool = causal_conv1d(jnp.concatenate(parts, -1), kernel, bias, "silu", pool, **sequences.keywords)
            return self._split(output), pool
        outputs, states = [], []
        # one call for each part: concatenating and splitting them would copy all of them twice
        for i, (x, taps, b, state) in enumerate(zip(parts, *map(self._split, (kernel, bias, recent)), strict=True)):
            run = functools.partial(unit_conv1d, unit_dim=unit_dim) if unit_dim and i < 2 else causal_conv1d
            output, state = run(x, taps, b, "silu", state, **sequences.keywords)
            outputs.append(output)
            states.append(state)
        return outputs, jnp.concatenate(states, -1)

    def _split(self, x: jax.Array | None) -> list[Any]:
        """The channels of `x` that belong to each part; `None` for each if there is no `x`."""
        return [None] * len(self.widths) if x is None else jnp.split(x, np.cumsum(self.widths[:-1]), -1)
