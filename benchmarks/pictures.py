"""`python -m benchmarks.pictures`: draws the pictures that are committed, from the numbers that are committed.

`python -m benchmarks.page` makes docs/benchmarks.md and its pictures; the page says how.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks import beside_peers, linear_recurrence, time_for_a_byte

ROOT = Path(__file__).parent.parent
PICTURES: dict[str, Any] = {
    "docs/assets/beside_peers.svg": (
        ("linear_recurrence_h200.json", "delta_rule_h200.json", "flash_attention_h200.json"),
        beside_peers.draw,
    ),
    "docs/assets/time_for_a_byte.svg": ("time_for_a_byte.json", time_for_a_byte.draw),
    "benchmarks/results/linear_recurrence_by_length.svg": (
        "linear_recurrence_by_length.json",
        linear_recurrence.draw,
    ),
}


def drawn(path: str) -> str:
    """The picture that belongs at `path`."""
    source, draw = PICTURES[path]
    if isinstance(source, tuple):
        return draw({Path(each).stem: _read(each) for each in source})
    return draw(_read(source))


def _read(source: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / source).read_text())


if __name__ == "__main__":
    for path in PICTURES:
        (ROOT / path).write_text(drawn(path), encoding="utf-8")
        print(f"wrote {path}")
