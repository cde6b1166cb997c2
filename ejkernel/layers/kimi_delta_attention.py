"""Kimi Delta Attention, as flash-linear-attention and transformers' Kimi Linear have it."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.delta_rule import kda
from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._dtypes import checked, wide
from ejkernel.layers._norm import RMSNorm
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import Made, into_heads, merge, out_of_heads, split, whole
from ejkernel.layers._state import RecurrentState, begin
from ejkernel.layers._time_steps import log_decay, log_rates, time_step_bias


class KimiDeltaAttention(nnx.Module):
    """Kimi Delta Attention: a token replaces what its key recalls, after a gate per key dim has faded the memory.

    The log decay is `-exp(A_log) · softplus(x W_1 W_2 + dt_bias)`, one a key dim, and the share replaced `σ(x W_b)`.

    Args:
        width: Of the input and the output.
        heads: How many heads there are.
        head_dim: Of each head's queries, keys and values; also the width between the two projections of each gate.
        convolution: How many tokens, its own included, a query, key or value is made of by the short convolution.
        gate_bias: Whether the output gate has a bias, as flash-linear-attention's has and Kimi Linear's has not.
        epsilon: Of the norm.
        dtype: What is computed in; `None` is the input's. Norms, gates and the memory are in at least float32.
        param_dtype: Of the parameters.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = KimiDeltaAttention(64, heads=4, head_dim=16, rngs=nnx.Rngs(0))
        >>> output, state = layer(jnp.ones((2, 10, 64)))
        >>> output, state = layer(jnp.ones((2, 1, 64)), state)
        >>> output.shape, state.memory.shape, state.recent.shape
        ((2, 1, 64), (2, 4, 16, 16), (2, 3, 192))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int = 128,
        convolution: int = 4,
        gate_bias: bool = False,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), _checks.positive_int("heads", heads)
        self.head_dim = _checks.positive_int("head_dim", head_dim)
        self.dtype, param_dtype = checked(dtype, param_dtype)
        made = Made(self.dtype, param_dtype, rngs)
        features = heads * head_dim
        self.query, self.key, self.value = (into_heads(width, features, made) for _ in range(3))
        self.convolution = ShortConvolution(_checks.positive_int("convolution", convolution), 3 * features, made)
        self.decay_down = whole(width, head_dim, made)
        self.decay_up = into_heads(head_dim, features, made)
        self.A_log = nnx.Param(log_rates(heads, made))
        self.dt_bias = nnx.Param(time_step_bias(features, made))
        self.beta = into_heads(width, heads, made)
        self.output_gate_down = whole(width, head_dim, made)
        self.output_gate_up = into_heads(head_dim, features, made, bias=_checks.flag("gate_bias", gate_bias))
        self.norm = RMSNorm(head_dim, epsilon, param_dtype)
        self.out = out_of_heads(features, width, made)

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
        dims = _checks.Dims(width=self.width, H=self.heads, K=self.head_dim, V=self.head_dim)
        x, state, cu_seqlens = begin(x, state, cu_seqlens, self.dtype, dims, self.convolution)
        mixed = jnp.concatenate([self.query(x), self.key(x), self.value(x)], -1)
        mixed, recent = self.convolution(mixed, state and state.recent, cu_seqlens)
        query, key, value = (split(each, self.heads) for each in jnp.split(mixed, 3, -1))
        forgotten = split(self.decay_up(self.decay_down(x)), self.heads)
        output, memory = kda(
            query,
            key,
            value,
            log_decay(self.A_log[...][:, None], forgotten, split(self.dt_bias[...], self.heads)),
            jax.nn.sigmoid(wide(self.beta(x))),
            initial_state=None if state is None else state.memory,
            cu_seqlens=cu_seqlens,
            normalize=True,
        )
        output_gate = split(self.output_gate_up(self.output_gate_down(x)), self.heads)
        gated = self.norm(output) * jax.nn.sigmoid(wide(output_gate))
        output = without_padding(self.out(merge(gated).astype(x.dtype)), cu_seqlens)
        return output, RecurrentState(memory, recent)

    @classmethod
    def from_fla(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of flash-linear-attention's `KimiDeltaAttention`; `gate_bias` is on.

        Args:
            weights: Arrays by the names of its state dict, as `safetensors.numpy` gives them.
            *arguments: As the layer's own.
            prefix: What the names begin with here; all others are left alone.
            **options: As the layer's own, without `rngs`.

        Raises:
            ValueError: Names that are missing or unknown, or shapes that do not fit: all of them are listed.
        """
        return _weights.load(
            lambda: cls(*arguments, **{"gate_bias": True, **options}, rngs=nnx.Rngs(0)),
            weights,
            lambda layer: {
                **_projections("f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"),
                "convolution.kernel": _weights.convolution(
                    "q_conv1d", "k_conv1d", "v_conv1d", sizes=[layer.heads * layer.head_dim] * 3
                ),
                "A_log": _weights.same("A_log"),
                "dt_bias": _weights.same("dt_bias"),
                "output_gate_up.bias": _weights.same("g_proj.1.bias"),
            },
            prefix=prefix,
            reference="fla's KimiDeltaAttention of these sizes",
        )

    @classmethod
    def from_transformers(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `KimiLinearDeltaAttention`.

        Args:
            weights: Arrays by the names of its state dict, as `safetensors.numpy` gives them.
            *arguments: As the layer's own.
            prefix: What the names begin with here; all others are left alone.
            **options: As the layer's own, without `rngs`.

        Raises:
            ValueError: Names that are missing or unknown, or shapes that do not fit: all of them are listed.
        """
        gate = "forget_gate"
        return _weights.load(
            lambda: cls(*arguments, **options, rngs=nnx.Rngs(0)),
            weights,
            lambda layer: {
                **_projections(f"{gate}.f_a_proj", f"{gate}.f_b_proj", "g_a_proj", "g_b_proj"),
                "convolution.kernel": _weights.convolution("conv1d"),
                "A_log": _weights.reshaped(f"{gate}.A_log", lambda shape: (1, 1, *shape, 1)),
                "dt_bias": _weights.same(f"{gate}.dt_bias"),
            },
            prefix=prefix,
            reference="transformers' KimiLinearDeltaAttention of these sizes",
        )


def _projections(
    decay_down: str, decay_up: str, output_gate_down: str, output_gate_up: str
) -> dict[str, _weights.Source]:
    return {
        "query.kernel": _weights.linear("q_proj"),
        "key.kernel": _weights.linear("k_proj"),
        "value.kernel": _weights.linear("v_proj"),
        "decay_down.kernel": _weights.linear(decay_down),
        "decay_up.kernel": _weights.linear(decay_up),
        "beta.kernel": _weights.linear("b_proj"),
        "output_gate_down.kernel": _weights.linear(output_gate_down),
        "output_gate_up.kernel": _weights.linear(output_gate_up),
        "norm.scale": _weights.same("o_norm.weight"),
        "out.kernel": _weights.linear("o_proj"),
    }
