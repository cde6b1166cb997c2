"""The table by which kernels find the sequence that a block of tokens belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Packing:
    """Where packed sequences lie, for blocks of several lengths; `places.locate` reads it.

    Attributes:
        table: Borders of the sequences, the padding behind the last being one more, and for each length of a block, how
            many blocks lie before each sequence: `[1 + lengths, N + 2]`.
        owners: The sequence of each block, by tokens a block.

    Where nothing is packed there is neither.
    """

    table: jax.Array | None
    owners: dict[int, jax.Array]

    @staticmethod
    def of(tokens: int, cu_seqlens: jax.Array | None, lengths: Sequence[int]) -> "Packing":
        """For blocks of `lengths` tokens; of the last of these, a sequence without tokens has one all the same."""
        if cu_seqlens is None:
            return Packing(None, {})
        sequences = cu_seqlens.shape[0] - 1
        borders = jnp.concatenate([cu_seqlens.astype(jnp.int32), jnp.full((1,), tokens, jnp.int32)])
        size = jnp.array(lengths, jnp.int32)[:, None]
        counts = jnp.maximum(-(-jnp.diff(borders) // size), jnp.where(size == lengths[-1], 1, 0))
        before = jnp.pad(jnp.cumsum(counts, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
        # comparing all is one kernel; searching is one a step, and those are launched one after the other
        method = "compare_all" if sequences <= 4096 else "sort"
        owners = {}
        for i, length in enumerate(lengths):
            owner = jnp.arange(tokens // length + sequences + 1, dtype=jnp.int32)
            # a block that holds all tokens is one of each sequence, and nothing is to be searched
            if length != lengths[-1] or length < tokens:
                owner = jnp.searchsorted(before[i, 1:], owner, side="right", method=method).astype(jnp.int32)
            owners[length] = jnp.minimum(owner, sequences)
        return Packing(jnp.concatenate([borders[None], before]), owners)
