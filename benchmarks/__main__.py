"""`python -m benchmarks [name ...] [--json FILE]`: holds the library to the ratios that it promises.

Each of `BENCHMARKS` is a module of this folder with a `run() -> list[Row]`. `python -m benchmarks.gpu` times
one NVIDIA GPU, and `ejkernel bench` is for every machine.
"""

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

import jax

from benchmarks.timing import Row, table

BENCHMARKS = (
    "attention",
    "cumsum",
    "delta_rule",
    "flash_attention",
    "linear_recurrence",
    "one_query",
    "overhead",
    "time_for_a_byte",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time the kernels against baselines.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run, all if none: {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as well")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {device}")
    rows: list[Row] = []
    for name in arguments.names or BENCHMARKS:
        new = importlib.import_module(f"benchmarks.{name}").run()
        print(table(new), flush=True)
        rows += new
    if arguments.json:
        report = {"jax": jax.__version__, "device": device, "rows": [asdict(row) | {"met": row.met} for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
