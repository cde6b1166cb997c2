"""A call of blockwise attention as blocks of queries, and for each of them the blocks of keys in its sight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, heads_first
from ejkernel.kernels.attention.masks import by_group, live
from ejkernel.kernels.attention.xla import few_queries
from ejkernel.kernels.attention.xla.layout import Layout, layout, seen_keys
from ejkernel.kernels.attention.xla.segments import Segments, segments
from ejkernel.xla_utils.utils import cdiv

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call with heads before tokens and split by group, and its queries in blocks."""

    call: Call
    query: Array  # [B, Hkv, G, S, D]
    key: Array  # [B, Hkv, L, D]; for few queries [B, L, Hkv, D]
    value: Array  # [B, Hkv, L, Dv]; for few queries [B, L, Hkv, Dv]
    few: bool
    mixed: bool  # blocks of queries may hold several sequences
    mask: Array | None  # [1|B, 1|Hkv, 1|G, 1|S, 1|L]
    bias: Array | None
    sinks: Array | None  # [1, 1|Hkv, 1|G, 1, sinks]
    dropout_key: Array | None
    live_queries: Array | None  # [1|B, 1|Hkv, 1|G, 1|S, 1]: those that the mask leaves a key
    live_keys: Array | None  # [1|B, 1|Hkv, 1|L, 1]: those that the mask leaves a query
    in_reach: Array  # [1|B, 1, 1, S]: queries that position leaves a key
    segments: Segments | None  # of the keys
    layout: Layout
    key_size: int
    rows: "Rows"  # of every block, stacked


class Rows(NamedTuple):
    """A block of queries: their tokens, the first and one past the last key that position lets each see, and ids."""

    token: Array  # [Bq]
    start: Array  # [1|B, Bq]
    stop: Array  # [1|B, Bq]
    ids: Array | None  # [B, Bq]

    @property
    def in_reach(self) -> Array:
        """Queries that position leaves a key, `[1|B, 1, 1, Bq, 1]`."""
        return (self.start < self.stop)[:, None, None, :, None]


class Columns(NamedTuple):
    """A block of keys, and which pairs of it and a block of queries may attend."""

    start: Array  # the block's first key
    position: Array  # [Bk]
    new: Array  # [1|B, 1, Bk, 1]: keys in sight of some query of the row's block, and not visited before
    key: Array  # [B, Hkv, Bk, D], 0 where not new; for few queries all the bits [B, Bk, Hkv, D]
    value: Array  # [B, Hkv, Bk, Dv], 0 where not new; for few queries all the bits [B, Bk, Hkv, Dv]
    allowed: Array  # broadcasts to [B, Hkv, G, Bq, Bk]
    bias: Array | None  # broadcasts to [B, Hkv, G, Bq, Bk]


def problem(call: Call, inputs: Inputs, few: bool = False, apart: bool = False) -> Problem:
    """The `Problem` of a call; for few queries, keys and values stay in the layout that they come in.

    Packed sequences share blocks of queries unless they are to be `apart` or queries are few: the number of blocks then
    does not depend on the number of sequences. Sums of products over tokens need `finite` there, so that no NaN of one
    sequence reaches another.
    """
    packed, ids = inputs.cu_seqlens is not None, inputs.segment_ids
    mixed = not few and (ids is not None or (packed and not apart))
    query = heads_first(call, inputs.query)
    key, value = (x if few else x.swapaxes(1, 2) for x in (inputs.key, inputs.value))
    mask = None if inputs.mask is None else by_group(call, inputs.mask, 1)
    live_queries = live_keys = None
    if mask is not None:
        # what cannot attend or be attended to must not matter even if it is NaN, and 0 · NaN would let it
        live_queries, live_keys = live(mask)
        query = jnp.where(live_queries, query, 0)
        if not few:
            key, value = jnp.where(live_keys, key, 0), jnp.where(live_keys, value, 0)
    query_size, key_size = block_sizes(call, mixed)
    blocks = layout(call, query_size, None if mixed else inputs.cu_seqlens)
    offset = jnp.zeros(1, jnp.int32) if inputs.query_offset is None else inputs.query_offset
    start, stop = seen_keys(call, inputs.cu_seqlens, inputs.cu_seqlens_kv, offset)
    return Problem(
        call=call,
        query=query,
        key=key,
        value=value,
        few=few,
        mixed=mixed,
        mask=mask,
        bias=None if inputs.bias is None else by_group(call, inputs.bias, 1),
        sinks=None if inputs.sinks is None else by_group(call, inputs.sinks, 0)[None, :, :, None].astype(call.wide),
        dropout_key=inputs.dropout_key,
        live_queries=live_queries,
        live_keys=live_keys,
        in_reach=(start < stop)[:, None, None],
        segments=None if inputs.segment_ids_kv is None else segments(inputs.segment_ids_kv, key_size),
        layout=blocks,
        key_size=key_size,
        rows=Rows(
            blocks.split(jnp.arange(call.queries, dtype=jnp.int32), 0),
            blocks.split(start, 1),
            blocks.split(stop, 1),
            None if ids is None else blocks.split(ids, 1),
        ),
    )


