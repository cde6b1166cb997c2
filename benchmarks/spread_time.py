"""`python -m benchmarks.spread_time`: what the tokens of a call over several devices cost more than one device does.

On virtual CPU devices. Flops are those of the compiled program's matrix products, a token and head; times are of the
same tokens a device, in turns: devices share the cores, so that twice the devices may take twice the time.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

DEVICES = (1, 2, 4)
B, T, H, K, V = 1, 1024, 2, 128, 128  # tokens a device
OPS = ("recurrent_gla", "simple_gla", "retention", "gated_delta_rule", "kda")
BAR = 1.15  # of one device's work, for the recurrence


def program(name: str, devices: int, gradient: bool) -> tuple[Any, Any]:
    """What runs on these devices, compiled, and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import ejkernel
    from ejkernel import parallel

    mesh = jax.make_mesh((devices,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    op = getattr(ejkernel, name)
    if devices > 1:
        op = partial(getattr(parallel, name), axis_name="time", mesh=mesh)

    def step(arrays: dict[str, Any], cotangents: Any) -> Any:
        results, pull = jax.vjp(lambda arrays: op(**arrays), arrays)
        return results, pull(cotangents)

    def forward(arrays: dict[str, Any], cotangents: Any) -> Any:
        return op(**arrays)

    random, rows = np.random.default_rng(0), (B, T * devices, H)
    shapes = {"query": (*rows, K), "key": (*rows, K), "value": (*rows, V)}
    if name in ("recurrent_gla", "kda"):
        shapes["g"] = (*rows, K)
    elif name != "retention":
        shapes["g"] = rows
    if name in ("gated_delta_rule", "kda"):
        shapes["beta"] = rows
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["key"] /= np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
    arrays |= {name: -abs(arrays[name]) / 8 for name in ("g",) if name in arrays}
    arrays |= {name: np.tanh(abs(arrays[name])) for name in ("beta",) if name in arrays}
    cotangents = random.normal(size=shapes["value"]), random.normal(size=(B, H, K, V))
    time, same = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P(None, "time"), jax.P()))
    given = (
        jax.device_put(arrays, time),
        tuple(jax.device_put(jnp.float32(x), place) for x, place in zip(cotangents, (time, same), strict=True)),
    )
    return jax.jit(step if gradient else forward).lower(*given).compile(), given


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spread_time", description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(DEVICES)}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from benchmarks import hlo, timing

    rows, missed = [], False
    for name in OPS:
        for gradient in (False, True):
            programs = {devices: program(name, devices, gradient) for devices in DEVICES}
            flops = {n: hlo.dot_flops(compiled.as_text()) / (B * T * H) for n, (compiled, _) in programs.items()}
            runs = {str(n): partial(compiled, *given) for n, (compiled, given) in programs.items()}
            times = timing.compare(name, runs, rounds=arguments.rounds)
            for devices, timed in zip(DEVICES, times, strict=True):
                ratio = flops[devices] / flops[1]
                held = "delta" in name or name == "kda" or ratio <= BAR
                missed |= not held
                rows.append(
                    {
                        "op": name,
                        "gradient": gradient,
                        "devices": devices,
                        "flops": round(flops[devices]),
                        "ratio": round(ratio, 3),
                        "ms": round(timed.median_ms, 2),
                        "time a token": round(timed.ratio / devices, 2),
                    }
                )
                print(rows[-1], "" if held else "MISSED", flush=True)
    if arguments.json:
        content = {"jax": jax.__version__, "cores": os.cpu_count(), "tokens a device": T, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
