"""The picture of the start page: ops beside those of other libraries on one H200, from the rows that were measured."""

from collections.abc import Mapping
from typing import Any

from benchmarks import drawing

# the file that has a row, and its name there
OPS = {
    "recurrent_gla, mild gates": "linear_recurrence_h200",
    "simple_gla": "linear_recurrence_h200",
    "retention": "linear_recurrence_h200",
    "delta_rule": "delta_rule_h200",
    "kda, mild gates": "delta_rule_h200",
}
ATTENTION = ("causal", "soft cap", "D192 Dv128", "packed, ragged", "odd length", "bias without its gradient")


def draw(reports: Mapping[str, Any]) -> str:
    """Forward and backward, ms."""
    series: dict[str, list[float | None]] = {"ejkernel": [], "fla 0.6.0": [], "flex_attention": [], "cuDNN": []}

    def add(*times: float | None) -> None:
        for each, time in zip(series.values(), times, strict=True):
            each.append(time)

    def row_of(file: str, name: str) -> Any:
        (row,) = (row for row in reports[file]["rows"] if (row["name"], row["direction"]) == (name, "forward+backward"))
        return row

    for name, file in OPS.items():
        row = row_of(file, name)
        add(row["ms"], row["fla_ms"], None, None)
    for name in ATTENTION:
        row = row_of("flash_attention_h200", name)
        add(row[f"{row['chosen']}_ms"], None, row.get("flex_ms"), row.get("cudnn_ms"))
    names, size = [*OPS, "flash_attention, causal", *ATTENTION[1:]], (640, 560)
    return drawing.bars("Forward and backward, one H200", "ms", names, series, flat=True, log=False, size=size)
