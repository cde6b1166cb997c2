"""Retention, as flash-linear-attention has it."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._gated_output import SOURCES, GatedOutputLayer
from ejkernel.layers._parameters import ParamInit
from ejkernel.layers._recurrent import Mixed, RecurrentState
from ejkernel.layers._rotary import rotary
from ejkernel.layers._tokens import Sequences, next_position, positions
from ejkernel.linear_attention import retention


class Retention(GatedOutputLayer):
    """Retention: linear attention whose state decays at a fixed rate per head.

    Queries and keys are rotated by their position, so the state also has the number of tokens.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads share the keys' and the values' width.
        kv_heads: How many heads keys and values have, a divisor of `heads`; `None` is `heads`.
        key_width: The size of all query heads together; `None` is `width`.
        value_width: The size of all heads' outputs together; `None` is twice the `width`.
        convolution: How many tokens a short convolution of queries, keys and values spans, the token itself included;
            `None`, as published, is without one.
        rope_theta: The base of the rotation's frequencies.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is that of the input. Norms, gates and the state are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = Retention(64, heads=4, rngs=nnx.Rngs(0))
        >>> output, states = layer(jnp.ones((30, 64)), cu_seqlens=jnp.array([0, 10, 30]))
        >>> output.shape, states.memory.shape, states.position.tolist()
        ((30, 64), (2, 4, 16, 32), [10, 20])
    """

    counts_tokens, has_step = True, False

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        convolution: int | None = None,
        rope_theta: float = 10000.0,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        init = ParamInit(dtype, param_dtype, rngs)
        key_width = width if key_width is None else key_width
        value_width = 2 * _checks.positive_int("width", width) if value_width is None else value_width
        super().__init__(width, heads, kv_heads, key_width, value_width, convolution, epsilon, init)
        if self.key_dim % 2:
            _checks.fail("key_width", key_width, f"an even width per head, as rotation needs, not {self.key_dim}")
        self.rotate = rotary(self.key_dim, _checks.positive("rope_theta", rope_theta))

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        query, key, value, recent = self._projected(x, state, sequences)
        at = positions(x, state.position, sequences)
        query, key = self.rotate(query, at), self.rotate(key, at)
        output, memory = retention(query, key, value, initial_state=state.memory, **sequences.keywords)
        return self._gated(x, output), RecurrentState(memory, recent, next_position(x, state.position, sequences))

    @classmethod
    def from_fla(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of fla's `MultiScaleRetention`; see `ejkernel.layers`."""
        layouts, ignored = {"fla's MultiScaleRetention": SOURCES}, ["rotary.inv_freq"]
        return _weights.load(cls, arguments, options, weights, prefix, layouts, ignored)
