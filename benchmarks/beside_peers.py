"""The picture of the start page: ops beside those of other libraries on one H200, from the rows that were measured."""

from collections.abc import Mapping
from typing import Any

from benchmarks import drawing

# how a row is called, the file that has it, and its name there
OPS = {
    "recurrent_gla": ("linear_recurrence_h200", "gla-backward"),
    "simple_gla": ("linear_recurrence_h200", "simple_gla-backward"),
    "retention": ("linear_recurrence_h200", "g_gamma-backward"),
    "delta_rule": ("delta_rule_h200", "delta-backward"),
    "kda": ("delta_rule_h200", "kda-backward"),
}
ATTENTION = {
    "flash_attention": "causal",
    "with a soft cap": "soft cap",
    "D192, Dv128": "D192 Dv128",
    "packed, ragged": "packed, ragged",
    "an odd length": "odd length",
    "a fixed bias": "bias without its gradient",
}


def draw(reports: Mapping[str, Any]) -> str:
    """Forward and backward, ms."""
    series: dict[str, list[float | None]] = {"ejkernel": [], "fla 0.6.0": [], "flex_attention": [], "cuDNN": []}

    def add(*times: float | None) -> None:
        for each, time in zip(series.values(), times, strict=True):
            each.append(time)

    for file, name in OPS.values():
        (row,) = (row for row in reports[file]["rows"] if row["name"] == name)
        add(row["ms"], row["fla_ms"], None, None)
    rows = [row for row in reports["flash_attention_h200"]["rows"] if row["direction"] == "forward+backward"]
    for name in ATTENTION.values():
        (row,) = (row for row in rows if row["name"] == name)
        add(row[f"{row['chosen']}_ms"], None, row.get("flex_ms"), row.get("cudnn_ms"))
    names, size = [*OPS, *ATTENTION], (640, 560)
    return drawing.bars("Forward and backward, one H200", "ms", names, series, flat=True, log=False, size=size)
