"""The short convolution over tokens that published layers put before their recurrence."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel import _checks
from ejkernel.layers._parameters import ParamInit, matching, wide
from ejkernel.xla_utils.utils import prepare_token_indices


class ShortConvolution(nnx.Module):
    """Each channel mixed with its own last `size - 1` tokens: `silu(Σ_l kernel[size - 1 - l] · x_{t-l} + bias)`.

    `widths` are the channels of the arrays that it is called with, which stand side by side in its kernel.
    """

    def __init__(self, size: int, widths: Sequence[int], init: ParamInit, *, bias: bool = False) -> None:
        self.size, self.widths = _checks.positive_int("convolution", size), tuple(widths)
        bound, shape = self.size**-0.5, (self.size, self.channels)
        self.kernel = nnx.Param(init.uniform(shape, -bound, bound, init.param_dtype))
        self.bias = init.param(jnp.zeros(self.channels)) if bias else None

    @property
    def channels(self) -> int:
        return sum(self.widths)

    def __call__(
        self, parts: Sequence[jax.Array], recent: jax.Array | None, cu_seqlens: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array]:
        """The mixed `parts`, and the last `size - 1` tokens, which as `recent` continue the sequence."""
        x = jnp.concatenate(parts, -1)
        delayed, recent = _lagged(x, self.size - 1, recent, cu_seqlens)
        taps = self.kernel[...][::-1]
        first, *others = [matching(tap, each) * each for tap, each in zip(taps, map(wide, delayed), strict=True)]
        mixed = sum(others, first)
        if self.bias is not None:
            mixed = mixed + matching(self.bias[...], mixed)
        return jnp.split(jax.nn.silu(mixed).astype(x.dtype), np.cumsum(self.widths[:-1]), -1), recent


def _lagged(
    x: jax.Array, count: int, recent: jax.Array | None, cu_seqlens: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """`x` delayed by 0 … `count` tokens within each sequence, and the last `count` tokens of each sequence.

    `recent` is that second result of an earlier call, `[N, count, width]`; `None` means zeros. It gives the tokens
    before the first ones of `x`, which is `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
    """
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    recent = jnp.zeros((rows, count, x.shape[-1]), x.dtype) if recent is None else recent.astype(x.dtype)
    if cu_seqlens is not None:
        delayed, recent = _lagged_packed(x.reshape(x.shape[-2:]), count, recent, cu_seqlens)
        return [each.reshape(x.shape) for each in delayed], recent
    T = x.shape[1]
    longer = jnp.concatenate([recent, x], 1)  # [B, count + T, width]
    return [longer[:, count - lag : count - lag + T] for lag in range(count + 1)], longer[:, T:]


def _lagged_packed(
    x: jax.Array, count: int, recent: jax.Array, cu_seqlens: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    T, N, width = x.shape[0], recent.shape[0], x.shape[-1]
    # all that a token may come after: the stream, what came before it, and a 0 for padding
    rows = jnp.concatenate([x, recent.reshape(N * count, width), jnp.zeros((1, width), x.dtype)])

    def at(sequence: jax.Array, place: jax.Array) -> jax.Array:
        # in a sequence that follows its recent tokens, its first token stands at `count`
        row = jnp.where(place >= count, cu_seqlens[sequence] + place - count, T + sequence * count + place)
        return rows[jnp.where(sequence < N, row, T + N * count)]

    sequence, position = prepare_token_indices(cu_seqlens, total_tokens=T).T
    delayed = [x, *(at(sequence, position + count - lag) for lag in range(1, count + 1))]
    ends = jnp.diff(cu_seqlens)[:, None] + jnp.arange(count, dtype=cu_seqlens.dtype)[None]
    return delayed, at(jnp.arange(N, dtype=cu_seqlens.dtype)[:, None], ends)
