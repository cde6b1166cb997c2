"""Reads results files of `ejkernel bench`; every field is checked, and an error names file, field and what fits."""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ejkernel.bench.calls import DIRECTIONS, DTYPES
from ejkernel.bench.results import FORMAT, LONGEST, Report, Row


class ResultsError(ValueError):
    """The file holds no results of `ejkernel bench`; the message says why."""


@dataclass(frozen=True)
class Kind:
    """A test for values, and its words."""

    fits: Callable[[Any], bool]
    expected: str


def _one_of(*choices: str) -> Kind:
    return Kind(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}")


def _matching(pattern: str, expected: str) -> Kind:
    return Kind(lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, expected)


def _whole(low: int, high: int) -> Kind:
    return Kind(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def _number(low: float, high: float) -> Kind:
    # an int may be too large for a float, and still be compared with one
    return Kind(
        lambda value: type(value) in (int, float) and low <= value <= high, f"a number from {low:g} to {high:g}"
    )


def _is_date(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


# files are named after these two, so that nothing in them may lead to another folder
NAME = _matching(r"[a-z][a-z0-9_.]{0,39}", "a name of at most 40 of a-z, 0-9, _ and .")
PLATFORM = _matching(r"[A-Za-z][A-Za-z0-9_]{0,19}", "a name of at most 20 letters, digits and _")
IMPLEMENTATION = _matching(r"[a-z0-9_]{0,40}", "a name of at most 40 of a-z, 0-9 and _, or nothing")
DIRECTION, DTYPE = _one_of(*DIRECTIONS), _one_of(*DTYPES)
DATE = Kind(_is_date, "a date as in 2026-01-31")
LINE = Kind(
    lambda value: isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= len(value) <= LONGEST,
    f"a line of 1 to {LONGEST} printable letters",
)
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
SIZE, AMOUNT = _whole(1, 2**53), _whole(0, 2**63)
# far beyond what any machine takes or does, and far from where arithmetic with it would overflow
POSITIVE, NOT_NEGATIVE = _number(1e-9, 1e30), _number(0, 1e30)

# what each field must be; a pair is an object, with the kinds of its names and of its values
KINDS: Mapping[str, Kind | tuple[Kind, Kind]] = {
    "device": LINE,
    "platform": PLATFORM,
    "versions": (LINE, LINE),
    "date": DATE,
    "copy_bytes_per_s": POSITIVE,
    "flops_per_s": (DTYPE, POSITIVE),
    "peers_missing": (NAME, LINE),
    "complete": FLAG,
    "op": NAME,
    "who": NAME,
    "implementation": IMPLEMENTATION,
    "direction": DIRECTION,
    "dtype": DTYPE,
    "batch": SIZE,
    "tokens": SIZE,
    "heads": SIZE,
    "dim": SIZE,
    "bytes": AMOUNT,
    "flops": AMOUNT,
    "median_ms": POSITIVE,
    "spread_ms": NOT_NEGATIVE,
    "ratio": POSITIVE,
    "rounds": SIZE,
    "calls": SIZE,
    "compile_s": NOT_NEGATIVE,
    "temporary_bytes": AMOUNT,
    "errors": (NAME, NOT_NEGATIVE),
    "left_out": LINE,
    "failed": LINE,
}


def load(path: Path) -> Report:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error})") from None
    return loads(text, str(path))


def loads(text: str, where: str = "results") -> Report:
    """The report in `text`, every field checked; `where` is named in errors."""
    try:
        head = json.loads(text)
    except ValueError as error:
        raise ResultsError(f"{where}: is no JSON, or only a part of it ({error})") from None
    except RecursionError:
        raise ResultsError(f"{where}: is not in the format {FORMAT!r}; its brackets are nested too deep") from None
    if not isinstance(head, dict) or head.pop("format", None) != FORMAT:
        raise ResultsError(f"{where}: is not in the format {FORMAT!r}")
    rows = head.pop("rows", None)
    if not isinstance(rows, list):
        raise ResultsError(f"{where}: has no rows")
    report = _checked(Report, head, where)
    report.rows = [_checked(Row, row, f"{where}: row {number}") for number, row in enumerate(rows)]
    return report


def _checked(kind: type[Any], values: Any, where: str) -> Any:
    """`kind(**values)`, each value checked."""
    if not isinstance(values, dict):
        raise ResultsError(f"{where}: got {_shown(values)}; expected an object")
    known = {each.name: each for each in fields(kind) if each.name != "rows"}
    if unknown := sorted(values.keys() - known.keys()):
        raise ResultsError(f"{where}: {_shown(unknown[0])} is no field of it; expected {', '.join(known)}")
    for name, each in known.items():
        if name in values:
            if not (values[name] is None and each.default is None):
                for wrong in _misfits(KINDS[name], values[name], name):
                    raise ResultsError(f"{where}: {wrong}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ResultsError(f"{where}: lacks {name}")
    return kind(**values)


def _misfits(kind: Kind | tuple[Kind, Kind], value: Any, name: str) -> Iterator[str]:
    """What is wrong with the field `name` if it has this value."""
    if isinstance(kind, Kind):
        if not kind.fits(value):
            yield f"{name}: got {_shown(value)}; expected {kind.expected}"
    elif not isinstance(value, dict):
        yield f"{name}: got {_shown(value)}; expected an object"
    else:
        for key, each in value.items():
            yield from _misfits(kind[0], key, f"a name in {name}")
            yield from _misfits(kind[1], each, f"{name}.{key}")


def _shown(value: Any) -> str:
    """For a message: short, on one line, and no deeper than its outermost brackets."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "null" if value is None else f"{value!r:.40}"
