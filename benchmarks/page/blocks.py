"""Results as a page: what it says of each device, its tables and its pictures, all from the rows."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.page import figures
from benchmarks.page.document import Block, Figure, Heading, Paragraph, Points, Table, as_html, as_markdown
from benchmarks.page.machine import Machine, machines
from ejkernel.bench.calls import DIRECTIONS
from ejkernel.bench.results import OURS, Report, Row, line
from ejkernel.bench.results import write as write_file

SUFFIXES = (".html", ".md")


def write(path: Path, reports: Sequence[Report], sources: Sequence[Path]) -> None:
    """Writes the page to `path`; a Markdown page has its pictures in a folder of its name."""
    for each, text in files(path, reports, sources).items():
        each.parent.mkdir(exist_ok=True)
        write_file(each, text)


def files(path: Path, reports: Sequence[Report], sources: Sequence[Path]) -> dict[Path, str]:
    """What `write` writes."""
    blocks = list(_blocks(path, reports, sources))
    if path.suffix == ".html":
        return {path: as_html(blocks)}
    folder = path.with_suffix("")
    pictures = {folder / f"{each.name}.svg": each.svg for each in blocks if isinstance(each, Figure)}
    return {path: as_markdown(blocks, folder.name), **pictures}


def _blocks(path: Path, reports: Sequence[Report], sources: Sequence[Path]) -> Iterator[Block]:
    yield Heading(1, "Benchmarks")
    yield Paragraph(
        "Every op against other ways to compute the same, in one run. In each round every candidate is timed once, in "
        "changing order; a figure is the median over the rounds, a ratio the median of the rounds' ratios. Compiling "
        "is not timed; the call from Python is, of which a GPU's shortest times consist. Forward + backward is the "
        "output and the gradients of all inputs."
    )
    if sources:
        names = [each.as_posix() for each in sources]
        # a file's name may be no text
        command = line(shlex.join(["ejkernel", "bench", "--from", *names, "--plot", path.as_posix()]))
        yield Paragraph(
            f"This page is made from rows kept as JSON by `{command}`; `ejkernel bench --json FILE` measures such rows "
            "on your machine, `ejkernel bench --plot FILE.html` draws them."
        )
    for machine in machines(reports):
        yield from _of_machine(machine)


def _of_machine(machine: Machine) -> Iterator[Block]:
    yield Heading(2, machine.name)
    yield Paragraph(_measured_on(machine))
    yield Heading(3, "Time against length")
    for direction in DIRECTIONS:
        yield from figures.times(machine, direction)
    yield from _crossings(machine)
    yield from _peers(machine)
    yield from _machine_use(machine)
    yield Heading(3, "Memory against length")
    yield Paragraph("What a call takes beside its arguments and results; under 0.01 MB is drawn as 0.01.")
    for direction in DIRECTIONS:
        yield from figures.memory(machine, direction)
    yield from _errors(machine)
    yield from _not_run(machine)


def _measured_on(machine: Machine) -> str:
    report = machine.reports[0]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    dates = sorted({each.date for each in machine.reports})
    rates = {dtype: rate for each in machine.reports for dtype, rate in each.flops_per_s.items()}
    best = ", ".join(f"{_si(rate)}FLOP/s in {dtype}" for dtype, rate in rates.items())
    partly = "" if all(each.complete for each in machine.reports) else " The run was stopped before its end."
    return (
        f"{' and '.join(dates)}; {versions}. At best, a copy moves {_si(report.copy_bytes_per_s)}B/s and a matrix "
        f"product does {best}, measured in the same run. Sizes where nothing else is said: {machine.sizes}, "
        f"{machine.dtype}, causal.{partly}"
    )


def _si(value: float) -> str:
    power, letter = next((each for each in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= each[0]), (1.0, ""))
    return f"{value / power:.3g} {letter}"


def _crossings(machine: Machine) -> Iterator[Block]:
    softmax = {direction: machine.fastest_softmax(direction) for direction in DIRECTIONS}
    linear = [op for op in machine.ops if not machine.is_softmax(op)]
    if not linear or not any(softmax.values()):
        return
    yield Heading(3, "Where softmax attention is faster")
    yield Paragraph(
        "Against the fastest softmax attention measured at each length, ours or a peer's. Between measured lengths the "
        "crossing is read off the straight line in the picture."
    )
    rows = [
        [op, *(figures.crossing_words(machine.curve(op, OURS, each), softmax[each]) for each in DIRECTIONS)]
        for op in linear
    ]
    yield Table(["softmax is faster than", *DIRECTIONS], rows)


def _peers(machine: Machine) -> Iterator[Block]:
    pairs = [(op, who) for op in machine.ops for who in machine.peers(op)]
    if not pairs:
        return
    yield Heading(3, "Each op and its peers")
    yield Paragraph("Whole lines are forward + backward, broken ones forward.")
    for op in dict.fromkeys(op for op, _ in pairs):
        yield from figures.against_peers(machine, op)
    yield Paragraph(
        "How many times as long as ours a peer takes, forward / forward + backward, by tokens; below 1 it is faster."
    )
    yield Table(
        ["op", "peer", *map(str, machine.lengths)],
        [[op, who, *(_ratios(machine, op, who, tokens) for tokens in machine.lengths)] for op, who in pairs],
    )


def _ratios(machine: Machine, op: str, who: str, tokens: int) -> str:
    rows = [machine.row(op, who, direction, tokens) for direction in DIRECTIONS]
    return " / ".join("-" if row is None or row.ratio is None else _short(row.ratio, 2) for row in rows)


def _machine_use(machine: Machine) -> Iterator[Block]:
    tokens = machine.common_length()
    if tokens is None:
        return
    yield Heading(3, f"At {tokens} tokens")
    yield Paragraph(
        "`bytes` and `flops`: the share of the copy's and the matrix product's rate that is reached, counting every "
        "argument and result moved once, and the operations of the definition, nothing computed twice. What stays in a "
        "cache between calls can exceed the copy. `spread`: the distance between the quartiles. `MB beside`: memory "
        "beside arguments and results."
    )
    head = ["runs on", "ms (spread)", "bytes", "flops", "MB beside", "compile s"]
    for direction in DIRECTIONS:
        lines = []
        for op in machine.ops:
            row = machine.row(op, OURS, direction, tokens)
            if row is not None and row.median_ms is not None:
                shares = machine.report_of(row).shares(row)
                lines.append([op, row.implementation, *_figures(row, shares)])
        if lines:
            yield Table([direction, *head], lines)


def _figures(row: Row, shares: tuple[float | None, float | None]) -> list[str]:
    time = f"{_short(row.median_ms, 3)} ({_short(row.spread_ms, 2)})"
    used = ["-" if each is None else f"{each:.0%}" for each in shares]
    megabytes = None if row.temporary_bytes is None else row.temporary_bytes / 1e6
    return [time, *used, _short(megabytes, 3), _short(row.compile_s, 2)]


def _short(value: float | None, digits: int) -> str:
    """To so many digits, and never as a power of ten unless it is tiny."""
    return "-" if value is None else f"{float(f'{value:.{digits}g}'):g}"


def _errors(machine: Machine) -> Iterator[Block]:
    """By dtype, at the longest length that has been checked in each."""
    checked = machine.checked
    dtypes = [dtype for dtype in ("float32", "float16", "bfloat16") if dtype in checked]
    if not dtypes:
        return
    yield Heading(3, "Error by dtype")
    lengths = ", ".join(f"{dtype} at {checked[dtype]} tokens" for dtype in dtypes)
    if len(set(checked.values())) == 1:
        lengths = f"At {checked[dtypes[0]]} tokens"
    yield Paragraph(
        "The relative norm of the error of one head against float64, of the output / of the worst gradient. Inputs are "
        f"rounded to the dtype before, so this is the error of computing alone. {lengths}."
    )
    yield from figures.errors(machine, dtypes)
    lines = []
    for op in machine.ops:
        for who in (OURS, *machine.peers(op)):
            cells = [_error_cell(machine, op, who, dtype) for dtype in dtypes]
            if any(cell != "-" for cell in cells):
                lines.append([op, who, *cells])
    yield Table(["op", "by", *dtypes], lines)


def _error_cell(machine: Machine, op: str, who: str, dtype: str) -> str:
    found = machine.errors(op, who, dtype)
    return "-" if not found else " / ".join("-" if each is None else f"{each:.1e}" for each in found)


def _not_run(machine: Machine) -> Iterator[Block]:
    """Whoever was left out or failed, from which length on and why; each peer and reason once."""
    reasons: dict[tuple[str, str, str], list[Row]] = {}
    for row in machine.rows:
        if reason := row.failed or row.left_out:
            # the numbers in a reason differ from length to length
            kind = re.sub(r"[\d.e+]+", "#", reason.split(" already: ")[-1])
            who = row.who if row.dtype == machine.dtype else f"{row.who}, {row.dtype}"
            reasons.setdefault((who, row.direction, kind), []).append(row)
    lines = []
    for (who, direction, _), rows in reasons.items():
        first = min(rows, key=lambda row: row.tokens)
        ops = ", ".join(dict.fromkeys(row.op for row in rows))
        reason = first.failed or first.left_out
        lines.append(f"{who}, {direction}, from {first.tokens} tokens, for {ops}: {reason}")
    absent = {name: why for report in machine.reports for name, why in report.peers_missing.items()}
    lines += [f"{name}: {why}" for name, why in absent.items()]
    if lines:
        yield Heading(3, "Not run")
        yield Points(lines)
