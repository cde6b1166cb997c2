"""The base class of gated linear attention and retention, as flash-linear-attention has them."""

import jax

from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._gated_norm import normed_and_gated
from ejkernel.layers._parameters import ParamInit, group_count, head_width, split_heads
from ejkernel.layers._recurrent import RecurrentLayer, RecurrentState
from ejkernel.layers._tokens import Sequences


class GatedOutputLayer(RecurrentLayer):
    """Projections to queries, keys and values, an optional convolution, a norm per head and an output gate by SiLU."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None,
        key_width: int,
        value_width: int,
        convolution: int | None,
        epsilon: float,
        init: ParamInit,
    ) -> None:
        self.heads = heads
        self.key_dim = head_width("key_width", key_width, heads)
        self.value_dim = head_width("value_width", value_width, heads)
        self.kv_heads = group_count("kv_heads", heads if kv_heads is None else kv_heads, heads)
        super().__init__(width, (heads, self.key_dim, self.value_dim), init)
        widths = (key_width, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim)
        self.query, self.key, self.value = (init.column_parallel(width, each) for each in widths)
        if convolution is not None:
            self.convolution = ShortConvolution(convolution, widths, init)
        self.output_gate = init.column_parallel(width, value_width)
        self.norm = init.norm(self.value_dim, epsilon)
        self.out = init.row_parallel(value_width, width)

    def _projected(
        self, x: jax.Array, state: RecurrentState, sequences: Sequences
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """The heads of queries, keys and values, and the convolution's last tokens."""
        parts, recent = [self.query(x), self.key(x), self.value(x)], None
        if self.convolution is not None:
            parts, recent = self.convolution(parts, state.recent, sequences)
        query, key, value = map(split_heads, parts, (self.heads, self.kv_heads, self.kv_heads))
        return query, key, value, recent

    def _gated(self, x: jax.Array, output: jax.Array) -> jax.Array:
        return normed_and_gated(self.norm, output, self.output_gate(x))


SOURCES = {
    **_weights.linears(query="q_proj", key="k_proj", value="v_proj", output_gate="g_proj", out="o_proj"),
    **_weights.copies({"norm.scale": "g_norm_swish_gate.weight"}),
    "convolution.kernel": _weights.convolution("q_conv1d", "k_conv1d", "v_conv1d"),
}
