"""The recurrence's phases beside one device's own call, on one NVIDIA GPU: what cutting time over devices costs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.rows import Part, Row
from benchmarks.timing import compare
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS
from ejkernel.kernels.linear_recurrence.call import Call

K = V = 128


@dataclass(frozen=True)
class Work:
    decay: Literal["key", "head"]
    B: int
    T: int
    H: int
    gradient: bool

    @property
    def name(self) -> str:
        return f"{self.decay} gates, B{self.B} T{self.T} H{self.H}" + ", gradients" * self.gradient


def programs(work: Work, platform: str = "triton") -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    """A call as it is, and in phases with the states between them given; and their arguments."""
    serves = next(each for each in IMPLEMENTATIONS if each.name == platform)
    decay, B, T, H, gradient = work.decay, work.B, work.T, work.H, work.gradient
    call = Call(
        batch=B, tokens=T, heads=H, key_dim=K, value_dim=V, sequences=B, packed=False, decay=decay,
        value_decay=False, scale=K**-0.5, reverse=False, dtype=np.dtype(jnp.bfloat16),
    )  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), 8))
    tokens = [jax.random.normal(next(keys), (B, T, H, K), jnp.bfloat16) for _ in range(4)]
    gate = -jax.random.uniform(next(keys), (B, T, H, K) if decay == "key" else (B, T, H)) / 16
    states = [jax.random.normal(next(keys), (B, H, K, V)) for _ in range(2)]

    def whole(inputs: Any, start: Any, cotangents: Any) -> Any:
        results, pull = jax.vjp(lambda inputs, start: serves.run(call, *inputs, start, None), inputs, start)
        return results, pull(cotangents) if gradient else ()

    def phased(inputs: Any, start: Any, cotangents: Any) -> Any:
        memory, added = serves.phases.begin(call, inputs, None)
        output, kept = serves.phases.finish(call, inputs, None, memory, start)
        if not gradient:
            return output, added
        memory, d_start = serves.phases.begin_back(call, inputs, None, start, kept, cotangents[0])
        return output, added, d_start, serves.phases.finish_back(call, inputs, None, start, kept, memory, cotangents)

    given = (*tokens[:3], gate, None), states[0], (tokens[3], states[1])
    return {"one call": whole, "phases": phased}, given


def measure(work: Work, bandwidth: float) -> list[Row]:
    candidates, given = programs(work)
    compiled = {name: partial(jax.jit(run).lower(*given).compile(), *given) for name, run in candidates.items()}
    one, two = compare(work.name, compiled, rounds=15)
    times = {"one_call_ms": round(one.median_ms, 3), "phases_ms": round(two.median_ms, 3), "ratio": round(two.ratio, 3)}
    return [{"name": work.name} | times]


# in those of one row, time is cut in segments
WORKS = [
    Work(decay, *shape, gradient)
    for decay in ("key", "head")
    for shape in ((1, 65536, 16), (8, 4096, 16))
    for gradient in (False, True)
]
PARTS = {"phases": Part(WORKS, measure)}
