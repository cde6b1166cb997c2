"""`python -m benchmarks.tpu_phases`: what a recurrence's phases cost on a TPU beside one walk, by schedules and bytes.

As `benchmarks.tpu`, from compiled kernels without a chip: bundles bound what the schedule allows, and never a time.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tpu import CHIPS, UNIT, Case, blocks_of, bytes_of, compile_for, prepare, steady

CASES = [Case("key gates"), Case("head gates", decay="head")]
# what a call of one device runs, and what comes before each where states are known late
WALKS = {"forward": "added", "backward": "returned"}


def program(case: Case) -> tuple[Any, list[Any]]:
    """All four kernels of a call in phases."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ejkernel.kernels.linear_recurrence.call import Call
    from ejkernel.kernels.linear_recurrence.pallas.phases import PHASES

    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    call = Call(
        batch=B, tokens=T, heads=H, key_dim=K, value_dim=V, sequences=B, packed=False, decay=case.decay,
        value_decay=False, scale=1.0, reverse=False, dtype=np.dtype(jnp.dtype(case.dtype)),
    )  # fmt: skip

    def run(tokens: Any, gate: Any, start: Any, d_output: Any, d_end: Any) -> Any:
        query, key, value, d_output = (x.reshape(B, T, H, -1) for x in (*tokens, d_output))
        inputs = query, key, value, gate.reshape(B, T, H, K) if case.decay == "key" else gate, None
        memory, added = PHASES.begin(call, inputs, None)
        output, kept = PHASES.finish(call, inputs, None, memory, start)
        memory, d_start = PHASES.begin_back(call, inputs, None, start, kept, d_output)
        found = PHASES.finish_back(call, inputs, None, start, kept, memory, (d_output, d_end))
        return added, d_start, *(x.reshape(B, T, -1) for x in (output, *found[:4]))

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    x, state = shape(B, T, H * K, dtype=case.dtype), shape(B, H, K, V)
    gate = shape(B, T, H * K) if case.decay == "key" else shape(B, T, H)
    return run, [(x, x, x), gate, state, x, state]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_phases", description=str(__doc__).splitlines()[0])
    parser.add_argument("--chips", default="v5e,v6e")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(name)
        import jax

        rows = []
        for case in CASES:
            for chip in arguments.chips.split(","):
                for path in folder.iterdir():
                    path.unlink()
                function, given = program(case)
                text = compile_for(CHIPS[chip], jax.jit(function), *given).as_text()
                units = case.B * case.H * case.T / UNIT
                found = {}
                for kernel, moved in bytes_of(text).items():
                    (path,) = (
                        each for each in folder.glob(f"*-{kernel}-*-final_bundles.txt") if "analysis" not in each.name
                    )
                    bundles = steady(path) * blocks_of("recurrent", case) / units
                    found[kernel.split(".")[0].rpartition("_")[2]] = bundles, moved / units
                for walk, first in WALKS.items():
                    (cycles, moved), (more_cycles, more) = found[walk], found[first]
                    rows.append(
                        {
                            "case": case.name,
                            "chip": chip,
                            "walk": walk,
                            "bundles": round(cycles, 1),
                            "first phase": round(more_cycles, 1),
                            "bytes": round(moved),
                            "bundles ratio": round(1 + more_cycles / cycles, 2),
                            "bytes ratio": round(1 + more / moved, 2),
                        }
                    )
                    print(rows[-1], flush=True)
        if arguments.json:
            content = {"jax": jax.__version__, "unit": f"{UNIT} tokens of a head", "rows": rows}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
