"""The gated linear recurrence against a plain `lax.scan` over tokens and its autodiff."""

import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import drawing
from benchmarks.timing import Row, compare
from ejkernel import recurrent
from ejkernel.bench.scan import token_scan

Arrays = dict[str, jax.Array]


def arrays(tokens: int, heads: int = 8, dim: int = 128, gate_dim: int | None = None) -> Arrays:
    """`B = 1`, `K = V = dim`, with one gate a key dim or, for `gate_dim = 1`, one a head."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, tokens, heads, dim)) for k in keys[:3])
    g = jax.nn.log_sigmoid(jax.random.normal(keys[3], (1, tokens, heads, gate_dim or dim)))
    return {"query": query, "key": key, "value": value, "g": g}


def forward(function: Callable[..., Any], inputs: Arrays) -> Callable[[], Any]:
    return functools.partial(jax.jit(lambda x: function(**x)), inputs)


def with_gradient(function: Callable[..., Any], inputs: Arrays) -> Callable[[], Any]:
    def loss(x: Arrays) -> jax.Array:
        output, state = function(**x)
        return (output**2).sum() + state.sum()

    return functools.partial(jax.jit(jax.value_and_grad(loss)), inputs)


def speed() -> list[Row]:
    """Ratios to the scan; a bar of 1 / 2 means at least twice as fast."""
    rows = []
    for gates, gate_dim, forward_bar, gradient_bar in (("key", None, 1.8, 12), ("head", 1, 2, 20)):
        x = arrays(8192, gate_dim=gate_dim)
        rows += compare(
            f"T 8192 H 8 K V 128, gate a {gates}: forward",
            {"lax.scan": forward(token_scan, x), "recurrent": forward(recurrent, x)},
            bars={"recurrent": 1 / forward_bar},
            rounds=11,
        )
        rows += compare(
            f"T 8192 H 8 K V 128, gate a {gates}: forward + backward",
            {"lax.scan": with_gradient(token_scan, x), "recurrent": with_gradient(recurrent, x)},
            bars={"recurrent": 1 / gradient_bar},
            rounds=2,  # the scan keeps a state a token: 4 GiB, and many seconds
            settled=True,
        )
    constant = {name: array for name, array in x.items() if name != "g"} | {"g_gamma": -0.1 * jnp.arange(8.0)}
    rows += compare(
        "T 8192 H 8 K V 128, one gate a head: forward",
        {"lax.scan": forward(token_scan, x), "recurrent": forward(recurrent, constant)},
        bars={"recurrent": 1 / 2},
        rounds=11,
    )
    return rows


def short() -> list[Row]:
    """Few tokens, where a scan is at its best."""
    rows = []
    for (heads, dim), tokens in itertools.product(((8, 128), (4, 64)), (1, 2, 3, 4, 7, 8, 16, 31, 32, 64)):
        x = arrays(tokens, heads, dim)
        for what, wrap in (("forward", forward), ("forward + backward", with_gradient)):
            candidates = {"lax.scan": wrap(token_scan, x), "recurrent": wrap(recurrent, x)}
            name = f"T {tokens} H {heads} K V {dim}: {what}"
            rows += compare(name, candidates, bars={"recurrent": 1.1}, rounds=101)
    return rows


LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
CURVE = Path(__file__).parent / "results" / "linear_recurrence_by_length.json"


def length() -> list[Row]:
    """Forward + backward against length, kept for a picture; ratios are to 1024 tokens, so linear means `T / 1024`."""
    inputs = {tokens: arrays(tokens, heads=2, dim=64) for tokens in LENGTHS}
    steps = {f"T {tokens}": with_gradient(recurrent, x) for tokens, x in inputs.items()}
    rows = compare("forward + backward by length, H 2 K V 64", steps, rounds=7)
    megabytes, seconds = [], []
    for step, x in zip(steps.values(), inputs.values(), strict=True):
        jax.clear_caches()
        start = time.perf_counter()
        compiled = step.func.lower(x).compile()
        seconds.append(time.perf_counter() - start)
        megabytes.append(compiled.memory_analysis().temp_size_in_bytes / 1e6)
    print("tokens   temporaries MB   as a share of T·K·V   lower + compile s")
    for tokens, size, took in zip(LENGTHS, megabytes, seconds, strict=True):
        print(f"{tokens:6d} {size:16.1f} {size * 1e6 / (tokens * 2 * 64 * 64 * 4):21.4f} {took:19.2f}")
    found = {
        "title": "Recurrence, forward + backward: H 2, K V 64",
        "tokens": LENGTHS,
        "time, ms": [float(f"{row.median_ms:.3g}") for row in rows],
        "temporaries, MB": [float(f"{size:.3g}") for size in megabytes],
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items())
    CURVE.write_text(f"{{\n{lines}\n}}\n")
    return rows


def draw(found: dict[str, Any]) -> str:
    """What `length` kept, as a picture."""
    curves = {name: list(zip(found["tokens"], found[name], strict=True)) for name in ("time, ms", "temporaries, MB")}
    return drawing.lines(found["title"], "tokens", "ms or MB", curves, log_x=True, log_y=True)


def run() -> list[Row]:
    return speed() + short() + length()
