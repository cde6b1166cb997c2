r"""The recurrence's Triton kernels on one NVIDIA GPU: times, memory floors and errors, checked on a slice of each row.

python -m benchmarks.gpu_linear_recurrence --json benchmarks/results/linear_recurrence_h200.json \
    [--fla] [row ...]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _drawing
from ejkernel.bench.timing import Row
from ejkernel.kernels import _launch
from ejkernel.kernels.linear_recurrence import triton as triton_gpu
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call


@dataclass(frozen=True)
class Work:
    """One line of the table. `bar` is the time promised on one H200, `fla` what flash-linear-attention 0.6.0 took."""

    name: str
    decay: str = "key"
    gate: str = "sixteenth"
    backward: bool = False
    learn_gate: bool = True
    B: int = 8
    T: int = 4096
    H: int = 16
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    sequences: int = 0
    state: bool = False
    bar: float | None = None
    fla: float | None = None

    @property
    def call(self) -> Call:
        return Call(
            batch=self.B,
            tokens=self.T,
            heads=self.H,
            key_dim=self.K,
            value_dim=self.V,
            sequences=self.sequences or self.B,
            packed=bool(self.sequences),
            decay=self.decay,  # type: ignore[arg-type]
            value_decay=False,
            scale=self.K**-0.5,
            reverse=False,
            dtype=np.dtype(jnp.dtype(self.dtype)),
        )


GLA = Work("gla", fla=1.37, bar=0.45)
HEAD = Work("g_gamma", decay="constant", fla=0.38, bar=0.18)
WORKS = [
    GLA,
    replace(GLA, name="gla-unscaled", gate="plain"),
    replace(GLA, name="gla-strong", gate="strong", bar=1.1),
    replace(GLA, name="gla-backward", backward=True, fla=5.85, bar=1.65),
    replace(GLA, name="gla-unscaled-backward", gate="plain", backward=True, fla=5.85, bar=1.65),
    replace(GLA, name="gla-strong-backward", gate="strong", backward=True, fla=5.85, bar=3.5),
    HEAD,
    replace(HEAD, name="g_gamma-backward", backward=True, learn_gate=False, fla=1.84, bar=0.72),
    replace(HEAD, name="g_gamma-learned-backward", backward=True, fla=1.84, bar=0.72),
    replace(HEAD, name="simple_gla", decay="head"),
    replace(HEAD, name="simple_gla-backward", decay="head", backward=True, fla=1.84, bar=0.72),
    Work("none", decay="none"),
    Work("none-backward", decay="none", backward=True),
    replace(GLA, name="gla-long", B=1, T=65536, fla=None, bar=0.98),
    replace(GLA, name="gla-narrow", B=2, T=8192, H=4, fla=None, bar=0.11),
    Work("decode", B=256, T=1, state=True, fla=0.24, bar=0.155),
    Work("gla-K64-V64", B=32, T=2048, H=8, K=64, V=64),
    Work("gla-K64-V128", K=64),
    Work("gla-K256-V256", H=8, K=256, V=256),
    Work("gla-float32", dtype="float32"),
    Work("simple_gla-float32", decay="head", dtype="float32"),
    Work("gla-float16", dtype="float16"),
    Work("simple_gla-float16", decay="head", dtype="float16"),
    Work("simple_gla-float16-backward", decay="head", dtype="float16", backward=True),
    Work("gla-T32768", B=1, T=32768),
    Work("gla-T32768-packed", B=1, T=32768, sequences=32),
]


def lengths(work: Work) -> np.ndarray:
    """Uneven ones that fill the stream."""
    parts = np.random.default_rng(0).exponential(size=work.sequences) + 0.1
    borders = np.round(np.cumsum(parts) / parts.sum() * work.T)
    return np.concatenate([[0], borders]).astype(np.int32)


def inputs(work: Work, seed: int) -> tuple[Any, ...]:
    """query, key, value, log decay, initial state, borders, and the output's cotangent."""
    call, keys = work.call, jax.random.split(jax.random.key(seed), 6)
    tokens = (call.batch, call.tokens, call.heads)

    def normal(key: jax.Array, *shape: int, dtype: Any = call.dtype) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)

    decay = None
    if work.decay == "constant":
        decay = jnp.broadcast_to(jnp.log(1 - 2.0 ** (-5.0 - jnp.arange(work.H))), (call.sequences, work.H))
    elif work.decay != "none":
        gate = jax.nn.log_sigmoid(jax.random.normal(keys[3], tokens + ((work.K,) if work.decay == "key" else ())))
        decay = gate * {"sixteenth": 1 / 16, "plain": 1.0, "strong": 30.0}[work.gate]
    state = normal(keys[4], call.sequences, work.H, work.K, work.V, dtype=jnp.float32) if work.state else None
    borders = jnp.asarray(lengths(work)) if work.sequences else None
    query, key = normal(keys[0], *tokens, work.K), normal(keys[1], *tokens, work.K)
    return query, key, normal(keys[2], *tokens, work.V), decay, state, borders, normal(keys[5], *tokens, work.V)


