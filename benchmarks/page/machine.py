"""All that was measured on one device, and how to find things in it."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ejkernel._ops import OPS
from ejkernel.bench.results import OURS, Report, Row

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Machine:
    """All that was measured on one device. Times are compared in the dtype that has most rows."""

    reports: Sequence[Report]
    slug: str

    @property
    def name(self) -> str:
        return self.reports[0].device

    @cached_property
    def rows(self) -> list[Row]:
        return [row for report in self.reports for row in report.rows]

    @cached_property
    def main(self) -> list[Row]:
        """The rows of one dtype and size, the one that has most."""
        kind = Counter((row.dtype, row.sizes) for row in self.rows).most_common(1)[0][0]
        return [row for row in self.rows if (row.dtype, row.sizes) == kind]

    @property
    def dtype(self) -> str:
        return self.main[0].dtype

    @property
    def sizes(self) -> str:
        return self.main[0].sizes

    @property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(row.op for row in self.rows))

    @property
    def lengths(self) -> list[int]:
        return sorted({row.tokens for row in self.main})

    @staticmethod
    def is_softmax(op: str) -> bool:
        return op in OPS and OPS[op].core == "softmax"

    def peers(self, op: str) -> list[str]:
        return list(dict.fromkeys(row.who for row in self.rows if row.op == op and row.who != OURS))

    def row(self, op: str, who: str, direction: str, tokens: int) -> Row | None:
        wanted = (op, who, direction, tokens)
        return next((row for row in self.main if (row.op, row.who, row.direction, row.tokens) == wanted), None)

    def curve(self, op: str, who: str, direction: str) -> Curve:
        """Milliseconds by tokens."""
        rows = (self.row(op, who, direction, tokens) for tokens in self.lengths)
        return [(row.tokens, row.median_ms) for row in rows if row is not None and row.median_ms]

    def fastest_softmax(self, direction: str) -> Curve:
        best: dict[float, float] = {}
        for op in filter(self.is_softmax, self.ops):
            for who in (OURS, *self.peers(op)):
                for tokens, taken in self.curve(op, who, direction):
                    best[tokens] = min(taken, best.get(tokens, math.inf))
        return sorted(best.items())

    def crossing(self) -> bool:
        """Whether both softmax attention and linear ops were timed."""
        return any(map(self.is_softmax, self.ops)) and not all(map(self.is_softmax, self.ops))

    def common_length(self) -> int | None:
        """The longest at which at least three quarters of our calls have been timed."""
        timed = {(row.op, row.direction, row.tokens) for row in self.main if row.who == OURS and row.median_ms}
        calls = {call[:2] for call in timed}
        counts = Counter(tokens for _, _, tokens in timed)
        return max((tokens for tokens, count in counts.items() if count >= 0.75 * len(calls)), default=None)

    @cached_property
    def checked(self) -> dict[str, int]:
        """By dtype, the longest length that errors are known at; the same for all dtypes if they have one in common."""
        known: dict[str, set[int]] = {}
        for row in self.rows:
            if row.errors:
                known.setdefault(row.dtype, set()).add(row.tokens)
        common = set.intersection(*known.values()) if known else set()
        return {dtype: max(common or lengths) for dtype, lengths in known.items()}

    def errors(self, op: str, who: str, dtype: str) -> tuple[float | None, float | None] | None:
        """Of the output, and of the worst gradient."""
        tokens = self.checked.get(dtype)
        found: dict[str, float] = {}
        for row in self.rows:
            if (row.op, row.who, row.dtype, row.tokens) == (op, who, dtype, tokens):
                found |= row.errors or {}
        output = found.pop("output", None)
        return None if output is None and not found else (output, max(found.values(), default=None))


def machines(reports: Sequence[Report]) -> list[Machine]:
    """The reports by device, those without rows left out."""
    by_device: dict[str, list[Report]] = {}
    for report in reports:
        if report.rows:
            by_device.setdefault(report.device, []).append(report)
    found: list[Machine] = []
    for same in by_device.values():
        platform, taken = same[0].platform.lower(), {each.slug for each in found}
        names = itertools.chain([platform], (f"{platform}{number}" for number in itertools.count(2)))
        found.append(Machine(same, next(name for name in names if name not in taken)))
    return found
