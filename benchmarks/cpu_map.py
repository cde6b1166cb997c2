"""`python -m benchmarks.cpu_map`: the recurrences on a CPU beside a plain `lax.scan` over tokens, by size and gate.

Both walks of ours are timed, token by token and chunk by chunk. The rows are kept as JSON, one file for each release of
JAX.
"""

import argparse
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import delta_rule
from benchmarks.linear_recurrence import Arrays, forward, with_gradient
from ejkernel import _drawing, recurrent
from ejkernel.bench.results import processor
from ejkernel.bench.scan import token_scan
from ejkernel.bench.timing import compare, milliseconds
from ejkernel.kernels.chunks import token_walk

KINDS = ("head", "key", "value", "delta")
DIMS = (16, 64, 128, 256)
TOKENS = (1, 16, 128, 1024, 8192, 65536)
LONG = ((4, 64, 65536), (8, 128, 8192))  # heads, dims, tokens
HEADS = (4, 8, 32)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Cell:
    """One call: `B = 1`, `K = V = dim`, packed in sequences of uneven lengths or not, with gradients or not."""

    kind: str  # whose gates the linear recurrence has, or the delta rule
    heads: int
    dim: int
    tokens: int
    packed: bool
    gradient: bool

    def __str__(self) -> str:
        packed, both = (", packed" if self.packed else ""), (" + backward" if self.gradient else "")
        return f"{self.kind}{packed}, H {self.heads} K V {self.dim} T {self.tokens}: forward{both}"


def cells() -> Iterator[Cell]:
    for each in itertools.starmap(Cell, itertools.product(KINDS, HEADS, DIMS, TOKENS, (False, True), (False, True))):
        # what packing, many heads and great length change shows at a few sizes
        if each.packed and (each.heads > 4 or each.tokens != (128 if each.gradient else 1024)):
            continue
        if each.heads > 4 and (each.dim not in (64, 128) or each.tokens < 128 or each.gradient):
            continue
        if each.tokens > 1024 and ((each.heads, each.dim, each.tokens) not in LONG or each.gradient):
            continue
        # the scan's gradients keep three states a token
        if each.gradient and each.tokens * each.dim**2 > 1 << 21:
            continue
        yield each


