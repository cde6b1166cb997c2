"""`python -m benchmarks.peers [--json FILE]`: compares, prints a table, and fails above a bound."""

import argparse
import datetime
import importlib.metadata
import json
import sys
import warnings
from pathlib import Path
from typing import Any

SEEDS = range(3)
# Of two programs in float32; of our gradients from those in float64, as theirs may be further off, and as a rate's is a
# hundred times smaller than the numbers that it is the sum of; of both in float64, where only rounding may be left.
BOUNDS = {"output": 1e-5, "decoding": 1e-5, "ours": 3e-5, "float64": 1e-12}
PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention", "jax", "flax")


def compared() -> dict[str, list[dict[str, Any]]]:
    """A row for each reference, the worst of all seeds; and one for the files of each family."""
    from benchmarks.peers import files
    from benchmarks.peers.compare import double, numbers
    from benchmarks.peers.hybrid_models import MODELS
    from benchmarks.peers.hybrid_models import numbers as whole_model
    from benchmarks.peers.references import references

    with double():
        precise = references()
    rows, read = [], {}
    for reference, other in zip(references(), precise, strict=True):
        found = [numbers(reference, other if reference.float64 else None, seed) for seed in SEEDS]
        rows.append(_row(reference.layer, reference.theirs, found))
        if (model := reference.config.model_type) not in read:
            read[model] = files.read(reference.config)
            print(f"{'files':22} {model:36}", *(f"{name} {each}" for name, each in read[model].items()), flush=True)
    for name in MODELS:
        found = [whole_model(name, seed) for seed in SEEDS]
        rows.append(_row("examples/hybrid_models.py", f"transformers {name}, the model", found))
    return {"rows": rows, "files": [{"model_type": model, **found} for model, found in read.items()]}


def _row(layer: str, reference: str, found: list[dict[str, float]]) -> dict[str, Any]:
    worst = {name: max(each[name] for each in found) for name in found[0]}
    print(f"{layer:22} {reference:36}", *(f"{name} {each:.1e}" for name, each in worst.items()), flush=True)
    return {"layer": layer, "reference": reference, **worst}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as well")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    found = compared()
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "seeds": len(SEEDS),
        "bounds": BOUNDS,
        **found,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    above = [
        f"{row['layer']} beside {row['reference']}: {name} {row[name]:.1e} above {bound}"
        for row in found["rows"]
        for name, bound in BOUNDS.items()
        if name in row and not row[name] <= bound
    ]
    for line in above:
        print(line, file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
