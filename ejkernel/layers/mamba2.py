"""The Mamba-2 mixer, as transformers' Mamba-2 and Bamba have it."""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._parameters import ParamInit, group_count, matching, merge_heads, split_heads, wide
from ejkernel.layers._recurrent import Mixed, RecurrentLayer, RecurrentState
from ejkernel.layers._time_steps import log_decay, shortest_and_longest, time_step, time_step_bias
from ejkernel.linear_attention import simple_gla


class Mamba2(RecurrentLayer):
    """Mamba-2: a state space model whose every token chooses a time step per head, for which the memory fades.

    It is linear attention with queries `C`, keys `B` and values `x · dt`, whose log decay is `-exp(A_log) · dt` with
    `dt = softplus(… + dt_bias)`, and to whose output `D · x` is added.

    Args:
        width: Last dim of the input and the output.
        heads: How many heads values, time steps and memories have.
        head_dim: Of each head's values.
        state_dim: Of queries and keys.
        groups: How many heads queries and keys have, a divisor of `heads`.
        convolution: Tokens that the short convolution of queries, keys and values spans, its own included.
        convolution_bias: Whether that has a bias.
        bias: Whether the projections have one.
        time_step_limit: The shortest and the longest time step, past which they are cut off.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is the input's. Norms, time steps and the memory are in at least float32.
        param_dtype: The dtype of the parameters.
        rngs: Random keys for the initial parameters.

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
        init = ParamInit(dtype, param_dtype, rngs)
        self.heads, self.groups = heads, group_count("groups", groups, heads)
        self.head_dim = _checks.positive_int("head_dim", head_dim)
        self.state_dim = _checks.positive_int("state_dim", state_dim)
        super().__init__(width, (heads, state_dim, head_dim), init)
        self.time_step_limit = shortest_and_longest("time_step_limit", time_step_limit, "(shortest, longest)")
        bias, convolution_bias = _checks.flag("bias", bias), _checks.flag("convolution_bias", convolution_bias)
        features, states = heads * head_dim, groups * state_dim
        # side by side: the output gate, the convolution's channels (values, keys, queries), the time steps
        self.into = init.column_parallel(width, 2 * features + 2 * states + heads, bias=bias)
        self.convolution = ShortConvolution(convolution, (features, states, states), init, bias=convolution_bias)
        self.A_log = init.param(jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32)))
        self.D = init.param(jnp.ones(heads))
        self.dt_bias = time_step_bias(heads, init)
        self.norm = init.norm(features, epsilon)
        self.out = init.row_parallel(features, width, bias=bias)

    def _mix(self, x: jax.Array, state: RecurrentState, cu_seqlens: jax.Array | None) -> Mixed:
        features, states = self.heads * self.head_dim, self.groups * self.state_dim
        ends = [features, 2 * features, 2 * features + states, 2 * features + 2 * states]
        output_gate, *parts, step = jnp.split(self.into(x), ends, -1)
        (value, key, query), recent = self.convolution(parts, state.recent, cu_seqlens)
        value = wide(split_heads(value, self.heads))
        step = jnp.clip(time_step(step, self.dt_bias[...]), *self.time_step_limit)
        # a group's queries and keys serve several heads' values
        output, memory = simple_gla(
            split_heads(query, self.groups),
            split_heads(key, self.groups),
            (value * step[..., None]).astype(x.dtype),
            log_decay(self.A_log[...], step),
            softmax_scale=1.0,
            initial_state=state.memory,
            cu_seqlens=cu_seqlens,
        )
        output = wide(output) + matching(self.D[...][:, None], value) * value
        gated = self.norm(merge_heads(output) * jax.nn.silu(wide(output_gate)))
        return gated, RecurrentState(memory, recent)

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `Mamba2Mixer` or `BambaMixer`; see `ejkernel.layers`."""
        reference = "transformers' Mamba2Mixer of these sizes"
        sources = {
            **_weights.linears(into="in_proj", out="out_proj"),
            **_weights.copies({"A_log": "A_log", "D": "D", "dt_bias": "dt_bias", "norm.scale": "norm.weight"}),
            **_weights.copies({"convolution.bias": "conv1d.bias"}),
            "convolution.kernel": _weights.convolution("conv1d"),
        }
        return _weights.load(cls, arguments, options, weights, prefix, reference, sources)
