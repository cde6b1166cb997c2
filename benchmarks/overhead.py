"""What a call costs before anything is computed: in Python where it is eager, and in tracing and lowering a model.

The baseline is `jax.nn.dot_product_attention`. Arrays are so small that computing them takes no time to speak of.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import ejkernel
from benchmarks.timing import Row, compare

TOKENS, HEADS, DIM, LAYERS, CALLS = 16, 2, 16, 16, 50
EAGER, TRACED = 3.0, 1.5
Op = Callable[[Array, Array, Array], Array]


def run() -> list[Row]:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, TOKENS, HEADS, DIM))
    ops = _ops()
    eager = {name: functools.partial(_eager, op, query, key, value) for name, op in ops.items()}
    bars = {name: EAGER for name in ops if name != "jax.nn"}
    rows = compare(f"overhead, {CALLS} eager calls", eager, bars=bars, rounds=11)
    for direction in ("forward", "forward+backward"):
        traced = {name: functools.partial(_lowered, op, query, direction) for name, op in ops.items()}
        bars = {name: TRACED for name in ops if name != "jax.nn"}
        rows += compare(f"overhead, {LAYERS} layers traced and lowered, {direction}", traced, bars=bars, rounds=5)
    return rows


def _ops() -> dict[str, Op]:
    gates = -jax.random.uniform(jax.random.key(1), (1, TOKENS, HEADS, DIM))
    per_head, beta = gates[..., 0], -gates[..., 1]

    def first(op: Callable[..., Any], *more: Any, **options: Any) -> Op:
        return lambda query, key, value: op(query, key, value, *more, **options)[0]

    return {
        "jax.nn": lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True),
        "attention": first(ejkernel.attention, causal=True, dtype=None),
        "flash_attention": lambda *qkv: ejkernel.flash_attention(*qkv, causal=True),
        "linear_attention": first(ejkernel.linear_attention),
        "retention": first(ejkernel.retention),
        "simple_gla": first(ejkernel.simple_gla, per_head),
        "recurrent_gla": first(ejkernel.recurrent_gla, gates),
        "delta_rule": first(ejkernel.delta_rule, beta),
        "gated_delta_rule": first(ejkernel.gated_delta_rule, per_head, beta),
    }


def _eager(op: Op, query: Array, key: Array, value: Array) -> Array:
    for _ in range(CALLS):
        output = op(query, key, value)
    return output


def _lowered(op: Op, x: Array, direction: str) -> None:
    def model(x: Array, weights: Array) -> Array:
        for i in range(LAYERS):
            query, key, value = (x * weights[i, j] for j in range(3))
            x = x + op(query, key, value)
        return x.sum()

    jax.clear_caches()
    function = model if direction == "forward" else jax.grad(model, 1)
    jax.jit(function).lower(x, jnp.ones((LAYERS, 3)))
