"""Attention over pages in plain JAX: tile after tile of a sequence's queries, block after block of its keys.

A query's output is the same to the bit in every call. So tiles of queries and blocks of keys begin at fixed positions
of a sequence, whatever part of it a call holds, and products always have the same shapes: rows of a tile that are not
in the call are computed and thrown away.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels import _varying
from ejkernel.kernels.attention.paged.call import Call, Inputs, Places, page_of, places, tiles
from ejkernel.kernels.attention.xla.softmax import online, rounded

# Keys of a block; a tile of queries lies inside one.
KEYS = 128
# Rows of a product: heads of a group times queries of a tile. More pay for prompts, fewer for single tokens.
ROWS = 16

Results = tuple[Array, Array, Array | None]


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def run(call: Call, *arrays: Array | None) -> Results:
    """Output, and pages of keys and values; see `Call`."""
    inputs = Inputs(*arrays)  # type: ignore[arg-type]
    if 0 in (call.tokens, call.sequences):
        shape = (1, call.tokens, call.heads, call.value_dim)
        return jnp.zeros(shape, call.dtype), inputs.key_pages, inputs.value_pages
    if 0 in (call.places, call.pages):
        return _missing(call, inputs), inputs.key_pages, inputs.value_pages
    where = places(call, inputs)
    inputs = write(call, inputs, where)
    output = finished(call, _attend(call, inputs, where), where)
    return output[None], inputs.key_pages, inputs.value_pages


def finished(call: Call, output: Array, where: Places) -> Array:
    """The output `[T, H, Dv]`, with NaN for tokens without a page and 0 for padding."""
    output = jnp.where((where.page == call.pages)[:, None, None], jnp.nan, output)
    return jnp.where(where.real[:, None, None], output, 0).astype(call.dtype)


def _missing(call: Call, inputs: Inputs) -> Array:
    """The output where there are no pages at all."""
    shape = (1, call.tokens, call.heads, call.value_dim)
    real = jnp.arange(call.tokens) < inputs.cu_seqlens[-1]
    return jnp.broadcast_to(jnp.where(real[:, None, None], jnp.nan, 0), shape).astype(call.dtype)


def write(call: Call, inputs: Inputs, where: Places) -> Inputs:
    """`inputs` with the new tokens written to their pages."""

    def written(pages: Array, x: Array) -> Array:
        return pages.at[where.page, where.row].set(x[0].astype(pages.dtype), mode="drop")

    if inputs.key is not None:
        inputs = inputs._replace(key_pages=written(inputs.key_pages, inputs.key))
    if inputs.value is not None and inputs.value_pages is not None:
        inputs = inputs._replace(value_pages=written(inputs.value_pages, inputs.value))
    return inputs


class _Sums(NamedTuple):
    """The carry of the online softmax, `[Hkv, rows, ·]`."""

    top: Array  # the running maximum
    total: Array  # the sum of exp(score - top)
    sums: Array  # the sum of exp(score - top) times the value
    bad: Array  # whether the row has seen a place without a page, or a value that is not finite


def _attend(call: Call, inputs: Inputs, where: Places) -> Array:
    """The outputs of all sequences' queries, `[T, H, Dv]`."""
    size = tile_size(call)
    ends, shift = tiles(where, size)
    query = inputs.query[0]

    def visit(i: Array, output: Array) -> Array:
        n = jnp.searchsorted(ends, i, side="right", method="scan_unrolled").astype(jnp.int32)
        begin = (i + shift[n]) * size  # position of the tile's first row
        index = begin + jnp.arange(size, dtype=jnp.int32) - where.first[n]
        inside = (index >= 0) & (index < where.queries[n])
        token = inputs.cu_seqlens[n] + index
        rows = query.at[token].get(mode="clip")
        rows = jnp.where(inside[:, None, None], rows, 0)
        tile = _tile(call, inputs, rows, inputs.table[n], begin, where.ends[n])
        return output.at[jnp.where(inside, token, call.tokens)].set(tile, mode="drop")

    output = jnp.zeros((call.tokens, call.heads, call.value_dim), call.wide)
    return lax.fori_loop(0, ends[-1], visit, _varying.like(output, query))


def tile_size(call: Call) -> int:
    """How many queries a tile has: a power of two that depends on heads alone, as other sizes may give other bits."""
    size = 1
    while size * call.groups < ROWS:
        size *= 2
    return size


