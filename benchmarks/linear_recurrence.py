"""The gated linear recurrence against a plain `lax.scan` over tokens and its autodiff."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import Row, compare
from ejkernel import recurrent

Arrays = dict[str, jax.Array]


def arrays(tokens: int, heads: int = 8, dim: int = 128, gate_dim: int | None = None) -> Arrays:
    """`B = 1`, `K = V = dim`, with one gate a key dim or, for `gate_dim = 1`, one a head."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, tokens, heads, dim)) for k in keys[:3])
    g = jax.nn.log_sigmoid(jax.random.normal(keys[3], (1, tokens, heads, gate_dim or dim)))
    return {"query": query, "key": key, "value": value, "g": g}


def token_scan(query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What everybody writes first."""
    scale = query.shape[-1] ** -0.5

    def step(state: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a = x
        state = jnp.exp(a)[..., None] * state + k[..., None] * v[..., None, :]
        return state, scale * jnp.einsum("bhk,bhkv->bhv", q, state)

    state = jnp.zeros((query.shape[0], *query.shape[2:], value.shape[-1]))
    state, output = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value, g)))
    return jnp.moveaxis(output, 0, 1), state


def forward(function: Callable[..., Any], inputs: Arrays) -> Callable[[], Any]:
    return functools.partial(jax.jit(lambda x: function(**x)), inputs)


def with_gradient(function: Callable[..., Any], inputs: Arrays) -> Callable[[], Any]:
    def loss(x: Arrays) -> jax.Array:
        output, state = function(**x)
        return (output**2).sum() + state.sum()

    return functools.partial(jax.jit(jax.value_and_grad(loss)), inputs)


def speed() -> list[Row]:
    """Ratios to the scan; a bar of 1 / 2.5 means at least 2.5 times as fast."""
    rows = []
    for gates, gate_dim, forward_bar, gradient_bar in (("key", None, 2.5, 12), ("head", 1, 4, 20)):
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
        )
    return rows


def short() -> list[Row]:
    """Few tokens, where a scan is at its best."""
    rows = []
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        x = arrays(tokens)
        for what, wrap in (("forward", forward), ("forward + backward", with_gradient)):
            candidates = {"lax.scan": wrap(token_scan, x), "recurrent": wrap(recurrent, x)}
            rows += compare(f"T {tokens}: {what}", candidates, bars={"recurrent": 1.1}, rounds=101)
    return rows


def length() -> list[Row]:
    """Time against length; ratios are to 1024 tokens, so linear means ratio = T / 1024."""
    candidates = {f"T {t}": with_gradient(recurrent, arrays(t, heads=2, dim=64)) for t in (1024, 4096, 16384, 65536)}
    return compare("forward + backward by length, H 2 K V 64", candidates, rounds=5)


def cost() -> str:
    """Temporaries and compile time by length."""
    lines = ["forward + backward, H 2 K V 64:  tokens   temporaries MB   per T·K·V   lower + compile s"]
    for tokens in (512, 4096, 16384, 32768, 65536):
        start = time.perf_counter()
        compiled = (
            with_gradient(recurrent, arrays(tokens, heads=2, dim=64))
            .func.lower(arrays(tokens, heads=2, dim=64))
            .compile()
        )
        took = time.perf_counter() - start
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        share = temporaries / (tokens * 2 * 64 * 64 * 4)
        lines.append(f"{tokens:40d} {temporaries / 1e6:16.1f} {share:11.4f} {took:19.2f}")
    return "\n".join(lines)


def run() -> list[Row]:
    print(cost())
    return speed() + short() + length()
