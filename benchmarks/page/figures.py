"""The pictures of a page, and what is read off them."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import drawing
from benchmarks.page.document import Figure
from benchmarks.page.machine import Curve, Machine
from ejkernel._ops import OPS
from ejkernel.bench.calls import DIRECTIONS
from ejkernel.bench.results import OURS

SIZE = (336, 280)  # two beside each other in a column of text, one on a phone, neither scaled
NUMBERS = {name: number for number, name in enumerate((*OPS, "scan", "jax.nn"))}
WHO = {name: number for number, name in enumerate((OURS, "scan", "fla", "jax.nn", "cudnn"))}


def times(machine: Machine, direction: str) -> Iterator[Figure]:
    """Our ops on one axis of length, where linear and softmax attention cross."""
    curves = {op: machine.curve(op, OURS, direction) for op in machine.ops}
    yield from _by_length(machine, f"time-{_slug(direction)}", f"Time, {direction}", "ms", curves, NUMBERS)


def against_peers(machine: Machine, op: str) -> Iterator[Figure]:
    whole, broken = (
        {who: machine.curve(op, who, direction) for who in (OURS, *machine.peers(op))}
        for direction in reversed(DIRECTIONS)
    )
    yield from _by_length(machine, f"peers-{op.replace('_', '-')}", op, "ms", whole, WHO, broken)


def memory(machine: Machine, direction: str) -> Iterator[Figure]:
    """Our ops, and the peers that come with JAX on the op that asks most of them."""
    curves = {op: machine.megabytes(op, OURS, direction) for op in machine.ops}
    for who, op in (("scan", "recurrent_gla"), ("jax.nn", "flash_attention")):
        curves[who] = machine.megabytes(op, who, direction)
    yield from _by_length(
        machine, f"memory-{_slug(direction)}", f"Temporary memory, {direction}", "MB", curves, NUMBERS
    )


def errors(machine: Machine, dtypes: Sequence[str]) -> Iterator[Figure]:
    """Of our ops, by dtype."""
    for number, what in enumerate(("output", "gradients")):
        found = {op: [machine.errors(op, OURS, dtype) for dtype in dtypes] for op in machine.ops}
        series = {op: [each[number] if each else None for each in row] for op, row in found.items()}
        series = {op: row for op, row in series.items() if any(row)}
        if series:
            title = f"Error of the {what}"
            svg = drawing.bars(title, "relative", dtypes, series, size=SIZE, colours=NUMBERS)
            yield _named(machine, f"error-{what}", title, "relative", series, svg)


def _by_length(
    machine: Machine,
    name: str,
    title: str,
    unit: str,
    curves: dict[str, Curve],
    colours: dict[str, int],
    broken: dict[str, Curve] | None = None,
) -> Iterator[Figure]:
    """Nothing if there is nothing to draw."""
    curves = {each: points for each, points in curves.items() if points}
    broken = {each: points for each, points in (broken or {}).items() if points}
    if curves or broken:
        both_log = {"log_x": True, "log_y": True}
        svg = drawing.lines(title, "tokens", unit, curves, **both_log, size=SIZE, colours=colours, dashed=broken)
        yield _named(machine, name, title, unit, dict.fromkeys((*curves, *broken)), svg)


def _named(machine: Machine, name: str, title: str, unit: str, shown: Iterable[str], svg: str) -> Figure:
    return Figure(f"{machine.slug}-{name}", f"{title} on {machine.name}, {unit}: {', '.join(shown)}", svg)


def _slug(direction: str) -> str:
    return direction.replace("+", "-and-")


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
