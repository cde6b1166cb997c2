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
    found = machines(reports)
    for machine in found:
        if machine.crossing():
            yield Paragraph(
                f"{machine.name}: how long our ops take against the number of tokens, and from which length on they "
                "are faster than softmax attention."
            )
            yield from _times(machine)
            yield from _crossings(machine)
    yield Heading(2, "How it was measured")
    yield Paragraph(
        "In each round every candidate is timed once, in changing order; a time is the median over the rounds, a ratio "
        "the median of the rounds' ratios. Compiling is not timed; the call from Python is, which is what a GPU's "
        "shortest times consist of. Forward + backward is the output and the gradients of all inputs."
    )
    if sources:
        names = [each.as_posix() for each in sources]
        # a file's name may be no text
        command = line(shlex.join(["python", "-m", "benchmarks.page", *names, "--plot", path.as_posix()]))
        yield Paragraph(
            "`ejkernel bench` measures on your machine, and `ejkernel bench --json FILE` keeps the rows. This page is "
            f"made from such rows by `{command}`."
        )
    for machine in found:
        yield Heading(2, machine.name)
        yield Paragraph(_measured_on(machine))
        if not machine.crossing():
            yield from _times(machine)
        yield from _peers(machine)
        yield from _table(machine)
        yield from _not_run(machine)


def _times(machine: Machine) -> Iterator[Block]:
    for direction in DIRECTIONS:
        yield from figures.times(machine, direction)


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
    yield Paragraph(
        "Softmax attention is the fastest that was measured at each length, ours or another library's. Between "
        "measured lengths, times are taken from the straight line in the picture."
    )
    rows = [
        [op, *(figures.crossing_words(machine.curve(op, OURS, each), softmax[each]) for each in DIRECTIONS)]
        for op in linear
    ]
    yield Table(["softmax is faster than", *DIRECTIONS], rows)


# the names of peers on all pages; in results files and on the command line they are shorter
PEERS = {"scan": "lax.scan", "jax.nn": "jax.nn, XLA", "cudnn": "jax.nn, cuDNN"}


def _peers(machine: Machine) -> Iterator[Block]:
    pairs = [(op, who) for op in machine.ops for who in machine.peers(op)]
    if not pairs:
        return
    yield Heading(3, f"Peers on {machine.name}")
    yield Paragraph(
        "A peer's time divided by ours, forward / forward + backward, by the number of tokens; above 1 ours is "
        "faster. lax.scan is a loop over tokens, jax.nn is jax.nn.dot_product_attention."
    )
    yield Table(
        ["op", "peer", *map(str, machine.lengths)],
        [
            [op, PEERS.get(who, who), *(_ratios(machine, op, who, tokens) for tokens in machine.lengths)]
            for op, who in pairs
        ],
    )


def _ratios(machine: Machine, op: str, who: str, tokens: int) -> str:
    rows = [machine.row(op, who, direction, tokens) for direction in DIRECTIONS]
    return " / ".join("-" if row is None or row.ratio is None else _short(row.ratio, 2) for row in rows)


def _table(machine: Machine) -> Iterator[Block]:
    tokens = machine.common_length()
    if tokens is None:
        return
    yield Heading(3, f"{tokens} tokens on {machine.name}")
    yield Paragraph(
        "Forward / forward + backward. `MB beside` is memory in addition to arguments and results. `error` is that of "
        "the output / of the worst gradient at the longest length that was checked: the norm of the difference from "
        "float64 divided by the norm."
    )
    lines = []
    for op in machine.ops:
        rows = [machine.row(op, OURS, direction, tokens) for direction in DIRECTIONS]
        known = [row for row in rows if row is not None and row.median_ms is not None]
        if known:
            times = " / ".join(_short(row and row.median_ms, 3) for row in rows)
            sizes = (row and row.temporary_bytes for row in rows)
            beside = " / ".join("-" if size is None else _short(size / 1e6, 3) for size in sizes)
            lines.append([op, known[0].implementation, times, beside, _error_cell(machine, op)])
    yield Table(["op", "runs on", "ms", "MB beside", "error"], lines)


def _short(value: float | None, digits: int) -> str:
    """To so many digits, and never as a power of ten unless it is tiny."""
    return "-" if value is None else f"{float(f'{value:.{digits}g}'):g}"


def _error_cell(machine: Machine, op: str) -> str:
    found = machine.errors(op, OURS, machine.dtype)
    return "-" if not found else " / ".join("-" if each is None else f"{each:.1e}" for each in found)


def _not_run(machine: Machine) -> Iterator[Block]:
    """Whoever was left out or failed, from which length on and why; each peer and reason once."""
    reasons: dict[tuple[str, str, str], list[Row]] = {}
    for row in machine.rows:
        if reason := row.failed or row.left_out:
            # the numbers in a reason differ from length to length
            kind = re.sub(r"[\d.e+]+", "#", reason.split(" already: ")[-1])
            kind = "memory" if "RESOURCE_EXHAUSTED" in kind else kind
            name = PEERS.get(row.who, row.who)
            who = name if row.dtype == machine.dtype else f"{name}, {row.dtype}"
            reasons.setdefault((who, row.direction, kind), []).append(row)
    lines = []
    for (who, direction, _), rows in reasons.items():
        first = min(rows, key=lambda row: row.tokens)
        ops = ", ".join(dict.fromkeys(row.op for row in rows))
        reason = first.failed or first.left_out or ""
        # what a compiler says beside it is of no use here
        reason = "out of memory" if "RESOURCE_EXHAUSTED" in reason else reason
        lines.append(f"{who}, {direction}, from {first.tokens} tokens, for {ops}: {reason}")
    absent = {name: why for report in machine.reports for name, why in report.peers_missing.items()}
    lines += [f"{name}: {why}" for name, why in absent.items()]
    if lines:
        yield Heading(3, f"Not run on {machine.name}")
        yield Points(lines)
