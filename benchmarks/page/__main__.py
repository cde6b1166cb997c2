"""`python -m benchmarks.page ROWS.json ... --plot PAGE`: draws what `ejkernel bench --json` measured."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import blocks, reading
from ejkernel._command_line import quietly
from ejkernel.bench import results
from examples.demo import drawing


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 without matplotlib; 2 for wrong use, or files that hold no results or cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="Draw rows of ejkernel bench.")
    parser.add_argument("rows", type=Path, nargs="+", help="files that `ejkernel bench --json` wrote")
    page = "the page to write: .html, or .md with its pictures in a folder beside it"
    parser.add_argument("--plot", type=Path, metavar="FILE", required=True, help=page)
    options = parser.parse_args(arguments)
    if options.plot.suffix not in blocks.SUFFIXES:
        parser.error(f"--plot: got {options.plot}; expected a name that ends in {' or '.join(blocks.SUFFIXES)}")
    if why := drawing.missing():
        print(f"--plot: {why}", file=sys.stderr)
        return 1
    try:
        results.check_writable(options.plot)
        blocks.write(options.plot, [reading.load(path) for path in options.rows], options.rows)
    except (reading.ResultsError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(results.line(f"wrote {options.plot}"))
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
