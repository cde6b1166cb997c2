"""What one token goes through before it attends: the static facts of a call, and its arrays."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from ejkernel.kernels._views import View


@dataclass(frozen=True)
class Call:
    """Static facts of a call, which computes one token of each row.

    With scales, each query and key head is divided by the root of its mean square and multiplied by its scale. With
    `value_norm`, value heads are normalised so too, without a scale. Then the first `2 · pairs` dims of each query and
    key head are rotated: dim `i` together with dim `i + pairs`. The cosines and sines of the position's angles are
    multiplied by `factor`. Keys and values go to the cache, unless their position is none of the cache's.
    """

    batch: int
    queries: View  # not `query`: with it would be `value`, which means something else to Triton
    keys: View
    values: View
    capacity: int
    pairs: int
    factor: float
    value_norm: bool
    epsilon: float
    dtype: np.dtype

    @property
    def wide(self) -> np.dtype:
        """The dtype to compute in."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Inputs(NamedTuple):
    """The arrays of a call.

    The first three are outputs of projections. They may be one array, and may hold copies of the rows behind the rows.
    """

    query: jax.Array  # [rows, groups, width]
    key: jax.Array
    value: jax.Array
    position: jax.Array  # [B]
    keys: jax.Array  # [B, capacity, Hkv, D]
    values: jax.Array
    frequencies: jax.Array | None  # [pairs]
    query_scale: jax.Array | None  # [D]
    key_scale: jax.Array | None  # [D]


class Results(NamedTuple):
    """The rotated queries, and the caches with the new keys and values."""

    query: jax.Array  # [B, 1, H, D]
    keys: jax.Array
    values: jax.Array
