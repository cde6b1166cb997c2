"""Multi-head softmax attention, with a cache that grows with the sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.attention import attention, flash_attention
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import into_heads, merge, out_of_heads, per_head, split
from ejkernel.xla_utils.utils import prepare_position_ids


class KeyValueCache(NamedTuple):
    """The keys and values of the tokens seen, and how many there are.

    Attributes:
        key: `[B, capacity, Hkv, K]`, rotated by their positions.
        value: `[B, capacity, Hkv, K]`.
        position: `[B]` int32, where the next token goes.
    """

    key: jax.Array
    value: jax.Array
    position: jax.Array

    @property
    def capacity(self) -> int:
        return self.key.shape[1]


class MultiHeadAttention(nnx.Module):
    """Causal softmax attention with rotary positions and grouped key/value heads.

    Args:
        width: Of the input and the output.
        heads: How many heads share the width.
        kv_heads: How many heads keys and values have, a divisor of `heads`; `None` is as many.
        rngs: Where parameters are drawn from.

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

    def __init__(self, width: int, heads: int, *, kv_heads: int | None = None, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.width, self.head_dim = width, per_head("width", width, heads)
        if heads % _checks.positive_int("kv_heads", self.kv_heads):
            _checks.fail("kv_heads", self.kv_heads, f"a divisor of the {heads} heads")
        if self.head_dim % 2:
            _checks.fail("width", width, f"an even width per head, as rotation needs, not {self.head_dim}")
        self.query = into_heads(width, heads * self.head_dim, rngs)
        self.key = into_heads(width, self.kv_heads * self.head_dim, rngs)
        self.value = into_heads(width, self.kv_heads * self.head_dim, rngs)
        self.out = out_of_heads(heads * self.head_dim, width, rngs)

    def empty_cache(self, batch: int, capacity: int, dtype: DTypeLike = jnp.float32) -> KeyValueCache:
        """Room for `capacity` tokens of each of `batch` sequences."""
        batch, capacity = _checks.positive_int("batch", batch), _checks.positive_int("capacity", capacity)
        shape, dtype = (batch, capacity, self.kv_heads, self.head_dim), _checks.floating_dtype("dtype", dtype)
        return KeyValueCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def __call__(
        self, x: jax.Array, cache: KeyValueCache | None = None, cu_seqlens: jax.Array | None = None
    ) -> tuple[jax.Array, KeyValueCache | None]:
        """Attends from the tokens of `x` to themselves and to those in the cache, and returns the longer cache too.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            cache: From `empty_cache` or an earlier call; `None`, as in training, keeps nothing. Tokens past its
                capacity come out as NaN.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`; excludes a cache. Tokens past the last one are
                padding: output 0, no gradient, no effect.
        """
        dims = _checks.Dims(width=self.width, Hkv=self.kv_heads, K=self.head_dim)
        x, cu_seqlens = _checks.layer_input(dims, x, cu_seqlens)
        x = without_padding(x, cu_seqlens)
        query = split(self.query(x), self.heads)
        key, value = (split(project(x), self.kv_heads) for project in (self.key, self.value))
        if cache is None:
            positions = jnp.arange(x.shape[-2])
            if cu_seqlens is not None:
                positions = prepare_position_ids(cu_seqlens, total_tokens=x.shape[-2])
            query, key = rotate(query, positions), rotate(key, positions)
            output = flash_attention(query, key, value, causal=True, cu_seqlens=cu_seqlens)
            return without_padding(self.out(merge(output)), cu_seqlens), None
        if cu_seqlens is not None:
            _checks.fail("cache", "one together with cu_seqlens", "one of them")
        if not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache: got {type(cache).__name__}; expected what empty_cache or an earlier call returned")
        cache = KeyValueCache(
            _checks.carried(dims, "cache.key", cache.key, "capacity Hkv K"),
            _checks.carried(dims, "cache.value", cache.value, "capacity Hkv K"),
            _checks.cache_position(dims, cache.position),
        )
        if x.shape[1] > cache.capacity:
            _checks.fail("x", f"{x.shape[1]} tokens", f"at most the {cache.capacity} that the cache has room for")
        positions = cache.position[:, None] + jnp.arange(x.shape[1])  # [B, T]
        query, key = rotate(query, positions), rotate(key, positions)
        row = jnp.arange(x.shape[0])[:, None]
        keys = cache.key.at[row, positions].set(key.astype(cache.key.dtype), mode="drop")
        values = cache.value.at[row, positions].set(value.astype(cache.value.dtype), mode="drop")
        if x.shape[1] == 1:
            # the weights of one query are few enough to hold, which is faster than going block by block
            seen = jnp.arange(cache.capacity) <= positions  # [B, capacity]
            output, _ = attention(query, keys, values, seen[:, None, None], dtype=None)
        else:
            # causality, counted from the first query's position, also hides the empty rest of the cache
            output = flash_attention(query, keys, values, causal=True, query_offset=cache.position)
        output = jnp.where(positions[..., None] < cache.capacity, self.out(merge(output)), jnp.nan)
        return output, KeyValueCache(keys, values, cache.position + x.shape[1])


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of `x [..., T, H, K]`: the two halves of `K` are turned by angles that grow with position."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)  # [..., T, 1, K/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
