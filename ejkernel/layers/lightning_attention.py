"""Lightning attention, as transformers' MiniMax has it."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._parameters import ParamInit, head_width, merge_heads, split_heads, wide, wide_dtype
from ejkernel.layers._recurrent import Mixed, RecurrentLayer, RecurrentState
from ejkernel.layers._tokens import Sequences
from ejkernel.linear_attention import recurrent_gla


class LightningAttention(RecurrentLayer):
    """Lightning attention: linear attention whose state decays at a fixed rate per head, more slowly in later layers.

    The log decay of head `h` of `H` in layer `l` of `L` is `-2^(-8 (h + 1) / H) · (1 - l / (L - 1 + 1e-5) + 1e-5)`,
    which differs from that of the op `lightning_attn`. It is stored in the variable `log_decay`, which is no
    `nnx.Param`: training does not change it, and layers that are scanned over may each have their own.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads there are.
        layer_idx: Which layer of the model this is, from 0 to `num_layers - 1`; may be traced.
        num_layers: How many layers the model has.
        head_dim: The size of each query, key and value head; `None` is `width / heads`.
        epsilon: Added to the mean square in the norm.
        dtype: The dtype to compute in; `None` is that of the input. Norms and the state are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = LightningAttention(64, heads=4, layer_idx=1, num_layers=12, rngs=nnx.Rngs(0))
        >>> output, state = layer(jnp.ones((2, 10, 64)))
        >>> output.shape, state.memory.shape
        ((2, 10, 64), (2, 4, 16, 16))
    """

    has_step = False

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
        init = ParamInit(dtype, param_dtype, rngs)
        self.heads = _checks.positive_int("heads", heads)
        self.head_dim = _checks.positive_int(
            "head_dim", head_width("width", width, heads) if head_dim is None else head_dim
        )
        super().__init__(width, (heads, self.head_dim, self.head_dim), init)
        number = _checks.layer_number(layer_idx, _checks.positive_int("num_layers", num_layers))
        share = number.astype(wide_dtype(init.param_dtype)) / (num_layers - 1 + 1e-5)
        rates = 2.0 ** (-8 / heads * jnp.arange(1, heads + 1, dtype=share.dtype))
        self.log_decay = nnx.Variable(-rates * (1 - share + 1e-5))
        features = heads * self.head_dim
        # columns of each head: its query, its key and its value
        self.query_key_value = init.column_parallel(width, 3 * features)
        self.output_gate = init.column_parallel(width, features)
        self.norm = init.norm(features, epsilon)
        self.out = init.row_parallel(features, width)

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        query, key, value = jnp.split(jax.nn.silu(split_heads(self.query_key_value(x), self.heads)), 3, -1)
        output, memory = recurrent_gla(
            query,
            key,
            value,
            g_gamma=jax.lax.stop_gradient(self.log_decay[...]),
            softmax_scale=1.0,
            initial_state=state.memory,
            **sequences.keywords,
        )
        gated = self.norm(merge_heads(output)) * jax.nn.sigmoid(wide(self.output_gate(x)))
        return gated, RecurrentState(memory)

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `MiniMaxLightningAttention`; see `ejkernel.layers`."""
        sources = {
            **_weights.linears(query_key_value="qkv_proj", output_gate="output_gate", out="out_proj"),
            **_weights.copies({"norm.scale": "norm.weight"}),
        }
        # buffers that are computed from the layer's number
        ignored = ["slope_rate", "query_decay", "key_decay", "diagonal_decay"]
        layouts = {"transformers' MiniMaxLightningAttention": sources}
        return _weights.load(cls, arguments, options, weights, prefix, layouts, ignored)
