"""Gated DeltaNet, as transformers' Qwen3-Next has it."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.delta_rule import gated_delta_rule
from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._dtypes import checked, wide
from ejkernel.layers._norm import RMSNorm
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import Made, into_heads, merge, out_of_heads, shared_by, split
from ejkernel.layers._state import RecurrentState, begin
from ejkernel.layers._time_steps import log_decay, log_rates, time_step_bias


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet: a token replaces what its key recalls, after a gate per head has faded the memory.

    The log decay is `-exp(A_log) · softplus(x W_a + dt_bias)` and the share replaced `σ(x W_b)`, both one a value head.

    Args:
        width: Of the input and the output.
        key_heads: How many heads queries and keys have, a divisor of `value_heads`.
        value_heads: How many heads values, gates and memories have.
        key_dim: Of each head's queries and keys.
        value_dim: Of each head's values.
        convolution: How many tokens, its own included, a query, key or value is made of by the short convolution.
        epsilon: Of the norm.
        dtype: What is computed in; `None` is the input's. Norms, gates and the memory are in at least float32.
        param_dtype: Of the parameters.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = GatedDeltaNet(64, key_heads=2, value_heads=4, key_dim=16, value_dim=16, rngs=nnx.Rngs(0))
        >>> output, state = layer(jnp.ones((2, 10, 64)))
        >>> output, state = layer(jnp.ones((2, 1, 64)), state)
        >>> output.shape, state.memory.shape, state.recent.shape
        ((2, 1, 64), (2, 4, 16, 16), (2, 3, 128))
    """

    def __init__(
        self,
        width: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int = 128,
        value_dim: int = 128,
        convolution: int = 4,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.width = _checks.positive_int("width", width)
        self.key_heads = shared_by("key_heads", key_heads, value_heads, "value_heads")
        self.value_heads = value_heads
        self.key_dim, self.value_dim = (
            _checks.positive_int("key_dim", key_dim),
            _checks.positive_int("value_dim", value_dim),
        )
        self.dtype, param_dtype = checked(dtype, param_dtype)
        made = Made(self.dtype, param_dtype, rngs)
        keys, values = key_heads * key_dim, value_heads * value_dim
        # of a key head side by side: its query, its key, and the values and output gates of the value heads it serves
        self.query_key_value_gate = into_heads(width, 2 * keys + 2 * values, made)
        # likewise what they replace and forget
        self.beta_decay = into_heads(width, 2 * value_heads, made)
        size = _checks.positive_int("convolution", convolution)
        self.convolution = ShortConvolution(size, 2 * keys + values, made)
        self.A_log = nnx.Param(log_rates(value_heads, made))
        self.dt_bias = nnx.Param(time_step_bias(value_heads, made))
        self.norm = RMSNorm(value_dim, epsilon, param_dtype)
        self.out = out_of_heads(values, width, made)

    def __call__(
        self, x: jax.Array, state: RecurrentState | None = None, cu_seqlens: _checks.Borders | None = None
    ) -> tuple[jax.Array, RecurrentState]:
        """Runs over the tokens of `x` and returns the output, shaped like it, and the state after them.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            state: From an earlier call that this one continues; `None` starts from nothing.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`. Tokens past the last one are padding: output 0, no
                gradient, no effect.
        """
        dims = _checks.Dims(width=self.width, H=self.value_heads, K=self.key_dim, V=self.value_dim)
        x, state, cu_seqlens = begin(x, state, cu_seqlens, self.dtype, dims, self.convolution)
        served = self.value_heads // self.key_heads
        K, values = self.key_dim, served * self.value_dim
        grouped = split(self.query_key_value_gate(x), self.key_heads)  # [..., key_heads, 2 K + 2 values]
        *parts, output_gate = map(merge, jnp.split(grouped, [K, 2 * K, 2 * K + values], -1))
        mixed, recent = self.convolution(jnp.concatenate(parts, -1), state and state.recent, cu_seqlens)
        query, key, value = jnp.split(mixed, [self.key_heads * K, 2 * self.key_heads * K], -1)
        replaced, forgotten = map(merge, jnp.split(split(wide(self.beta_decay(x)), self.key_heads), 2, -1))
        output, memory = gated_delta_rule(
            split(query, self.key_heads),
            split(key, self.key_heads),
            split(value, self.value_heads),
            log_decay(self.A_log[...], forgotten, self.dt_bias[...]),
            jax.nn.sigmoid(replaced),
            initial_state=None if state is None else state.memory,
            cu_seqlens=cu_seqlens,
            normalize=True,
        )
        gated = self.norm(output) * jax.nn.silu(wide(split(output_gate, self.value_heads)))
        output = without_padding(self.out(merge(gated).astype(x.dtype)), cu_seqlens)
        return output, RecurrentState(memory, recent)

    @classmethod
    def from_transformers(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `Qwen3NextGatedDeltaNet`.

        Args:
            weights: Arrays by the names of its state dict, as `safetensors.numpy` gives them.
            *arguments: As the layer's own.
            prefix: What the names begin with here; all others are left alone.
            **options: As the layer's own, without `rngs`.

        Raises:
            ValueError: Names that are missing or unknown, or shapes that do not fit: all of them are listed.
        """
        return _weights.load(
            lambda: cls(*arguments, **options, rngs=nnx.Rngs(0)),
            weights,
            lambda layer: {
                "query_key_value_gate.kernel": _weights.linear("in_proj_qkvz"),
                "beta_decay.kernel": _weights.linear("in_proj_ba"),
                "convolution.kernel": _weights.convolution("conv1d"),
                "A_log": _weights.same("A_log"),
                "dt_bias": _weights.same("dt_bias"),
                "norm.scale": _weights.same("norm.weight"),
                "out.kernel": _weights.linear("out_proj"),
            },
            prefix=prefix,
            reference="transformers' Qwen3NextGatedDeltaNet of these sizes",
        )
