"""On an NVIDIA GPU, `flash_attention` against calling cuDNN directly: what choosing the implementation costs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.timing import Row, compare
from ejkernel import _dispatch
from ejkernel.attention import flash_attention

BAR = 1.03
BATCH, TOKENS, HEADS, DIM = 4, 4096, 16, 128
CALLS = 20  # a round, so that starting them does not count


def run() -> list[Row]:
    if jax.default_backend() != "gpu":
        return []
    rows: list[Row] = []
    for kv_heads in (HEADS, HEADS // 4):
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(BATCH, TOKENS, heads, DIM) for heads in (HEADS, kv_heads, kv_heads)]
        arrays = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        explanation = _dispatch.explain(flash_attention, *arrays, causal=True)
        if explanation.chosen.get("cuda") != "cudnn":
            raise RuntimeError(f"cuDNN was not chosen:\n{explanation}")
        for direction in ("forward", "forward+backward"):
            group = f"flash_attention, bf16, {HEADS}/{kv_heads} heads, {direction}, {CALLS} calls"
            candidates = {
                name: _compiled(function, arrays, direction)
                for name, function in (("cuDNN", _cudnn), ("flash_attention", _ours), ("flash_attention on XLA", _xla))
            }
            _agree(candidates["cuDNN"](), candidates["flash_attention"]())
            loops = {name: _repeated(each) for name, each in candidates.items()}
            rows += compare(group, loops, bars={"flash_attention": BAR}, rounds=9)
    return rows


def _cudnn(query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _ours(query: Array, key: Array, value: Array) -> Array:
    return flash_attention(query, key, value, causal=True)


def _xla(query: Array, key: Array, value: Array) -> Array:
    return flash_attention(query, key, value, causal=True, platform="xla")


def _compiled(function: Callable[..., Array], arrays: tuple[Array, ...], direction: str) -> Callable[[], Any]:
    def backward(*arrays: Array) -> Any:
        output, pull = jax.vjp(function, *arrays)
        return pull(output)

    program = jax.jit(function if direction == "forward" else backward)
    return lambda: program(*arrays)


def _repeated(call: Callable[[], Any]) -> Callable[[], Any]:
    def loop() -> Any:
        for _ in range(CALLS - 1):
            call()
        return call()

    return loop


def _agree(expected: Any, actual: Any) -> None:
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        error = jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32)).max()
        if error > 0.02 * jnp.abs(one).max():
            raise RuntimeError(f"flash_attention differs from cuDNN by {error}")
