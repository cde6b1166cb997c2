"""How a call is cut for a TPU: chunks and heads a program, and which tokens of which sequence each visit is for."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.linear_recurrence.call import Call, Decay

DTYPES = {np.dtype(each) for each in (jnp.bfloat16, jnp.float32)}
LARGEST_DIM = 256
LANES = 128
CHUNK = 128  # tokens that interact through one matrix of scores
BLOCK = 512  # tokens a visit
# Natural log of the decay in half a chunk beyond which key gates take the exact path: 2^-80, and for the digits of
# float32 2^-40
LIMITS = {np.dtype(jnp.bfloat16): 55.0, np.dtype(np.float32): 27.0}


@dataclass(frozen=True)
class Sizes:
    """Everything that the device code of a call is compiled for."""

    key_dim: int
    value_dim: int
    chunk: int
    chunks: int  # a visit
    heads: int  # a program
    query_heads: int  # that a program's heads share, and so on
    key_heads: int
    value_heads: int
    decay: Decay
    scale: float
    reverse: bool
    masked: bool  # a visit may have tokens that are not its own
    packed: bool
    limit: float

    @property
    def block(self) -> int:
        return self.chunk * self.chunks

    def block_heads(self, array: str) -> int:
        """How many heads of an array a program sees."""
        return {"query": self.query_heads, "key": self.key_heads, "value": self.value_heads}.get(array, self.heads)


def sizes(call: Call, query: jax.Array, key: jax.Array, value: jax.Array) -> Sizes:
    """How the call is cut."""
    mine = [x.shape[2] for x in (query, key, value)]
    heads = _heads_at_once(call, mine)
    wide = max(call.key_dim, call.value_dim) > LANES
    # float32 products of wide heads leave little room beside them
    chunk = CHUNK // 2 if wide and call.dtype.itemsize == 4 else CHUNK
    # the smallest VMEM, of 16 MiB, has to hold it twice
    block = BLOCK * 2 // call.dtype.itemsize // (2 if wide else 1)
    if call.packed:
        # each sequence has a block that is partly another's, and is gone through for either
        block = min(block, call.tokens // (4 * call.sequences))
    # no less than a whole chunk: tokens of head gates lie along lanes
    chunks = max(CHUNK // chunk, min(block // chunk, -(-call.tokens // chunk)))
    return Sizes(
        key_dim=call.key_dim,
        value_dim=call.value_dim,
        chunk=chunk,
        chunks=chunks,
        heads=heads,
        query_heads=max(1, heads * mine[0] // call.heads),
        key_heads=max(1, heads * mine[1] // call.heads),
        value_heads=max(1, heads * mine[2] // call.heads),
        decay=call.decay,
        scale=float(call.scale),
        reverse=call.reverse,
        masked=call.packed or call.tokens % (chunk * chunks) != 0,
        packed=call.packed,
        limit=LIMITS[call.dtype],
    )


def _heads_at_once(call: Call, mine: list[int]) -> int:
    """Heads a program: some hide the latency of one another's products; whole lanes must hold them in every array."""
    wanted = 2 * LANES // max(call.key_dim, call.value_dim)

    def fits(heads: int) -> bool:
        for own, dim in zip(
            (*mine, call.heads, call.heads),
            (call.key_dim, call.key_dim, call.value_dim, call.key_dim, call.value_dim),
            strict=True,
        ):
            shared = call.heads // own
            if heads % shared and shared % heads:
                return False
            block = max(1, heads // shared)
            if block * dim % LANES and block != own:
                return False
        return True

    choices = [each for each in range(1, call.heads + 1) if call.heads % each == 0 and fits(each)]
    return min(choices, key=lambda each: (each < wanted, each))


class Item(NamedTuple):
    """One visit: a block of tokens, and which of them are its own, from `low` to before `high`.

    `[visits]` each on their way to the device, one number each there.
    """

    block: Any
    sequence: Any
    low: Any
    high: Any
    first: Any  # whether no other visit of its sequence comes before it
    last: Any  # and none after it
    fresh: Any  # whether no other visit of its block comes before it
    start: Any = None  # the block's first token

    @staticmethod
    def read(table: Any, number: Any, sizes: Sizes) -> "Item":
        item = Item(*(table[field, number] for field in range(7)))
        return item._replace(start=item.block * sizes.block)


def number_of_visits(call: Call, sizes: Sizes) -> int:
    """Each border of packed sequences may split a block, and what is past the last one is visited too."""
    return -(-call.tokens // sizes.block) + (call.sequences + 1 if call.packed else 0)


def visits(call: Call, sizes: Sizes, cu_seqlens: jax.Array | None) -> Item:
    """The visits in the order of the tokens."""
    L, T = sizes.block, call.tokens
    blocks = -(-T // L)
    if cu_seqlens is None:
        number = jnp.arange(blocks, dtype=np.int32)
        whole = jnp.full_like(number, T)
        ends = number == 0, number == blocks - 1
        return Item(number, 0 * number, 0 * number, whole, *ends, number >= 0)
    borders = jnp.concatenate([jnp.minimum(cu_seqlens, T), jnp.full(1, T, cu_seqlens.dtype)]).astype(np.int32)
    low, high = borders[:-1], borders[1:]  # with what is past the last border as one more
    first = jnp.minimum(low, T - 1) // L
    count = jnp.where(high > low, (high - 1) // L - first + 1, 1).at[-1].multiply(low[-1] < T)
    after = jnp.cumsum(count, dtype=np.int32)
    number = jnp.arange(number_of_visits(call, sizes), dtype=np.int32)
    real = number < after[-1]
    sequence = jnp.minimum(jnp.searchsorted(after, number, side="right").astype(np.int32), call.sequences)
    inside = number - (after - count)[sequence]
    block = jnp.where(real, first[sequence] + inside, blocks - 1)
    mine = real & (sequence < call.sequences)
    ends = (inside == 0) & mine, (inside == count[sequence] - 1) & mine
    low, high = (jnp.where(mine, each[sequence], 0) for each in (low, high))
    return Item(block, jnp.minimum(sequence, call.sequences - 1), low, high, *ends, block >= 0)


def table(item: Item, reverse: bool) -> jax.Array:
    """The visits as the device reads them, in the order in which it makes them."""
    if reverse:
        item = Item(*(each[::-1] for each in item[:-1]))
        item = item._replace(first=item.last, last=item.first)
    fresh = jnp.concatenate([jnp.ones(1, bool), item.block[1:] != item.block[:-1]])
    return jnp.stack([each.astype(np.int32) for each in item._replace(fresh=fresh)[:-1]])


def supports(call: Call) -> str | None:
    """Why a call cannot be cut so, or `None` if it can."""
    if call.dtype not in DTYPES:
        return f"dtype {call.dtype} is none of bfloat16, float32"
    if any(dim % 64 or not 0 < dim <= LARGEST_DIM for dim in (call.key_dim, call.value_dim)):
        return f"head dims K={call.key_dim}, V={call.value_dim}; it takes multiples of 64 up to {LARGEST_DIM}"
    if jax.export.is_symbolic_dim(call.batch):
        return "a batch that is known only when the program runs"
    if 0 in (call.batch, call.tokens, call.heads, call.sequences):
        return "an array without elements"
    if call.tokens == 1 and not call.packed:
        return "one token, which XLA takes in one step"
    if not (call.scale > 0 and math.isfinite(call.scale)):
        return f"softmax_scale {call.scale}: it is folded into the decays"
    return None


def served(x: jax.Array | None) -> jax.Array | None:
    """`x` in a dtype that TPUs have."""
    if x is None or x.dtype in DTYPES or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(np.float32)
