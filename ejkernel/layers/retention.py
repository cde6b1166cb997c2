"""Retention, as flash-linear-attention has it."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._positions import advanced, positions
from ejkernel.layers._rotary import rotary
from ejkernel.layers._state import RecurrentState, begin
from ejkernel.layers.gated_linear_attention import GatedOutput
from ejkernel.linear_attention import retention


class Retention(GatedOutput):
    """Retention: memory fades at a fixed rate per head, the same for every token.

    Queries and keys are rotated by their position, so the state counts the tokens.

    Args:
        width: Of the input and the output.
        heads: How many heads share the keys' and the values' width.
        kv_heads: How many heads keys and values have, a divisor of `heads`; `None` is as many.
        key_width: Of all heads' queries together; `None` is `width`.
        value_width: Of all heads' outputs together; `None` is twice the `width`.
        convolution: How many tokens, its own included, a query, key or value is made of by a short convolution;
            `None`, as published, is without one.
        rope_theta: The base of the rotation's frequencies.
        epsilon: Of the norm.
        dtype: What is computed in; `None` is the input's. Norms, gates and the memory are in at least float32.
        param_dtype: Of the parameters.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = Retention(64, heads=4, rngs=nnx.Rngs(0))
        >>> output, states = layer(jnp.ones((30, 64)), cu_seqlens=jnp.array([0, 10, 30]))
        >>> output.shape, states.memory.shape, states.position.tolist()
        ((30, 64), (2, 4, 16, 32), [10, 20])
    """

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
        key_width = width if key_width is None else key_width
        value_width = 2 * _checks.positive_int("width", width) if value_width is None else value_width
        super().__init__(width, heads, kv_heads, key_width, value_width, convolution, epsilon, dtype, param_dtype, rngs)
        if self.key_dim % 2:
            _checks.fail("key_width", key_width, f"an even width per head, as rotation needs, not {self.key_dim}")
        self.rotate = rotary(self.key_dim, _checks.positive("rope_theta", rope_theta))

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
        x, state, cu_seqlens = begin(x, state, cu_seqlens, self.dtype, self.dims(), self.convolution, counted=True)
        query, key, value, recent = self.projected(x, state, cu_seqlens)
        start = None if state is None else state.position
        at = positions(x, start, cu_seqlens)
        query, key = self.rotate(query, at), self.rotate(key, at)
        memory = None if state is None else state.memory
        output, memory = retention(query, key, value, initial_state=memory, cu_seqlens=cu_seqlens)
        return self.finish(x, output, cu_seqlens), RecurrentState(memory, recent, advanced(x, start, cu_seqlens))

    @classmethod
    def from_fla(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of flash-linear-attention's `MultiScaleRetention`.

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
            lambda layer: layer.sources(),
            prefix=prefix,
            reference="fla's MultiScaleRetention of these sizes",
            ignored=["rotary.inv_freq"],
        )
