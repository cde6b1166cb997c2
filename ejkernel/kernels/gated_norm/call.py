"""What a gated norm is: its static facts and its arrays."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.kernels._mapping import fold_rows


@dataclass(frozen=True)
class Call:
    """Static facts of one call, whose output is `[B, T, H, D]` in `dtype`.

    `skip` times the value is added to `x`. That is divided by the root of its mean square over the last axis, and
    multiplied by `scale` and the activated gate; by the gate before the norm with `gate_first`.
    """

    batch: int
    tokens: int
    heads: int
    dim: int
    epsilon: float
    activation: Literal["silu", "sigmoid"]
    gate_first: bool
    shared_scale: bool  # whether all heads have one
    dtype: np.dtype

    @property
    def wide(self) -> np.dtype:
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        of_tokens = {name: "BTHD" for name in ("x", "gate", "value")}
        found = of_tokens | {"scale": "D" if self.shared_scale else "HD", "skip": "HD"}
        return {name: found[name] for name in Inputs._fields}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> Self:
        """The call that a device has where so many share its rows and heads."""
        return replace(self, batch=self.batch // rows, heads=self.heads // heads)

    def result_specs(self, tokens: PartitionSpec) -> PartitionSpec:
        """How the output is sharded where shardings are explicit, from the sharding of `x`."""
        return tokens


class Inputs(NamedTuple):
    """The arrays of a call, or their cotangents."""

    x: jax.Array  # [B, T, H, D]
    gate: jax.Array  # the same, before its activation
    scale: jax.Array  # [H, D], or [D] if it is shared
    value: jax.Array | None  # [B, T, H, D]
    skip: jax.Array | None  # [H, D] if there is a value


def fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped calls join the batch, unless they have parameters of their own, or gradients of them."""
    if any((mapped.scale, mapped.skip, wanted.scale, wanted.skip)):
        return None
    return replace(call, batch=call.batch * size), fold_rows(inputs, size, mapped, ("scale", "skip"))
