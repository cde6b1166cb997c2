"""The Mamba-2 mixer, as transformers' Mamba-2 and Bamba have it."""

import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._dtypes import checked, matching, wide
from ejkernel.layers._norm import RMSNorm
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import Made, into_heads, merge, out_of_heads, shared_by, split
from ejkernel.layers._state import RecurrentState, begin
from ejkernel.layers._time_steps import shortest_and_longest, time_step, time_step_bias
from ejkernel.linear_attention import simple_gla


class Mamba2(nnx.Module):
    """Mamba-2: a state space model whose every token chooses a time step per head, for which the memory fades.

    It is linear attention with queries `C`, keys `B` and values `x · dt`, whose log decay is `-exp(A_log) · dt` with
    `dt = softplus(… + dt_bias)`, and to whose output `D · x` is added.

    Args:
        width: Of the input and the output.
        heads: How many heads values, time steps and memories have.
        head_dim: Of each head's values.
        state_dim: Of queries and keys.
        groups: How many heads queries and keys have, a divisor of `heads`.
        convolution: How many tokens, its own included, a query, key or value is made of by the short convolution.
        convolution_bias: Whether that has a bias.
        bias: Whether the projections have one.
        time_step_limit: The shortest and the longest time step, past which they are cut off.
        epsilon: Of the norm.
        dtype: What is computed in; `None` is the input's. Norms, time steps and the memory are in at least float32.
        param_dtype: Of the parameters.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = Mamba2(64, heads=8, head_dim=16, state_dim=32, rngs=nnx.Rngs(0))
        >>> output, state = layer(jnp.ones((2, 10, 64)))
        >>> output, state = layer(jnp.ones((2, 1, 64)), state)
        >>> output.shape, state.memory.shape, state.recent.shape
        ((2, 1, 64), (2, 8, 32, 16), (2, 3, 192))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int = 64,
        state_dim: int = 128,
        groups: int = 1,
        convolution: int = 4,
        convolution_bias: bool = True,
        bias: bool = False,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), heads
        self.groups = shared_by("groups", groups, heads)
        self.head_dim = _checks.positive_int("head_dim", head_dim)
        self.state_dim = _checks.positive_int("state_dim", state_dim)
        self.time_step_limit = shortest_and_longest("time_step_limit", time_step_limit, "(shortest, longest)")
        self.dtype, param_dtype = checked(dtype, param_dtype)
        made = Made(self.dtype, param_dtype, rngs)
        bias = _checks.flag("bias", bias)
        features, channels = heads * head_dim, heads * head_dim + 2 * groups * state_dim
        # side by side: the output gate, the convolution's channels (values, keys, queries), the time steps
        self.into = into_heads(width, features + channels + heads, made, bias=bias)
        self.convolution = ShortConvolution(
            _checks.positive_int("convolution", convolution),
            channels,
            made,
            bias=_checks.flag("convolution_bias", convolution_bias),
        )
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32)).astype(param_dtype))
        self.D = nnx.Param(jnp.ones(heads, param_dtype))
        self.dt_bias = nnx.Param(time_step_bias(heads, made))
        self.norm = RMSNorm(features, epsilon, param_dtype)
        self.out = out_of_heads(features, width, made, bias=bias)

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
        dims = _checks.Dims(width=self.width, H=self.heads, K=self.state_dim, V=self.head_dim)
        x, state, cu_seqlens = begin(x, state, cu_seqlens, self.dtype, dims, self.convolution)
        features, states = self.heads * self.head_dim, self.groups * self.state_dim
        projected = self.into(x)
        output_gate, mixed, chosen = jnp.split(projected, [features, 2 * features + 2 * states], -1)
        mixed, recent = self.convolution(mixed, state and state.recent, cu_seqlens)
        value, key, query = jnp.split(mixed, [features, features + states], -1)
        value = split(value, self.heads)
        step = jnp.clip(time_step(chosen, self.dt_bias[...]), *self.time_step_limit)
        rate = -jnp.exp(matching(self.A_log[...], step))
        # a group's queries and keys serve several heads' values
        output, memory = simple_gla(
            split(query, self.groups),
            split(key, self.groups),
            (wide(value) * step[..., None]).astype(x.dtype),
            rate * step,
            softmax_scale=1.0,
            initial_state=None if state is None else state.memory,
            cu_seqlens=cu_seqlens,
        )
        value = wide(value)
        output = wide(output) + matching(self.D[...][:, None], value) * value
        gated = self.norm(merge(output) * jax.nn.silu(wide(output_gate)))
        return without_padding(self.out(gated.astype(x.dtype)), cu_seqlens), RecurrentState(memory, recent)

    @classmethod
    def from_transformers(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `Mamba2Mixer` or `BambaMixer`.

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
                "into.kernel": _weights.linear("in_proj"),
                "into.bias": _weights.same("in_proj.bias") if layer.into.bias is not None else None,
                "convolution.kernel": _weights.convolution("conv1d"),
                "convolution.bias": _weights.same("conv1d.bias") if layer.convolution.bias is not None else None,
                "A_log": _weights.same("A_log"),
                "D": _weights.same("D"),
                "dt_bias": _weights.same("dt_bias"),
                "norm.scale": _weights.same("norm.weight"),
                "out.kernel": _weights.linear("out_proj"),
                "out.bias": _weights.same("out_proj.bias") if layer.out.bias is not None else None,
            },
            prefix=prefix,
            reference="transformers' Mamba2Mixer of these sizes",
        )
