"""Serving on one NVIDIA GPU: times of calls on pages and pools.

Counts are of the programs for an H200: how much of the cache is aliased, how many copies of its size there are, and how
much is held beside it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from benchmarks import described
from benchmarks.gpu import rows
from benchmarks.gpu.rows import Part, Row
from ejkernel import PagedCache


@dataclass(frozen=True)
class Work:
    """A step `(cache, arrays) -> (output, cache)`, what makes its arguments, and the milliseconds asked of one H200."""

    name: str
    step: Callable[[Any, dict[str, Any]], tuple[jax.Array, Any]]
    make: Callable[[], tuple[Any, dict[str, Any]]]
    bar: float | None = None


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape).astype(dtype)


def borders(*lengths: int) -> jax.Array:
    return jnp.cumsum(jnp.array([0, *lengths]), dtype=jnp.int32)


def paged(name: str, new: list[int], before: list[int], heads: tuple[int, int], bar: float | None = None) -> Work:
    """New tokens of sequences that have some before, 128 dims a head, in pages of 64."""

    def make() -> tuple[Any, dict[str, Any]]:
        T, N, places = sum(new), len(new), -(-max(map(sum, zip(new, before, strict=True))) // 64)
        pages = [normal(N * places + 1, 64, heads[1], 128) for _ in range(2)]
        arrays = {"query": normal(T, heads[0], 128), "key": normal(T, heads[1], 128), "value": normal(T, heads[1], 128)}
        table = jnp.arange(N * places, dtype=jnp.int32).reshape(N, places)
        arrays |= {"table": table, "lengths": jnp.array(before, jnp.int32), "cu_seqlens": borders(*new)}
        return PagedCache(*pages), arrays

    return Work(name, lambda pages, arrays: ejkernel.paged_attention(pages=pages, **arrays), make, bar)


def latent(name: str, sequences: int, before: int, bar: float) -> Work:
    """One token each, 128 heads that read one head of 576 dims, of which 512 are values."""

    def make() -> tuple[Any, dict[str, Any]]:
        places = before // 64 + 1
        arrays = {"query": normal(sequences, 128, 576), "key": normal(sequences, 1, 576), "value": None}
        arrays["table"] = jnp.arange(sequences * places, dtype=jnp.int32).reshape(sequences, places)
        arrays |= {"lengths": jnp.full(sequences, before, jnp.int32), "cu_seqlens": borders(*[1] * sequences)}
        return PagedCache(normal(sequences * places, 64, 1, 576), None), arrays

    return Work(name, lambda pages, arrays: ejkernel.paged_attention(pages=pages, **arrays, value_dim=512), make, bar)


def pool(name: str, op: str, sequences: int, tokens: int, *, keep: bool = False, bar: float | None = None) -> Work:
    """Tokens of sequences in a pool of 1024 states, 16 heads of 128; `keep` writes the state after each of them."""

    def make() -> tuple[Any, dict[str, Any]]:
        T = sequences * tokens
        arrays: dict[str, Any] = {each: normal(T, 16, 128) for each in ("query", "key", "value")}
        decay = jax.nn.log_sigmoid(normal(T, 16, 128, dtype=jnp.float32))
        arrays["g"] = decay if op == "recurrent_gla" else decay[..., 0]
        if op == "gated_delta_rule":
            arrays["beta"] = jax.nn.sigmoid(normal(T, 16, dtype=jnp.float32))
        slots = jnp.arange(sequences, dtype=jnp.int32) * 3
        arrays |= {"cu_seqlens": borders(*[tokens] * sequences), "reads": slots, "writes": slots}
        if keep:
            arrays["writes"] = jnp.arange(T, dtype=jnp.int32).reshape(sequences, tokens)
            arrays["at"] = jnp.broadcast_to(jnp.arange(1, tokens + 1, dtype=jnp.int32), (sequences, tokens))
        return normal(1024, 16, 128, 128, dtype=jnp.float32), arrays

    return Work(name, lambda states, arrays: getattr(ejkernel, op)(**arrays, states=states), make, bar)


def convolution(name: str) -> Work:
    """One token of 256 sequences, as a layer of width 2048 has them."""

    def make() -> tuple[Any, dict[str, Any]]:
        slots = jnp.arange(256, dtype=jnp.int32) * 3
        arrays = {"x": normal(256, 6144), "weight": normal(4, 6144), "cu_seqlens": borders(*[1] * 256)}
        return normal(1024, 3, 6144), arrays | {"reads": slots, "writes": slots}

    return Work(name, lambda states, arrays: ejkernel.causal_conv1d(**arrays, states=states), make)


PIECES, SINGLE = [512] * 8, [1] * 56
WORKS = [
    paged("one query, 32768 keys", [1] * 8, [32767] * 8, (32, 8), bar=0.29),
    # together at most 1.15 times the two that follow
    paged("pieces and single tokens", PIECES + SINGLE, [3584] * 8 + [4095] * 56, (32, 8)),
    paged("pieces alone", PIECES, [3584] * 8, (32, 8)),
    paged("single tokens alone", SINGLE, [4095] * 56, (32, 8)),
    latent("latent decode", 64, 8191, bar=0.45),
    pool("gla, one token", "recurrent_gla", 256, 1, bar=0.15),
    pool("gated delta rule, one token", "gated_delta_rule", 256, 1, bar=0.15),
    # at most 1.5 times one token of as many
    pool("four drafts", "gated_delta_rule", 64, 4, keep=True),
    pool("one token of 64", "gated_delta_rule", 64, 1),
    pool("gla, prompts", "recurrent_gla", 8, 512),
    pool("gla, one prompt of 8192", "recurrent_gla", 1, 8192),
    pool("gated delta rule, prompts", "gated_delta_rule", 8, 512),
    pool("gated delta rule, one prompt of 8192", "gated_delta_rule", 1, 8192),
    convolution("convolution, one token"),
]


def count(work: Work) -> dict[str, Any]:
    """What can be read off the program for an H200."""
    cache, arrays = jax.eval_shape(work.make)
    program = described.compiled(work.step, (cache, arrays), 0)
    text, memory = program.as_text(), program.memory_analysis()
    parts = jax.tree.leaves(cache)
    dims = [",".join(map(str, each.shape)) for each in parts]
    copies = [line for line in text.splitlines() if re.search(r"= \S+ copy(-start)?\(", line)]
    return {
        "name": work.name,
        "cache_mib": round(sum(each.size * each.dtype.itemsize for each in parts) / 2**20, 1),
        "aliased_mib": round(memory.alias_size_in_bytes / 2**20, 1),
        "copies_of_the_cache": sum(f"[{each}]" in line for line in copies for each in dims),
        "temporaries_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "triton_kernels": described.PLATFORMS["gpu"].kernels(text),
        "loops": len(re.findall(r" while\(", text)),
    }


def measure(work: Work, bandwidth: float) -> list[Row]:
    cache, arrays = jax.jit(work.make)()
    step = jax.jit(work.step, donate_argnums=0)

    def call(_: int) -> Any:
        nonlocal cache
        output, cache = step(cache, arrays)
        return output

    jax.block_until_ready(call(0))
    return [rows.timed(work.name, rows.in_batches(call, 20), work.bar)]


PARTS = {"serving": Part(WORKS, measure, count)}
