"""Kimi Delta Attention, as flash-linear-attention and transformers' Kimi Linear have it."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.delta_rule import kda
from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._parameters import ParamInit, split_heads, wide
from ejkernel.layers._recurrent import Mixed, RecurrentLayer, RecurrentState, normed_and_gated
from ejkernel.layers._time_steps import log_decay, log_rates, time_step, time_step_bias


class KimiDeltaAttention(RecurrentLayer):
    """Kimi Delta Attention: a token replaces what its key recalls, after a gate per key dim has faded the memory.

    The log decay is `-exp(A_log) · softplus(x W_1 W_2 + dt_bias)`, one a key dim, and the share replaced `σ(x W_b)`.

    Args:
        width: Last dim of the input and the output.
        heads: How many heads there are.
        head_dim: Of each head's queries, keys and values; also the width between the two projections of each gate.
        convolution: Tokens that the short convolution of queries, keys and values spans, its own included.
        gate_bias: Whether the output gate has a bias, as flash-linear-attention's has and Kimi Linear's has not.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is the input's. Norms, gates and the memory are in at least float32.
        param_dtype: The dtype of the parameters.
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
        convolution: int = 4,
        gate_bias: bool = False,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        init = ParamInit(dtype, param_dtype, rngs)
        self.heads = _checks.positive_int("heads", heads)
        self.head_dim = _checks.positive_int("head_dim", head_dim)
        super().__init__(width, (heads, head_dim, head_dim), init)
        features = heads * head_dim
        self.query, self.key, self.value = (init.column_parallel(width, features) for _ in range(3))
        self.convolution = ShortConvolution(convolution, [features] * 3, init)
        self.decay_down = init.replicated(width, head_dim)
        self.decay_up = init.column_parallel(head_dim, features)
        self.A_log = log_rates(heads, init)
        self.dt_bias = time_step_bias(features, init)
        self.beta = init.column_parallel(width, heads)
        self.output_gate_down = init.replicated(width, head_dim)
        self.output_gate_up = init.column_parallel(head_dim, features, bias=_checks.flag("gate_bias", gate_bias))
        self.norm = init.norm(head_dim, epsilon)
        self.out = init.row_parallel(features, width)

    def _mix(self, x: jax.Array, state: RecurrentState, cu_seqlens: jax.Array | None) -> Mixed:
        parts, recent = self.convolution([self.query(x), self.key(x), self.value(x)], state.recent, cu_seqlens)
        query, key, value = (split_heads(each, self.heads) for each in parts)
        step = time_step(self.decay_up(self.decay_down(x)), self.dt_bias[...])
        output, memory = kda(
            query,
            key,
            value,
            log_decay(self.A_log[...][:, None], split_heads(step, self.heads)),
            jax.nn.sigmoid(wide(self.beta(x))),
            initial_state=state.memory,
            cu_seqlens=cu_seqlens,
            normalize=True,
        )
        output_gate = jax.nn.sigmoid(wide(self.output_gate_up(self.output_gate_down(x))))
        return normed_and_gated(self.norm, output, output_gate), RecurrentState(memory, recent)

    @classmethod
    def from_fla(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of fla's `KimiDeltaAttention`, which has a `gate_bias`; see `ejkernel.layers`."""
        reference, options = "fla's KimiDeltaAttention of these sizes", {"gate_bias": True, **options}
        sources = {
            **_SHARED,
            **_weights.linears(decay_down="f_proj.0", decay_up="f_proj.1"),
            **_weights.linears(output_gate_down="g_proj.0", output_gate_up="g_proj.1"),
            **_weights.copies({"A_log": "A_log", "dt_bias": "dt_bias"}),
            "convolution.kernel": _weights.convolution("q_conv1d", "k_conv1d", "v_conv1d"),
        }
        return _weights.load(cls, arguments, options, weights, prefix, reference, sources)

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `KimiLinearDeltaAttention`; see `ejkernel.layers`."""
        reference = "transformers' KimiLinearDeltaAttention of these sizes"
        sources = {
            **_SHARED,
            **_weights.linears(decay_down="forget_gate.f_a_proj", decay_up="forget_gate.f_b_proj"),
            **_weights.linears(output_gate_down="g_a_proj", output_gate_up="g_b_proj"),
            **_weights.copies({"dt_bias": "forget_gate.dt_bias"}),
            "A_log": _weights.Source(["forget_gate.A_log"], lambda shape: (1, 1, *shape, 1)),
            "convolution.kernel": _weights.convolution("conv1d"),
        }
        return _weights.load(cls, arguments, options, weights, prefix, reference, sources)


# what both checkpoints name alike
_SHARED = {
    **_weights.linears(query="q_proj", key="k_proj", value="v_proj", beta="b_proj", out="o_proj"),
    **_weights.copies({"norm.scale": "o_norm.weight"}),
}
