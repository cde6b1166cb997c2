"""What the recurrences' benchmarks on one NVIDIA GPU do alike: their clock, their rows and their report."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Row
from ejkernel.kernels import _launch

ERRORS = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}  # the largest that a row may have, by its dtype


@dataclass(frozen=True)
class Work:
    """One line of the table. `bar` is the time promised on one H200, `fla` what flash-linear-attention 0.6.0 took."""

    name: str
    backward: bool = False
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
    def borders(self) -> jax.Array | None:
        """Of sequences of uneven lengths that fill the stream, if it is packed."""
        if not self.sequences:
            return None
        parts = np.random.default_rng(0).exponential(size=self.sequences) + 0.1
        borders = np.round(np.cumsum(parts) / parts.sum() * self.T)
        return jnp.asarray(np.concatenate([[0], borders]).astype(np.int32))


# of a work and the bytes a second that a copy moves, a row of the report
Measure = Callable[[Any, float], dict[str, Any]]


def clock(
    function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], batches: int = 9, seconds: float = 0.02
) -> tuple[float, float]:
    """Median milliseconds of a call and the distance of the quartiles, over batches of calls on rotating inputs.

    Batches of some `seconds`: a chip that multiplies for longer becomes hot, and slower by a few percent.
    """
    jax.block_until_ready(function(*sets[0]))
    start = time.perf_counter()
    jax.block_until_ready(function(*sets[-1]))
    calls = max(4, min(200, int(seconds / (time.perf_counter() - start))))
    return in_batches(lambda i: function(*sets[i % len(sets)]), calls, batches)


def in_batches(function: Callable[[int], Any], calls: int, batches: int = 9) -> tuple[float, float]:
    """The same by so many calls a batch, each of which is told its number.

    A time is what a batch of twice as many takes more: to start the first call and to wait for the last takes half a
    millisecond to one, which no call is to be charged with.
    """

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for i in range(calls):
            result = function(i)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    times = []
    for _ in range(batches):
        once, twice = seconds(calls), seconds(2 * calls)
        times.append((twice - once) / calls * 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 2 GiB."""
    x = jnp.zeros(1 << 29, jnp.float32) + 1
    median, _ = clock(jax.jit(lambda x: x + 1), [(x,)])
    return 2 * x.nbytes / median * 1e3


def relative_errors(results: Any, expected: Any, cut: Callable[[jax.Array], jax.Array]) -> list[float]:
    """Of each result, as far as it is `cut` out to be compared."""
    found = []
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        a = cut(a).astype(jnp.float32)
        found.append(float(jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)))
    return found


def measured(
    work: Work,
    bandwidth: float,
    function: jax.stages.Wrapped,
    sets: Sequence[tuple[Any, ...]],
    read: Any,
    errors: Callable[[Any], list[float]],
    timed: Callable[[], tuple[float, float]],
) -> dict[str, Any]:
    """A work's row.

    Args:
        work: What it is of.
        bandwidth: Bytes a second that a copy moves.
        function: The program, under `jit`.
        sets: Arguments for it, in turn.
        read: The arrays that must be read at least.
        errors: Those of the results of the first set.
        timed: Median milliseconds of a call and their spread.
    """
    start = time.perf_counter()
    compiled = function.lower(*sets[0]).compile()
    compile_s = time.perf_counter() - start
    median, spread = timed()
    results = function(*sets[0])
    moved = sum(x.nbytes for x in jax.tree.leaves((read, results)))
    found = errors(results)
    if not max(found) < ERRORS[work.dtype]:
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


def against_bars(what: str, works: Sequence[Work], measure: Measure) -> list[Row]:
    """For `python -m benchmarks`: the rows with a bar, as ratios to fla's time where there is one, else to the bar."""
    if _launch.capability() is None or _launch.unavailable():
        return []
    bandwidth, rows = copy_bandwidth(), []
    for work in works:
        if work.bar is not None:
            row, base = measure(work, bandwidth), work.fla or work.bar
            group = f"{what} on Triton, against fla 0.6.0 as measured on one H200"
            rows.append(Row(group, work.name, row["ms"], row["spread_ms"], row["ms"] / base, work.bar / base))
    return rows


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    found.add_argument("names", nargs="*", metavar="row", help="which rows, all if none")
    found.add_argument("--json", type=Path, metavar="FILE")
    return found


def report(
    arguments: argparse.Namespace,
    works: Sequence[Work],
    measure: Measure,
    facts: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """The rows asked for, printed and written as they come, after what they were measured with and other `facts`."""
    import jax_triton
    import triton

    bandwidth = copy_bandwidth()
    found = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": triton.__version__,
        "jax_triton": jax_triton.__version__,
        "copy_bandwidth_tb_s": round(bandwidth / 1e12, 3),
        **facts(),
        "rows": [],
    }
    for work in works:
        if not arguments.names or work.name in arguments.names:
            try:
                row = measure(work, bandwidth)
            except Exception as error:
                row = {"name": work.name, "failed": str(error)[:500]}
            found["rows"].append(row)
            print(row, flush=True)
            write(arguments, found)
    return found


def write(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def main(description: str | None, works: Sequence[Any], measure: Any, count: Callable[[Any], dict[str, Any]]) -> None:
    """The command of a benchmark that times its rows on a GPU or, without one, counts what is compiled for an H200."""
    given = parser(description)
    given.add_argument(
        "--described", action="store_true", help="compile for an H200 that is not here, and time nothing"
    )
    arguments = given.parse_args()
    if not arguments.described:
        report(arguments, works, measure)
        return
    found: dict[str, Any] = {"jax": jax.__version__, "rows": []}
    for work in works:
        if not arguments.names or work.name in arguments.names:
            found["rows"].append(count(work))
            print(json.dumps(found["rows"][-1]), flush=True)
    write(arguments, found)
