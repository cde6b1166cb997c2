"""The rows of a run of `ejkernel bench`, and how they are written as JSON: whole or not at all."""

import datetime
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "ejkernel bench, version 1"
OURS = "ejkernel"
LONGEST = 1000  # characters of a text


@dataclass(frozen=True)
class Row:
    """One call of one candidate. What was not measured is `None`; if nothing was, `left_out` or `failed` says why.

    `spread_ms` is the distance between the quartiles; `ratio` the median over rounds of this time over ours;
    `bytes` what must move at least; `errors` the relative norms of the errors of output and gradients.
    """

    op: str
    who: str
    implementation: str
    direction: str
    dtype: str
    batch: int
    tokens: int
    heads: int
    dim: int
    bytes: int | None = None
    flops: int | None = None
    median_ms: float | None = None
    spread_ms: float | None = None
    ratio: float | None = None
    rounds: int | None = None
    calls: int | None = None
    compile_s: float | None = None
    temporary_bytes: int | None = None
    errors: dict[str, float] | None = None
    left_out: str | None = None
    failed: str | None = None

    @property
    def error(self) -> float | None:
        """The largest of the errors."""
        return max(self.errors.values()) if self.errors else None

    @property
    def sizes(self) -> str:
        return f"B{self.batch} H{self.heads} K{self.dim} V{self.dim}"


@dataclass
class Report:
    """A run: the machine, the versions, and the rows."""

    device: str
    platform: str
    versions: dict[str, str]
    date: str
    copy_bytes_per_s: float
    flops_per_s: dict[str, float]
    peers_missing: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    rows: list[Row] = field(default_factory=list)

    def shares(self, row: Row) -> tuple[float | None, float | None]:
        """The shares of the machine's bytes and operations a second that a row reaches."""
        if row.median_ms is None or row.bytes is None or row.flops is None:
            return None, None
        seconds, rate = row.median_ms / 1e3, self.flops_per_s.get(row.dtype)
        return row.bytes / seconds / self.copy_bytes_per_s, row.flops / seconds / rate if rate else None


def empty_report(versions: dict[str, str], copy_bytes_per_s: float, flops_per_s: dict[str, float]) -> Report:
    """An empty report of this machine and day."""
    import jax

    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else f"{_processor()}, {os.cpu_count()} cores"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Report(line(name), device.platform, versions, today, copy_bytes_per_s, flops_per_s)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "CPU"


def line(text: str) -> str:
    """`text` on one line: what cannot be printed becomes a blank, and what is too long is cut."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(printable.split())[:LONGEST] or "-"


def dumps(report: Report) -> str:
    """JSON with a row a line, and numbers to four digits."""
    head = {"format": FORMAT, **{name: value for name, value in asdict(report).items() if name != "rows"}}
    rows = [{name: value for name, value in asdict(row).items() if value is not None} for row in report.rows]
    text = json.dumps(_rounded(head), indent=2).removesuffix("\n}")
    lines = ",\n    ".join(json.dumps(_rounded(row)) for row in rows)
    return f'{text},\n  "rows": [\n    {lines}\n  ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def check_writable(path: Path) -> None:
    """Raises `OSError` if `write` could not; before hours of measuring rather than after."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; expected a file")
    if path.exists() and not path.is_file():
        return  # a pipe or a device, which opening would already use
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path}: may not be written")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror})") from None


def write(path: Path, text: str) -> None:
    """`path` holds what it held before until all of `text` is written."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
