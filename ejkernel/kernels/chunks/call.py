"""What is fixed when a call of a recurrence is traced, whichever recurrence it is."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Its arrays travel beside it: those of the recurrence's `Inputs` in their order, then `cu_seqlens`, `[N + 1]` with
    `B = 1`, or `None`, if every row is one sequence and `N = B`. The results are the output `[B, T, H, V]` in `dtype`
    and the final states `[N, H, K, V]`.
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

    largest_chunk: ClassVar[int] = 64  # of a chunk's tokens; measured on CPUs

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit, from the sharding of an array with all heads."""
        rows, tokens, heads, _ = tokens
        return PartitionSpec(rows, tokens, heads, None), PartitionSpec(None if self.packed else rows, heads, None, None)

    @property
    def state_dtype(self) -> np.dtype:
        """States and everything summed over tokens are kept in float32, or float64 for float64 input."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
