"""`python -m benchmarks [name ...] [--json FILE]`: runs every module of this folder that has a `run() -> list[Row]`.

They hold the library to ratios that it promises. `ejkernel bench` is for every machine, and makes docs/benchmarks.md.
"""

import argparse
import importlib
import json
import pkgutil
from dataclasses import asdict
from pathlib import Path

import jax

import benchmarks
from ejkernel.bench.timing import Row, table

NOT_BENCHMARKS = {"__main__", "cpu_map", "numerics", "pictures", "spread_time", "tpu", "tpu_training"}


def main() -> None:
    names = [each.name for each in pkgutil.iter_modules(benchmarks.__path__) if each.name not in NOT_BENCHMARKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time the kernels against baselines.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run, all if none: {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as well")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in names]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")

    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {device}")
    rows: list[Row] = []
    for name in arguments.names or names:
        new = importlib.import_module(f"benchmarks.{name}").run()
        print(table(new), flush=True)
        rows += new
    if arguments.json:
        report = {"jax": jax.__version__, "device": device, "rows": [asdict(row) | {"met": row.met} for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
