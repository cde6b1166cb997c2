"""What is done to one token before it attends: static facts and arrays."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from ejkernel.kernels._views import View


@dataclass(frozen=True)
class Call:
    """Static facts of one token of each row.

    Heads of queries and keys are divided by the root of their mean square and multiplied by a scale if there is one;
    so are values if `value_norm`, without a scale. Pairs of a head's dims, from the two halves of its first ones, are
    rotated by a position's angles, whose cosines and sines are multiplied by `factor`.
    """

    batch: int
    query: View
    key: View
    value: View
    capacity: int
    pairs: int  # of dims that are rotated; 0 for none
    factor: float
    value_norm: bool
    epsilon: float
    dtype: np.dtype

    @property
    def wide(self) -> np.dtype:
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Inputs(NamedTuple):
    """The arrays of a call. The first three may be the same, and may have copies of the rows behind them."""

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
    """Of a call. Tokens at positions that the cache does not have are not stored."""

    query: jax.Array  # [B, 1, H, D]
    keys: jax.Array
    values: jax.Array