def borders(tokens: int) -> np.ndarray:
    """Of sequences of 16 to 112 tokens, or of 8 to 56."""
    lengths = np.resize([3, 1, 7, 5], max(4, tokens // 64))
    return np.concatenate([[0], np.cumsum(lengths) * tokens // lengths.sum()]).astype(np.int32)


def arrays(cell: Cell) -> Arrays:
    if cell.kind == "delta":
        return delta_rule.arrays("delta_rule", cell.tokens, cell.heads, cell.dim)
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, cell.tokens, cell.heads, cell.dim)
    query, key, value = (jax.random.normal(k, shape) for k in keys[:3])
    gates = jax.nn.log_sigmoid(jax.random.normal(keys[3], (*shape[:3], 1 if cell.kind == "head" else cell.dim)))
    return {"query": query, "key": key, "value": value, "gv" if cell.kind == "value" else "gk": gates}


def candidates(cell: Cell) -> dict[str, Callable[[], Any]]:
    """The scan and ours, by both walks, compiled."""
    op = delta_rule.OPS["delta_rule"] if cell.kind == "delta" else recurrent
    scan, ours = token_scan, op
    if cell.packed:
        at = borders(cell.tokens)
        first = jnp.isin(jnp.arange(cell.tokens), at)

        # the scan has no final states of packed sequences
        def scan(**x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return token_scan(**x, first=first)[0], jnp.zeros(())

        def ours(**x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return op(**x, cu_seqlens=at)[0], jnp.zeros(())

    inputs, found = arrays(cell), {}

    def compiled(function: Callable[..., Any]) -> Callable[[], Any]:
        call = (with_gradient if cell.gradient else forward)(function, inputs)
        return functools.partial(call.func.lower(inputs).compile(), inputs)

    found["scan"] = compiled(scan)
    for name in ("tokens", "chunks"):
        token_walk.LARGEST_STATE = 1 << 30 if name == "tokens" else 0
        jax.clear_caches()
        found[name] = compiled(ours)
    return found


def measured(cell: Cell) -> dict[str, Any]:
    """The cell's row."""
    found = candidates(cell)
    once = max(min(milliseconds(function) for _ in range(2)) for function in found.values())
    # short calls many times a round, or the clock is what is measured
    calls = max(1, int(3 / once))

    def repeated(function: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [function() for _ in range(calls)]

    rounds = 3 if once > 150 else 5 if once > 20 else 9
    rows = compare(str(cell), {name: repeated(each) for name, each in found.items()}, rounds=rounds)
    # how many times as long as ours the scan takes
    tokens, chunks = (float(f"{1 / row.ratio:.3g}") for row in rows[1:])
    # tokens by a tenth at least, if chunks keep up with the scan: between cells these gain more, as with more cores
    by_tokens = tokens > (1.1 if chunks >= 1 else 1) * chunks
    times = {"tokens_times": tokens, "chunks_times": chunks, "by_tokens": by_tokens}
    return asdict(cell) | {"scan_ms": float(f"{rows[0].median_ms / calls:.4g}")} | times


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(*(row[name] for name in Cell.__dataclass_fields__))


# what a place in the map is coloured by: how many times as long as ours the scan takes
STEPS = {
    "the scan is faster": (0.95, "#f08a72"),
    "equal within a twentieth": (1.05, "#c3c7cf"),
    "up to twice as fast": (2, "#a9d8a4"),
    "more": (math.inf, "#5fb865"),
}
NAMES = {"head": "a gate a head", "key": "key gates", "value": "value gates", "delta": "delta_rule"}


def draw(report: dict[str, Any], gradient: bool) -> str:
    """The map of one release of JAX."""
    rows = [row for row in report["rows"] if row["gradient"] == gradient and row["heads"] == HEADS[0]]
    columns = sorted({(row["packed"], row["tokens"]) for row in rows})
    found: dict[str, list[float | None]] = {}
    for row in rows:
        places = found.setdefault(f"{NAMES[row['kind']]}, {row['dim']}", [None] * len(columns))
        taken = row["tokens_times" if row["by_tokens"] else "chunks_times"]
        places[columns.index((row["packed"], row["tokens"]))] = taken
    return _drawing.heat(
        f"{'Forward and backward' if gradient else 'Forward'}: times as fast as lax.scan, JAX {report['jax']}",
        "tokens",
        [f"{tokens}\npacked" if packed else str(tokens) for packed, tokens in columns],
        found,
        STEPS,
        size=(640, 23 * len(found) + 120),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_map", description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="fill JAX's compilation cache alone")
    parser.add_argument("--only", default="", help="cells whose name has this")
    arguments = parser.parse_args()
    file = RESULTS / f"cpu_map_{jax.__version__}.json"
    found = json.loads(file.read_text()) if file.exists() else {"rows": []}
    found = {"jax": jax.__version__, "device": f"{processor()}, {os.cpu_count()} cores"} | found
    known = {cell_of(row) for row in found["rows"]}
    order = list(cells())
    for cell in order:
        if arguments.only not in str(cell) or cell in known:
            continue
        if arguments.compile:
            candidates(cell)
            continue
        row = measured(cell)
        print(f"{cell}: tokens {row['tokens_times']}, chunks {row['chunks_times']}", flush=True)
        found["rows"].append(row)
        found["rows"].sort(key=lambda row: order.index(cell_of(row)))
        _write(file, found)


def _write(path: Path, found: dict[str, Any]) -> None:
    rows = ",\n".join(f"    {json.dumps(row)}" for row in found["rows"])
    facts = "".join(f"  {json.dumps(name)}: {json.dumps(found[name])},\n" for name in found if name != "rows")
    path.write_text(f'{{\n{facts}  "rows": [\n{rows}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
