"""The ops as data: how to call each, on what, and what that must cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.attention import attention, flash_attention
from ejkernel.delta_rule import delta_rule, gated_delta_rule, kda
from ejkernel.linear_attention import (
    lightning_attn,
    linear_attention,
    recurrent,
    recurrent_gla,
    retention,
    simple_gla,
)

Arrays = dict[str, jax.Array]
LAYER, LAYERS = 3, 12  # of lightning_attn


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; keys and values have as many heads and dims as queries."""

    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: str


@dataclass(frozen=True)
class Op:
    """An op of the library.

    Attributes:
        name: What the library calls it.
        run: Takes the arrays by name, returns the output `[B, T, H, V]` alone.
        softmax: Whether its work grows with the square of the tokens.
        gates: The arrays beside query, key and value, each with its dims (`"BTHK"`, ...).
        fixed_log_decay: For `H` heads, the log decay that the op has built in, `[H]`.
    """

    name: str
    run: Callable[..., jax.Array]
    softmax: bool = False
    gates: Mapping[str, str] | None = None
    fixed_log_decay: Callable[[int], np.ndarray] | None = None

    def inputs(self, shape: Shape) -> Arrays:
        """Arrays to call it with. Log decays are float32, as models have them, and mild, as trained ones are.

        Keys of the delta rule have length 1.
        """
        keys = iter(jax.random.split(jax.random.key(0), 3 + len(self.gates or {})))
        sizes = {"B": shape.batch, "T": shape.tokens, "H": shape.heads, "K": shape.dim, "V": shape.dim}
        tokens = (shape.batch, shape.tokens, shape.heads, shape.dim)
        drawn = {name: jax.random.normal(next(keys), tokens) for name in ("query", "key", "value")}
        if self.corrects:
            drawn["key"] /= jnp.linalg.norm(drawn["key"], axis=-1, keepdims=True)
        arrays = {name: x.astype(shape.dtype) for name, x in drawn.items()}
        for name, dims in (self.gates or {}).items():
            gate = jax.random.normal(next(keys), tuple(sizes[dim] for dim in dims))
            arrays[name] = jax.nn.sigmoid(gate) if name == "beta" else jax.nn.log_sigmoid(gate) / 16
        return arrays

    @property
    def corrects(self) -> bool:
        """Whether tokens replace what their keys recall: the delta rule."""
        return "beta" in (self.gates or {})

    def flops(self, shape: Shape, gradient: bool) -> int:
        """Multiplications and additions of the definition, causal pairs alone; nothing computed twice is counted.

        Softmax has two products a pair of tokens and head, the recurrence two a token and head (into the state, out of
        it), the delta rule one more out of it. The gradient has twice as many.
        """
        each = 4 * shape.dim if self.softmax else (6 if self.corrects else 4) * shape.dim * shape.dim
        count = shape.tokens * (shape.tokens + 1) // 2 if self.softmax else shape.tokens
        return shape.batch * shape.heads * count * each * (3 if gradient else 1)


def cotangent(shape: Shape) -> jax.Array:
    """Of the output."""
    tokens = (shape.batch, shape.tokens, shape.heads, shape.dim)
    return jax.random.normal(jax.random.key(1), tokens).astype(shape.dtype)


def moved_bytes(*arrays: Any) -> int:
    """What must move at least: every array given or returned, once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _retention(heads: int) -> np.ndarray:
    return np.log1p(-(2.0 ** (-5 - np.arange(heads))))


def _lightning(heads: int) -> np.ndarray:
    return -(8 / heads) * (1 - LAYER / LAYERS) * np.arange(heads)


# the fixed decays are spelled out again, since what checks the library must not take them from it
OPS = {
    op.name: op
    for op in (
        Op("recurrent_gla", lambda **x: recurrent_gla(**x)[0], gates={"g": "BTHK"}),
        Op("simple_gla", lambda **x: simple_gla(**x)[0], gates={"g": "BTH"}),
        Op("retention", lambda **x: retention(**x)[0], fixed_log_decay=_retention),
        Op(
            "lightning_attn",
            lambda **x: lightning_attn(**x, layer_idx=LAYER, num_layers=LAYERS)[0],
            fixed_log_decay=_lightning,
        ),
        Op("linear_attention", lambda **x: linear_attention(**x)[0]),
        Op("recurrent", lambda **x: recurrent(**x)[0], gates={"gk": "BTHK", "gv": "BTHV"}),
        Op("flash_attention", lambda **x: flash_attention(**x, causal=True), softmax=True),
        Op("attention", lambda **x: attention(**x, causal=True, dtype=None)[0], softmax=True),
        Op("delta_rule", lambda **x: delta_rule(**x)[0], gates={"beta": "BTH"}),
        Op("gated_delta_rule", lambda **x: gated_delta_rule(**x)[0], gates={"g": "BTH", "beta": "BTH"}),
        Op("kda", lambda **x: kda(**x)[0], gates={"g": "BTHK", "beta": "BTH"}),
    )
}
