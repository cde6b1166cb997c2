r"""The short convolution's Triton kernels on one NVIDIA GPU: times, memory and errors, checked on some channels.

python -m benchmarks.gpu_convolution --json benchmarks/results/convolution_h200.json [row ...]
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from benchmarks import gpu_rows
from benchmarks.timing import Row

CHECKED = 128  # channels, each computed by itself


@dataclass(frozen=True)
class Work(gpu_rows.Work):
    """`H · K` are the channels."""

    H: int = 48
    taps: int = 4


# as in layers of width 2048: queries, keys and values side by side
ROWS = Work("rows", bar=0.23)
BACKWARD = replace(ROWS, name="rows-backward", backward=True, bar=0.75)
PACKED = replace(ROWS, name="packed", B=1, T=32768, sequences=32, bar=1.05 * 0.23)
WORKS = [
    ROWS,
    BACKWARD,
    PACKED,
    replace(PACKED, name="packed-backward", backward=True, bar=1.05 * 0.75),
    replace(ROWS, name="rows-state", state=True, bar=None),
    replace(BACKWARD, name="rows-state-backward", state=True, bar=None),
    replace(PACKED, name="packed-state-backward", backward=True, state=True, bar=None),
    replace(ROWS, name="float32", dtype="float32", bar=None),
    replace(BACKWARD, name="float32-backward", dtype="float32", bar=None),
    replace(ROWS, name="decode", B=64, T=1, state=True, bar=None),
]


def inputs(work: Work, seed: int) -> dict[str, jax.Array]:
    """The call's arrays by name, and the output's cotangent."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (work.B, work.T, work.H * work.K)
    found = {
        "x": jax.random.normal(keys[0], shape).astype(work.dtype),
        "weight": jax.random.normal(keys[1], (work.taps, shape[-1])) * work.taps**-0.5,
    }
    if work.state:
        states = (work.sequences or work.B, work.taps - 1, shape[-1])
        found["initial_state"] = jax.random.normal(keys[2], states).astype(work.dtype)
    if work.backward:
        found["doutput"] = jax.random.normal(keys[3], shape).astype(work.dtype)
    return found


def program(work: Work, platform: str) -> Callable[..., Any]:
    def forward(arrays: dict[str, jax.Array]) -> Any:
        return ejkernel.causal_conv1d(**arrays, activation="silu", cu_seqlens=work.borders, platform=platform)

    def both(arrays: dict[str, jax.Array]) -> Any:
        inputs = {name: x for name, x in arrays.items() if name != "doutput"}
        output, pull = jax.vjp(lambda x: forward(x)[0], inputs)
        return output, pull(arrays["doutput"])[0]

    return both if work.backward else forward


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    sets = [(inputs(work, seed),) for seed in range(2)]
    function = jax.jit(program(work, "triton"))

    def cut(x: jax.Array) -> jax.Array:
        return x[..., :CHECKED].astype(jnp.float32)

    def errors(results: Any) -> list[float]:
        expected = jax.jit(program(work, "xla"))(jax.tree.map(cut, sets[0][0]))
        return gpu_rows.relative_errors(results, expected, cut)

    return gpu_rows.measured(work, bandwidth, function, sets, sets[0], errors, lambda: gpu_rows.clock(function, sets))


def run() -> list[Row]:
    return gpu_rows.against_bars("causal_conv1d", WORKS, measure)


def main() -> None:
    gpu_rows.report(gpu_rows.parser(__doc__).parse_args(), WORKS, measure)


if __name__ == "__main__":
    main()
