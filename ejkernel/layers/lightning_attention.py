"""Lightning attention, as transformers' MiniMax has it."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._dtypes import checked, wide, wide_dtype
from ejkernel.layers._norm import RMSNorm
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import Made, into_heads, merge, out_of_heads, per_head, split
from ejkernel.layers._state import RecurrentState, begin
from ejkernel.linear_attention import recurrent_gla


class LightningAttention(nnx.Module):
    """Lightning attention: memory fades at a fixed rate per head, slower in later layers.

    The log decay of head `h` of `H` in layer `l` of `L` is `-2^(-8 (h + 1) / H) · (1 - l / (L - 1 + 1e-5) + 1e-5)`,
    which differs from that of the op `lightning_attn`. It is held in the variable `log_decay`, which is no `nnx.Param`:
    training leaves it alone, and layers that are scanned over may each have their own.

    Args:
        width: Of the input and the output.
        heads: How many heads there are.
        layer_idx: Which layer of the model this is, from 0 to `num_layers - 1`; may be traced.
        num_layers: How many layers the model has.
        head_dim: Of each head's queries, keys and values; `None` is `width / heads`.
        epsilon: Of the norm.
        dtype: What is computed in; `None` is the input's. Norms and the memory are in at least float32.
        param_dtype: Of the parameters.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = LightningAttention(64, heads=4, layer_idx=1, num_layers=12, rngs=nnx.Rngs(0))
        >>> output, state = layer(jnp.ones((2, 10, 64)))
        >>> output.shape, state.memory.shape
        ((2, 10, 64), (2, 4, 16, 16))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        layer_idx: int | jax.Array,
        num_layers: int,
        head_dim: int | None = None,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), _checks.positive_int("heads", heads)
        self.head_dim = (
            per_head("width", width, heads) if head_dim is None else _checks.positive_int("head_dim", head_dim)
        )
        self.dtype, param_dtype = checked(dtype, param_dtype)
        at_least = wide_dtype(param_dtype)
        number, num_layers = _checks.layer_number(layer_idx), _checks.positive_int("num_layers", num_layers)
        # past the last layer the memory would grow
        if _checks.is_concrete(layer_idx) and not 0 <= float(layer_idx) < num_layers:
            _checks.fail("layer_idx", layer_idx, f"at least 0 and below num_layers, {num_layers}")
        share = number.astype(at_least) / (num_layers - 1 + 1e-5)
        rates = 2.0 ** (-8 / heads * jnp.arange(1, heads + 1, dtype=at_least))
        self.log_decay = nnx.Variable(-rates * (1 - share + 1e-5))
        made = Made(self.dtype, param_dtype, rngs)
        features = heads * self.head_dim
        # a head's query, key and value stand side by side
        self.query_key_value = into_heads(width, 3 * features, made)
        self.output_gate = into_heads(width, features, made)
        self.norm = RMSNorm(features, epsilon, param_dtype)
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
        x, state, cu_seqlens = begin(x, state, cu_seqlens, self.dtype, dims)
        query, key, value = jnp.split(jax.nn.silu(split(self.query_key_value(x), self.heads)), 3, -1)
        output, memory = recurrent_gla(
            query,
            key,
            value,
            g_gamma=jax.lax.stop_gradient(self.log_decay[...]),
            softmax_scale=1.0,
            initial_state=None if state is None else state.memory,
            cu_seqlens=cu_seqlens,
        )
        gated = self.norm(merge(output)) * jax.nn.sigmoid(wide(self.output_gate(x)))
        return without_padding(self.out(gated.astype(x.dtype)), cu_seqlens), RecurrentState(memory)

    @classmethod
    def from_transformers(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `MiniMaxLightningAttention`.

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
                "query_key_value.kernel": _weights.linear("qkv_proj"),
                "output_gate.kernel": _weights.linear("output_gate"),
                "norm.scale": _weights.same("norm.weight"),
                "out.kernel": _weights.linear("out_proj"),
            },
            prefix=prefix,
            reference="transformers' MiniMaxLightningAttention of these sizes",
            # tables that follow from the layer's number
            ignored=["slope_rate", "query_decay", "key_decay", "diagonal_decay"],
        )
