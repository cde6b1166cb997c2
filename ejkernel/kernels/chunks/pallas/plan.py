"""How a call is tiled for a TPU: chunks and heads a program, and which tokens each visit to a block is for."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks.call import Call

TOKENS = "query", "key", "value"
DTYPES = {np.dtype(each) for each in (jnp.bfloat16, jnp.float32)}
LARGEST_DIM = 256
LANES = 128
CHUNK = 128  # tokens that interact through one matrix of scores
BLOCK = 512  # tokens a visit
# Key gates are mild if neither half of a chunk decays by more than exp(-limit): 2^-80, for the digits of float32 2^-40.
# They are bounded if no tile of 8 tokens decays by more than 2^-80. Others are legal too, and take an exact path.
LIMITS = {np.dtype(jnp.bfloat16): (55.0, 55.0), np.dtype(np.float32): (27.0, 55.0)}


@dataclass(frozen=True)
class Sizes:
    """Everything that the device code of a call is compiled for."""

    key_dim: int
    value_dim: int
    chunk: int  # tokens
    chunks: int  # a block
    heads: int  # a program
    read_heads: tuple[int, int, int]  # of query, key and value that a program reads; fewer where heads share them
    decay: str
    scale: float
    reverse: bool
    masked: bool  # a block may hold tokens that are not the visit's
    limits: tuple[float, float]  # of `LIMITS`
    joined: bool = False  # rows hold several sequences, each of which begins with a gate that forgets everything

    @property
    def block(self) -> int:
        """Tokens a block."""
        return self.chunk * self.chunks

    def heads_of(self, array: str) -> int:
        """How many heads of an array a program reads or writes."""
        return dict(zip(TOKENS, self.read_heads, strict=True)).get(array, self.heads)


def sizes(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, most_chunks: int = BLOCK) -> Sizes:
    """How the call is tiled, in blocks of at most so many chunks."""
    array_heads = [x.shape[2] for x in (query, key, value)]
    heads = _heads_per_program(call, array_heads)
    wide = max(call.key_dim, call.value_dim) > LANES
    # float32 products of wide heads leave little room beside them
    chunk = CHUNK // 2 if wide and call.dtype.itemsize == 4 else CHUNK
    # the smallest VMEM, of 16 MiB, has to hold it twice
    block = BLOCK * 2 // call.dtype.itemsize // (2 if wide else 1)
    if call.packed:
        # a block that two sequences share is visited once for each
        block = min(block, call.tokens // (4 * call.sequences))
    # at least CHUNK tokens: gates of heads and betas have their tokens along the lanes
    chunks = max(CHUNK // chunk, min(most_chunks, block // chunk, -(-call.tokens // chunk)))
    query_heads, key_heads, value_heads = (max(1, heads * each // call.heads) for each in array_heads)
    return Sizes(
        key_dim=call.key_dim,
        value_dim=call.value_dim,
        chunk=chunk,
        chunks=chunks,
        heads=heads,
        read_heads=(query_heads, key_heads, value_heads),
        decay=call.decay,
        scale=float(call.scale),
        reverse=call.reverse,
        masked=call.packed or call.tokens % (chunk * chunks) != 0,
        limits=LIMITS[call.dtype],
    )


def _heads_per_program(call: Call, array_heads: list[int]) -> int:
    """As many as hide the latency of one another's products and, in every array, fill whole lanes."""
    wanted = 2 * LANES // max(call.key_dim, call.value_dim)
    dims = call.key_dim, call.key_dim, call.value_dim, call.key_dim, call.value_dim

    def fits(heads: int) -> bool:
        for number, dim in zip((*array_heads, call.heads, call.heads), dims, strict=True):
            shared = call.heads // number
            block = max(1, heads // shared)
            if (heads % shared and shared % heads) or (block * dim % LANES and block != number):
                return False
        return True

    choices = [each for each in range(1, call.heads + 1) if call.heads % each == 0 and fits(each)]
    return min(choices, key=lambda each: (each < wanted, each))


class Visit(NamedTuple):
    """One step of a kernel's loop: a block of tokens, of which those from `low` to before `high` are the visit's.

    On the host each field is an array `[visits]`, on the device a number.
    """

    block: Any
    sequence: Any
    low: Any
    high: Any
    first: Any  # whether it is the first visit of its sequence
    last: Any  # whether it is the last
    fresh: Any = None  # whether it is the first visit to its block
    start: Any = None  # the block's first token

    @staticmethod
    def read(table: Any, number: Any, sizes: Sizes) -> "Visit":
        visit = Visit(*(table[field, number] for field in range(7)))
        return visit._replace(start=visit.block * sizes.block)


def number_of_visits(call: Call, sizes: Sizes) -> int:
    """Each border of packed sequences may split a block, and the padding past the last one is visited too."""
    return -(-call.tokens // sizes.block) + (call.sequences + 1 if call.packed else 0)


def table(call: Call, sizes: Sizes, cu_seqlens: jax.Array | None, reverse: bool) -> jax.Array:
    """The fields of all visits `[7, visits]`, in the order in which the device makes them."""
    visits = _visits(call, sizes, cu_seqlens)
    if reverse:
        visits = Visit(*(each[::-1] for each in visits[:6]))
        visits = visits._replace(first=visits.last, last=visits.first)
    fresh = jnp.concatenate([jnp.ones(1, bool), visits.block[1:] != visits.block[:-1]])
    return jnp.stack([each.astype(np.int32) for each in visits._replace(fresh=fresh)[:-1]])


def _visits(call: Call, sizes: Sizes, cu_seqlens: jax.Array | None) -> Visit:
    """All visits in the order of the tokens; `fresh` is not known yet."""
    L, T = sizes.block, call.tokens
    blocks = -(-T // L)
    if cu_seqlens is None:
        number = jnp.arange(blocks, dtype=np.int32)
        whole = jnp.full_like(number, T)
        ends = number == 0, number == blocks - 1
        return Visit(number, 0 * number, 0 * number, whole, *ends)
    borders = jnp.concatenate([jnp.minimum(cu_seqlens, T), jnp.full(1, T, cu_seqlens.dtype)]).astype(np.int32)
    low, high = borders[:-1], borders[1:]  # the padding past the last border counts as one more sequence
    first = jnp.minimum(low, T - 1) // L
    count = jnp.where(high > low, (high - 1) // L - first + 1, 1).at[-1].multiply(low[-1] < T)
    after = jnp.cumsum(count, dtype=np.int32)
    number = jnp.arange(number_of_visits(call, sizes), dtype=np.int32)
    real = number < after[-1]
    sequence = jnp.minimum(jnp.searchsorted(after, number, side="right").astype(np.int32), call.sequences)
    inside = number - (after - count)[sequence]
    block = jnp.where(real, first[sequence] + inside, blocks - 1)
    real = real & (sequence < call.sequences)
    ends = (inside == 0) & real, (inside == count[sequence] - 1) & real
    low, high = (jnp.where(real, each[sequence], 0) for each in (low, high))
    return Visit(block, jnp.minimum(sequence, call.sequences - 1), low, high, *ends)


def supports(call: Call) -> str | None:
    """Why a call cannot be tiled so, or `None` if it can."""
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


def cast_inputs(call: Any, inputs: Any, half: bool) -> tuple[Any, Any]:
    """A call and its named arrays in dtypes that TPUs have; query, key, value in bfloat16 if `half`, else float32."""
    dtype = np.dtype(jnp.bfloat16 if half else np.float32)

    def cast(x: jax.Array) -> jax.Array:
        return x if x.dtype in DTYPES or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(np.float32)

    tokens = {name: getattr(inputs, name).astype(dtype) for name in TOKENS}
    return replace(call, dtype=dtype), _varying.align(jax.tree.map(cast, inputs)._replace(**tokens))
