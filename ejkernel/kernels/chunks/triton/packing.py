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

# Tokens that `list_chunks` takes at once.
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
    """Tables of sequences that do not fill a row each, which `places.locate` and `places.visit` read.

    Attributes:
        table: The borders of packed sequences, with the padding behind the last as one more sequence, and for each
            length of a block the number of blocks before each sequence: `[1 + lengths, N + 2]`.
        owners: By a block's length, the sequence of each block.
        chunks: If rows hold several sequences, the list of each row's chunks: `[B, T + 2]`.
        before: How many of these begin before each multiple of a chunk's size: `[B, cdiv(T, C) + 1]`.
        ids: The ids of the tokens' sequences, for kernels that go token by token: `[B, T]`.
        reads: If states are slots of a pool, the slot that each sequence starts from, -1 for none: `[N]`.
        prompts: The sequences of a pool that have chunks, at most so many, then -1.
    """

    table: jax.Array | None = None
    owners: dict[int, jax.Array] = field(default_factory=dict)
    chunks: jax.Array | None = None
    before: jax.Array | None = None
    ids: jax.Array | None = None
    reads: jax.Array | None = None
    prompts: jax.Array | None = None

    @staticmethod
    def of_call(call: Any, sequences: jax.Array | None, lengths: Sequence[int]) -> "Packing":
        """For blocks of `lengths` tokens, the first of which is a chunk's."""
        if call.segmented:
            assert sequences is not None
            return Packing.of_segments(sequences, lengths[0], call.reverse)
        return Packing.of(call.tokens, sequences, lengths)

    @staticmethod
    def of_segments(ids: jax.Array, chunk: int, reverse: bool) -> "Packing":
        """For rows that hold several sequences: runs of equal ids `[B, T]`."""
        (B, T), ids = ids.shape, _as_int32(ids)
        block = min(_BLOCK, padded(T))
        lists = _launch.launch(
            importlib.import_module(LISTS).list_chunks,
            {"ids": ids, "T": T},
            {"chunks": shape(B, T + 2, dtype=jnp.int32), "before": shape(B, cdiv(T, chunk) + 1, dtype=jnp.int32)},
            constants=_Constants(chunk, block, reverse),
            programs=B,
            tile=Tile(block, warps=max(1, min(8, block // 128))),
        )
        return Packing(chunks=lists.chunks, before=lists.before, ids=ids)

    @staticmethod
    def of(tokens: int, cu_seqlens: jax.Array | None, lengths: Sequence[int]) -> "Packing":
        """For blocks of `lengths` tokens; an empty sequence has a block of the last of these lengths."""
        if cu_seqlens is None:
            return Packing()
        sequences = cu_seqlens.shape[0] - 1
        borders = jnp.concatenate([cu_seqlens.astype(jnp.int32), jnp.full((1,), tokens, jnp.int32)])
        size = jnp.array(lengths, jnp.int32)[:, None]
        counts = jnp.maximum(-(-jnp.diff(borders) // size), jnp.where(size == lengths[-1], 1, 0))
        before = jnp.pad(jnp.cumsum(counts, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
        # comparing all is one kernel, bisection one a step, launched one after the other
        method = "compare_all" if sequences <= 4096 else "sort"
        owners = {}
        for i, length in enumerate(lengths):
            owner = jnp.arange(tokens // length + sequences + 1, dtype=jnp.int32)
            # blocks that hold all tokens are one a sequence, and need no search
            if length != lengths[-1] or length < tokens:
                owner = jnp.searchsorted(before[i, 1:], owner, side="right", method=method).astype(jnp.int32)
            owners[length] = jnp.minimum(owner, sequences)
        return Packing(jnp.concatenate([borders[None], before]), owners)


def _as_int32(ids: jax.Array) -> jax.Array:
    """Ids that change where these do from token to token, and are negative where these are."""
    if np.can_cast(ids.dtype, np.int32):
        return ids.astype(jnp.int32)
    change = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(ids >= 0, jnp.cumsum(change, 1, dtype=jnp.int32), -1)
