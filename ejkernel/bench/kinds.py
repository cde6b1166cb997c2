"""What a field of a results file may be, and how that is said when it is something else."""

import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

LONGEST = 1000  # letters of a text


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


DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("float32", "bfloat16", "float16")

# files are named after these two, so that nothing in them may lead to another folder
Name = Annotated[str, _matching(r"[a-z][a-z0-9_.]{0,39}", "a name of at most 40 of a-z, 0-9, _ and .")]
Platform = Annotated[str, _matching(r"[A-Za-z][A-Za-z0-9_]{0,19}", "a name of at most 20 letters, digits and _")]
Implementation = Annotated[str, _matching(r"[a-z0-9_]{0,40}", "a name of at most 40 of a-z, 0-9 and _, or nothing")]
Direction = Annotated[str, _one_of(*DIRECTIONS)]
Dtype = Annotated[str, _one_of(*DTYPES)]
Date = Annotated[str, Kind(_is_date, "a date as in 2026-01-31")]
Line = Annotated[
    str,
    Kind(
        lambda value: (
            isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= len(value) <= LONGEST
        ),
        f"a line of 1 to {LONGEST} printable letters",
    ),
]
Flag = Annotated[bool, Kind(lambda value: isinstance(value, bool), "true or false")]
Size = Annotated[int, _whole(1, 2**53)]
Amount = Annotated[int, _whole(0, 2**63)]
# far beyond what any machine takes or does, and far from where arithmetic with it would overflow
Positive = Annotated[float, _number(1e-9, 1e30)]
NotNegative = Annotated[float, _number(0, 1e30)]


def line(text: str) -> str:
    """`text` as a `Line`: what cannot be printed, line breaks too, becomes a blank, and what is too long is cut."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(printable.split())[:LONGEST] or "-"


def misfits(kind: Any, value: Any, name: str) -> Iterator[str]:
    """What is wrong with the field `name`, of the type `kind`, if it has this value."""
    if get_origin(kind) is dict:
        key_kind, value_kind = get_args(kind)
        if not isinstance(value, dict):
            yield f"{name}: got {shown(value)}; expected an object"
            return
        for key, each in value.items():
            yield from misfits(key_kind, key, f"a name in {name}")
            yield from misfits(value_kind, each, f"{name}.{key}")
    elif get_origin(kind) is Annotated:
        check = get_args(kind)[1]
        if not check.fits(value):
            yield f"{name}: got {shown(value)}; expected {check.expected}"
    elif value is not None:  # all others are one of these or None
        yield from misfits(get_args(kind)[0], value, name)


def shown(value: Any) -> str:
    """For a message: short, on one line, and no deeper than its outermost brackets."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "null" if value is None else f"{value!r:.40}"
