"""The clock of the benchmarks on one NVIDIA GPU, and how their rows are printed and kept."""

import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

RESULTS = Path(__file__).parents[1] / "results"
DIRECTIONS = ("forward", "forward+backward")
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Rows of one results file.

    Attributes:
        works: What is timed, each with a `name`.
        measure: The rows of a work, given the bytes that a copy moves in a second.
        count: A row of what the work's program does as compiled for an H200, which needs no GPU, if there is such.
    """

    works: Sequence[Any]
    measure: Callable[[Any, float], Sequence[Row]]
    count: Callable[[Any], Row] | None = None


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


def timed(name: str, milliseconds: tuple[float, float], bar: float | None = None) -> Row:
    """A row of a median and its spread, and whether the time that was promised of one H200 is met."""
    median, spread = (round(each, 4) for each in milliseconds)
    return {
        "name": name,
        "ms": median,
        "spread_ms": spread,
        "bar_ms": bar,
        "met": None if bar is None else median <= bar,
    }


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """The norm of the difference by that of what is expected, in float32."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm((actual - expected).ravel()) / jnp.maximum(jnp.linalg.norm(expected.ravel()), 1e-30))


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for name in ("triton", "jax-triton"):
        found[name.replace("-", "_")] = metadata.version(name)
    return found


def joined(rows: Sequence[Row], more: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """`rows` with what `more` has of the same name and direction, in the order of `names`.

    >>> joined([{"name": "b", "ms": 1}, {"name": "old"}], [{"name": "a"}, {"name": "b", "ms": 2}], ["a", "b"])
    [{'name': 'a'}, {'name': 'b', 'ms': 2}]
    """
    found: dict[tuple[str, str], Row] = {}
    for row in (*rows, *more):
        key = row["name"], row.get("direction", "")
        found[key] = found.get(key, {}) | row
    order = {name: number for number, name in enumerate(names)}
    # rows of names that are no more are left out; a stable sort leaves a work's rows in the order of its directions
    return sorted((row for row in found.values() if row["name"] in order), key=lambda row: order[row["name"]])


def measured(part: Part, names: Sequence[str], file: Path, until: float) -> bool:
    """Times the works of these names, or all: prints each row and writes the file after it.

    Rows that were not measured this time stay in the file as they are. Returns whether every work was: one may fail,
    and those are left that `until`, a time of `time.monotonic`, leaves no time for.
    """
    complete = True
    bandwidth = copy_bandwidth()
    head = versions() | {"copy_bandwidth_tb_s": round(bandwidth / 1e12, 3)}
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    chosen = [work for work in part.works if not names or work.name in names]
    for number, work in enumerate(chosen):
        if time.monotonic() > until:
            print("no time left for " + ", ".join(repr(each.name) for each in chosen[number:]), flush=True)
            return False
        try:
            new = part.measure(work, bandwidth)
        except Exception as error:
            print(f"FAILED {work.name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            complete = False
            continue
        for row in new:
            print(json.dumps(row), flush=True)
        today = {"date": datetime.date.today().isoformat()}
        rows = joined(rows, [row | today for row in new], [each.name for each in part.works])
        write(file, head | {"rows": rows})
    return complete


def counted(part: Part, names: Sequence[str], file: Path) -> None:
    """Writes what the works' programs do as compiled for an H200 that is not here; nothing is timed."""
    assert part.count is not None
    found: dict[str, Any] = {"jax": jax.__version__, "rows": []}
    for work in part.works:
        if not names or work.name in names:
            found["rows"].append(part.count(work))
            print(json.dumps(found["rows"][-1]), flush=True)
            write(file, found)


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
