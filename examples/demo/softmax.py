"""Softmax attention as one would write it by hand to generate fast, for the demo to be held against."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Cache(NamedTuple):
    """Keys and values `[H, L, D]`, of which `position` are filled: of one head together, so that one reads on."""

    key: jax.Array
    value: jax.Array
    position: jax.Array


class OneQueryAttention(nnx.Module):
    """Attends from one token of one sequence to its cache: two products and nothing else.

    A batch or tokens before the heads would make XLA's products on a CPU 7 to 20 times as slow.
    """

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads, self.head_dim = heads, width // heads
        self.query, self.key, self.value, self.out = (
            nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def empty_cache(self, capacity: int) -> Cache:
        empty = jnp.zeros((self.heads, capacity, self.head_dim))
        return Cache(empty, empty, jnp.int32(0))

    def __call__(self, x: jax.Array, cache: Cache, cu_seqlens: None = None) -> tuple[jax.Array, Cache]:
        """`x` and the output are `[1, 1, width]`."""
        query, key, value = (
            project(x).reshape(self.heads, self.head_dim) for project in (self.query, self.key, self.value)
        )
        start = (0, cache.position, 0)
        keys = jax.lax.dynamic_update_slice(cache.key, key[:, None], start)
        values = jax.lax.dynamic_update_slice(cache.value, value[:, None], start)
        logits = jnp.einsum("hd,hld->hl", query, keys) * self.head_dim**-0.5
        seen = jnp.arange(keys.shape[1]) <= cache.position
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
        output = jnp.einsum("hl,hld->hd", weights, values)
        return self.out(output.reshape(x.shape)), Cache(keys, values, cache.position + 1)
