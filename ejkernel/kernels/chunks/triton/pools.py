"""Calls that start from slots of a pool of states and write slots.

Prompts go by chunks, and a few last tokens of a sequence, or all of a short one, token by token. Which tokens go which
way depends on their sequence alone, so it has the same results to the bit whatever else is in the call, and wherever it
is cut at multiples of 128 tokens.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _launch, _mapping
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.pools import PooledCall
from ejkernel.kernels.chunks.triton.launching import F32, MOST_BY_TOKEN
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.xla_utils.utils import cdiv

SLOTS = "ejkernel.kernels.chunks.triton.device.slots"
TABLES = "ejkernel.kernels.chunks.triton.device.pool_tables"
# Entries of a table that a program fills.
_TABLE = 128
Results = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Slots:
    """The slots of a pool of states that a call's sequences read and write.

    Attributes:
        pool: The states `[slots, H, K, V]`.
        held: Whether another sequence writes the slot that a sequence reads: `[N]`.
        copies: Copies of the initial states of sequences whose slot is held: `[N, H, K, V]`, otherwise not filled. A
            walk over chunks puts the states here that the token-by-token kernel goes on from.
        at: After how many of its tokens a sequence writes: `[N, C]`.
        slots: The slot that it writes then, -1 for none; each slot comes once: `[N, C]`.
    """

    pool: jax.Array
    held: jax.Array
    copies: jax.Array
    at: jax.Array
    slots: jax.Array

    def inputs(self) -> dict[str, Any]:
        """Inputs of kernels beside the states."""
        return {"held": self.held, "at": self.at, "slots": self.slots, "C": self.at.shape[1]}

    def in_place(self) -> dict[str, jax.Array]:
        """What a walk over chunks overwrites."""
        return {"pool": self.pool, "copies": self.copies}


@dataclass(frozen=True)
class Kernels:
    """The kernels of a recurrence that read and write slots.

    Attributes:
        launcher: `launcher(call, *inputs)` gives what launches the call's kernels, and the inputs by name.
        step: `step(launcher, x, slots, output=None, inside=False)` goes token by token. It gives the output, in place
            of `output` if that is given, and the pool.
        walk: `walk(launcher, x, slots)` goes by chunks. It gives the output, the pool and the copies, by name. `None`:
            all tokens go one by one.
    """

    launcher: Callable[..., tuple[Any, Any]]
    step: Callable[..., Results]
    walk: Callable[..., Any] | None


@dataclass(frozen=True)
class _Constants:
    """What `hold` is compiled for."""

    heads: int
    key_dim: int
    value_dim: int
    value_block: int


@dataclass(frozen=True)
class _TableConstants:
    """What `make_tables` is compiled for."""

    chunk: int | None  # `None`: nothing goes by chunks
    most_by_token: int
    block: int  # entries of a table that a program fills


def run(kernels: Kernels, pooled: PooledCall, call: Call, *arrays: jax.Array | None) -> Results:
    """Output and pool; `call` is that of `pooled` as the kernels have it, arrays are as `PooledCall` lists them.

    Mapped calls run one after the other.
    """
    walk = kernels.walk if pooled.longest > MOST_BY_TOKEN else None

    def one(static: Call, arrays: Any) -> Results:
        *inputs, cu_seqlens, states, reads, writes, at = arrays
        launcher, x = kernels.launcher(static, *inputs)
        most = None if kernels.walk is None else MOST_BY_TOKEN
        constants = replace(launcher.constants, pooled=True, most_by_token=most)
        chunk = launcher.config.chunk if walk else None
        packing, slots = _tables(static, chunk, cu_seqlens, states, reads, writes, at)
        launcher = replace(launcher, packing=packing, constants=constants)
        if walk is None:
            return kernels.step(launcher, x, slots)
        walked = walk(launcher, x, slots)
        slots = replace(slots, pool=walked.pool, copies=walked.copies)
        output, pool = kernels.step(launcher, x, slots, output=walked.output)
        if at is not None:
            _, pool = kernels.step(launcher, x, replace(slots, pool=pool), inside=True)
        return output, pool

    return _mapping.foldable(one, lambda *_: None, call)(arrays)


def supports(core: Callable[[Any], str | None]) -> Callable[[PooledCall], str | None]:
    """`supports` of calls with a pool, from that of calls without."""
    return lambda pooled: "an array without elements" if pooled.checkpoints == 0 else core(pooled.call)


def _tables(
    call: Call,
    chunk: int | None,
    cu_seqlens: jax.Array,
    pool: jax.Array,
    reads: jax.Array,
    writes: jax.Array,
    at: jax.Array | None,
) -> tuple[Packing, Slots]:
    """Where sequences lie, for chunks of so many tokens if any tokens go by chunks, and their slots."""
    (N, C), H = writes.shape, call.heads
    # chunks and the sequences that have any: no more than there may be
    prompts = min(N, call.tokens // (MOST_BY_TOKEN + 1))
    chunks = 0 if chunk is None else call.tokens // chunk + prompts
    integers: Any = partial(shape, dtype=jnp.int32)
    tables = _launch.launch(
        importlib.import_module(TABLES).make_tables,
        {
            **{"cu_seqlens": cu_seqlens.astype(jnp.int32), "source": reads, "target": writes, "at": at},
            **{"T": call.tokens, "N": N, "C": C, "S": pool.shape[0], "B": chunks, "M": prompts},
        },
        {
            "packing": integers(2, N + 2),
            "owner": integers(chunks) if chunk else None,
            "prompts": integers(prompts) if chunk else None,
            **{"reads": integers(N), "held": integers(N), "after": integers(N, C), "slots": integers(N, C)},
        },
        constants=_TableConstants(chunk, MOST_BY_TOKEN, _TABLE),
        programs=1 + cdiv(N * C, _TABLE) + cdiv(N, _TABLE) + cdiv(chunks, _TABLE),
        tile=Tile(_TABLE, warps=8),
    )
    block = min(4096, padded(call.key_dim * call.value_dim))
    # between chunks and tokens, states keep all their digits
    dtype = pool.dtype if chunk is None else F32
    (copies,) = _launch.launch(
        importlib.import_module(SLOTS).hold,
        {"states": pool, "reads": tables.reads, "held": tables.held},
        {"copies": shape(N, H, call.key_dim, call.value_dim, dtype=dtype)},
        constants=_Constants(H, call.key_dim, call.value_dim, block),
        programs=N * H,
        tile=Tile(block, warps=4),
    )
    owners = {} if chunk is None else {chunk: tables.owner}
    packing = Packing(tables.packing, owners, reads=tables.reads, prompts=tables.prompts)
    return packing, Slots(pool, tables.held, copies, tables.after, tables.slots)
