r"""The delta rule's Triton kernels on one NVIDIA GPU: times, memory and errors, checked on a slice of each row.

python -m benchmarks.gpu_delta_rule --json benchmarks/results/delta_rule_h200.json [row ...]
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from benchmarks import gpu_rows
from benchmarks.timing import Row


@dataclass(frozen=True)
class Work(gpu_rows.Work):
    op: str = "gated_delta_rule"
    gate: float = 1 / 16  # times log_sigmoid
    bound: float | None = None  # gates between 0 and this instead, as Kimi-K3's


GATED = Work("gated", bar=0.50, fla=0.84)
PLAIN = replace(GATED, name="delta", op="delta_rule", fla=1.01)
KDA = replace(GATED, name="kda", op="kda", bar=0.85, fla=1.76)
LONG = replace(GATED, name="gated-long", B=1, T=65536, bar=None, fla=None)
SHORT = replace(GATED, name="gated-B32", B=32, T=1024, bar=None, fla=None)
PACKED = replace(GATED, name="gated-T32768-packed", B=1, T=32768, sequences=32, bar=None, fla=None)
WORKS = [
    GATED,
    replace(GATED, name="gated-backward", backward=True, bar=1.9, fla=None),
    PLAIN,
    replace(PLAIN, name="delta-backward", backward=True, bar=1.9, fla=2.83),
    KDA,
    replace(KDA, name="kda-backward", backward=True, bar=3.0, fla=9.45),
    replace(KDA, name="kda-bounded", bound=-5.0, bar=0.95, fla=None),
    replace(KDA, name="kda-bounded-backward", bound=-5.0, backward=True, bar=3.0, fla=None),
    replace(KDA, name="kda-strong", gate=30.0, bar=None, fla=None),
    replace(KDA, name="kda-strong-backward", gate=30.0, backward=True, bar=None, fla=None),
    LONG,
    replace(LONG, name="gated-long-backward", backward=True),
    replace(LONG, name="kda-long", op="kda"),
    replace(LONG, name="kda-long-backward", op="kda", backward=True),
    SHORT,
    replace(SHORT, name="gated-B32-backward", backward=True),
    PACKED,
    replace(PACKED, name="gated-T32768-packed-backward", backward=True),
    replace(GATED, name="gated-float32", dtype="float32", bar=None, fla=None),
    replace(GATED, name="decode", B=256, T=1, state=True, bar=0.155, fla=0.191),
]


def inputs(work: Work, seed: int) -> dict[str, jax.Array]:
    """The call's arrays by name, and the output's cotangent; keys have length 1."""
    keys = jax.random.split(jax.random.key(seed), 7)
    rows = (work.B, work.T, work.H)
    query, key = (jax.random.normal(each, (*rows, work.K)) for each in keys[:2])
    found = {
        "query": query.astype(work.dtype),
        "key": (key / jnp.linalg.norm(key, axis=-1, keepdims=True)).astype(work.dtype),
        "value": jax.random.normal(keys[2], (*rows, work.V)).astype(work.dtype),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[3], rows)),
    }
    if work.op != "delta_rule":
        shape = (*rows, work.K) if work.op == "kda" else rows
        found["g"] = jax.nn.log_sigmoid(jax.random.normal(keys[4], shape)) * work.gate
        if work.bound is not None:
            found["g"] = work.bound * jax.nn.sigmoid(jax.random.normal(keys[4], shape))
    if work.state:
        found["initial_state"] = jax.random.normal(keys[5], (work.B, work.H, work.K, work.V))
    if work.backward:
        found["doutput"] = jax.random.normal(keys[6], (*rows, work.V)).astype(work.dtype)
    return found


def program(work: Work, platform: str) -> Callable[..., Any]:
    front, borders = getattr(ejkernel, work.op), work.borders

    def forward(arrays: dict[str, jax.Array]) -> Any:
        return front(**arrays, cu_seqlens=borders, platform=platform)

    def both(arrays: dict[str, jax.Array]) -> Any:
        inputs = {name: x for name, x in arrays.items() if name != "doutput"}
        output, pull = jax.vjp(lambda x: forward(x)[0], inputs)
        return output, pull(arrays["doutput"])[0]

    return both if work.backward else forward


def errors(work: Work, arrays: dict[str, jax.Array], results: Any) -> list[float]:
    """Relative errors of the results' first row and head against XLA's in float32."""

    def cut(x: jax.Array) -> jax.Array:
        is_state = x.shape == (work.sequences or work.B, work.H, work.K, work.V)
        return (x[:, :1] if is_state else x[:, :, :1])[: None if work.sequences else 1].astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(program(work, "xla"))(jax.tree.map(cut, arrays))
    return gpu_rows.relative_errors(results, expected, cut)


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    sets = [(inputs(work, seed),) for seed in range(2)]
    function = jax.jit(program(work, "triton"))

    def timed() -> tuple[float, float]:
        if not work.state:
            return gpu_rows.clock(function, sets)
        # donated, so that the state is updated in place
        step = jax.jit(lambda state, rest: ejkernel.gated_delta_rule(**rest, initial_state=state)[1], donate_argnums=0)
        rest = {name: x for name, x in sets[0][0].items() if name != "initial_state"}
        states = [sets[0][0]["initial_state"] + 0]

        def again() -> jax.Array:
            states[0] = step(states[0], rest)
            return states[0]

        return gpu_rows.clock(again, [()])

    def compared(results: Any) -> list[float]:
        return errors(work, sets[0][0], results)

    return gpu_rows.measured(work, bandwidth, function, sets, sets[0], compared, timed)


def run() -> list[Row]:
    return gpu_rows.against_bars("delta rule", WORKS, measure)


def main() -> None:
    gpu_rows.report(gpu_rows.parser(__doc__).parse_args(), WORKS, measure)


if __name__ == "__main__":
    main()
