"""`ejkernel bench`: its arguments, what it prints, its exit codes."""

import argparse
import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ejkernel import __version__
from ejkernel._command_line import no_device, whole
from ejkernel._ops import COMMON, Op
from ejkernel.bench import ceilings, results
from ejkernel.bench.calls import DIRECTIONS, DTYPES, Shape
from ejkernel.bench.measure import Limits, measure
from ejkernel.bench.peers import PEERS, Peer
from ejkernel.bench.results import OURS, Report, Row, line

PACKAGES = ("jax", "jaxlib", "numpy", "triton", "jax-triton", "torch", "fla-core")
_positive = whole(1, 2**31 - 1)
EXAMPLES = """examples:
  %(prog)s            every op against the peers that are installed
  %(prog)s --quick    the same on short sequences, to see whether all is well
  %(prog)s recurrent_gla flash_attention --lengths 1024 4096 --gradient
  %(prog)s simple_gla --peer scan --json rows.json

In a checkout, python -m benchmarks.page rows.json --plot page.html draws the rows, and python -m benchmarks.fla is this
command with flash-linear-attention among the peers.

exit codes: 0; 1 if a peer asked for is missing, or an op fails; 2 for wrong use or files; 130 after Ctrl-C, with what
was measured so far written as asked.
"""


def main(
    arguments: Sequence[str] | None = None,
    prog: str = "ejkernel bench",
    peers: Mapping[str, Peer] = PEERS,
) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Time the ops against their peers on this machine's device, and check them against float64.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser, peers)
    options = parser.parse_args(arguments)
    for what, given, known in (("op", options.ops, COMMON), ("peer", options.peer or [], {**peers, "none": None})):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    if options.json is not None:
        results.check_writable(options.json)
    return _run(options, peers)


def _add_arguments(parser: argparse.ArgumentParser, peers: Mapping[str, Peer]) -> None:
    known = "; ".join(f"{peer.name}: {peer.description}" for peer in peers.values())
    parser.add_argument("ops", nargs="*", metavar="op", help=f"which, all if none: {', '.join(COMMON)}")
    which = f"which of them, or none; if not given, those that can run here ({known})"
    parser.add_argument("--peer", nargs="+", action="extend", metavar="NAME", help=which)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    tokens = "tokens (64 to 16384 on a CPU, 256 to 65536 elsewhere)"
    parser.add_argument("--lengths", type=_positive, nargs="+", metavar="T", help=tokens)
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, help="of query, key and value (float32 on a CPU, bfloat16 elsewhere)"
    )
    for name, what in (("batch", "rows"), ("heads", "heads"), ("dim", "dims of a head, keys' and values'")):
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=what)
    only = parser.add_mutually_exclusive_group()
    for name, direction in zip(("forward", "gradient"), DIRECTIONS, strict=True):
        only.add_argument(
            f"--{name}", dest="directions", action="store_const", const=[direction], help=f"{direction} only"
        )
    parser.add_argument("--rounds", type=_positive, metavar="N", help=f"times each is timed ({Limits.rounds})")
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=Limits.call_s,
        metavar="S",
        help="leave out whose call would take longer, by how long it took on fewer tokens (%(default)g s)",
    )
    parser.add_argument("--quick", action="store_true", help="short sequences and few rounds")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}; expected a number above 0")
    return number


def _run(options: argparse.Namespace, known: Mapping[str, Peer]) -> int:
    if why := no_device():
        print(why, file=sys.stderr)
        return 1
    names = known if options.peer is None else [name for name in options.peer if name != "none"]
    missing = {name: reason for name in names if (reason := known[name].missing())}
    if missing and options.peer:
        print("\n".join(f"--peer {name}: {reason}" for name, reason in missing.items()), file=sys.stderr)
        return 1
    peers = [known[name] for name in dict.fromkeys(names) if name not in missing]
    shapes = _shapes(options)
    rounds = options.rounds or (3 if options.quick else Limits.rounds)
    dtypes = dict.fromkeys(shape.dtype for shape in shapes)
    rates = {dtype: ceilings.matmul_rate(dtype, quick=options.quick) for dtype in dtypes}
    report = results.empty_report(_versions(), ceilings.copy_rate(quick=options.quick), rates)
    report.peers_missing = missing
    print("\n".join(_header(report)), flush=True)
    try:
        with _status() as say:
            for op, shape, direction in _calls(options, shapes):
                say(f"{op.name}, {shape.tokens} tokens, {direction}")
                its_peers = [peer for peer in peers if peer.computes(op)]
                rows = measure(op, shape, direction, its_peers, report.rows, Limits(rounds, options.limit))
                print("\n".join(_lines(report, rows, report.rows[-1:])), flush=True)
                report.rows += rows
        report.complete = True
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        # what was measured stays, also after Ctrl-C and when the reader of a pipe has gone
        if options.json is not None:
            results.write(options.json, results.dumps(report))
    if options.json is not None:
        print(line(f"wrote {options.json}"))
    return int(any(row.who == OURS and row.failed for row in report.rows)) if report.complete else 130


