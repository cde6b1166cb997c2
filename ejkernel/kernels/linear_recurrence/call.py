"""What is fixed when a call of the gated linear recurrence is traced."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

Decay = Literal["none", "constant", "head", "key"]


@dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Its arrays travel beside it: those of `Inputs` in their order, then `cu_seqlens`, `[N + 1]` with `B = 1`, or `None`,
    if every row is one sequence and `N = B`. The results are the output `[B, T, H, V]` in `dtype` and the final states
    `[N, H, K, V]`.
    """

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    sequences: int
    packed: bool
    decay: Decay
    value_decay: bool
    scale: float
    reverse: bool
    dtype: np.dtype

    largest_chunk: ClassVar[int] = 64  # of a chunk's tokens; measured on CPUs

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit and this is that of an array with all heads."""
        rows, tokens, heads, _ = tokens
        return PartitionSpec(rows, tokens, heads, None), PartitionSpec(None if self.packed else rows, heads, None, None)

    @property
    def state_dtype(self) -> np.dtype:
        """States and everything summed over tokens are kept in float32, or float64 for float64 input."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Inputs(NamedTuple):
    """The arrays of a call that have gradients, or their cotangents.

    Query, key and value each have a number of heads that divides `H`.
    """

    query: jax.Array  # [B, T, heads, K]
    key: jax.Array  # [B, T, heads, K]
    value: jax.Array  # [B, T, heads, V]
    log_decay: jax.Array | None  # by `Call.decay`: None; constant [N, H]; head [B, T, H]; key [B, T, H, K]
    value_log_decay: jax.Array | None  # [B, T, H, V]
    initial_state: jax.Array | None  # [N, H, K, V]; None for zeros

    @property
    def gates(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Log decays of key dims and of value dims."""
        return self.log_decay, self.value_log_decay
