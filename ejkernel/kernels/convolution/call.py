"""What a call of the short convolution is: its static facts and its arrays."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.kernels._mapping import fold_rows


@dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Its arrays are those of `Inputs`. The results are the output `[B, T, D]` and the final states `[N, W - 1, D]`, both
    in `dtype`. Sequences are the rows of a batch, with `N = B`; packed in one row, with `B = 1`; or several in each
    row, told apart by segment ids, with one state a row, so `N = B`.
    """

    batch: int
    tokens: int
    channels: int
    taps: int  # W
    sequences: int  # N
    layout: Literal["rows", "packed", "segments"]
    activation: Literal["silu"] | None
    dtype: np.dtype
    # Channels of a head: what the activation gives is divided, head by head, by its norm, as `_normalization` does it.
    # 0 for no norm.
    unit_dim: int = 0

    @property
    def history(self) -> int:
        """How many tokens before its own a token's sum spans."""
        return self.taps - 1

    @property
    def sum_dtype(self) -> np.dtype:
        """Sums and activations are in float32, or float64 for float64 input."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def heads(self) -> int:
        """What a mesh shards as it does heads: channels, each computed by itself, or heads that have a norm."""
        return self.channels // self.together

    @property
    def together(self) -> int:
        """How many channels a device has at least."""
        return max(self.unit_dim, 1)

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each, of which `H` are channels."""
        rows = "N" if self.layout == "packed" else "B"
        states = {"initial_state": f"{rows}WH", "cu_seqlens": "N", "segment_ids": "BT"}
        return {"x": "BTH", "weight": "WH", "bias": "H", **states}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> Self:
        """The call that a device has where so many share its rows and channels."""
        sequences = self.sequences if self.layout == "packed" else self.sequences // rows
        return replace(self, batch=self.batch // rows, channels=self.channels // heads, sequences=sequences)

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit, from the sharding of `x`."""
        rows, _, channels = tokens
        return tokens, PartitionSpec(None if self.layout == "packed" else rows, None, channels)


class Inputs(NamedTuple):
    """The arrays of a call, or their cotangents."""

    x: jax.Array  # [B, T, D]
    weight: jax.Array  # [W, D], the last row weighing the token itself
    bias: jax.Array | None  # [D]
    initial_state: jax.Array | None  # [N, W - 1, D], oldest first; None for zeros
    cu_seqlens: jax.Array | None  # [N + 1] if the layout is "packed"
    segment_ids: jax.Array | None  # [B, T] if the layout is "segments"


def fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped calls join the batch, unless they have weights of their own, or gradients of them."""
    if call.layout == "packed" or any((mapped.weight, mapped.bias, wanted.weight, wanted.bias)):
        return None
    larger = replace(call, batch=call.batch * size, sequences=call.sequences * size)
    return larger, fold_rows(inputs, size, mapped, ("weight", "bias"))
