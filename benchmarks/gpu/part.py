"""One part of `python -m benchmarks.gpu`, in a process of its own."""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.gpu import bench, rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part", description=__doc__)
    parser.add_argument("part", metavar="MODULE:PART")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--described", action="store_true")
    given = parser.parse_intermixed_args(arguments)
    until = time.monotonic() + given.seconds
    module, name = given.part.split(":")
    if name == "bench":
        return bench.main(given.folder / f"bench_{device()}.json")
    part = importlib.import_module(f"benchmarks.gpu.{module}").PARTS[name]
    known = [work.name for work in part.works]
    if unknown := set(given.names) - set(known):
        print(f"{name}: no row {', '.join(sorted(unknown))}; there are {', '.join(map(repr, known))}")
        return 1
    if given.described:
        if part.count is None:
            print(f"{name}: its programs are not counted")
            return 1
        rows.counted(part, given.names, given.folder / f"{name}_compiled.json")
        return 0
    complete = rows.measured(part, given.names, given.folder / f"{name}_{device()}.json", until)
    return 0 if complete else 1


def device() -> str:
    """What the files of this device's rows are named after, as in `h200`."""
    return jax.devices()[0].device_kind.lower().removeprefix("nvidia ").replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
