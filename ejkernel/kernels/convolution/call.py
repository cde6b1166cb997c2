"""The short convolution: the static facts of a call, and its arrays."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.kernels._mapping import fold_rows


@dataclass(frozen=True)
class Call:
    """Static facts of one call, whose arrays are `Inputs`.

    The results are the output `[B, T, D]` and the final states `[N, W - 1, D]`, both in `dtype`. By `layout`, each row
    is a sequence and `N = B`; or `N` sequences are packed in one row and `B = 1`; or each row holds several sequences,
    told apart by segment ids, but has one state, so `N = B`.
    """

    batch: int
    tokens: int
    channels: int
    taps: int  # W
    sequences: int  # N
    layout: Literal["rows", "packed", "segments"]
    activation: Literal["silu"] | None
    dtype: np.dtype
    # Each head of so many channels is divided by its norm after the activation; 0 is without norms.
    unit_dim: int = 0

    @property
    def history(self) -> int:
        """How many earlier tokens a token's sum spans."""
        return self.taps - 1

    @property
    def sum_dtype(self) -> np.dtype:
        """The dtype of sums, activations and norms."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def heads(self) -> int:
        """What a mesh shards along the axis of heads: single channels, or heads if they have norms."""
        return self.channels // self.together

    @property
    def together(self) -> int:
        """How many channels must stay on one device; `_mesh.split` reads it."""
        return max(self.unit_dim, 1)

    def dims(self) -> dict[str, str]:
        """The axes of the arrays by name, a letter each; `H` is that of channels."""
        rows = "N" if self.layout == "packed" else "B"
        states = {"initial_state": f"{rows}WH", "cu_seqlens": "N", "segment_ids": "BT"}
        return {"x": "BTH", "weight": "WH", "bias": "H", **states}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> Self:
        """The call on each device if so many devices share the rows, and so many the channels."""
        sequences = self.sequences if self.layout == "packed" else self.sequences // rows
        return replace(self, batch=self.batch // rows, channels=self.channels // heads, sequences=sequences)

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit, from the sharding of `x`."""
        rows, _, channels = tokens
        return tokens, PartitionSpec(None if self.layout == "packed" else rows, None, channels)


class Inputs(NamedTuple):
    """The arrays of a call, or their cotangents."""

    x: jax.Array  # [B, T, D]
    weight: jax.Array  # [W, D], the last row for the token itself
    bias: jax.Array | None  # [D]
    initial_state: jax.Array | None  # [N, W - 1, D], oldest first; None for zeros
    cu_seqlens: jax.Array | None  # [N + 1] if the layout is "packed"
    segment_ids: jax.Array | None  # [B, T] if the layout is "segments"


def fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped calls join the batch, unless weights or bias are mapped, or their gradients wanted."""
    if call.layout == "packed" or any((mapped.weight, mapped.bias, wanted.weight, wanted.bias)):
        return None
    larger = replace(call, batch=call.batch * size, sequences=call.sequences * size)
    return larger, fold_rows(inputs, size, mapped, ("weight", "bias"))
