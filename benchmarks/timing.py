"""Rows of `python -m benchmarks`: candidates timed against a baseline, and the ratios that they promise."""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel.bench.timing import in_rounds, milliseconds, ratio, spread


@dataclass(frozen=True)
class Row:
    """One candidate's times, in milliseconds, and how they compare with its group's baseline."""

    group: str
    name: str
    median_ms: float
    spread_ms: float  # distance between the quartiles
    ratio: float  # the median over rounds of (this / baseline)
    bar: float | None = None  # the ratio promised

    @property
    def met(self) -> bool | None:
        return None if self.bar is None else self.ratio <= self.bar


def compare(
    group: str,
    candidates: Mapping[str, Callable[[], Any]],
    *,
    bars: Mapping[str, float] | None = None,
    rounds: int = 21,
    settled: bool = False,
) -> list[Row]:
    """Times each of `candidates` once a round, `rounds` times over; the first of them is the baseline.

    A candidate is a function without arguments that returns arrays; its first call, which compiles, is not timed.
    `bars` holds the ratio to the baseline that a candidate promises to stay within. If `settled`, each is called once
    untimed before it is timed: what the one before it leaves to be freed, gigabytes perhaps, is not its own time.
    """
    bars = bars or {}
    if unknown := set(bars) - set(candidates):
        raise ValueError(f"bars: got {sorted(unknown)}; expected some of {list(candidates)}")
    for function in candidates.values():
        milliseconds(function)
    clock = _settled if settled else milliseconds
    clocks = {name: functools.partial(clock, function) for name, function in candidates.items()}
    times = in_rounds(clocks, rounds)
    base = times[next(iter(candidates))]
    return [
        Row(group, name, statistics.median(each), spread(each), ratio(each, base), bars.get(name))
        for name, each in times.items()
    ]


def _settled(function: Callable[[], Any]) -> float:
    milliseconds(function)
    return milliseconds(function)


def table(rows: Iterable[Row]) -> str:
    """The rows as text, a block a group.

    >>> print(table([Row("add", "g + 1", 2.0, 0.1, 1.0), Row("add", "g + g", 3.0, 0.2, 1.5, bar=1.2)]))
    add                                     median ms   spread    ratio      bar
      g + 1                                      2.00     0.10     1.00
      g + g                                      3.00     0.20     1.50     1.20  MISSED
    """
    lines: list[str] = []
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            lines.append(f"{group:<38} {'median ms':>10} {'spread':>8} {'ratio':>8} {'bar':>8}")
        line = f"  {row.name:<36} {row.median_ms:>10.2f} {row.spread_ms:>8.2f} {row.ratio:>8.2f}"
        if row.bar is not None:
            line += f" {row.bar:>8.2f}  {'ok' if row.met else 'MISSED'}"
        lines.append(line)
    return "\n".join(lines)
