"""Multi-head latent attention, as DeepSeek V3, Kimi and Ling 3 have it: keys and values come from a small latent."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks, _sharding
from ejkernel.attention import flash_attention
from ejkernel.layers import _weights
from ejkernel.layers._cached import CachedAttention
from ejkernel.layers._parameters import ParamInit, merge_heads, split_heads, wide
from ejkernel.layers._rotary import rotary_or_none
from ejkernel.layers._tokens import stored
from ejkernel.paged_attention import PagedCache, paged_attention

OutputGate = Literal["head", "dim"]
Projected = tuple[jax.Array, jax.Array]  # queries and latents


class LatentCache(NamedTuple):
    """The latents of all earlier tokens, from which keys and values are computed, and how many there are.

    Attributes:
        latent: `[B, capacity, latent_dim + rotary_dim]`, the normalised latent and the rotated part of the key.
        position: `[B]` int32, the position of the next token.
    """

    latent: jax.Array
    position: jax.Array

    @property
    def capacity(self) -> int:
        return self.latent.shape[1]


class MultiHeadLatentAttention(CachedAttention):
    """Causal softmax attention whose keys and values are projected from one latent per token; only latents are cached.

    A head's key has `key_dim` dims that are projected from the latent, and `rotary_dim` that are rotated and that all
    heads share. Training and prompts compute keys and values. Single tokens attend to the latents themselves: the
    projections of keys and values are applied to the query and to the output instead. All tokens of a `RaggedBatch` do
    the same, unless it consists of whole prompts.

    Args:
        width: The size of the last axis of the input and the output.
        heads: How many heads there are.
        latent_dim: The size of the latent from which keys and values are projected.
        query_rank: The width between the two projections of queries; `None` is one projection.
        key_dim: The number of dims of each query and key head that are not rotated.
        rotary_dim: The number of dims of each query and key head that are rotated.
        value_dim: The size of each value head.
        bias: Whether the down projections and the last projection have a bias.
        output_gate: Whether the output is multiplied by the sigmoid of a projection of the input: by one gate for each
            `"head"`, as in Ling 3, or for each `"dim"`, as in Kimi-K3; `None` is without a gate.
        softmax_scale: The factor of scores; `None` is `(key_dim + rotary_dim) ** -0.5`.
        rope_theta: The base of the rotation's frequencies; `None` is without rotation, as in Kimi Linear.
        rope_scaling: As a model's `config.json` has it; `rope_type` is `default`, `linear`, `llama3`, `yarn` or
            `proportional`.
        epsilon: Added to the mean square in the norms.
        dtype: The dtype to compute in; `None` is the input's. Norms, rotations and the softmax are in at least float32.
        param_dtype: The dtype of projections and convolutions; other parameters are in at least float32.
        rngs: Random keys for the initial parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> sizes = {"latent_dim": 24, "key_dim": 16, "rotary_dim": 8, "value_dim": 16}
        >>> layer = MultiHeadLatentAttention(64, heads=4, **sizes, rngs=nnx.Rngs(0))
        >>> cache = layer.empty_cache(batch=2, capacity=32)
        >>> output, cache = layer(jnp.ones((2, 10, 64)), cache)
        >>> output, cache = layer(jnp.ones((2, 1, 64)), cache)
        >>> output.shape, cache.latent.shape, cache.position.tolist()
        ((2, 1, 64), (2, 32, 32), [11, 11])
    """

    cache_type = LatentCache
    patterns = ("latent",)
    page_pattern = "P page 1 latent"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        latent_dim: int = 512,
        query_rank: int | None = None,
        key_dim: int = 128,
        rotary_dim: int = 64,
        value_dim: int = 128,
        bias: bool = False,
        output_gate: OutputGate | None = None,
        softmax_scale: float | None = None,
        rope_theta: float | None = 10000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), _checks.positive_int("heads", heads)
        self.latent_dim = _checks.positive_int("latent_dim", latent_dim)
        self.key_dim = _checks.positive_int("key_dim", key_dim)
        self.rotary_dim = _checks.positive_int("rotary_dim", rotary_dim)
        self.value_dim = _checks.positive_int("value_dim", value_dim)
        if softmax_scale is not None:
            _checks.positive("softmax_scale", softmax_scale)
        self.softmax_scale = float((key_dim + rotary_dim) ** -0.5 if softmax_scale is None else softmax_scale)
        if output_gate not in (None, "head", "dim"):
            _checks.fail("output_gate", repr(output_gate), "'head', 'dim' or None")
        self.output_gate_of = output_gate
        if rope_theta is not None and rotary_dim % 2:
            _checks.fail("rotary_dim", rotary_dim, "an even number, as rotation needs")
        self.rotate = rotary_or_none(rotary_dim, rope_theta, rope_scaling)
        init, bias = ParamInit(dtype, param_dtype, rngs), _checks.flag("bias", bias)
        self.dtype = init.dtype
        queries = heads * (key_dim + rotary_dim)
        if query_rank is None:
            self.query_down, self.query_norm = None, None
            self.query = init.column_parallel(width, queries)
        else:
            self.query_down = init.replicated(width, _checks.positive_int("query_rank", query_rank), bias=bias)
            self.query_norm = init.norm(query_rank, epsilon)
            self.query = init.column_parallel(query_rank, queries)
        # columns: the latent, then the part of the key that all heads share
        self.latent_down = init.replicated(width, latent_dim + rotary_dim, bias=bias)
        self.latent_norm = init.norm(latent_dim, epsilon)
        # columns of each head: its key, then its value
        self.key_value = init.column_parallel(latent_dim, heads * (key_dim + value_dim))
        gates = {None: None, "head": heads, "dim": heads * value_dim}[output_gate]
        self.output_gate = None if gates is None else init.column_parallel(width, gates)
        self.out = init.row_parallel(heads * value_dim, width, bias=bias)

    @property
    def sizes(self) -> dict[str, int]:
        return {"latent": self.latent_dim + self.rotary_dim}

    def _empty_pages(self, rows: tuple[int, int], dtype: DTypeLike) -> PagedCache:
        # without values, which are made from the latents
        return PagedCache(jnp.zeros((*rows, 1, self.latent_dim + self.rotary_dim), dtype), None)

    def _extend(
        self, x: jax.Array, cache: LatentCache, at: jax.Array, fits: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        query, latent = projected = self._projected(x, at)
        latents = stored(cache.latent, latent, at, fits)
        # causal masks, which count from the first query's position, also hide the unused end of the cache
        attend = self._attend_to_latents if x.shape[1] == 1 else self._attend
        output = attend((query, latents.astype(x.dtype)), query_offset=cache.position)
        return self._finish(x, projected, output), (latents,)

    def _projected(self, x: jax.Array, at: jax.Array) -> Projected:
        """Queries `[…, T, H, key_dim + rotary_dim]`, and the latents that are cached, both rotated."""
        down = x
        if self.query_down is not None and self.query_norm is not None:
            down = self.query_norm(self.query_down(x)).astype(x.dtype)
        query = split_heads(self.query(down), self.heads)
        latent, shared = jnp.split(self.latent_down(x), [self.latent_dim], -1)
        latent = self.latent_norm(latent).astype(x.dtype)
        if self.rotate is not None:
            unrotated, rotated = jnp.split(query, [self.key_dim], -1)
            query = jnp.concatenate([unrotated, self.rotate(rotated, at)], -1)
            shared = self.rotate(shared[..., None, :], at)[..., 0, :]
        return query, jnp.concatenate([latent, shared], -1)

    def _key_value(self, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Every head's keys and values, `[…, L, H, ·]`."""
        latent, shared = jnp.split(latent, [self.latent_dim], -1)
        key, value = jnp.split(split_heads(self.key_value(latent), self.heads), [self.key_dim], -1)
        return jnp.concatenate([key, _sharding.broadcast_heads(shared, key)], -1), value

    def _attend(self, projected: Projected, **options: Any) -> jax.Array:
        query, latents = projected
        return self._flash_attention(query, *self._key_value(latents), **options)

    def _attend_to_latents(self, projected: Projected, **options: Any) -> jax.Array:
        """The same without keys and values: `q · (W_k c) = (W_kᵀ q) · c`, and `Σ w (W_v c) = W_v (Σ w c)`."""
        query, latents = self._absorbed(projected[0]), projected[1][:, :, None]
        return self._values(self._flash_attention(query, latents, latents[..., : self.latent_dim], **options))

    def _flash_attention(self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        return flash_attention(query, key, value, causal=True, softmax_scale=self.softmax_scale, **options)

    def _key_value_of_pages(self, projected: Projected) -> tuple[jax.Array, None]:
        return projected[1][:, None], None

    def _attend_to_pages(self, projected: Projected, cache: PagedCache, *where: Any) -> tuple[jax.Array, PagedCache]:
        options: dict[str, Any] = {"value_dim": self.latent_dim, "softmax_scale": self.softmax_scale}
        query, tokens = self._absorbed(projected[0]), self._key_value_of_pages(projected)
        latents, cache = paged_attention(query, *tokens, cache, *where, **options)
        return self._values(latents), cache

    def _absorbed(self, query: jax.Array) -> jax.Array:
        """Queries that attend to latents, `[…, T, H, latent_dim + rotary_dim]`."""
        unrotated, rotated = jnp.split(query, [self.key_dim], -1)
        to_key = self._to_heads(query)[0]
        absorbed = jnp.einsum("...thk,chk->...thc", unrotated, to_key, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([absorbed, rotated], -1)

    def _values(self, output: jax.Array) -> jax.Array:
        """The values `[…, T, H, value_dim]` from weighted sums of latents."""
        return jnp.einsum("...thc,chv->...thv", output, self._to_heads(output)[1], precision=jax.lax.Precision.HIGHEST)

    def _to_heads(self, x: jax.Array) -> list[jax.Array]:
        """The kernels that project a latent to keys and to values, `[latent_dim, H, ·]`, in the dtype of `x`."""
        kernel = self.key_value.kernel[...].astype(x.dtype).reshape(self.latent_dim, self.heads, -1)
        return jnp.split(kernel, [self.key_dim], -1)

    def _finish(self, x: jax.Array, projected: Projected, output: jax.Array) -> jax.Array:
        if self.output_gate is not None:
            gate = jax.nn.sigmoid(wide(self.output_gate(x)))
            gate = gate[..., None] if self.output_gate_of == "head" else split_heads(gate, self.heads)
            output = (wide(output) * gate).astype(output.dtype)
        return self.out(merge_heads(output))

    @classmethod
    def from_transformers(
        cls,
        weights: _weights.Weights,
        *arguments: Any,
        prefix: str = "",
        interleaved: bool = True,
        **options: Any,
    ) -> Self:
        """The layer with the weights of transformers' DeepSeek V3, Kimi Linear or Ling 3, or of Kimi-K3.

        `interleaved` says that dims which are rotated together are neighbours in the weights, as in DeepSeek V3 and
        Ling 3. Without it they are in two halves, which is the order of this layer. See `ejkernel.layers` for the other
        arguments.
        """
        layouts = _layouts(_checks.flag("interleaved", interleaved))
        return _weights.load(cls, arguments, options, weights, prefix, layouts)


def _halves_apart(rows: np.ndarray, dims: int) -> np.ndarray:
    """`rows […, dims, columns]` with the last `dims` reordered: first those of even index, then those of odd index."""
    unrotated, rotated = rows[..., :-dims, :], rows[..., -dims:, :]
    return np.concatenate([unrotated, rotated[..., ::2, :], rotated[..., 1::2, :]], -2)


def _of_each_head(rows: np.ndarray, layer: MultiHeadLatentAttention) -> np.ndarray:
    by_head = rows.reshape(layer.heads, -1, rows.shape[-1])
    return _halves_apart(by_head, layer.rotary_dim).reshape(rows.shape)


def _layouts(interleaved: bool) -> dict[str, _weights.Sources]:
    of_query: dict[str, Any] = {"rows": _of_each_head} if interleaved else {}
    sources = {
        **_weights.linears(query_down="q_a_proj", latent_down="kv_a_proj_with_mqa", key_value="kv_b_proj"),
        **_weights.linears(output_gate="g_proj", out="o_proj"),
        **_weights.copies({"query_norm.scale": "q_a_layernorm.weight", "latent_norm.scale": "kv_a_layernorm.weight"}),
        "query.kernel": _weights.linear("q_b_proj", **of_query),
    }
    if interleaved:
        sources["latent_down.kernel"] = _weights.linear(
            "kv_a_proj_with_mqa", rows=lambda x, layer: _halves_apart(x, layer.rotary_dim)
        )
        sources["latent_down.bias"] = _weights.Source(
            ["kv_a_proj_with_mqa.bias"], convert=lambda x, layer: _halves_apart(x[:, None], layer.rotary_dim)[:, 0]
        )
    direct = sources | {"query.kernel": _weights.linear("q_proj", **of_query)}
    return {
        "transformers' DeepseekV3Attention": sources,
        "transformers' DeepseekV3Attention without q_lora_rank": direct,
        "Ling's latent attention": sources | _weights.linears(out="dense"),
        "Ling's latent attention without q_lora_rank": direct | _weights.linears(out="dense"),
    }
