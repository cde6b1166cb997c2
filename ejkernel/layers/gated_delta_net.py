"""Gated DeltaNet, as Qwen3-Next, Qwen3.5, Olmo-Hybrid and flash-linear-attention have it."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.delta_rule import gated_delta_rule
from ejkernel.kernels.step.call import Results
from ejkernel.layers import _one_token, _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._gated_norm import normed_and_gated
from ejkernel.layers._one_token import Heads
from ejkernel.layers._parameters import ParamInit, apart, group_count, merge_heads, parts, split_heads, wide
from ejkernel.layers._recurrent import Mixed, RecurrentLayer, RecurrentState
from ejkernel.layers._time_steps import beta_of, log_decay, log_rates, time_step, time_step_bias
from ejkernel.layers._tokens import Sequences


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet: the delta rule, whose state decays by one gate per head.

    Each value head has a log decay, `-exp(A_log) · softplus(x W_a + dt_bias)`, and the delta rule's `beta = σ(x W_b)`.

    Args:
        width: The size of the last axis of the input and the output.
        key_heads: How many heads queries and keys have, a divisor of `value_heads`.
        value_heads: How many heads values, gates and the state have.
        key_dim: The size of each query and key head.
        value_dim: The size of each value head.
        convolution: How many tokens the short convolution of queries, keys and values spans, the token itself included.
        negative_eigenvalues: Whether `beta` goes up to 2, as in Olmo-Hybrid, so that transitions may have negative
            eigenvalues.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is that of the input. Norms, gates and the state are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

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
        negative_eigenvalues: bool = False,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        init = ParamInit(dtype, param_dtype, rngs)
        self.key_heads = group_count("key_heads", key_heads, value_heads, "value_heads")
        self.value_heads = value_heads
        self.key_dim = _checks.positive_int("key_dim", key_dim)
        self.value_dim = _checks.positive_int("value_dim", value_dim)
        super().__init__(width, (value_heads, key_dim, value_dim), init)
        self.negative_eigenvalues = _checks.flag("negative_eigenvalues", negative_eigenvalues)
        keys, values = key_heads * key_dim, value_heads * value_dim
        # columns of each key head: its query, its key, and the values and output gates of its value heads
        self.query_key_value_gate = init.column_parallel(width, 2 * keys + 2 * values)
        # columns of each key head: the betas and the decays of its value heads
        self.beta_decay = init.column_parallel(width, 2 * value_heads)
        self.convolution = ShortConvolution(convolution, (keys, keys, values), init)
        self.A_log = log_rates(value_heads, init)
        self.dt_bias = time_step_bias(value_heads, init)
        self.norm = init.norm(value_dim, epsilon)
        self.out = init.row_parallel(values, width)

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        K, values = self.key_dim, self.value_heads // self.key_heads * self.value_dim
        *mixed, output_gate = parts(self.query_key_value_gate, x, (K, K, values, values), self.key_heads)
        (query, key, value), recent = self.convolution(mixed, state.recent, sequences, K)
        beta_decay = split_heads(wide(self.beta_decay(x)), self.key_heads)
        beta, decay = map(merge_heads, jnp.split(beta_decay, 2, -1))
        output, memory = gated_delta_rule(
            split_heads(query, self.key_heads),
            split_heads(key, self.key_heads),
            split_heads(value, self.value_heads),
            log_decay(self.A_log[...], time_step(decay, self.dt_bias[...])),
            beta_of(beta, self.negative_eigenvalues),
            initial_state=state.memory,
            normalize=isinstance(state.memory, _checks.Pool),
            **sequences.keywords,
        )
        return normed_and_gated(self.norm, output, output_gate), RecurrentState(memory, recent)

    def _step(self, x: jax.Array, state: RecurrentState) -> Results:
        groups, shared = self.key_heads, self.value_heads // self.key_heads
        inputs = apart(x)
        heads, gates = self.query_key_value_gate(next(inputs)), self.beta_decay(next(inputs))
        K, V, H = self.key_dim, self.value_dim, self.value_heads
        return _one_token.run(
            state,
            Heads(heads, K, groups, 0, groups),
            Heads(heads, K, groups, K, groups),
            Heads(heads, V, groups, 2 * K, H),
            Heads(gates, 1, groups, shared, H),
            decay="softplus",
            rate=self.A_log[...],
            bias=self.dt_bias[...],
            beta=Heads(gates, 1, groups, 0, H),
            beta_factor=2.0 if self.negative_eigenvalues else 1.0,
            convolution=self.convolution,
            normalize=True,
            norm=self.norm,
            output_gate=Heads(heads, V, groups, 2 * K + shared * V, H),
        )

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' Gated DeltaNet of Qwen3-Next, Qwen3.5 or Olmo-Hybrid.

        The names of the weights tell which of them it is. See `ejkernel.layers` for the arguments.
        """
        return _weights.load(cls, arguments, options, weights, prefix, _TRANSFORMERS)

    @classmethod
    def from_fla(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of fla's `GatedDeltaNet`, whose `epsilon` is 1e-5; see `ejkernel.layers`."""
        return _weights.load(cls, arguments, {"epsilon": 1e-5, **options}, weights, prefix, _FLA)


def _widths(layer: GatedDeltaNet) -> tuple[int, int, int]:
    return layer.convolution.widths


def _by_key_head(rows: np.ndarray, layer: GatedDeltaNet) -> np.ndarray:
    """Rows of all queries, all keys, all values and all gates, reordered key head by key head."""
    keys, _, values = _widths(layer)
    return _weights.grouped(rows, (keys, keys, values, values), layer.key_heads)


def _beta_decay(*names: str) -> _weights.Source:
    return _weights.linear(
        *names,
        widths=lambda layer: [layer.value_heads] * 2,
        rows=lambda x, layer: _weights.grouped(x, [layer.value_heads] * 2, layer.key_heads),
    )


_SHARED = _weights.copies({"A_log": "A_log", "dt_bias": "dt_bias"})
_QWEN = {
    **_SHARED,
    **_weights.copies({"norm.scale": "norm.weight"}),
    **_weights.linears(out="out_proj"),
    "convolution.kernel": _weights.convolution("conv1d"),
}
# the names in fla and in Olmo-Hybrid, with a projection for each
_APART = {
    **_SHARED,
    **_weights.copies({"norm.scale": "o_norm.weight"}),
    **_weights.linears(out="o_proj"),
    "query_key_value_gate.kernel": _weights.linear(
        *("q_proj", "k_proj", "v_proj", "g_proj"),
        widths=lambda layer: (*_widths(layer), _widths(layer)[2]),
        rows=_by_key_head,
    ),
    "beta_decay.kernel": _beta_decay("b_proj", "a_proj"),
    "convolution.kernel": _weights.convolution("q_conv1d", "k_conv1d", "v_conv1d"),
}
_FLA = {"fla's GatedDeltaNet": _APART}
_TRANSFORMERS = {
    "transformers' Qwen3NextGatedDeltaNet": {
        **_QWEN,
        **_weights.linears(query_key_value_gate="in_proj_qkvz", beta_decay="in_proj_ba"),
    },
    "transformers' Qwen3_5GatedDeltaNet": {
        **_QWEN,
        "query_key_value_gate.kernel": _weights.linear(
            *("in_proj_qkv", "in_proj_z"),
            widths=lambda layer: (layer.convolution.channels, _widths(layer)[2]),
            rows=_by_key_head,
        ),
        "beta_decay.kernel": _beta_decay("in_proj_b", "in_proj_a"),
    },
    # the module has one convolution, the published files one for each of query, key and value
    "transformers' OlmoHybridGatedDeltaNet": _APART | {"convolution.kernel": _weights.convolution("conv1d")},
    "Olmo-Hybrid's Gated DeltaNet": _APART,
}
