"""A call to be timed: its sizes, its arrays, and the operations and bytes that it needs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._ops import TAPS, Op

DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("float32", "bfloat16", "float16")
Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; keys and values have as many heads and dims as queries."""

    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: str


def inputs(op: Op, shape: Shape) -> Arrays:
    """Arrays to call `op` with. Log decays are float32, as models have them, and mild, as trained ones are.

    Keys of the delta rule have length 1. The convolution's arrays are as `Op.results` takes them.
    """
    gates = op.gates if op.benchmark_gates is None else op.benchmark_gates
    keys = iter(jax.random.split(jax.random.key(0), 3 + len(gates)))
    if op.core == "convolution":
        x = jax.random.normal(next(keys), (shape.batch, shape.tokens, shape.heads, shape.dim)).astype(shape.dtype)
        return {"x": x, "weight": jax.random.normal(next(keys), (1, TAPS, shape.heads, shape.dim)) / TAPS}
    sizes = {"B": shape.batch, "T": shape.tokens, "H": shape.heads, "K": shape.dim, "V": shape.dim}
    tokens = (shape.batch, shape.tokens, shape.heads, shape.dim)
    drawn = {name: jax.random.normal(next(keys), tokens) for name in ("query", "key", "value")}
    if op.core == "delta rule":
        drawn["key"] /= jnp.linalg.norm(drawn["key"], axis=-1, keepdims=True)
    arrays = {name: x.astype(shape.dtype) for name, x in drawn.items()}
    for name, dims in gates.items():
        gate = jax.random.normal(next(keys), tuple(sizes[dim] for dim in dims))
        arrays[name] = jax.nn.sigmoid(gate) if name == "beta" else jax.nn.log_sigmoid(gate) / 16
    return arrays


def cotangent(shape: Shape) -> jax.Array:
    """A cotangent of the output."""
    tokens = (shape.batch, shape.tokens, shape.heads, shape.dim)
    return jax.random.normal(jax.random.key(1), tokens).astype(shape.dtype)


def flops(op: Op, shape: Shape, gradient: bool) -> int:
    """Multiplications and additions of the definition, causal pairs alone; nothing computed twice is counted.

    Softmax has two products a pair of tokens and head, the recurrence two a token and head (into the state, out of
    it), the delta rule one more out of it, the convolution one for each of its taps. The gradient has twice as many.
    """
    state_products = {"linear recurrence": 4, "delta rule": 6}
    if op.core == "softmax":
        each, count = 4 * shape.dim, shape.tokens * (shape.tokens + 1) // 2
    elif op.core == "convolution":
        each, count = 2 * TAPS * shape.dim, shape.tokens
    else:
        each, count = state_products[op.core] * shape.dim * shape.dim, shape.tokens
    return shape.batch * shape.heads * count * each * (3 if gradient else 1)


def moved_bytes(*arrays: Any) -> int:
    """The bytes of all arguments and results, each of which moves once at least."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