def _tile(call: Call, inputs: Inputs, query: Array, table: Array, begin: Array, end: Array) -> Array:
    """The output `[size, H, Dv]` of a tile of queries at positions from `begin` on, in a sequence of `end` tokens."""
    size, G = query.shape[0], call.groups
    query = query.astype(call.wide).reshape(size, call.kv_heads, G, call.key_dim)
    query = jnp.moveaxis(query, 0, 2).reshape(call.kv_heads, G * size, call.key_dim)
    row_position = begin + jnp.tile(jnp.arange(size, dtype=jnp.int32), G)

    def visit(b: Array, carry: _Sums) -> _Sums:
        position = b * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        page, row = page_of(call, table, position), position % call.page
        stored = (page < call.pages) & (position < end)
        key, value = _block(call, inputs, page, row, stored)
        allowed = (position[None] <= row_position[:, None]) & (position < end)[None]
        if call.left is not None:
            allowed &= position[None] >= row_position[:, None] - call.left
        scores = _product("nrd,knd->nrk", query, key) * call.scale
        if call.soft_cap is not None:
            scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
        scores = jnp.where(allowed, rounded(scores), -jnp.inf)
        top, weights, shrink = online(carry.top, scores)
        # a weight of 0 does not hide what is not finite
        finite = jnp.isfinite(value)
        known = finite.all(-1).T & stored[None]  # [Hkv, keys]
        bad = (allowed[None] & ~known[:, None]).any(-1, keepdims=True)
        added = _product("nrk,knd->nrd", weights, jnp.where(finite, value, 0))
        total = carry.total * shrink + weights.sum(-1, keepdims=True)
        return _Sums(top, total, carry.sums * shrink + added, carry.bad | bad)

    shape = (call.kv_heads, G * size, 1)
    zeros = jnp.zeros(shape, call.wide)
    sums = jnp.zeros((*shape[:2], call.value_dim), call.wide)
    carry = _varying.like(_Sums(jnp.full_like(zeros, -jnp.inf), zeros, sums, jnp.zeros(shape, bool)), query)
    low = 0 if call.left is None else jnp.maximum(begin - call.left, 0) // KEYS
    # queries past the table have no page of their own, whatever they see
    high = jnp.minimum(begin // KEYS, (call.places * call.page - 1) // KEYS) + 1
    output = _normalized(call, lax.fori_loop(low, high, visit, carry), inputs.sinks)
    output = jnp.moveaxis(output.reshape(call.kv_heads, G, size, call.value_dim), 2, 0)
    return output.reshape(size, call.heads, call.value_dim)


def _block(call: Call, inputs: Inputs, page: Array, row: Array, stored: Array) -> tuple[Array, Array]:
    """Keys and values `[keys, Hkv, ·]`, 0 where nothing is stored."""

    def read(pages: Array) -> Array:
        return jnp.where(stored[:, None, None], pages.at[page, row].get(mode="clip"), 0).astype(call.wide)

    key = read(inputs.key_pages)
    return key, key[..., : call.value_dim] if inputs.value_pages is None else read(inputs.value_pages)


def _product(product: str, rows: Array, columns: Array) -> Array:
    return jnp.einsum(product, rows, columns, precision=lax.Precision.HIGHEST)


def _normalized(call: Call, carry: _Sums, sinks: Array | None) -> Array:
    """The output `[Hkv, rows, Dv]` of a tile after its last keys: the sinks join in."""
    top, total, sums, bad = carry
    if sinks is not None:
        heads = sinks.shape[0]
        shape = (call.kv_heads, call.groups, 1) if heads == call.heads else (heads, 1, 1)
        sinks = sinks.astype(call.wide).reshape(*shape, -1)
        size = top.shape[1] // call.groups
        sinks = jnp.broadcast_to(sinks, (call.kv_heads, call.groups, size, sinks.shape[-1]))
        sinks = sinks.reshape(call.kv_heads, top.shape[1], -1)
        _, weights, shrink = online(top, sinks)
        total, sums = total * shrink + weights.sum(-1, keepdims=True), sums * shrink
    output = jnp.where(total == 0, 0, sums / jnp.where(total == 0, 1, total))
    return jnp.where(bad, jnp.nan, output)
