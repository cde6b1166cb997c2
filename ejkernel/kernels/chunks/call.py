"""What is fixed when a call of a recurrence is traced, whichever recurrence it is."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Its arrays travel beside it: those of the recurrence's `Inputs` in their order, then where sequences lie. If
    `packed`, that is `cu_seqlens`, `[N + 1]` with `B = 1`; if `segmented`, `segment_ids [B, T]` of rows that may hold
    several sequences each, and `N = B`; else `None`, as every row is one sequence and `N = B`. The results are the
    output `[B, T, H, V]` in `dtype` and the final states `[N, H, K, V]`.
    """

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    sequences: int
    packed: bool
    decay: str  # which log decays there are, see the recurrence's `Inputs`
    scale: float
    reverse: bool
    dtype: np.dtype
    segmented: bool = field(default=False, kw_only=True)
    # how many devices share the call of which this is a part; it is cut as that one is
    devices: int = field(default=1, kw_only=True)

    largest_chunk: ClassVar[int] = 64  # of a chunk's tokens; measured on CPUs

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit, from the sharding of an array with all heads."""
        rows, tokens, heads, _ = tokens
        return PartitionSpec(rows, tokens, heads, None), PartitionSpec(None if self.packed else rows, heads, None, None)

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> Self:
        """The call that a device has where so many share its rows and heads."""
        sequences = self.sequences if self.packed else self.sequences // rows
        return replace(
            self,
            batch=self.batch // rows,
            heads=self.heads // heads,
            sequences=sequences,
            devices=self.devices * rows * heads,
        )

    def _dims(self, **gates: str) -> dict[str, str]:
        """The dimensions of all arrays, in their order, a letter each; `gates` are those between value and state."""
        tokens = {"query": "BTHK", "key": "BTHK", "value": "BTHV"}
        rows = "N" if self.packed else "B"
        sequences = {"segment_ids": "BT"} if self.segmented else {"cu_seqlens": "N"}
        return {**tokens, **gates, "initial_state": f"{rows}HKV", **sequences}

    @property
    def state_dtype(self) -> np.dtype:
        """States and everything summed over tokens are kept in float32, or float64 for float64 input."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
