"""What is fixed when a call of the delta rule is traced."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from jax.sharding import PartitionSpec

Decay = Literal["none", "head", "key"]


@dataclass(frozen=True)
class Call:
    """Static facts of one call; the arrays travel beside it, positionally, in this order:

    | array | shape |
    |---|---|
    | `query` | `[B, T, ·, K]` |
    | `key` | `[B, T, ·, K]` |
    | `value` | `[B, T, ·, V]`; each of the three has a number of heads of its own that divides `H` |
    | `beta` | `[B, T, H]` |
    | `log_decay` | by `decay`: `None`; `head` `[B, T, H]`; `key` `[B, T, H, K]` |
    | `initial_state` | `[N, H, K, V]` or `None` for zeros |
    | `cu_seqlens` | `[N + 1]` with `B = 1`, or `None`: then every row is one sequence and `N = B` |

    and the results are the output `[B, T, H, V]` in `dtype` and the final states `[N, H, K, V]`.
    """

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    sequences: int
    packed: bool
    decay: Decay
    scale: float
    reverse: bool
    dtype: np.dtype
    mapped: int = 1  # how many of it `vmap` makes, as far as the front sees

    # of a chunk's tokens; 64 multiply more and, where tokens reflect (beta 2), are off by twice as much
    largest_chunk: ClassVar[int] = 32

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit and this is that of an array with all heads."""
        rows, tokens, heads, _ = tokens
        return PartitionSpec(rows, tokens, heads, None), PartitionSpec(None if self.packed else rows, heads, None, None)

    @property
    def state_dtype(self) -> np.dtype:
        """States and everything summed over tokens are kept in float32, or float64 for float64 input."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
