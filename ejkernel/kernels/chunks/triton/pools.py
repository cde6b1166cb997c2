"""Calls that start from slots of a pool of states and write slots, by the kernels that go token by token.

So a sequence has the same results to the bit wherever it is cut, and whatever else is in the call.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _launch, _mapping
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.pools import PooledCall, checkpoints
from ejkernel.kernels.chunks.triton.packing import Packing

SLOTS = "ejkernel.kernels.chunks.triton.device.slots"
Results = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Slots:
    """The slots of a pool of states that a call's sequences read and write.

    Attributes:
        pool: The states `[slots, H, K, V]`.
        reads: The slot that a sequence starts from, -1 for none: `[N]`.
        held: Whether another sequence writes that slot: `[N]`.
        copies: Copies of the initial states of sequences whose slot is held: `[N, H, K, V]`, otherwise not filled.
        at: After how many of its tokens a sequence writes: `[N, C]`.
        slots: The slot that it writes then, -1 for none; each slot comes once: `[N, C]`.
    """

    pool: jax.Array
    reads: jax.Array
    held: jax.Array
    copies: jax.Array
    at: jax.Array
    slots: jax.Array

    def inputs(self) -> dict[str, Any]:
        """Inputs of kernels beside the pool, which is an output in place."""
        names = ("reads", "held", "copies", "at", "slots")
        return {name: getattr(self, name) for name in names} | {"C": self.at.shape[1]}

    def outputs(self) -> dict[str, Any]:
        return {"pool": shape(*self.pool.shape, dtype=self.pool.dtype)}

    def in_place(self) -> dict[str, jax.Array]:
        return {"pool": self.pool}


@dataclass(frozen=True)
class _Constants:
    """What `hold` is compiled for."""

    heads: int
    key_dim: int
    value_dim: int
    value_block: int


def run(step: Callable[..., Results], call: Call, *arrays: jax.Array | None) -> Results:
    """Output and pool. `step(call, packing, slots, *inputs)` is the recurrence's, of arrays as `PooledCall` lists them.

    Mapped calls run one after the other.
    """

    def one(static: Call, arrays: Any) -> Results:
        *inputs, cu_seqlens, states, reads, writes, at = arrays
        borders = jnp.minimum(cu_seqlens, static.tokens).astype(jnp.int32)
        slots = _slots(static, borders, states, reads, writes, at)
        end = jnp.full((1,), static.tokens, jnp.int32)
        return step(static, Packing(jnp.concatenate([borders, end])[None]), slots, *inputs)

    return _mapping.foldable(one, lambda *_: None, call)(arrays)


def supports(core: Callable[[Any], str | None]) -> Callable[[PooledCall], str | None]:
    """`supports` of calls with a pool, from that of calls without."""
    return lambda pooled: "an array without elements" if pooled.checkpoints == 0 else core(pooled.call)


def _slots(
    call: Call, borders: jax.Array, pool: jax.Array, reads: jax.Array, writes: jax.Array, at: jax.Array | None
) -> Slots:
    (N, H, *_), number = (call.sequences, call.heads), pool.shape[0]
    after, slots = checkpoints(number, borders, writes, at)
    slots = jnp.minimum(slots, number)
    order = jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    # if several sequences write a slot, the first one does, with all heads
    first = jnp.full((number + 1,), slots.size, jnp.int32).at[slots].min(order)
    slots = jnp.where((slots < number) & (first[slots] == order), slots, -1)
    reads = jnp.where((reads >= 0) & (reads < number), reads, -1).astype(jnp.int32)
    writer = first[jnp.where(reads < 0, number, reads)]
    other = writer // slots.shape[1] != jnp.arange(N, dtype=jnp.int32)
    held = (reads >= 0) & (writer < slots.size) & other
    block = min(4096, padded(call.key_dim * call.value_dim))
    (copies,) = _launch.launch(
        importlib.import_module(SLOTS).hold,
        {"states": pool, "reads": reads, "held": held.astype(jnp.int32)},
        {"copies": shape(N, H, call.key_dim, call.value_dim, dtype=pool.dtype)},
        constants=_Constants(H, call.key_dim, call.value_dim, block),
        programs=N * H,
        tile=Tile(block, warps=4),
    )
    return Slots(pool, reads, held.astype(jnp.int32), copies, after.astype(jnp.int32), slots.astype(jnp.int32))
