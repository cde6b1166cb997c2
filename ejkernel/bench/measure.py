"""Times an op and its peers on one shape, measures their errors, and says why a candidate was left out."""

import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ejkernel._dispatch import _default_platform, explain
from ejkernel._ops import Op
from ejkernel.bench import exact
from ejkernel.bench.calls import Arrays, Shape, cotangent, flops, inputs, moved_bytes
from ejkernel.bench.peers import Peer
from ejkernel.bench.programs import Program, compiled, one_head
from ejkernel.bench.results import OURS, Row, line
from ejkernel.bench.timing import in_rounds, milliseconds, ratio, spread

SAMPLE_MS = 10.0  # a shorter call is repeated until a clock reading is about this long
MOST_CALLS = 200
GROUP_S = 8.0  # rounds are given up, down to three, to keep a group of candidates near this


@dataclass(frozen=True)
class Limits:
    """How many rounds are timed, and how long a call may take."""

    rounds: int = 11
    call_s: float = 5.0


def measure(
    op: Op, shape: Shape, direction: str, peers: Sequence[Peer], before: Sequence[Row], limits: Limits
) -> list[Row]:
    """A row for the op and each of its peers; rows `before` tell which calls would take too long."""
    gradient = direction != "forward"
    arrays = inputs(op, shape)
    upstream = cotangent(shape) if gradient else None
    builders = {OURS: lambda: compiled(op.output, arrays, upstream)}
    builders |= {peer.name: functools.partial(peer.program, op, arrays, upstream) for peer in peers}
    rows: dict[str, Row] = {}
    programs: dict[str, Program | None] = {}
    expected = _Expected(op, arrays, upstream, shape)
    for who, build in builders.items():
        row = Row(op.name, who, "", direction, shape.dtype, shape.batch, shape.tokens, shape.heads, shape.dim)
        if who == OURS:
            row = replace(row, implementation=_implementation(op, arrays))
        row = replace(row, left_out=_reason_to_skip(row, op, before, limits))
        if row.left_out is None:
            row, programs[who] = _prepared(row, build, expected)
        rows[who] = row
    ready = {who: each for who, each in programs.items() if each is not None}
    gradients = arrays if gradient else {}
    moved = moved_bytes(arrays, upstream, gradients, arrays["x" if op.core == "convolution" else "value"])
    operations = flops(op, shape, gradient)
    for who, times in _timed(ready, limits).items():
        rows[who] = replace(rows[who], bytes=moved, flops=operations, **times)
    return list(rows.values())


def _implementation(op: Op, arrays: Arrays) -> str:
    chosen = explain(lambda: op.output(**arrays)).chosen
    return chosen.get(_default_platform(), chosen.get("default", ""))


def _reason_to_skip(row: Row, op: Op, before: Sequence[Row], limits: Limits) -> str | None:
    """Why not to run it, if the same call at fewer tokens predicts too long a time or too much memory."""
    kin = ("op", "who", "direction", "dtype", "batch", "heads", "dim")
    shorter = [each for each in before if all(getattr(each, name) == getattr(row, name) for name in kin)]
    shorter = [each for each in shorter if each.tokens < row.tokens]
    if not shorter:
        return None
    last = shorter[-1]
    if last.left_out is not None:
        return f"left out at {last.tokens} tokens already: {last.left_out.split(' already: ')[-1]}"
    if last.median_ms is not None:
        seconds = last.median_ms / 1e3 * (row.tokens / last.tokens) ** (2 if op.core == "softmax" else 1)
        if seconds > limits.call_s:
            return f"would take about {seconds:.2g} s a call, from {last.tokens} tokens (--limit {limits.call_s:g})"
    sizes = [(each.tokens, each.temporary_bytes) for each in shorter if each.temporary_bytes]
    free = _memory()
    if len(sizes) > 1 and free is not None:
        # if it grows as before; compiling a program that does not fit takes long on a GPU, and prints many errors
        (tokens, size), (longer, larger) = sizes[-2:]
        growth = math.log(larger / size) / math.log(longer / tokens)
        needed = larger * (row.tokens / longer) ** growth
        if needed > free:
            return f"would need about {needed / 2**30:.3g} GiB beside its arrays, and {free / 2**30:.3g} GiB are free"
    return None