def program(work: Work, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
    def forward(query: Any, key: Any, value: Any, decay: Any, state: Any, borders: Any, doutput: Any) -> Any:
        return run(call, query, key, value, decay, None, state, borders)

    def both(query: Any, key: Any, value: Any, decay: Any, state: Any, borders: Any, doutput: Any) -> Any:
        def output(*differentiated: Any) -> Any:
            gate = differentiated[3] if work.learn_gate else decay
            return run(call, *differentiated[:3], gate, None, state, borders)[0]

        result, pull = jax.vjp(output, query, key, value, decay)
        return result, pull(doutput)

    return both if work.backward else forward


def errors(work: Work, arrays: tuple[Any, ...], results: Any) -> list[float]:
    """Relative errors of the results' first row and first two heads against XLA's in float32."""
    rows, heads = (1, min(2, work.H)) if not work.sequences else (work.B, min(2, work.H))
    call = replace(work.call, batch=rows, heads=heads, dtype=np.dtype(np.float32))
    if not work.sequences:
        call = replace(call, sequences=rows)

    def cut(x: Any) -> Any:
        if x is None or x.ndim == 1:
            return x
        state = (work.call.sequences, work.H, work.K, work.V)
        head = 1 if x.ndim == 2 or x.shape == state else 2
        x = x[: call.sequences if head == 1 else rows]
        return jax.lax.slice_in_dim(x, 0, heads, axis=head)

    small = [cut(x) for x in arrays]
    small = [x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float32) for x in small]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(program(work, xla.run, call))(*small)
    found = []
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        a = cut(a).astype(jnp.float32)
        found.append(float(jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)))
    return found


def clock(
    function: Callable[..., Any], sets: list[tuple[Any, ...]], batches: int = 9, seconds: float = 0.02
) -> tuple[float, float]:
    """Median milliseconds of a call and the distance of the quartiles, over batches of calls on rotating inputs."""
    jax.block_until_ready(function(*sets[0]))
    start = time.perf_counter()
    jax.block_until_ready(function(*sets[-1]))
    calls = max(4, min(200, int(seconds / (time.perf_counter() - start))))
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for i in range(calls):
            result = function(*sets[i % len(sets)])
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls * 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    sets = [inputs(work, seed) for seed in range(2)]
    function = jax.jit(program(work, triton_gpu.run, work.call))
    start = time.perf_counter()
    compiled = function.lower(*sets[0]).compile()
    compile_s = time.perf_counter() - start
    if work.state:
        # donated, so that the state is updated in place
        step = jax.jit(program(work, triton_gpu.run, work.call), donate_argnums=4)
        median, spread = clock_in_place(step, sets[0])
    else:
        median, spread = clock(function, sets)
    results = function(*sets[0])
    moved = sum(x.nbytes for x in jax.tree.leaves((sets[0] if work.backward else sets[0][:6], results)))
    found = errors(work, sets[0], results)
    bound = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}[work.dtype]
    if not max(found) < bound:
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


