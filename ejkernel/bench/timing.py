"""Times functions against each other in one run, so that other load on the machine affects all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def in_rounds(clocks: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each clock measures in each of `rounds`, by name."""
    order = list(clocks)
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        for name in order:
            times[name].append(clocks[name]())
        # each candidate follows another one next time, so none always inherits the same caches
        order.append(order.pop(0))
    return times


def milliseconds(function: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """How long a call of `function` takes until `wait` has its result."""
    start = time.perf_counter()
    wait(function())
    return (time.perf_counter() - start) * 1e3


def spread(times: Sequence[float]) -> float:
    """The distance between the quartiles.

    >>> spread([1.0, 2.0, 3.0]), spread([5.0])
    (1.0, 0.0)
    """
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of one candidate's time over another's."""
    return statistics.median(mine / its for mine, its in zip(times, base, strict=True))
