"""The short convolution over tokens that published layers put before their recurrence."""

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
        """The mixed `parts`, and the last `size - 1` tokens, which as `recent` continue the sequence.

        Parts are mixed one by one: side by side they would be copied together, and apart again. With a pool they are
        side by side, as it is one array, which is updated where it is.
        """
        mixed, recent, _ = self._mixed(parts, recent, sequences, (0,) * len(parts))
        return mixed, recent

    def with_units(
        self, parts: Sequence[jax.Array], recent: jax.Array | None, sequences: Sequences, dim: int
    ) -> tuple[list[jax.Array], jax.Array, bool]:
        """As a call, with the heads of `dim` of queries and keys, the first two parts, divided by their norms.

        The last result is whether that is left to the op, as its `normalize`, which it is with a pool.
        """
        return self._mixed(parts, recent, sequences, (dim, dim, *[0] * (len(parts) - 2)))

    def _mixed(
        self, parts: Sequence[jax.Array], recent: jax.Array | None, sequences: Sequences, units: Sequence[int]
    ) -> tuple[list[jax.Array], jax.Array, bool]:
        """The mixed parts, the last tokens, and whether none of the parts has heads that are divided by their norms."""
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        if isinstance(recent, _checks.Pool):
            x = jnp.concatenate(parts, -1)
            whole, pool = causal_conv1d(x, kernel, bias, "silu", recent, **sequences.keywords)
            return self._split(whole), pool, True
        found = []
        for x, taps, b, state, unit_dim in zip(parts, *map(self._split, (kernel, bias, recent)), units, strict=True):
            run = functools.partial(unit_conv1d, unit_dim=unit_dim) if unit_dim else causal_conv1d
            found.append(run(x, taps, b, "silu", state, **sequences.keywords))
        return [each for each, _ in found], jnp.concatenate([state for _, state in found], -1), not any(units)

    def _split(self, x: jax.Array | None) -> list[Any]:
        """Each part's channels of `x`, if there is one."""
        return [None] * len(self.widths) if x is None else jnp.split(x, np.cumsum(self.widths[:-1]), -1)
