"""The Mamba-2 mixer, as Codestral-Mamba, Bamba, Nemotron-H, Falcon-H1, Granite 4 and Zamba2 have it."""

import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.kernels.step.call import Results
from ejkernel.layers import _one_token, _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._gated_norm import normed_and_gated
from ejkernel.layers._one_token import Heads
from ejkernel.layers._parameters import ParamInit, group_count, matching, merge_heads, parts, split_heads, wide
from ejkernel.layers._recurrent import Mixed, RecurrentLayer, RecurrentState
from ejkernel.layers._time_steps import log_decay, shortest_and_longest, time_step, time_step_bias
from ejkernel.layers._tokens import Sequences
from ejkernel.linear_attention import simple_gla


class Mamba2(RecurrentLayer):
    """Mamba-2: a state space model with a time step per token and head.

    It is linear attention with queries `C`, keys `B` and values `x · dt`. The log decay is `-exp(A_log) · dt` with the
    time step `dt = softplus(… + dt_bias)`, and `D · x` is added to the output.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads values, time steps and the state have.
        head_dim: The size of each value head.
        state_dim: The size of each query and key head.
        groups: How many heads queries and keys have, a divisor of `heads`.
        convolution: How many tokens the short convolution of queries, keys and values spans, the token itself included.
        convolution_bias: Whether the convolution has a bias.
        bias: Whether the projections have a bias.
        out_bias: Whether the last projection has a bias; `None` is as `bias` says.
        time_step_limit: The shortest and the longest time step, to which time steps are clipped.
        norm: Whether the output is normalised. Falcon-H1 has models without.
        norm_groups: How many groups of heads are normalised separately; `None` is `groups`, as published.
        norm_before_gate: Whether the output is normalised before the output gate instead of after it.
        multipliers: Factors of the output gate, the values, the keys, the queries and the time steps, applied after the
            first projection, as in Falcon-H1; `None` is without.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is the input's. Norms, time steps and the state are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
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
        out_bias: bool | None = None,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        norm: bool = True,
        norm_groups: int | None = None,
        norm_before_gate: bool = False,
        multipliers: Sequence[float] | None = None,
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
        out_bias = bias if out_bias is None else _checks.flag("out_bias", out_bias)
        self.norm_groups = group_count("norm_groups", groups if norm_groups is None else norm_groups, heads)
        self.norm_before_gate = _checks.flag("norm_before_gate", norm_before_gate)
        self.multipliers = _checked_multipliers(multipliers)
        self.has_step = self.multipliers is None
        features, states = heads * head_dim, groups * state_dim
        # columns of each group: the output gate, the convolution's channels (value, key, query), the time steps
        self.into = init.column_parallel(width, 2 * features + 2 * states + heads, bias=bias)
        self.convolution = ShortConvolution(convolution, (features, states, states), init, bias=convolution_bias)
        self.A_log = init.param(jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32)))
        self.D = init.param(jnp.ones(heads))
        self.dt_bias = time_step_bias(heads, init)
        self.norm = init.norm(features, epsilon) if _checks.flag("norm", norm) else None
        self.out = init.row_parallel(features, width, bias=out_bias)

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        features, _, states, _, steps = self._widths()
        gate, value, others = parts(self.into, x, (features, features, 2 * states + steps), self.groups)
        apart = jnp.split(split_heads(others, self.groups), [states, 2 * states], -1)
        split = [gate, value, *map(merge_heads, apart)]
        if self.multipliers is not None:
            split = [each * factor for each, factor in zip(split, self.multipliers, strict=True)]
        output_gate, *mixed, step = split
        (value, key, query), recent = self.convolution(mixed, state.recent, sequences)
        value = split_heads(value, self.heads)
        step = jnp.clip(time_step(step, self.dt_bias[...]), *self.time_step_limit)
        # all heads of a group share its query and key
        output, memory = simple_gla(
            split_heads(query, self.groups),
            split_heads(key, self.groups),
            (wide(value) * step[..., None]).astype(x.dtype),
            log_decay(self.A_log[...], step),
            softmax_scale=1.0,
            initial_state=state.memory,
            **sequences.keywords,
        )
        return self._normed(output, output_gate, value), RecurrentState(memory, recent)

    def _widths(self) -> tuple[int, int, int, int, int]:
        """How many columns of a group are the output gate, value, key, query and time steps."""
        features = self.heads * self.head_dim // self.groups
        return features, features, self.state_dim, self.state_dim, self.heads // self.groups

    def _step(self, x: jax.Array, state: RecurrentState) -> Results:
        features, states = self.heads * self.head_dim, self.groups * self.state_dim
        gate_last = self.norm is not None and self.norm_before_gate
        projected, groups = self.into(x), self.groups
        _, value, key, query, step = np.cumsum([0, *self._widths()[:-1]]).tolist()
        output_gate = Heads(projected, self.head_dim, groups, 0, self.heads)
        results = _one_token.run(
            state,
            Heads(projected, self.state_dim, groups, query, groups),
            Heads(projected, self.state_dim, groups, key, groups),
            Heads(projected, self.head_dim, groups, value, self.heads),
            Heads(projected, 1, groups, step, self.heads),
            decay="softplus",
            rate=self.A_log[...],
            bias=self.dt_bias[...],
            limits=self.time_step_limit,
            values_by_step=True,
            convolution=self.convolution,
            channels=(features + states, features, 0),
            scale=1.0,
            skip=self.D[...],
            output_gate=None if gate_last else output_gate,
        )
        output = results.output
        if self.norm is not None:
            output = self.norm(output, self.norm_groups)
        if gate_last:
            gate = merge_heads(split_heads(projected, groups)[..., :value])
            output = output * jax.nn.silu(wide(gate))
        return results._replace(output=output)

    def _normed(self, output: jax.Array, gate: jax.Array, value: jax.Array) -> jax.Array:
        """The output plus `D · value`, multiplied by the gate, and normalised group by group before or after that."""
        if self.norm is None:
            value = wide(value)
            output = wide(output) + matching(self.D[...][:, None], value) * value
            return merge_heads(output) * jax.nn.silu(wide(gate))
        skip = jnp.repeat(self.D[...], self.head_dim)
        output, value = (split_heads(merge_heads(each), self.norm_groups) for each in (output, value))
        return normed_and_gated(self.norm, output, gate, gate_first=not self.norm_before_gate, value=value, skip=skip)

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' mixers of Mamba-2, Bamba, Nemotron-H, Falcon-H1 and others.

        Their names are the same. See `ejkernel.layers` for the arguments.
        """
        return _weights.load(cls, arguments, options, weights, prefix, {"transformers' Mamba2Mixer": _SOURCES})


def _by_group(rows: np.ndarray, layer: Mamba2) -> np.ndarray:
    """Rows of all gates, values, keys, queries and time steps, reordered group by group."""
    return _weights.grouped(rows, [layer.groups * each for each in layer._widths()], layer.groups)


_SOURCES = {
    **_weights.linears(out="out_proj"),
    "into.kernel": _weights.linear("in_proj", rows=_by_group),
    "into.bias": _weights.Source(["in_proj.bias"], convert=_by_group),
    **_weights.copies({"A_log": "A_log", "D": "D", "dt_bias": "dt_bias", "norm.scale": "norm.weight"}),
    **_weights.copies({"convolution.bias": "conv1d.bias"}),
    "convolution.kernel": _weights.convolution("conv1d"),
}


def _checked_multipliers(multipliers: Any) -> tuple[float, ...] | None:
    if multipliers is None:
        return None
    if not isinstance(multipliers, tuple | list) or len(multipliers) != 5:
        _checks.fail("multipliers", repr(multipliers), "five numbers or None")
    return tuple(_checks.real("multipliers", each) for each in multipliers)
