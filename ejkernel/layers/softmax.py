"""Multi-head softmax attention, with a cache that grows with the sequence."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.attention import flash_attention
from ejkernel.layers import _one_token, _weights
from ejkernel.layers._cached import CachedAttention
from ejkernel.layers._one_token import Heads
from ejkernel.layers._parameters import (
    ParamInit,
    apart,
    group_count,
    head_width,
    merge_heads,
    side_by_side,
    split_heads,
    unit_mean_square,
    wide,
)
from ejkernel.layers._rotary import rotary_or_none
from ejkernel.layers._tokens import Sequences, stored
from ejkernel.paged_attention import PagedCache, paged_attention

# queries, keys, values and the logits of the output gate
Projected = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


class KeyValueCache(NamedTuple):
    """The keys and values of all earlier tokens, and how many there are.

    Attributes:
        key: `[B, capacity, Hkv, K]`, rotated by their positions.
        value: `[B, capacity, Hkv, K]`.
        position: `[B]` int32, the position of the next token.
    """

    key: jax.Array
    value: jax.Array
    position: jax.Array

    @property
    def capacity(self) -> int:
        return self.key.shape[1]


class MultiHeadAttention(CachedAttention):
    """Causal softmax attention with rotary positions, and options for grouped heads, windows, sinks and more.

    The options make it the attention of Llama, Gemma 2 to 4, gpt-oss, Qwen3, Qwen3-Next, Qwen3.5 and others; their
    defaults are Llama's.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads queries have.
        kv_heads: How many heads keys and values have, a divisor of `heads`; `None` is `heads`.
        head_dim: The size of each query, key and value head; `None` is `width / heads`.
        bias: Whether the projections have a bias.
        out_bias: Whether the last projection has a bias; `None` is as `bias` says. Qwen2's has none.
        window: How many tokens a query sees, its own included; `None` is all.
        soft_cap: Scores become `soft_cap · tanh(scores / soft_cap)`; `None` is without a cap.
        softmax_scale: The factor of scores; `None` is `head_dim ** -0.5`.
        sinks: Whether each head has a learned logit that is added to the softmax's denominator.
        norm: Whether each query and key head is normalised before rotation.
        value_norm: Whether each value head is normalised, without a scale, as in Gemma 4.
        values_are_keys: Whether values are the projected keys, before norm and rotation, as in larger Gemma 4 models.
            There is then no projection of values.
        output_gate: Whether the output is multiplied by the sigmoid of a projection of the input. The projection of
            queries computes it too.
        rope_theta: The base of the rotation's frequencies; `None` is without rotation.
        rotary_dim: How many of a head's dims are rotated; `None` is all.
        rope_scaling: As a model's `config.json` has it; `rope_type` is `default`, `linear`, `llama3`, `yarn` or
            `proportional`.
        epsilon: Added to the mean square in the norms.
        dtype: The dtype to compute in; `None` is the input's. Norms, rotations and the softmax are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = MultiHeadAttention(64, heads=4, kv_heads=2, rngs=nnx.Rngs(0))
        >>> cache = layer.empty_cache(batch=2, capacity=32)
        >>> output, cache = layer(jnp.ones((2, 10, 64)), cache)
        >>> output, cache = layer(jnp.ones((2, 1, 64)), cache)
        >>> output.shape, cache.position.tolist()
        ((2, 1, 64), [11, 11])
    """

    cache_type = KeyValueCache
    patterns = ("Hkv K", "Hkv K")
    page_pattern = "P page Hkv K"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sinks: bool = False,
        norm: bool = False,
        value_norm: bool = False,
        values_are_keys: bool = False,
        output_gate: bool = False,
        rope_theta: float | None = 10000.0,
        rotary_dim: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), heads
        self.head_dim = head_width("width", width, heads) if head_dim is None else head_dim
        _checks.positive_int("head_dim", self.head_dim)
        self.kv_heads = group_count("kv_heads", heads if kv_heads is None else kv_heads, heads)
        self.window = None if window is None else _checks.positive_int("window", window)
        self.soft_cap = None if soft_cap is None else _checks.positive("soft_cap", soft_cap)
        self.softmax_scale = None if softmax_scale is None else _checks.positive("softmax_scale", softmax_scale)
        rotated = self.head_dim if rotary_dim is None else _checks.positive_int("rotary_dim", rotary_dim)
        if rope_theta is None and rotary_dim is not None:
            _checks.fail("rotary_dim", repr(rotary_dim), "None, as rope_theta is None")
        if rope_theta is not None and (rotated % 2 or rotated > self.head_dim):
            name = "head_dim" if rotary_dim is None else "rotary_dim"
            _checks.fail(name, rotated, f"an even number of the {self.head_dim} dims of a head, as rotation needs")
        self.rotate = rotary_or_none(rotated, rope_theta, rope_scaling)
        init = ParamInit(dtype, param_dtype, rngs)
        self.dtype = init.dtype
        bias, self.output_gate = _checks.flag("bias", bias), _checks.flag("output_gate", output_gate)
        # columns of each head: its query, then its gate
        self.query = init.column_parallel(width, (2 if output_gate else 1) * heads * self.head_dim, bias=bias)
        self.key = init.column_parallel(width, self.kv_heads * self.head_dim, bias=bias)
        same = _checks.flag("values_are_keys", values_are_keys)
        self.value = None if same else init.column_parallel(width, self.kv_heads * self.head_dim, bias=bias)
        out_bias = bias if out_bias is None else _checks.flag("out_bias", out_bias)
        self.out = init.row_parallel(heads * self.head_dim, width, bias=out_bias)
        normed = _checks.flag("norm", norm)
        self.query_norm, self.key_norm = (init.norm(self.head_dim, epsilon) if normed else None for _ in range(2))
        self.value_norm, self.epsilon = _checks.flag("value_norm", value_norm), _checks.positive("epsilon", epsilon)
        self.sinks = init.param(jnp.zeros(heads)) if _checks.flag("sinks", sinks) else None

    @property
    def sizes(self) -> dict[str, int]:
        return {"Hkv": self.kv_heads, "K": self.head_dim}

    def _empty_pages(self, rows: tuple[int, int], dtype: DTypeLike) -> PagedCache:
        shape = (*rows, self.kv_heads, self.head_dim)
        return PagedCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def _extend(
        self, x: jax.Array, cache: KeyValueCache, at: jax.Array, fits: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        if _one_token.applies(x, Sequences()):
            return _one_token.in_two_rows(self._decode, x, cache)
        query, key, value, gate = self._projected(x, at)
        keys, values = stored(cache.key, key, at, fits), stored(cache.value, value, at, fits)
        # causal masks, which count from the first query's position, also hide the unused end of the cache
        projected = query, keys, values, gate
        return self._finish(x, projected, self._attend(projected, query_offset=cache.position)), (keys, values)

    def _decode(self, x: jax.Array, cache: KeyValueCache) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The same for a single token `[rows, 1, width]`; rows past those of the cache are copies of the others."""
        D, kv_heads, gate = self.head_dim, self.kv_heads, None
        kernels = [each for each in (self.query, self.key, self.value) if each is not None]
        projected, (start, *starts) = side_by_side(kernels, apart(x))
        heads = Heads(projected, D, 1, start, self.heads)
        if self.output_gate:
            query_gate = projected[..., start : start + 2 * self.heads * D]
            heads = Heads(query_gate, D, self.heads, 0, self.heads)
            gate = split_heads(query_gate, self.heads)[: cache.key.shape[0], None, :, D:]
        query, keys, values = _one_token.rotate_and_store(
            heads,
            Heads(projected, D, 1, starts[0], kv_heads),
            Heads(projected, D, 1, starts[-1], kv_heads),
            cache.position,
            cache.key,
            cache.value,
            rotation=self.rotate,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            value_norm=self.value_norm,
            epsilon=self.epsilon,
        )
        projected_heads = query, keys, values, gate
        output = self._attend(projected_heads, query_offset=cache.position)
        return self._finish(x, projected_heads, output), (keys, values)

    def _key_value_of_pages(self, projected: Projected) -> tuple[jax.Array, jax.Array]:
        return projected[1], projected[2]

    def _attend_to_pages(self, projected: Projected, cache: PagedCache, *where: Any) -> tuple[jax.Array, PagedCache]:
        return paged_attention(*projected[:3], cache, *where, **self._options())

    def _attend(self, projected: Projected, **options: Any) -> jax.Array:
        query, key, value, _ = projected
        return flash_attention(query, key, value, causal=True, **options, **self._options())

    def _projected(self, x: jax.Array, at: jax.Array) -> Projected:
        query, gate = split_heads(self.query(x), self.heads), None
        if self.output_gate:
            query, gate = jnp.split(query, 2, -1)
        key = split_heads(self.key(x), self.kv_heads)
        value = key if self.value is None else split_heads(self.value(x), self.kv_heads)
        if self.value_norm:
            value = unit_mean_square(value, self.epsilon).astype(x.dtype)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query).astype(x.dtype), self.key_norm(key).astype(x.dtype)
        if self.rotate is not None:
            query, key = self.rotate(query, at), self.rotate(key, at)
        return query, key, value, gate

    def _options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale,
            "logits_soft_cap": self.soft_cap,
            "sliding_window": None if self.window is None else (self.window - 1, 0),
            "softmax_aux": None if self.sinks is None else wide(self.sinks[...])[:, None],
        }

    def _finish(self, x: jax.Array, projected: Projected, output: jax.Array) -> jax.Array:
        gate = projected[3]
        if gate is not None:
            output = (wide(output) * jax.nn.sigmoid(wide(gate))).astype(output.dtype)
        return self.out(merge_heads(output))

    @classmethod
    def from_transformers(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' attention in Llama, Gemma 2 or 4, gpt-oss, Qwen3 and others.

        See `ejkernel.layers` for the arguments.
        """
        layouts = {"transformers' attention": _SOURCES}
        return _weights.load(cls, arguments, options, weights, prefix, layouts)

    @classmethod
    def from_gemma3(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' `Gemma3Attention`, whose norms' scales are stored less 1.

        `norm` is on. See `ejkernel.layers` for the arguments.
        """
        layouts = {"transformers' Gemma3Attention": _SCALES_LESS_1}
        return _weights.load(cls, arguments, {"norm": True, **options}, weights, prefix, layouts)

    @classmethod
    def from_qwen3_next(cls, weights: _weights.Weights, *arguments: Any, prefix: str = "", **options: Any) -> Self:
        """The layer with the weights of transformers' attention in Qwen3-Next or Qwen3.5, which have the same names.

        `norm` and `output_gate` are on. See `ejkernel.layers` for the arguments.
        """
        options = {"norm": True, "output_gate": True, **options}
        layouts = {"transformers' Qwen3NextAttention": _SCALES_LESS_1}
        return _weights.load(cls, arguments, options, weights, prefix, layouts)


_SOURCES = {
    **_weights.linears(query="q_proj", key="k_proj", value="v_proj", out="o_proj"),
    **_weights.copies({"query_norm.scale": "q_norm.weight", "key_norm.scale": "k_norm.weight", "sinks": "sinks"}),
}
_SCALES_LESS_1 = _SOURCES | {
    f"{name}_norm.scale": _weights.one_plus(f"{name[0]}_norm.weight") for name in ("query", "key")
}
