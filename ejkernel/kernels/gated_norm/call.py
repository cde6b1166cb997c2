"""A norm with an output gate: the static facts of a call, and its arrays."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.kernels._mapping import fold_rows


@dataclass(frozen=True)
class Call:
    """Static facts of one call, whose output is `[B, T, H, D]` in `dtype`.

    `skip` times `value`, if they are given, is added to `x`. The sum is divided by the root of its mean square over the
    last axis, and multiplied by `scale` and by the activated gate. With `gate_first`, it is multiplied by the gate
    before the norm instead.
    """

    batch: int
    tokens: int
    heads: int
    dim: int
    epsilon: float
    activation: Literal["silu", "sigmoid"]
    gate_first: bool
    shared_scale: bool  # whether all heads share one scale
    dtype: np.dtype

    @property
    def wide(self) -> np.dtype:
        """The dtype to compute in."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        scale = "D" if self.shared_scale else "HD"
        return {"x": "BTHD", "gate": "BTHD", "scale": scale, "value": "BTHD", "skip": "HD"}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> Self:
        """The call on each device if so many devices share the rows, and so many the heads."""
        return replace(self, batch=self.batch // rows, heads=self.heads // heads)

    def result_specs(self, tokens: PartitionSpec) -> PartitionSpec:
        """How the output is sharded where shardings are explicit, from the sharding of `x`."""
        return tokens


class Inputs(NamedTuple):
    """The arrays of a call, or their cotangents."""

    x: jax.Array  # [B, T, H, D]
    gate: jax.Array  # [B, T, H, D], before its activation
    scale: jax.Array  # [H, D], or [D] if all heads share it
    value: jax.Array | None  # [B, T, H, D]
    skip: jax.Array | None  # [H, D], given together with a value


def fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped calls join the batch, unless parameters are mapped, or their gradients wanted."""
    if any((mapped.scale, mapped.skip, wanted.scale, wanted.skip)):
        return None
    return replace(call, batch=call.batch * size), fold_rows(inputs, size, mapped, ("scale", "skip"))
