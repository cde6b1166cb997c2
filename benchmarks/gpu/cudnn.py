"""`flash_attention` beside cuDNN called directly: what choosing the implementation costs on an NVIDIA GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.gpu.rows import DIRECTIONS, Part, Row, relative_error
from benchmarks.timing import compare
from ejkernel.attention import flash_attention

BAR = 1.03  # of cuDNN's own time
CALLS = 20  # a round, so that starting them does not count


@dataclass(frozen=True)
class Work:
    """A causal call in bfloat16, 128 dims."""

    H: int
    Hkv: int
    B: int = 4
    S: int = 4096

    @property
    def name(self) -> str:
        return f"{self.H} / {self.Hkv}"

    def inputs(self) -> list[Array]:
        shapes = [(self.B, self.S, heads, 128) for heads in (self.H, self.Hkv, self.Hkv)]
        keys = jax.random.split(jax.random.key(0), 3)
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def direct(query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


CANDIDATES: dict[str, Callable[..., Array]] = {
    "cudnn": direct,
    "ours": partial(flash_attention, causal=True),
    "xla": partial(flash_attention, causal=True, platform="xla"),
}


def program(function: Callable[..., Array], direction: str) -> Callable[..., Any]:
    """The call, or its gradients with its output as cotangent."""

    def backward(*arrays: Array) -> Any:
        output, pull = jax.vjp(function, *arrays)
        return pull(output)

    return function if direction == "forward" else backward


def measure(work: Work, bandwidth: float) -> list[Row]:
    arrays, found = work.inputs(), []
    for direction in DIRECTIONS:
        calls = {name: partial(jax.jit(program(each, direction)), *arrays) for name, each in CANDIDATES.items()}
        pairs = zip(jax.tree.leaves(calls["ours"]()), jax.tree.leaves(calls["cudnn"]()), strict=True)
        if not (error := max(relative_error(*pair) for pair in pairs)) < 0.02:
            raise RuntimeError(f"flash_attention differs from cuDNN by {error}")
        timed = compare(direction, {name: partial(_repeated, each) for name, each in calls.items()}, rounds=9)
        times = {f"{row.name}_ms": round(row.median_ms / CALLS, 4) for row in timed}
        ratio = next(row.ratio for row in timed if row.name == "ours")
        met = {"ratio": round(ratio, 4), "bar": BAR, "met": ratio <= BAR}
        found.append({"name": work.name, "direction": direction} | times | met)
    return found


def _repeated(call: Callable[[], Any]) -> Any:
    for _ in range(CALLS - 1):
        call()
    return call()


PARTS = {"attention": Part([Work(16, 16), Work(16, 4)], measure)}
