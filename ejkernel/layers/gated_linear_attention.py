"""Gated linear attention, as flash-linear-attention has it."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._dtypes import checked, wide
from ejkernel.layers._norm import RMSNorm
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import Made, into_heads, merge, out_of_heads, per_head, shared_by, split, whole
from ejkernel.layers._state import RecurrentState, begin
from ejkernel.layers._time_steps import shortest_and_longest
from ejkernel.linear_attention import recurrent_gla


class GatedOutput(nnx.Module):
    """Projections around an op: into queries, keys and values, and out of its output, normalised per head and gated.

    What gated linear attention and retention share.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None,
        key_width: int,
        value_width: int,
        convolution: int | None,
        epsilon: float,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), heads
        self.key_dim = per_head("key_width", key_width, heads)
        self.value_dim = per_head("value_width", value_width, heads)
        self.kv_heads = shared_by("kv_heads", heads if kv_heads is None else kv_heads, heads)
        self.dtype, param_dtype = checked(dtype, param_dtype)
        made = Made(self.dtype, param_dtype, rngs)
        # in the order of the convolution's channels
        self.widths = (key_width, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim)
        self.query, self.key, self.value = (into_heads(width, each, made) for each in self.widths)
        if convolution is None:
            self.convolution = None
        else:
            size = _checks.positive_int("convolution", convolution)
            self.convolution = ShortConvolution(size, sum(self.widths), made)
        self.output_gate = into_heads(width, value_width, made)
        self.norm = RMSNorm(self.value_dim, epsilon, param_dtype)
        self.out = out_of_heads(value_width, width, made)

    def dims(self) -> _checks.Dims:
        return _checks.Dims(width=self.width, H=self.heads, K=self.key_dim, V=self.value_dim)

    def projected(
        self, x: jax.Array, state: RecurrentState | None, cu_seqlens: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries, keys and values by heads, and the convolution's last tokens."""
        parts, recent = [project(x) for project in (self.query, self.key, self.value)], None
        if self.convolution is not None:
            mixed = jnp.concatenate(parts, -1)
            mixed, recent = self.convolution(mixed, state and state.recent, cu_seqlens)
            parts = jnp.split(mixed, [self.widths[0], self.widths[0] + self.widths[1]], -1)
        query, key, value = parts
        return split(query, self.heads), split(key, self.kv_heads), split(value, self.kv_heads), recent

    def finish(self, x: jax.Array, output: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
        gated = self.norm(output) * jax.nn.silu(wide(split(self.output_gate(x), self.heads)))
        return without_padding(self.out(merge(gated).astype(x.dtype)), cu_seqlens)

    def sources(self) -> dict[str, _weights.Source | None]:
        convolutions = ("q_conv1d", "k_conv1d", "v_conv1d")
        return {
            "query.kernel": _weights.linear("q_proj"),
            "key.kernel": _weights.linear("k_proj"),
            "value.kernel": _weights.linear("v_proj"),
            "output_gate.kernel": _weights.linear("g_proj"),
            "norm.scale": _weights.same("g_norm_swish_gate.weight"),
            "out.kernel": _weights.linear("o_proj"),
            "convolution.kernel": _weights.convolution(*convolutions, sizes=self.widths) if self.convolution else None,
        }


class GatedLinearAttention(GatedOutput):
    """Gated linear attention: every token decides what each key dim forgets.

    The log decay is `log σ(x W_1 W_2 + b) / gate_normalizer`; `b` starts out so that the key dims remember for times
    between the two of `memory`, in tokens, the first head's shortest and the last head's longest.

    Args:
        width: Of the input and the output.
        heads: How many heads share the keys' and the values' width.
        kv_heads: How many heads keys, values and gates have, a divisor of `heads`; `None` is as many.
        key_width: Of all heads' queries together; `None` is half the `width`.
        value_width: Of all heads' outputs together; `None` is `width`.
        gate_rank: The width between the gate's two projections.
        gate_normalizer: What the gate's logarithm is divided by.
        memory: The shortest and the longest time that a key dim remembers at first, in tokens.
        convolution: How many tokens, its own included, a query, key or value is made of by a short convolution;
            `None` is without one. From 2 on, keys start out as the queries of the token before, if both have as many
            heads: a query finds what followed when the text last looked like this.
        epsilon: Of the norm.
        dtype: What is computed in; `None` is the input's. Norms, gates and the memory are in at least float32.
        param_dtype: Of the parameters.
        rngs: Where parameters are drawn from.

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
        key_width = _checks.positive_int("width", width) // 2 if key_width is None else key_width
        value_width = width if value_width is None else value_width
        super().__init__(width, heads, kv_heads, key_width, value_width, convolution, epsilon, dtype, param_dtype, rngs)
        _checks.positive_int("gate_rank", gate_rank)
        self.gate_normalizer = _checks.positive("gate_normalizer", gate_normalizer)
        memory = shortest_and_longest("memory", memory, "(shortest, longest), in tokens")
        shortest, longest = (_checks.positive("memory", each) for each in memory)
        made = Made(*checked(dtype, param_dtype), rngs)
        self.gate_down = whole(width, gate_rank, made)
        self.gate_up = into_heads(gate_rank, self.widths[1], made, bias=True)
        times = jnp.geomspace(shortest, longest, self.widths[1])
        # log σ of it is -gate_normalizer / times
        bias = -self.gate_normalizer / times - jnp.log(-jnp.expm1(-self.gate_normalizer / times))
        self.gate_up.bias.set_value(bias.astype(param_dtype))  # type: ignore[union-attr]
        if self.convolution is not None and self.convolution.size > 1 and self.kv_heads == heads:
            self._start_keys_as_queries_of_the_token_before(self.convolution)

    def _start_keys_as_queries_of_the_token_before(self, convolution: ShortConvolution) -> None:
        self.key.kernel.set_value(self.query.kernel[...])
        taps = convolution.kernel[...]
        none = jnp.zeros_like(taps[:1, : self.widths[0]])
        recent = taps[1:, : self.widths[0]]
        own = jnp.zeros_like(taps[:, -self.widths[2] :]).at[-1].set(1)
        parts = [jnp.concatenate([none, recent]), jnp.concatenate([recent, none]), own]
        convolution.kernel.set_value(jnp.concatenate(parts, 1))

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
        x, state, cu_seqlens = begin(x, state, cu_seqlens, self.dtype, self.dims(), self.convolution)
        query, key, value, recent = self.projected(x, state, cu_seqlens)
        gate = jax.nn.log_sigmoid(wide(self.gate_up(self.gate_down(x)))) / self.gate_normalizer
        gate = jnp.repeat(split(gate, self.kv_heads), self.heads // self.kv_heads, axis=-2)
        memory = None if state is None else state.memory
        output, memory = recurrent_gla(query, key, value, g=gate, initial_state=memory, cu_seqlens=cu_seqlens)
        return self.finish(x, output, cu_seqlens), RecurrentState(memory, recent)

    @classmethod
    def from_fla(cls, weights: Mapping[str, Any], *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of flash-linear-attention's `GatedLinearAttention`.

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
                **layer.sources(),
                "gate_down.kernel": _weights.linear("gk_proj.0"),
                "gate_up.kernel": _weights.linear("gk_proj.1"),
                "gate_up.bias": _weights.same("gk_proj.1.bias"),
            },
            prefix=prefix,
            reference="fla's GatedLinearAttention of these sizes",
        )
