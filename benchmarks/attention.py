"""`attention` against `jax.nn.dot_product_attention` on XLA, on calls that both can do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.timing import Row, compare
from ejkernel.attention import attention

BAR = 1.1
BATCH, TOKENS, HEADS, DIM = 2, 1024, 8, 64


def run() -> list[Row]:
    keys = jax.random.split(jax.random.key(0), 5)
    mask = jax.random.bernoulli(keys[3], 0.9, (BATCH, 1, TOKENS, TOKENS)).at[..., 0].set(True)
    bias = jax.random.normal(keys[4], (1, HEADS, TOKENS, TOKENS))
    cases: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
        "plain": (HEADS, {}, {}),
        "causal": (HEADS, {"causal": True}, {"is_causal": True}),
        "grouped": (HEADS // 4, {"causal": True}, {"is_causal": True}),
        "mask": (HEADS, {"attention_mask": mask}, {"mask": mask}),
        "bias": (HEADS, {"bias": bias}, {"bias": bias}),
    }
    rows: list[Row] = []
    for name, (kv_heads, ours, theirs) in cases.items():
        query = jax.random.normal(keys[0], (BATCH, TOKENS, HEADS, DIM))
        key, value = (jax.random.normal(each, (BATCH, TOKENS, kv_heads, DIM)) for each in keys[1:3])
        rows += _rows(name, (query, key, value), ours, theirs)
    return rows


def _rows(name: str, arrays: tuple[Array, ...], ours: dict[str, Any], theirs: dict[str, Any]) -> list[Row]:
    # masks and biases are arguments, so that neither side has them folded into its program
    def jax_nn(arrays: Any, theirs: Any) -> Array:
        return jax.nn.dot_product_attention(*arrays, **theirs, implementation="xla")

    def ejkernel(arrays: Any, ours: Any) -> Array:
        return attention(*arrays, **ours, dtype=None)[0]

    rows: list[Row] = []
    for direction in ("forward", "forward+backward"):
        candidates = {
            label: _compiled(function, arrays, options, direction)
            for label, function, options in (("jax.nn", jax_nn, theirs), ("attention", ejkernel, ours))
        }
        rows += compare(f"attention, {name}, {direction}", candidates, bars={"attention": BAR}, rounds=7)
    return rows


def _compiled(
    function: Callable[..., Array], arrays: Any, options: dict[str, Any], direction: str
) -> Callable[[], Any]:
    flags = {name: each for name, each in options.items() if isinstance(each, bool)}
    given = {name: each for name, each in options.items() if name not in flags}

    def forward(arrays: Any, given: Any) -> Array:
        return function(arrays, {**given, **flags})

    def backward(arrays: Any, given: Any) -> Any:
        return jax.grad(lambda arrays: jnp.sum(forward(arrays, given) ** 2))(arrays)

    compiled = jax.jit(forward if direction == "forward" else backward)
    return lambda: compiled(arrays, given)
