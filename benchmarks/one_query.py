"""One query against a cache, as decoding has it, beside two einsums over a cache laid out `[Hkv, L, D]` for them.

`flash_attention` and `attention` take theirs as the layers keep it, `[1, L, Hkv, D]`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.timing import Row, compare
from ejkernel.attention import attention, flash_attention

BAR = 1.5
HEADS = ((8, 8, 64), (8, 8, 128), (8, 2, 64), (8, 2, 128), (32, 4, 128))  # of queries, of keys, and their dim
KEYS = (1024, 4096, 16384)


def run() -> list[Row]:
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        for heads, kv_heads, dim in HEADS:
            for keys in KEYS:
                group = f"one query, {keys} keys, {heads}/{kv_heads} heads of {dim}, {dtype}"
                bars = {"flash_attention": BAR, "attention": BAR}
                rows += compare(group, _candidates(heads, kv_heads, dim, keys, dtype), bars=bars, rounds=15)
    return rows


def _candidates(heads: int, kv_heads: int, dim: int, keys: int, dtype: str) -> dict[str, Any]:
    draws = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(draws[0], (1, 1, heads, dim), dtype)
    key, value = (jax.random.normal(draw, (1, keys, kv_heads, dim), dtype) for draw in draws[1:])
    # an argument, as the filled length is in decoding
    filled = jnp.int32(keys)
    by_head = [jnp.copy(x[0].swapaxes(0, 1)) for x in (key, value)]
    grouped = query.reshape(kv_heads, heads // kv_heads, dim)
    return {
        "einsums": functools.partial(jax.jit(_einsums), grouped, *by_head, filled),
        "flash_attention": functools.partial(jax.jit(_flash), query, key, value, filled),
        "attention": functools.partial(jax.jit(_attention), query, key, value, filled),
    }


def _einsums(query: Array, key: Array, value: Array, filled: Array) -> Array:
    scores = jnp.einsum("ngd,nld->ngl", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(key.shape[1]) < filled, scores, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("ngl,nld->ngd", weights, value, preferred_element_type=jnp.float32).astype(query.dtype)


def _flash(query: Array, key: Array, value: Array, filled: Array) -> Array:
    return flash_attention(query, key, value, causal=True, query_offset=filled - 1)


def _attention(query: Array, key: Array, value: Array, filled: Array) -> Array:
    mask = (jnp.arange(key.shape[1]) < filled)[None, None, None]
    return attention(query, key, value, mask, dtype=None)[0]
