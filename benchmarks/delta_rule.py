"""The delta rule against a plain `lax.scan` over tokens and its autodiff."""

import itertools

import jax
import jax.numpy as jnp

from benchmarks.linear_recurrence import Arrays, forward, with_gradient
from benchmarks.timing import Row, compare
from ejkernel import delta_rule, gated_delta_rule, kda
from ejkernel.bench.scan import token_scan

OPS = {"delta_rule": delta_rule, "gated_delta_rule": gated_delta_rule, "kda": kda}


def arrays(op: str, tokens: int, heads: int = 8, dim: int = 128) -> Arrays:
    """`B = 1`, `K = V = dim`, keys of length 1, with the gate that the op has."""
    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value, g = (jax.random.normal(k, (1, tokens, heads, dim)) for k in keys[:4])
    found = {
        "query": query,
        "key": key / jnp.linalg.norm(key, axis=-1, keepdims=True),
        "value": value,
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (1, tokens, heads))),
    }
    gates = jax.nn.log_sigmoid(g)
    return found | {"delta_rule": {}, "gated_delta_rule": {"g": gates[..., 0]}, "kda": {"g": gates}}[op]


def speed() -> list[Row]:
    """Ratios to the scan; a bar of 1 / 10 means at least ten times as fast."""
    rows = []
    for name, op in OPS.items():
        x = arrays(name, 4096)
        for what, wrap, bar, rounds in (("forward", forward, 1.5, 11), ("forward + backward", with_gradient, 10, 3)):
            candidates = {"lax.scan": wrap(token_scan, x), name: wrap(op, x)}
            rows += compare(
                f"T 4096 H 8 K V 128: {what}", candidates, bars={name: 1 / bar}, rounds=rounds, settled=True
            )
    return rows


def short() -> list[Row]:
    """Few tokens, where a scan is at its best."""
    rows = []
    sizes, lengths = ((8, 128), (4, 64)), (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 128)
    for (heads, dim), (name, op), tokens in itertools.product(sizes, OPS.items(), lengths):
        x = arrays(name, tokens, heads, dim)
        for what, wrap in (("forward", forward), ("forward + backward", with_gradient)):
            candidates = {"lax.scan": wrap(token_scan, x), name: wrap(op, x)}
            rows += compare(f"T {tokens} H {heads} K V {dim}: {what}", candidates, bars={name: 1.1}, rounds=51)
    return rows


def run() -> list[Row]:
    return speed() + short()
