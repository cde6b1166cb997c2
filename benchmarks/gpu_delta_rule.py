r"""The delta rule's Triton kernels on one NVIDIA GPU: times, memory and errors, checked on a slice of each row.

python -m benchmarks.gpu_delta_rule --json benchmarks/results/delta_rule_h200.json [row ...]
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from benchmarks.gpu_linear_recurrence import clock, copy_bandwidth, lengths
from ejkernel.bench.timing import Row
from ejkernel.kernels import _launch

# Seconds of calls in a row: waiting for the last takes a millisecond, which no call is to be charged with.
BATCH = 0.1


@dataclass(frozen=True)
class Work:
    """One line of the table. `bar` is the time promised on one H200, `fla` what flash-linear-attention 0.6.0 took."""

    name: str
    op: str = "gated_delta_rule"
    backward: bool = False
    B: int = 8
    T: int = 4096
    H: int = 16
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    gate: float = 1 / 16  # times log_sigmoid
    sequences: int = 0
    state: bool = False
    bar: float | None = None
    fla: float | None = None


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
    if work.state:
        found["initial_state"] = jax.random.normal(keys[5], (work.B, work.H, work.K, work.V))
    if work.backward:
        found["doutput"] = jax.random.normal(keys[6], (*rows, work.V)).astype(work.dtype)
    return found


def program(work: Work, platform: str, borders: jax.Array | None) -> Callable[..., Any]:
    front = getattr(ejkernel, work.op)

    def forward(arrays: dict[str, jax.Array]) -> Any:
        return front(**arrays, cu_seqlens=borders, platform=platform)

    def both(arrays: dict[str, jax.Array]) -> Any:
        inputs = {name: x for name, x in arrays.items() if name != "doutput"}
        output, pull = jax.vjp(lambda x: forward(x)[0], inputs)
        return output, pull(arrays["doutput"])[0]

    return both if work.backward else forward


def errors(work: Work, arrays: dict[str, jax.Array], results: Any, borders: jax.Array | None) -> list[float]:
    """Relative errors of the results' first row and head against XLA's in float32."""

    def cut(x: jax.Array) -> jax.Array:
        is_state = x.shape == (work.sequences or work.B, work.H, work.K, work.V)
        return (x[:, :1] if is_state else x[:, :, :1])[: None if work.sequences else 1].astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(program(work, "xla", borders))(jax.tree.map(cut, arrays))
    found = []
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        a = cut(a)
        found.append(float(jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)))
    return found


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    sets = [(inputs(work, seed),) for seed in range(2)]
    borders = jnp.asarray(lengths(work)) if work.sequences else None  # type: ignore[arg-type]
    function = jax.jit(program(work, "triton", borders))
    start = time.perf_counter()
    compiled = function.lower(*sets[0]).compile()
    compile_s = time.perf_counter() - start
    results = function(*sets[0])
    found = errors(work, sets[0][0], results, borders)
    moved = sum(x.nbytes for x in jax.tree.leaves((sets[0], results)))
    if work.state:
        # donated, so that the state is updated in place
        step = jax.jit(lambda state, rest: ejkernel.gated_delta_rule(**rest, initial_state=state)[1], donate_argnums=0)
        rest = {name: x for name, x in sets[0][0].items() if name != "initial_state"}
        states = [sets[0][0]["initial_state"] + 0]

        def again() -> jax.Array:
            states[0] = step(states[0], rest)
            return states[0]

        median, spread = clock(again, [()], seconds=BATCH)
    else:
        median, spread = clock(function, sets, seconds=BATCH)
    if not max(found) < {"bfloat16": 2e-2, "float32": 1e-4}[work.dtype]:
        raise RuntimeError(f"{work.name}: errors {found}")
    return {
        "name": work.name,
        "ms": round(median, 4),
        "spread_ms": round(spread, 4),
        "floor_ms": round(moved / bandwidth * 1e3, 4),
        "bar_ms": work.bar,
        "met": None if work.bar is None else median <= work.bar,
        "fla_ms": work.fla,
        "largest_error": float(f"{max(found):.2e}"),
        "beside_inputs_and_outputs_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "compile_s": round(compile_s, 2),
    }


def run() -> list[Row]:
    """For `python -m benchmarks`: the rows with a bar, as ratios to fla's time where there is one, else to the bar."""
    if _launch.capability() is None or _launch.unavailable():
        return []
    bandwidth, rows = copy_bandwidth(), []
    for work in WORKS:
        if work.bar is not None:
            row, base = measure(work, bandwidth), work.fla or work.bar
            group = "delta rule on Triton, against fla 0.6.0 as measured on one H200"
            rows.append(Row(group, work.name, row["ms"], row["spread_ms"], row["ms"] / base, work.bar / base))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="row", help="which rows, all if none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    import jax_triton
    import triton

    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": triton.__version__,
        "jax_triton": jax_triton.__version__,
        "copy_bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "rows": [],
    }
    for work in WORKS:
        if not arguments.names or work.name in arguments.names:
            try:
                row = measure(work, bandwidth)
            except Exception as error:
                row = {"name": work.name, "failed": str(error)[:500]}
            report["rows"].append(row)
            print(row, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
