"""`flash_attention` on XLA: against `jax.nn.dot_product_attention`, and what windows and packing save.

A bar on memory is the ratio of temporaries; its times are bytes in MiB.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.timing import Row, compare
from ejkernel.attention import flash_attention

TOKENS, LONG, HEADS, DIM = 4096, 8192, 8, 64
DIRECTIONS = ("forward", "forward+backward")


def run() -> list[Row]:
    def jax_nn(query: Array, key: Array, value: Array) -> Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")

    rows: list[Row] = []
    for direction in DIRECTIONS:
        arrays = _arrays(TOKENS, HEADS)
        group = f"flash_attention, causal, 4096 tokens, {direction}"
        programs = {
            "jax.nn": _compiled(jax_nn, arrays, direction),
            "flash_attention": _compiled(_flash(causal=True), arrays, direction),
        }
        calls = {name: _call(program, arrays) for name, program in programs.items()}
        rows += compare(group, calls, bars={"flash_attention": 1.0}, rounds=5)
        rows += _memory(group, programs, bar=0.1)
    for direction in DIRECTIONS:
        arrays = _arrays(LONG, HEADS)
        borders = jnp.arange(0, LONG + 1, 512)
        programs = {
            "causal": _compiled(_flash(causal=True), arrays, direction),
            "window of 256": _compiled(_flash(causal=True, sliding_window=(256, 0)), arrays, direction),
            "16 sequences of 512": _compiled(_flash(causal=True, cu_seqlens=borders), arrays, direction),
            "every key": _compiled(_flash(), arrays, direction),
        }
        calls = {name: _call(program, arrays) for name, program in programs.items()}
        bars = {"window of 256": 0.25, "16 sequences of 512": 0.25}
        rows += compare(f"flash_attention, 8192 tokens, {direction}", calls, bars=bars, rounds=5)
    return rows


def _flash(**options: Any) -> Callable[..., Array]:
    return lambda query, key, value: flash_attention(query, key, value, dtype=None, **options)


def _arrays(tokens: int, heads: int) -> tuple[Array, ...]:
    return tuple(jax.random.normal(key, (1, tokens, heads, DIM)) for key in jax.random.split(jax.random.key(0), 3))


def _compiled(function: Callable[..., Array], arrays: tuple[Array, ...], direction: str) -> Any:
    def backward(*arrays: Array) -> Any:
        return jax.grad(lambda arrays: jnp.sum(function(*arrays) ** 2))(arrays)

    return jax.jit(function if direction == "forward" else backward).lower(*arrays).compile()


def _call(program: Any, arrays: tuple[Array, ...]) -> Callable[[], Any]:
    return lambda: program(*arrays)


def _memory(group: str, programs: dict[str, Any], bar: float) -> list[Row]:
    sizes = {name: np.divide(each.memory_analysis().temp_size_in_bytes, 2**20) for name, each in programs.items()}
    base = next(iter(sizes.values()))
    return [
        Row(
            f"{group}, MiB of temporaries",
            name,
            float(size),
            0.0,
            float(size / base),
            bar if name != "jax.nn" else None,
        )
        for name, size in sizes.items()
    ]
