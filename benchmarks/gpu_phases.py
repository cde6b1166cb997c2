"""`python -m benchmarks.gpu_phases`: the recurrence's phases beside one device's own call, on an NVIDIA GPU."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

K = V = 128
SHAPES = [(1, 65536, 16), (8, 4096, 16)]  # rows, tokens and heads; in the first, time is cut in segments


def programs(decay: str, B: int, T: int, H: int, gradient: bool) -> dict[str, Any]:
    """A call as it is, and in phases with the states between them given, compiled, with arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS
    from ejkernel.kernels.linear_recurrence.call import Call

    triton = next(each for each in IMPLEMENTATIONS if each.name == "triton")
    call = Call(
        batch=B, tokens=T, heads=H, key_dim=K, value_dim=V, sequences=B, packed=False, decay=decay,
        value_decay=False, scale=K**-0.5, reverse=False, dtype=np.dtype(jnp.bfloat16),
    )  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), 8))
    tokens = [jax.random.normal(next(keys), (B, T, H, K), jnp.bfloat16) for _ in range(4)]
    gate = -jax.random.uniform(next(keys), (B, T, H, K) if decay == "key" else (B, T, H)) / 16
    states = [jax.random.normal(next(keys), (B, H, K, V)) for _ in range(2)]

    def whole(inputs: Any, start: Any, cotangents: Any) -> Any:
        results, pull = jax.vjp(lambda inputs, start: triton.run(call, *inputs, start, None), inputs, start)
        return results, pull(cotangents) if gradient else ()

    def phased(inputs: Any, start: Any, cotangents: Any) -> Any:
        memory, added = triton.phases.begin(call, inputs, None)
        output, kept = triton.phases.finish(call, inputs, None, memory, start)
        if not gradient:
            return output, added
        memory, d_start = triton.phases.begin_back(call, inputs, None, start, kept, cotangents[0])
        return output, added, d_start, triton.phases.finish_back(call, inputs, None, start, kept, memory, cotangents)

    given = (*tokens[:3], gate, None), states[0], (tokens[3], states[1])
    return {name: partial(jax.jit(run).lower(*given).compile(), *given) for name, run in (("1", whole), ("2", phased))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_phases", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    import jax

    from benchmarks import timing

    rows = []
    for decay in ("key", "head"):
        for B, T, H in SHAPES:
            for gradient in (False, True):
                one, two = timing.compare(f"{decay} {B}", programs(decay, B, T, H, gradient), rounds=15)
                rows.append(
                    {
                        "decay": decay,
                        "shape": f"B{B} T{T} H{H}",
                        "gradient": gradient,
                        "one call": round(one.median_ms, 3),
                        "phases": round(two.median_ms, 3),
                        "ratio": round(two.ratio, 3),
                    }
                )
                print(rows[-1], flush=True)
    if arguments.json:
        content = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
