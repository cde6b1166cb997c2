"""Kimi Delta Attention, as flash-linear-attention, Kimi Linear, GLM-5.3-Flash and Ling 3 have it."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.delta_rule import kda
from ejkernel.kernels.step.call import Results
from ejkernel.layers import _one_token, _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._gated_norm import normed_and_gated
from ejkernel.layers._one_token import Heads
from ejkernel.layers._parameters import ParamInit, apart, group_count, side_by_side, split_heads, together
from ejkernel.layers._recurrent import Mixed, RecurrentLayer, RecurrentState
from ejkernel.layers._time_steps import beta_of, bounded_log_decay, log_decay, log_rates, time_step, time_step_bias
from ejkernel.layers._tokens import Sequences


class KimiDeltaAttention(RecurrentLayer):
    """Kimi Delta Attention: the delta rule, whose state decays by one gate per key dim.

    The log decay of each key dim is `-exp(A_log) · softplus(x W_1 W_2 + dt_bias)` or, with a `lower_bound`,
    `lower_bound · σ(exp(A_log) · (x W_1 W_2 + dt_bias))`. The delta rule's `beta` is `σ(x W_b)`, one per value head.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads queries and keys have, a divisor of `value_heads`.
        head_dim: The size of each query and key head.
        value_heads: How many heads values, gates and the state have; `None` is `heads`.
        value_dim: The size of each value head; `None` is `head_dim`.
        convolution: How many tokens the short convolution of queries, keys and values spans, the token itself included.
        lower_bound: A lower bound of the log decay, -5 in Kimi-K3, GLM-5.3-Flash and Ling 3; `None` is without one.
        negative_eigenvalues: Whether `beta` goes up to 2, so that transitions may have negative eigenvalues.
        low_rank_decay: Whether the decay comes from two projections, with `value_dim` between them. With `False`, as
            in Ling 3, it comes from one.
        low_rank_output_gate: The same for the output gate, which comes from one projection in Ling 3 and Kimi-K3.
        gate_bias: Whether the output gate has a bias. It has in flash-linear-attention, but not in Kimi Linear.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is that of the input. Norms, gates and the state are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

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
        value_heads: int | None = None,
        value_dim: int | None = None,
        convolution: int = 4,
        lower_bound: float | None = None,
        negative_eigenvalues: bool = False,
        low_rank_decay: bool = True,
        low_rank_output_gate: bool = True,
        gate_bias: bool = False,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        init = ParamInit(dtype, param_dtype, rngs)
        self.value_heads = heads if value_heads is None else _checks.positive_int("value_heads", value_heads)
        self.heads = group_count("heads", heads, self.value_heads, "heads" if value_heads is None else "value_heads")
        self.head_dim = _checks.positive_int("head_dim", head_dim)
        self.value_dim = head_dim if value_dim is None else _checks.positive_int("value_dim", value_dim)
        super().__init__(width, (self.value_heads, head_dim, self.value_dim), init)
        if lower_bound is not None and _checks.real("lower_bound", lower_bound) >= 0:
            _checks.fail("lower_bound", lower_bound, "a negative number or None")
        self.lower_bound = None if lower_bound is None else float(lower_bound)
        self.negative_eigenvalues = _checks.flag("negative_eigenvalues", negative_eigenvalues)
        gate_bias, rank = _checks.flag("gate_bias", gate_bias), self.value_dim
        keys, values, gates = heads * head_dim, self.value_heads * self.value_dim, self.value_heads * head_dim
        self.query, self.key, self.value = (init.column_parallel(width, each) for each in (keys, keys, values))
        self.convolution = ShortConvolution(convolution, (keys, keys, values), init)
        low_rank = _checks.flag("low_rank_decay", low_rank_decay)
        self.decay_down = init.replicated(width, rank) if low_rank else None
        self.decay_up = init.column_parallel(rank if low_rank else width, gates)
        # rates of 1, so that bounded gates start where the sigmoid is steep
        zeros = self.lower_bound is not None
        self.A_log = init.param(jnp.zeros(self.value_heads)) if zeros else log_rates(self.value_heads, init)
        self.dt_bias = time_step_bias(gates, init)
        self.beta = init.column_parallel(width, self.value_heads)
        low_rank = _checks.flag("low_rank_output_gate", low_rank_output_gate)
        self.output_gate_down = init.replicated(width, rank) if low_rank else None
        self.output_gate_up = init.column_parallel(rank if low_rank else width, values, bias=gate_bias)
        self.norm = init.norm(self.value_dim, epsilon)
        self.out = init.row_parallel(values, width)

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        parts = [self.query(x), self.key(x), self.value(x)]
        parts, recent = self.convolution(parts, state.recent, sequences, self.head_dim)
        query, key, value = map(split_heads, parts, (self.heads, self.heads, self.value_heads))
        output, memory = kda(
            query,
            key,
            value,
            self._log_decay(x),
            beta_of(self.beta(x), self.negative_eigenvalues),
            initial_state=state.memory,
            normalize=isinstance(state.memory, _checks.Pool),
            **sequences.keywords,
        )
        gated = normed_and_gated(self.norm, output, self._output_gate(x), "sigmoid")
        return gated, RecurrentState(memory, recent)

    def _step(self, x: jax.Array, state: RecurrentState) -> Results:
        K, V, heads, value_heads = self.head_dim, self.value_dim, self.heads, self.value_heads
        inputs = apart(x)
        projected, (query, key, value) = side_by_side([self.query, self.key, self.value], inputs)
        downs = [each for each in (self.decay_down, self.output_gate_down) if each is not None]
        lows = iter(together(downs, inputs))
        decay = self.decay_up(next(inputs) if self.decay_down is None else next(lows))
        output_gate = self.output_gate_up(next(inputs) if self.output_gate_down is None else next(lows))
        return _one_token.run(
            state,
            Heads(projected, K, 1, query, heads),
            Heads(projected, K, 1, key, heads),
            Heads(projected, V, 1, value, value_heads),
            Heads(decay, K),
            decay="softplus" if self.lower_bound is None else "bounded",
            factor=1.0 if self.lower_bound is None else self.lower_bound,
            rate=self.A_log[...],
            bias=self.dt_bias[...],
            beta=Heads(self.beta(next(inputs)), 1),
            beta_factor=2.0 if self.negative_eigenvalues else 1.0,
            convolution=self.convolution,
            normalize=True,
            norm=self.norm,
            output_gate=Heads(output_gate, V),
            activation="sigmoid",
        )

    def _decay(self, x: jax.Array) -> jax.Array:
        return self.decay_up(x if self.decay_down is None else self.decay_down(x))

    def _output_gate(self, x: jax.Array) -> jax.Array:
        return self.output_gate_up(x if self.output_gate_down is None else self.output_gate_down(x))

    def _log_decay(self, x: jax.Array) -> jax.Array:
        """The log decay of each key dim, `[..., T, value_heads, head_dim]`."""
        A_log, bias = self.A_log[...][:, None], self.dt_bias[...].reshape(self.value_heads, self.head_dim)

        # recomputed for the gradient: the logits take half the memory of the decay
        @jax.checkpoint
        def decay(gate: jax.Array, A_log: jax.Array, bias: jax.Array) -> jax.Array:
            if self.lower_bound is not None:
                return bounded_log_decay(A_log, gate, bias, self.lower_bound)
            return log_decay(A_log, time_step(gate, bias))

        return decay(split_heads(self._decay(x), self.value_heads), A_log, bias)

    @classmethod
    def from_fla(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of fla's `KimiDeltaAttention`, which has a `gate_bias`; see `ejkernel.layers`."""
        layouts = {"fla's KimiDeltaAttention": _FLA}
        return _weights.load(cls, arguments, {"gate_bias": True, **options}, weights, prefix, layouts)

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of Kimi Linear, Kimi-K3, GLM-5.3-Flash or Ling 3 (`bailing_hybrid`).

        Names are those of transformers' modules or of the published files. See `ejkernel.layers` for the arguments.
        """
        return _weights.load(cls, arguments, options, weights, prefix, _TRANSFORMERS)


_SHARED = {
    **_weights.linears(query="q_proj", key="k_proj", value="v_proj", beta="b_proj", out="o_proj"),
    **_weights.copies({"norm.scale": "o_norm.weight", "dt_bias": "dt_bias"}),
    # Kimi Linear stores it with axes of size 1, Kimi-K3 pads it
    "A_log": _weights.Source(
        ["A_log"],
        convert=lambda x, layer: x.reshape(-1)[: layer.value_heads],
        or_shapes=lambda shape: [(1, 1, *shape, 1), (-(-shape[0] // 128) * 128,)],
    ),
    "convolution.kernel": _weights.convolution("q_conv1d", "k_conv1d", "v_conv1d"),
}
_FLA = {
    **_SHARED,
    **_weights.linears(decay_down="f_proj.0", decay_up="f_proj.1"),
    **_weights.linears(output_gate_down="g_proj.0", output_gate_up="g_proj.1"),
}
_LOW_RANK = {
    **_SHARED,
    **_weights.linears(decay_down="f_a_proj", decay_up="f_b_proj"),
    **_weights.linears(output_gate_down="g_a_proj", output_gate_up="g_b_proj"),
}
_KIMI_K3 = _LOW_RANK | _weights.linears(output_gate_up="g_proj")
_FULL_RANK = _SHARED | _weights.linears(decay_up="f_proj", output_gate_up="g_proj")


def _in_modules(sources: _weights.Sources) -> _weights.Sources:
    """The names in transformers' modules: the decay in a module of its own, one convolution for all three."""
    decay = {
        path: source._replace(names=[f"forget_gate.{name}" for name in source.names])
        for path, source in sources.items()
        if path.startswith(("decay", "A_log", "dt_bias"))
    }
    return sources | decay | {"convolution.kernel": _weights.convolution("conv1d")}


_TRANSFORMERS = {
    "transformers' KimiLinearDeltaAttention": _in_modules(_LOW_RANK),
    "Kimi Linear's Kimi Delta Attention": _LOW_RANK,
    "Kimi-K3's Kimi Delta Attention": _KIMI_K3,
    "transformers' BailingHybridDeltaAttention": _in_modules(_FULL_RANK),
    "Ling's Kimi Delta Attention": _FULL_RANK,
    "Ling's Kimi Delta Attention, its output projection dense": _FULL_RANK | _weights.linears(out="dense"),
}