def _shapes(options: argparse.Namespace) -> list[Shape]:
    """What is asked for, and otherwise sizes that keep the device busy without tiring whoever waits."""
    on_cpu = jax.default_backend() == "cpu"
    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384) if on_cpu else (256, 1024, 4096, 16384, 65536)
    if options.quick:
        lengths = (128, 512)
    batch, heads, dim = (1, 4, 64) if on_cpu else (4, 16, 128)
    return [
        Shape(options.batch or batch, tokens, options.heads or heads, options.dim or dim, dtype)
        for dtype in options.dtype or (DTYPES[0] if on_cpu else DTYPES[1],)
        # shorter ones first: they predict which long ones would take too long
        for tokens in sorted(set(options.lengths or lengths))
    ]


def _calls(options: argparse.Namespace, shapes: Sequence[Shape]) -> Iterator[tuple[Op, Shape, str]]:
    for name in dict.fromkeys(options.ops or COMMON):
        for shape in shapes:
            for direction in options.directions or DIRECTIONS:
                yield COMMON[name], shape, direction


def _versions() -> dict[str, str]:
    found = {"ejkernel": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Says what is being measured, on a terminal that has `rich`; elsewhere the rows themselves say how far it is."""
    try:
        if not sys.stdout.isatty():
            raise ImportError
        from rich.console import Console
    except ImportError:
        yield lambda words: None
        return
    # seldom drawn anew: what is being timed should not share its cores with a spinner
    with Console(highlight=False).status("", refresh_per_second=1) as status:
        yield lambda words: status.update(words)


def _header(report: Report) -> Iterator[str]:
    yield f"{report.device} ({report.platform}); " + ", ".join(f"{each} {v}" for each, v in report.versions.items())
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in report.flops_per_s.items())
    yield f"at best: a copy {report.copy_bytes_per_s / 1e9:.3g} GB/s; a matrix product {rates}"
    yield from (f"without {name}: {reason}" for name, reason in report.peers_missing.items())
    yield "ratio: time over ejkernel's in the same rounds; bytes, flops: share of what the machine does at best;"
    yield "temp MB: memory beside arguments and results; error: largest, against float64"


def _lines(report: Report, rows: Sequence[Row], last: Sequence[Row]) -> Iterator[str]:
    """The rows as text, under a heading where op or sizes are not those of the `last` one."""
    first = rows[0]
    if not last or (last[0].op, last[0].sizes, last[0].dtype) != (first.op, first.sizes, first.dtype):
        yield f"\n{first.op}  {first.sizes} {first.dtype}"
        yield (
            f"{'tokens':>8}  {'':<16} {'':<16} {'ms':>9} {'spread':>8} {'ratio':>7} {'bytes':>6} {'flops':>6}"
            f" {'temp MB':>8} {'error':>8} {'compile s':>9}"
        )
    for row in rows:
        who = f"{row.who} {row.implementation}".strip()
        start = f"{row.tokens:>8}  {row.direction:<16} {who:<16}"
        if row.median_ms is None or row.spread_ms is None:
            yield f"{start} {'failed' if row.failed else 'not run'}: {row.failed or row.left_out}"
            continue
        moved, computed = report.shares(row)
        temporary = None if row.temporary_bytes is None else row.temporary_bytes / 1e6
        yield (
            f"{start} {row.median_ms:>9.3f} {row.spread_ms:>8.3f} {_or_dash(row.ratio, '.2f'):>7}"
            f" {_or_dash(moved, '.0%'):>6} {_or_dash(computed, '.0%'):>6} {_or_dash(temporary, '.1f'):>8}"
            f" {_or_dash(row.error, '.1e'):>8} {_or_dash(row.compile_s, '.2f'):>9}"
        )


def _or_dash(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