def _prepared(row: Row, build: Callable[[], Program], expected: "_Expected") -> tuple[Row, Program | None]:
    """The row of a program that is compiled, compared with the free memory, run once and checked; and the program."""
    try:
        program = build()
        row = replace(row, compile_s=program.compile_s, temporary_bytes=program.temporary_bytes)
        needed, free = program.temporary_bytes or 0, _memory()
        if free is not None and needed > free:
            sizes = f"needs {needed / 2**30:.3g} GiB beside its arrays, and {free / 2**30:.3g} GiB are free"
            return replace(row, left_out=sizes), None
        results = program.call()
        program.wait(results)
        errors = expected.errors(program, results)
    except Exception as error:  # whatever a peer does wrong is a line of the report, not its end
        words = str(error).strip().splitlines() or [""]
        reason = line(f"{type(error).__name__}: {words[0]}")[:200]
        if "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower():
            # the machine's fault, and a longer call need not be tried
            return replace(row, left_out=reason), None
        return replace(row, failed=reason), None
    if errors and not all(math.isfinite(each) for each in errors.values()):
        return replace(row, failed="its results are not finite"), None
    return replace(row, errors=errors), program


class _Expected:
    """The float64 results, computed at the first use and then shared by all candidates."""

    def __init__(self, op: Op, arrays: Arrays, upstream: jax.Array | None, shape: Shape) -> None:
        self.op, self.arrays, self.upstream, self.shape = op, arrays, upstream, shape
        self.head = shape.heads - 1
        self.results: dict[str, np.ndarray] | None = None

    def errors(self, program: Program, results: Any) -> dict[str, float] | None:
        if self.shape.tokens > exact.MAX_TOKENS:
            return None
        if self.results is None:
            arrays = one_head(self.arrays, self.head)
            upstream = None if self.upstream is None else one_head({"output": self.upstream}, self.head)["output"]
            self.results = exact.of_head(self.op, arrays, self.head, self.shape.heads, upstream)
        return exact.errors(program.read(results, self.head), self.results)


def _timed(programs: Mapping[str, Program], limits: Limits) -> dict[str, dict[str, Any]]:
    """The fields of a row that are about time."""
    if not programs:
        return {}
    calls, clocks, round_ms = {}, {}, 0.0
    for who, program in programs.items():
        # the first call since it was compiled and checked may take many times as long as the next
        once = min(milliseconds(program.call, program.wait) for _ in range(2))
        if once < SAMPLE_MS:
            # one by one, short calls look longer than they are in a row
            once = _mean_ms(program, 10)
        calls[who] = max(1, min(MOST_CALLS, round(SAMPLE_MS / max(once, 1e-3))))
        clocks[who] = functools.partial(_mean_ms, program, calls[who])
        round_ms += once * calls[who]
    rounds = min(limits.rounds, max(3, int(GROUP_S * 1e3 / max(round_ms, 1e-3))))
    times = in_rounds(clocks, rounds)
    base = times.get(OURS)
    return {
        who: {
            "median_ms": statistics.median(taken),
            "spread_ms": spread(taken),
            "ratio": None if base is None else ratio(taken, base),
            "rounds": rounds,
            "calls": calls[who],
        }
        for who, taken in times.items()
    }


def _mean_ms(program: Program, count: int) -> float:
    """Mean milliseconds of `count` calls: queued on a GPU, one by one on a CPU, where they would run in parallel."""
    on_cpu = jax.default_backend() == "cpu"

    def calls() -> Any:
        for _ in range(count - 1):
            results = program.call()
            if on_cpu:
                program.wait(results)
        return program.call()

    return milliseconds(calls, program.wait) / count


def _memory() -> float | None:
    """Bytes that a call may take: what the device says it has, or half of this machine's."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    except (AttributeError, ValueError, OSError):
        return None
