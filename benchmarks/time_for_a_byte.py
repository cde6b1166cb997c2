"""What one more byte costs the demo's model, against the same with softmax attention: the picture of the first page.

`python -m benchmarks time_for_a_byte` measures and keeps the numbers.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.timing import Row
from examples.demo import generation, report
from examples.demo.__main__ import CONTEXTS
from examples.demo.training import Settings, build

NUMBERS = Path(__file__).parent / "results" / "time_for_a_byte.json"


def run() -> list[Row]:
    """Ratios are to softmax attention with two products; what a model has learnt makes no difference to its time."""
    settings = Settings()
    _, writers = generation.generate(settings, build(settings)[1], generation.prompt(settings), CONTEXTS)
    linear, softmax = generation.costs(writers, generation.softmax(settings, CONTEXTS), rounds=41)
    found = {
        "context": CONTEXTS,
        "linear_ms": [float(f"{each.milliseconds:.3g}") for each in linear],
        "softmax_ms": [float(f"{each.milliseconds:.3g}") for each in softmax],
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items())
    NUMBERS.write_text(f"{{\n{lines}\n}}\n")
    rows = []
    for mine, its in zip(linear, softmax, strict=True):
        group = f"a byte after {mine.context}"
        rows.append(Row(group, "softmax attention", its.milliseconds, 0.0, 1.0))
        rows.append(Row(group, "gated linear attention", mine.milliseconds, 0.0, mine.milliseconds / its.milliseconds))
    return rows


def draw(found: dict[str, Any]) -> str:
    """What `run` kept, as a picture."""
    linear, softmax = (
        [generation.Cost(at, ms, 0) for at, ms in zip(found["context"], found[name], strict=True)]
        for name in ("linear_ms", "softmax_ms")
    )
    return report.cost_plot("Time for a byte", "milliseconds", linear, softmax, lambda cost: cost.milliseconds)
