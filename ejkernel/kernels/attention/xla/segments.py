"""Keys of rows that hold several sequences, told apart by ids.

Kept as a promise of the contract: `segment_ids`, whose ids may stand in any order, and keys out of sight cost nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Segments(NamedTuple):
    """Ids of the keys, and the least and the largest id, padding aside, of each block of `size` keys."""

    ids: Array  # [B, L]
    lowest: Array  # [B, blocks]
    highest: Array  # [B, blocks]
    size: int

    def around(self, ids: Array, counted: Array) -> tuple[Array, Array]:
        """The first and one past the last key that queries could share an id with, `[B]`, judged by blocks of keys.

        `ids [B, Bq]` are the queries' ids, of which only those that are `counted` count.
        """
        counted, limits = counted & (ids >= 0), np.iinfo(ids.dtype)
        lowest = jnp.where(counted, ids, ids.dtype.type(limits.max)).min(-1, keepdims=True)
        highest = jnp.where(counted, ids, ids.dtype.type(limits.min)).max(-1, keepdims=True)
        near = (self.lowest <= highest) & (self.highest >= lowest)
        block = jnp.arange(near.shape[-1], dtype=jnp.int32)
        first = jnp.where(near, block, block.size).min(-1) * self.size
        return first, (jnp.where(near, block, -1).max(-1) + 1) * self.size

    def shared(self, ids: Array, start: Array, size: int) -> Array:
        """Which queries with `ids [B, Bq]` share an id with which of `size` keys from `start` on, `[B, Bq, size]`."""
        queries, keys = ids[..., None], lax.dynamic_slice_in_dim(self.ids, start, size, 1)[:, None]
        return (queries == keys) & (queries >= 0)


def segments(ids: Array, size: int) -> Segments:
    """The `Segments` of keys with ids `[B, L]`, in blocks of `size`."""
    blocks = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge").reshape(ids.shape[0], -1, size)
    lowest = jnp.where(blocks >= 0, blocks, ids.dtype.type(np.iinfo(ids.dtype).max)).min(-1)
    return Segments(ids, lowest, blocks.max(-1), size)
