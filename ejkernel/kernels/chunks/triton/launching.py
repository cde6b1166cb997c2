"""How the kernels of a recurrence are launched on NVIDIA GPUs: their constants, and sizes of arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile, shape
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.xla_utils.utils import cdiv

F32 = jnp.float32
# Sequences of so few tokens are walked one token at a time.
FEW_TOKENS = 8
# In a pool, a sequence's tokens behind the last multiple of 128 go one at a time if they are so few. So drafts have the
# bits of single tokens, whatever else is in the call.
MOST_BY_TOKEN = 16


def capability() -> int:
    """The compute capability of the GPU here or, without one, of Hopper, whose configurations were measured."""
    return _launch.capability() or 90


def at_most_float32(x: jax.Array | None) -> jax.Array | None:
    """An array in float32 if it is in float64, which kernels do not have."""
    return x.astype(F32) if x is not None and x.dtype == jnp.float64 else x


def has_few_tokens(call: Any) -> bool:
    """Whether a call is walked one token at a time."""
    return call.tokens <= (3 * call.sequences if call.packed else FEW_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What kernels of either recurrence are compiled for; fields with defaults are constants of some kernels only."""

    heads: int
    key_dim: int
    value_dim: int
    chunk: int
    decay: str
    scale: float
    packed: bool
    listed: bool  # rows hold several sequences, and their chunks are listed
    whole: bool  # no chunk has a ragged end, which spares masks
    flip: bool  # the last token comes first
    precision: str  # of dots on float32 operands
    levels: int  # of dyadic blocks of a chunk
    query_heads: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_block: int = 0  # dims, or heads, that a program takes at once
    value_block: int = 0
    head_block: int = 0
    start: bool = False  # there is a state, or a cotangent, to start from
    pooled: bool = False  # states are slots of a pool
    most_by_token: int | None = None  # of a pooled sequence's last tokens, see `MOST_BY_TOKEN`; `None`: all of them
    inside: bool = False  # token by token to the checkpoints among tokens that go by chunks
    last: bool = False  # the last state, or the cotangent of the first, is wanted

    @staticmethod
    def facts(call: Any, config: Any) -> dict[str, Any]:
        """The fields without defaults."""
        return {
            "heads": call.heads,
            "key_dim": call.key_dim,
            "value_dim": call.value_dim,
            "chunk": config.chunk,
            "decay": call.decay,
            "scale": float(call.scale),
            "packed": call.packed,
            "listed": call.segmented,
            "whole": not (call.packed or call.segmented) and call.tokens % config.chunk == 0,
            "flip": call.reverse,
            "precision": config.precision,
            "levels": config.chunk.bit_length() - 1,
        }


@dataclass(frozen=True)
class Launcher:
    """One call, and how its kernels are launched."""

    call: Any
    plan: Any
    packing: Packing
    constants: Any  # the record that kernels get as `CALL`

    @property
    def config(self) -> Any:
        return self.plan.config

    @property
    def prompts(self) -> int:
        """How many sequences of a pool may have tokens that go by chunks."""
        return 0 if self.packing.prompts is None else self.packing.prompts.shape[0]

    def blocks(self, length: int) -> int:
        """Blocks of `length` tokens; of packed sequences, as many as there may be."""
        if self.prompts:
            return self.call.tokens // length + self.prompts
        if self.call.packed:
            return self.call.tokens // length + self.call.sequences + 1
        return self.call.batch * cdiv(self.call.tokens, length)

    def rows(self, dim: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """An array `[B, T, H, dim]`."""
        return shape(self.call.batch, self.call.tokens, self.call.heads, dim, dtype=dtype)

    def states(self) -> jax.ShapeDtypeStruct:
        """States of every sequence and head."""
        return shape(self.call.sequences, self.call.heads, self.call.key_dim, self.call.value_dim)

    def kept(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """An array of every head and row: `[chunks, H, C, *sizes]` or, if chunks are listed, `[B, H, T, *sizes]`."""
        call = self.call
        if call.segmented:
            return shape(call.batch, call.heads, call.tokens, *sizes, dtype=dtype)
        return shape(self.blocks(self.config.chunk), call.heads, self.config.chunk, *sizes, dtype=dtype)

    def flags(self) -> jax.ShapeDtypeStruct:
        """Flags of every chunk and head; a listed chunk has that of its first row."""
        if self.call.segmented:
            return self.kept(dtype=jnp.int32)
        return shape(self.blocks(self.config.chunk), self.call.heads, dtype=jnp.int32)

    def any_flags(self) -> jax.ShapeDtypeStruct | None:
        """If chunks are listed, flags of every chunk's size of rows: whether any chunk is flagged that begins there."""
        return shape(self.blocks(self.config.chunk), self.call.heads, dtype=jnp.int32) if self.call.segmented else None

    def launch(
        self,
        kernel: Any,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        programs: int,
        tile: Tile,
        length: int = 0,
        in_place: Mapping[str, jax.Array] | None = None,
        **constants: Any,
    ) -> Any:
        """Runs `kernel` over blocks of `length` tokens, with the call's constants but for those given here."""
        packing = self.packing
        places = {"packing": packing.table, "owner": packing.owners.get(length)}
        places |= {"chunks": packing.chunks, "before": packing.before}
        places |= {"reads": packing.reads, "prompts": packing.prompts}
        sizes = {"T": self.call.tokens, "N": self.call.sequences, "L": self.plan.segment}
        return _launch.launch(
            kernel,
            {**inputs, **places, **sizes},
            outputs,
            constants=replace(self.constants, **constants),
            programs=programs,
            tile=tile,
            in_place=in_place,
        )
