"""Keys of rows that hold several sequences, told apart by ids."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Segments(NamedTuple):
    """Ids of the keys, and between which ids, padding aside, each block of `size` keys lies."""

    ids: Array  # [B, L]
    lowest: Array  # [B, blocks]
    highest: Array
    size: int

    def around(self, ids: Array, real: Array) -> tuple[Array, Array]:
        """The first and one past the last key that any of these queries could share an id with, `[B]`.

        From the blocks alone. Of queries `ids [B, Bq]`, those that are not `real` do not count.
        """
        real, limits = real & (ids >= 0), np.iinfo(ids.dtype)
        lowest = jnp.where(real, ids, ids.dtype.type(limits.max)).min(-1, keepdims=True)
        highest = jnp.where(real, ids, ids.dtype.type(limits.min)).max(-1, keepdims=True)
        near = (self.lowest <= highest) & (self.highest >= lowest)
        block = jnp.arange(near.shape[-1], dtype=jnp.int32)
        first = jnp.where(near, block, block.size).min(-1) * self.size
        return first, (jnp.where(near, block, -1).max(-1) + 1) * self.size

    def shared(self, ids: Array, at: Array, size: int) -> Array:
        """Which of these queries share an id with which of the `size` keys from `at` on, `[B, Bq, size]`."""
        queries, keys = ids[..., None], lax.dynamic_slice_in_dim(self.ids, at, size, 1)[:, None]
        return (queries == keys) & (queries >= 0)


def segments(ids: Array, size: int) -> Segments:
    """The ids `[B, L]` of keys, which blocks of `size` are made of."""
    blocks = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge").reshape(ids.shape[0], -1, size)
    lowest = jnp.where(blocks >= 0, blocks, ids.dtype.type(np.iinfo(ids.dtype).max)).min(-1)
    return Segments(ids, lowest, blocks.max(-1), size)
