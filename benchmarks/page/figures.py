"""The pictures of a page, and what is read off them."""

import itertools
import math
from collections.abc import Iterator

from benchmarks import drawing
from benchmarks.page.document import Figure
from benchmarks.page.machine import Curve, Machine
from ejkernel._ops import OPS
from ejkernel.bench.results import OURS

SIZE = (336, 280)  # two beside each other in a column of text, one on a phone, neither scaled
NUMBERS = {name: number for number, name in enumerate(OPS)}  # a colour for each op, the same in all pictures


def times(machine: Machine, direction: str) -> Iterator[Figure]:
    """Our ops on one axis of length; nothing if nothing was timed."""
    curves = {op: machine.curve(op, OURS, direction) for op in machine.ops}
    curves = {op: curve for op, curve in curves.items() if curve}
    if curves:
        title = f"Time, {direction}"
        svg = drawing.lines(title, "tokens", "ms", curves, log_x=True, log_y=True, size=SIZE, colours=NUMBERS)
        name = f"{machine.slug}-time-{direction.replace('+', '-and-')}"
        yield Figure(name, f"{title} on {machine.name}, ms: {', '.join(curves)}", svg)


def crossings(one: Curve, other: Curve) -> list[tuple[float, bool]]:
    """Where `one` and `other` change places, and whether `one` is the lower after it.

    Between lengths that both have, the logarithms are taken as straight lines.

    >>> crossings([(1, 4.0), (4, 8.0)], [(1, 2.0), (4, 16.0)])
    [(2.0, True)]
    """
    mine, its = dict(one), dict(other)
    shared = sorted(mine.keys() & its.keys())
    gaps = [(x, math.log(mine[x] / its[x])) for x in shared]
    found = []
    for (x, gap), (next_x, next_gap) in itertools.pairwise(gaps):
        if (gap > 0) != (next_gap > 0):
            part = gap / (gap - next_gap)
            found.append((x * (next_x / x) ** part, next_gap <= 0))
    return found


def crossing_words(linear: Curve, softmax: Curve) -> str:
    """At which lengths softmax is the faster of the two."""
    shared = sorted(dict(linear).keys() & dict(softmax).keys())
    if not shared:
        return "-"
    changes = crossings(linear, softmax)
    if not changes:
        faster = dict(softmax)[shared[0]] < dict(linear)[shared[0]]
        return f"at {'all' if faster else 'none'} of {shared[0]:g} to {shared[-1]:g}"
    words = [f"{'below' if now else 'above'} about {_two_digits(x)}" for x, now in changes]
    return ", ".join(words)


def _two_digits(x: float) -> str:
    unit = 10 ** max(math.floor(math.log10(x)) - 1, 0)
    return str(round(x / unit) * unit)
