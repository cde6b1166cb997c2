"""What was measured, as rows, and its JSON: written whole or not at all, and checked when read."""

import datetime
import json
import os
import platform
import tempfile
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ejkernel.bench import kinds

FORMAT = "ejkernel bench, version 1"
OURS = "ejkernel"


class ResultsError(ValueError):
    """The file holds no results of `ejkernel bench`; the message says why."""


@dataclass(frozen=True)
class Row:
    """One call of one candidate. What was not measured is `None`; `left_out` or `failed` says why if that is all of it.

    `spread_ms` is the distance between the quartiles; `ratio` the median over rounds of this time over ours;
    `bytes` what must move at least; `errors` the relative norms of the errors of output and gradients.
    """

    op: kinds.Name
    who: kinds.Name
    implementation: kinds.Implementation
    direction: kinds.Direction
    dtype: kinds.Dtype
    batch: kinds.Size
    tokens: kinds.Size
    heads: kinds.Size
    dim: kinds.Size
    bytes: kinds.Amount | None = None
    flops: kinds.Amount | None = None
    median_ms: kinds.Positive | None = None
    spread_ms: kinds.NotNegative | None = None
    ratio: kinds.Positive | None = None
    rounds: kinds.Size | None = None
    calls: kinds.Size | None = None
    compile_s: kinds.NotNegative | None = None
    temporary_bytes: kinds.Amount | None = None
    errors: dict[kinds.Name, kinds.NotNegative] | None = None
    left_out: kinds.Line | None = None
    failed: kinds.Line | None = None

    @property
    def error(self) -> float | None:
        """The largest of the errors."""
        return max(self.errors.values()) if self.errors else None

    @property
    def sizes(self) -> str:
        return f"B{self.batch} H{self.heads} K{self.dim} V{self.dim}"


@dataclass
class Report:
    """A run: on what, with what, and its rows."""

    device: kinds.Line
    platform: kinds.Platform
    versions: dict[kinds.Line, kinds.Line]
    date: kinds.Date
    copy_bytes_per_s: kinds.Positive
    flops_per_s: dict[kinds.Dtype, kinds.Positive]
    peers_missing: dict[kinds.Name, kinds.Line] = field(default_factory=dict)
    complete: kinds.Flag = False
    rows: list[Row] = field(default_factory=list)

    def shares(self, row: Row) -> tuple[float | None, float | None]:
        """How much of the machine's bytes and operations a second a row makes use of."""
        if row.median_ms is None or row.bytes is None or row.flops is None:
            return None, None
        seconds, rate = row.median_ms / 1e3, self.flops_per_s.get(row.dtype)
        return row.bytes / seconds / self.copy_bytes_per_s, row.flops / seconds / rate if rate else None


def here(versions: dict[str, str], copy_bytes_per_s: float, flops_per_s: dict[str, float]) -> Report:
    """An empty report of this machine and moment."""
    import jax

    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else f"{processor()}, {os.cpu_count()} cores"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Report(kinds.line(name), device.platform, versions, today, copy_bytes_per_s, flops_per_s)


def processor() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "CPU"


def dumps(report: Report) -> str:
    """JSON with a row a line, and numbers to the digits that mean something."""
    head = {"format": FORMAT, **{name: value for name, value in asdict(report).items() if name != "rows"}}
    rows = [{name: value for name, value in asdict(row).items() if value is not None} for row in report.rows]
    text = json.dumps(_rounded(head), indent=2).removesuffix("\n}")
    lines = ",\n    ".join(json.dumps(_rounded(row)) for row in rows)
    return f'{text},\n  "rows": [\n    {lines}\n  ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


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
    report = _made(Report, head, where)
    report.rows = [_made(Row, row, f"{where}: row {number}") for number, row in enumerate(rows)]
    return report


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


def load(path: Path) -> Report:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error})") from None
    return loads(text, str(path))


def _made(kind: type[Any], values: Any, where: str) -> Any:
    """`kind(**values)`, each value held to what its field may be."""
    if not isinstance(values, dict):
        raise ResultsError(f"{where}: got {kinds.shown(values)}; expected an object")
    known = {each.name: each for each in fields(kind) if each.name != "rows"}
    if unknown := sorted(values.keys() - known.keys()):
        raise ResultsError(f"{where}: {kinds.shown(unknown[0])} is no field of it; expected {', '.join(known)}")
    for name, each in known.items():
        if name in values:
            for wrong in kinds.misfits(each.type, values[name], name):
                raise ResultsError(f"{where}: {wrong}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ResultsError(f"{where}: lacks {name}")
    return kind(**values)