def clock_in_place(step: Callable[..., Any], arrays: tuple[Any, ...]) -> tuple[float, float]:
    query, key, value, decay, state, borders, doutput = arrays
    state = state + 0
    times = []
    for batch in range(10):
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(200):
            _, state = step(query, key, value, decay, state, borders, doutput)
        jax.block_until_ready(state)
        if batch:
            times.append((time.perf_counter() - start) / 200 * 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 2 GiB."""
    x = jnp.zeros(1 << 29, jnp.float32) + 1
    median, _ = clock(jax.jit(lambda x: x + 1), [(x,)])
    return 2 * x.nbytes / median * 1e3


def launch_overhead() -> dict[str, float]:
    """Microseconds a call under `jit` of one kernel with next to no work, and of the least XLA can be asked for."""
    work = Work("tiny", decay="none", B=1, T=16, H=1, K=16, V=16)
    arrays = inputs(work, 0)
    kernel, _ = clock(jax.jit(program(work, triton_gpu.run, work.call)), [arrays])
    add, _ = clock(jax.jit(lambda x: x + 1), [arrays[:1]])
    return {"triton": round(kernel * 1e3, 1), "xla": round(add * 1e3, 1)}


def draw(report: dict[str, Any]) -> str:
    """The rows with a bar, as a picture."""
    rows = [row for row in report["rows"] if row.get("bar_ms")]
    names = {"this library": "ms", "fla 0.6.0": "fla_ms", "memory floor": "floor_ms"}
    series = {name: [row[key] for row in rows] for name, key in names.items()}
    size = (640, 90 + 36 * len(rows))
    title = "Gated linear recurrence, one H200"
    return _drawing.bars(title, "ms", [row["name"] for row in rows], series, flat=True, size=size)


def fla_times() -> dict[str, float]:
    """flash-linear-attention on the same shapes, by CUDA events, where it and PyTorch are installed."""
    import torch
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla
    from triton.testing import do_bench

    def make(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    B, T, H, K = 8, 4096, 16, 128
    q, k, v = (make(B, T, H, K) for _ in range(3))
    do = torch.randn_like(v)
    key_gate = (torch.nn.functional.logsigmoid(make(B, T, H, K, dtype=torch.float32)) / 16).detach().requires_grad_()
    head_gate = (torch.nn.functional.logsigmoid(make(B, T, H, dtype=torch.float32)) / 16).detach().requires_grad_()
    found = {}
    for name, function, gate in (("gla", chunk_gla, key_gate), ("simple_gla", chunk_simple_gla, head_gate)):
        found[name] = do_bench(lambda f=function, g=gate: f(q, k, v, g), return_mode="median")
        found[f"{name}-backward"] = do_bench(
            lambda f=function, g=gate: f(q, k, v, g)[0].backward(do), return_mode="median"
        )
    return found


def run() -> list[Row]:
    """For `python -m benchmarks`: the rows with a bar, as ratios to fla's time where there is one, else to the bar."""
    if _launch.capability() is None or _launch.unavailable():
        return []
    bandwidth, rows = copy_bandwidth(), []
    for work in WORKS:
        if work.bar is not None:
            row, base = measure(work, bandwidth), work.fla or work.bar
            group = "recurrence on Triton, against fla 0.6.0 as measured on one H200"
            rows.append(Row(group, work.name, row["ms"], row["spread_ms"], row["ms"] / base, work.bar / base))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="row", help="which rows, all if none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--fla", action="store_true", help="time flash-linear-attention in the same run")
    arguments = parser.parse_args()
    import jax_triton
    import triton

    bandwidth = copy_bandwidth()
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": triton.__version__,
        "jax_triton": jax_triton.__version__,
        "copy_bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "launch_us": launch_overhead(),
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
    if arguments.fla:
        report["fla_ms"] = fla_times()
        print(report["fla_ms"])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