def finite(p: Problem, x: Array) -> Array:
    """`x` for a product that sums over tokens: 0 for NaN and infinity where the tokens are of several sequences."""
    return jnp.where(jnp.isfinite(x), x, 0) if p.mixed else x


def block_sizes(call: Call, mixed: bool) -> tuple[int, int]:
    """How many queries and keys a block has."""
    queries, keys = call.block_sizes or (256, 512)
    if call.block_sizes is None:
        # every head's block is held at once; a batch of unknown size counts as one row
        rows = call.batch if isinstance(call.batch, int) else 1
        while queries > 64 and rows * call.heads * queries * keys > 2**23:
            queries //= 2
        if call.sequences:
            # blocks longer than most packed sequences would be mostly empty, or visit the keys of many sequences
            least, enough = (8, cdiv(512 * call.queries, call.keys)) if mixed else (32, 0)
            while queries > max(least, enough) and queries * call.sequences > call.queries:
                queries //= 2
    return min(queries, call.queries), min(keys, call.keys)


def over_keys(
    p: Problem, rows: Rows, visit: Callable[[Columns, Carry], Carry], carry: Carry, every_block: bool = False
) -> Carry:
    """`carry` after `visit` of each block of keys in sight of `rows`; `every_block` visits those out of sight too."""
    keys, in_reach = p.call.keys, rows.start < rows.stop
    first, last = jnp.where(in_reach, rows.start, keys).min(-1), rows.stop.max(-1)  # [1|B]
    if p.segments is not None and rows.ids is not None:
        segment_first, segment_last = p.segments.around(rows.ids, in_reach)
        # from a multiple of the block size on: what a sequence gets does not depend on where others begin
        first = jnp.maximum(first // p.key_size * p.key_size, segment_first)
        last = jnp.minimum(last, segment_last)
    row_first, row_last = first[:, None], last[:, None]
    first, last = jnp.where(first < last, first, keys).min(), jnp.where(first < last, last, 0).max()
    mask, bias = (_row_block(each, rows.token) for each in (p.mask, p.bias))

    def columns(begin: Array, size: int) -> Columns:
        start = jnp.minimum(begin, keys - size)  # the last block reaches back rather than past the end
        position = start + jnp.arange(size, dtype=start.dtype)
        # by row: what lies past one row's last key may be NaN where another row still has keys
        new = (position[None] >= jnp.maximum(begin, row_first)) & (position[None] < row_last)
        new = new[:, None, :, None]
        if p.few:
            bits = (few_queries.bits(p.key), few_queries.bits(p.value))
            key, value = (lax.dynamic_slice_in_dim(each, start, size, 1) for each in bits)
        else:
            key, value = (jnp.where(new, lax.dynamic_slice_in_dim(x, start, size, 2), 0) for x in (p.key, p.value))
        column = position[None, None]
        in_sight = (column >= rows.start[..., None]) & (column < rows.stop[..., None]) & new[:, :, :, 0]
        if p.segments is not None and rows.ids is not None:
            in_sight &= p.segments.shared(rows.ids, start, size)
        allowed = in_sight[:, None, None]
        if mask is not None:
            allowed &= _column_block(mask, start, size)
        bias_block = None if bias is None else _column_block(bias, start, size)
        return Columns(start, position, new, key, value, allowed, bias_block)

    if p.few:
        sizes = few_queries.lengths(p.call)
        programs = [lambda carry, size=size: visit(columns(first, size), carry) for size in sizes]
        return lax.switch(sum(last - first > size for size in sizes[:-1]), programs, carry)

    def step(i: Array, carry: Carry) -> Carry:
        return visit(columns(first + i * p.key_size, p.key_size), carry)

    if every_block:
        return lax.fori_loop(0, -(-keys // p.key_size), jax.checkpoint(step), carry)
    return lax.fori_loop(0, -(-jnp.maximum(last - first, 0) // p.key_size), step, carry)


def _row_block(x: Array | None, token: Array) -> Array | None:
    return x if x is None or x.shape[3] == 1 else jnp.take(x, token, 3, mode="clip")


def _column_block(x: Array, start: Array, size: int) -> Array:
    return x if x.shape[4] == 1 else lax.dynamic_slice_in_dim(x, start, size, 4)
