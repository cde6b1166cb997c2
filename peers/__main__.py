"""`python -m peers [--json FILE]`: compares, prints a table, and fails where a difference is above the bound."""

import os

# fla's kernels need no GPU then
os.environ["TRITON_INTERPRET"] = "1"

import argparse
import datetime
import importlib.metadata
import json
import sys
import warnings
from pathlib import Path

BOUND = 1e-5
COMPARED = ("output", "gradients", "decoding")
PACKAGES = ("torch", "transformers", "fla-core", "flash-linear-attention", "jax", "flax")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as well")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    from peers.compare import numbers
    from peers.qwen3_next import numbers as whole_model
    from peers.references import references

    rows = []
    print(f"{'layer':22} {'reference':36} {'output':>9} {'gradients':>9} {'decoding':>9}")
    for reference in references():
        found = numbers(reference)
        rows.append({"layer": reference.layer, "reference": reference.theirs, **found})
        cells = " ".join(f"{each:9.1e}" for each in found.values())
        print(f"{reference.layer:22} {reference.theirs:36} {cells}", flush=True)
    found = whole_model()
    rows.append({"layer": "examples/qwen3_next.py", "reference": "transformers Qwen3-Next, the model", **found})
    print(rows[-1])
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "bound": BOUND,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    above = [row for row in rows if not all(row[name] <= BOUND for name in COMPARED if name in row)]
    for row in above:
        print(f"above {BOUND}: {row['layer']} beside {row['reference']}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
