"""Gated linear attention, as flash-linear-attention has it."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.kernels.step.call import Results
from ejkernel.layers import _one_token, _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._gated_output import SOURCES, GatedOutputLayer
from ejkernel.layers._one_token import Heads
from ejkernel.layers._parameters import ParamInit, apart, repeated, side_by_side, split_heads, wide
from ejkernel.layers._recurrent import Mixed, RecurrentState
from ejkernel.layers._time_steps import shortest_and_longest
from ejkernel.layers._tokens import Sequences
from ejkernel.linear_attention import recurrent_gla


class GatedLinearAttention(GatedOutputLayer):
    """Gated linear attention: linear attention whose state decays by one gate per key dim.

    The log decay is `log σ(x W_1 W_2 + b) / gate_normalizer`. The initial `b` gives key dims time constants between the
    two of `memory`, in tokens: the shortest in the first head, the longest in the last.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads share the keys' and the values' width.
        kv_heads: How many heads keys, values and gates have, a divisor of `heads`; `None` is `heads`.
        key_width: The size of all query heads together; `None` is half the `width`.
        value_width: The size of all heads' outputs together; `None` is `width`.
        gate_rank: The width between the gate's two projections.
        gate_normalizer: What the gate's logarithm is divided by.
        memory: The shortest and the longest initial time constant of the decay, in tokens.
        convolution: How many tokens a short convolution of queries, keys and values spans, the token itself included;
            `None` is without one. From 2 on, if queries and keys have equally many heads, keys are initialised as the
            queries of the token before: at first a query then reads the values that followed tokens like its own.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is that of the input. Norms, gates and the state are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = GatedLinearAttention(64, heads=4, convolution=4, rngs=nnx.Rngs(0))
        >>> prompt, token = jnp.ones((2, 10, 64)), jnp.ones((2, 1, 64))
        >>> output, state = layer(prompt)
        >>> output, state = layer(token, state)
        >>> output.shape, state.memory.shape, state.recent.shape
        ((2, 1, 64), (2, 4, 8, 16), (2, 3, 128))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        memory: tuple[float, float] = (2.0, 2048.0),
        convolution: int | None = None,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        init = ParamInit(dtype, param_dtype, rngs)
        key_width = _checks.positive_int("width", width) // 2 if key_width is None else key_width
        value_width = width if value_width is None else value_width
        super().__init__(width, heads, kv_heads, key_width, value_width, convolution, epsilon, init)
        _checks.positive_int("gate_rank", gate_rank)
        self.gate_normalizer = _checks.positive("gate_normalizer", gate_normalizer)
        memory = shortest_and_longest("memory", memory, "(shortest, longest), in tokens")
        shortest, longest = (_checks.positive("memory", each) for each in memory)
        keys = self.kv_heads * self.key_dim
        self.gate_down = init.replicated(width, gate_rank)
        self.gate_up = init.column_parallel(gate_rank, keys, bias=True)
        times = jnp.geomspace(shortest, longest, keys)
        # log σ of it is -gate_normalizer / times
        bias = -self.gate_normalizer / times - jnp.log(-jnp.expm1(-self.gate_normalizer / times))
        self.gate_up.bias.set_value(bias.astype(param_dtype))  # type: ignore[union-attr]
        if self.convolution is not None and self.convolution.size > 1 and self.kv_heads == heads:
            self._start_keys_as_queries_of_the_token_before(self.convolution)

    def _start_keys_as_queries_of_the_token_before(self, convolution: ShortConvolution) -> None:
        self.key.kernel.set_value(self.query.kernel[...])
        taps = convolution.kernel[...]
        keys, _, values = convolution.widths
        none, recent = jnp.zeros_like(taps[:1, :keys]), taps[1:, :keys]
        current = jnp.zeros_like(taps[:, -values:]).at[-1].set(1)
        parts = [jnp.concatenate([none, recent]), jnp.concatenate([recent, none]), current]
        convolution.kernel.set_value(jnp.concatenate(parts, 1))

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        query, key, value, recent = self._projected(x, state, sequences)
        gate = self._log_decay(self.gate_up(self.gate_down(x)))
        gate = repeated(split_heads(gate, self.kv_heads), self.heads // self.kv_heads)
        output, memory = recurrent_gla(query, key, value, g=gate, initial_state=state.memory, **sequences.keywords)
        return self._gated(x, output), RecurrentState(memory, recent)

    def _step(self, x: jax.Array, state: RecurrentState) -> Results:
        K, V, kv_heads = self.key_dim, self.value_dim, self.kv_heads
        inputs, linears = apart(x), (self.query, self.key, self.value, self.output_gate)
        projected, (query, key, value, output_gate) = side_by_side(linears, inputs)
        return _one_token.run(
            state,
            Heads(projected, K, 1, query, self.heads),
            Heads(projected, K, 1, key, kv_heads),
            Heads(projected, V, 1, value, kv_heads),
            Heads(self.gate_up(self.gate_down(next(inputs))), K),
            decay="log_sigmoid",
            factor=1 / self.gate_normalizer,
            convolution=self.convolution,
            norm=self.norm,
            output_gate=Heads(projected, V, 1, output_gate, self.heads),
        )

    def _log_decay(self, x: jax.Array) -> jax.Array:
        # recomputed for the gradient: the logits take half the memory of the decay
        return jax.checkpoint(lambda x: jax.nn.log_sigmoid(wide(x)) / self.gate_normalizer)(x)

    @classmethod
    def from_fla(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of fla's `GatedLinearAttention`; see `ejkernel.layers`."""
        sources = SOURCES | _weights.linears(gate_down="gk_proj.0", gate_up="gk_proj.1")
        return _weights.load(cls, arguments, options, weights, prefix, {"fla's GatedLinearAttention": sources})
