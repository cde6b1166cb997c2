"""The tables by which kernels find the sequence that a block of tokens belongs to."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.xla_utils.utils import cdiv

# Tokens that are looked at at once where chunks are listed.
_BLOCK = 4096
LISTS = "ejkernel.kernels.chunks.triton.device.lists"


@dataclass(frozen=True)
class _Constants:
    """What `list_chunks` is compiled for."""

    chunk: int
    block: int
    flip: bool


@dataclass(frozen=True)
class Packing:
    """Where sequences lie that do not fill a row each; `places.locate` and `places.visit` read it.

    Attributes:
        table: Borders of the sequences, the padding behind the last being one more, and for each length of a block, how
            many blocks lie before each sequence: `[1 + lengths, N + 2]`.
        owners: The sequence of each block, by tokens a block.
        chunks: Where rows hold several sequences, the list of each row's chunks: `[B, T + 2]`.
        before: How many of them begin before so many chunks' sizes: `[B, cdiv(T, C) + 1]`.
        ids: The ids that say so, for kernels that go by tokens: `[B, T]`.
    """

    table: jax.Array | None = None
    owners: dict[int, jax.Array] = field(default_factory=dict)
    chunks: jax.Array | None = None
    before: jax.Array | None = None
    ids: jax.Array | None = None

    @staticmethod
    def of_call(call: Any, sequences: jax.Array | None, lengths: Sequence[int]) -> "Packing":
        """For blocks of `lengths` tokens, as `of` has them, of which the first is a chunk."""
        if call.segmented:
            assert sequences is not None
            return Packing.of_segments(sequences, lengths[0], call.reverse)
        return Packing.of(call.tokens, sequences, lengths)

    @staticmethod
    def of_segments(ids: jax.Array, chunk: int, reverse: bool) -> "Packing":
        """For rows that hold several sequences: runs of equal ids `[B, T]`."""
        (B, T), ids = ids.shape, _as_int32(ids)
        block = min(_BLOCK, padded(T))
        found = _launch.launch(
            importlib.import_module(LISTS).list_chunks,
            {"ids": ids, "T": T},
            {"chunks": shape(B, T + 2, dtype=jnp.int32), "before": shape(B, cdiv(T, chunk) + 1, dtype=jnp.int32)},
            constants=_Constants(chunk, block, reverse),
            programs=B,
            tile=Tile(block, warps=max(1, min(8, block // 128))),
        )
        return Packing(chunks=found.chunks, before=found.before, ids=ids)

    @staticmethod
    def of(tokens: int, cu_seqlens: jax.Array | None, lengths: Sequence[int]) -> "Packing":
        """For blocks of `lengths` tokens; of the last of these, a sequence without tokens has one all the same."""
        if cu_seqlens is None:
            return Packing()
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


def _as_int32(ids: jax.Array) -> jax.Array:
    """Ids that differ where these do from token to token, negative where these are."""
    if np.can_cast(ids.dtype, np.int32):
        return ids.astype(jnp.int32)
    change = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(ids >= 0, jnp.cumsum(change, 1, dtype=jnp.int32), -1)
