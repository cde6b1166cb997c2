"""Attention over pages on NVIDIA GPUs, as Triton kernels; XLA writes the new tokens into their pages.

As on XLA, a query's output is the same to the bit in every call: tiles of queries, blocks of keys and the ranges of
keys that are summed apart begin at fixed positions of a sequence, and their sizes depend on heads and dims alone.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import _launch, _varying
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._shared_memory import LARGE, MEMORY
from ejkernel.kernels.attention import constants
from ejkernel.kernels.attention.paged import xla
from ejkernel.kernels.attention.paged.call import Call, Inputs, Places, places, tiles

DEVICE = "ejkernel.kernels.attention.paged.triton.device.pages"
_LARGEST = {"D": 576, "Dv": 512}

# Split keys: how many are summed by one program, so that few queries of many keys fill a GPU.
RANGE = 1024
# The most bytes of sums over ranges; calls with more queries fill a GPU without split keys.
LARGEST_SUMS = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Constants(constants.Constants):
    """Constants of kernels with pages; `key_block` is at most 512."""

    rest_block: int  # the dims of a key past the first 512, padded, or 0
    page: int
    size: int  # queries of a tile
    group_block: int  # rows of a query
    row_blocks: int  # tiles that the heads of a group take
    range: int
    parts: int  # programs that ranges are dealt out to: one each, or one for all
    latent: bool
    windowed: bool


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    for name, dim in (("D", call.key_dim), ("Dv", call.value_dim)):
        if dim > _LARGEST[name]:
            return f"{name}={dim}, above {_LARGEST[name]}"
    sizes = (call.tokens, call.sequences, call.places, call.pages, call.heads, call.key_dim, call.value_dim)
    if (refusal := _launch.refusal((call.dtype, *call.cached), sizes)) is not None:
        return refusal
    if not _half(call) and max(call.key_dim, call.value_dim) > 256 and MEMORY.get(_launch.capability() or 90) != LARGE:
        return "float32 with a head dim above 256, for which this GPU has not the shared memory"
    return None


def tile_of(call: Call, split: bool = True) -> Tile:
    """The tile of a call, with split keys or without.

    What a row adds up, in which order, depends on the tile's columns alone, and these on dims, dtypes and device. A
    warpgroup multiplies 64 rows; in decoding most of them are idle. The table of pages is fetched ahead of the pages,
    which takes every other stage.
    """
    largest = padded(max(min(call.key_dim, 512), call.value_dim))
    bytes_each = 2 if _half(call) else 4
    row = largest * bytes_each  # of a tile
    large = MEMORY.get(_launch.capability() or 90) == LARGE
    if row <= 256:
        if not large:
            return Tile(64, 64, warps=4, stages=2)
        # sums of a range beside those of the ranges before it would not fit in the registers of four warps
        return Tile(64, 64, warps=4, stages=5) if split else Tile(128, 64, warps=8, stages=5)
    if bytes_each == 4 and not large:
        return Tile(32, 16, warps=4) if row <= 512 else Tile(16, 16, warps=4)
    if row <= 512:
        return Tile(64, 32, warps=8, stages=5 if large else 1)
    if row <= 1024:
        # of keys and values apart, no second block fits beside the first
        return Tile(64, 32, warps=8, stages=5 if call.latent else 1) if large else Tile(32, 16, warps=4)
    return Tile(32, 16, warps=8)


def _half(call: Call) -> bool:
    """Whether products are of half precision: all arrays have one dtype."""
    return call.dtype.itemsize == 2 and set(call.cached) == {call.dtype} and not call.scaled


@dataclass(frozen=True)
class Plan:
    """Sizes that a call runs with: its tiles, keys of a range, and the most bytes of sums over ranges."""

    tile: Tile  # with split keys
    whole: Tile  # without
    keys: int = RANGE
    largest_sums: int = LARGEST_SUMS

    @staticmethod
    def of(call: Call) -> "Plan":
        return Plan(tile_of(call), tile_of(call, split=False))


def run(call: Call, *arrays: Array | None, plan: Plan | None = None) -> Any:
    """Output, and pages of keys and values; `plan` is for tests."""
    inputs = Inputs(*arrays)  # type: ignore[arg-type]
    where = places(call, inputs)
    inputs = xla.write(call, inputs, where)
    output = _attend(call, _varying.align(inputs), where, plan or Plan.of(call))
    return xla.finished(call, output, where)[None], inputs.key_pages, inputs.value_pages


def _attend(call: Call, inputs: Inputs, where: Places, plan: Plan) -> Array:
    keys, device = plan.keys, importlib.import_module(DEVICE)
    group, size = _rows_and_queries(call, plan.tile)
    count = -(-call.places * call.page // keys)
    if call.left is not None:
        count = min(count, (call.left + size) // keys + 2)
    sums = count * call.tokens * call.heads * (call.value_dim + 3) * 4
    split = 1 < count and sums <= plan.largest_sums
    tile = plan.tile if split else plan.whole
    group, size = _rows_and_queries(call, tile)
    half = _half(call)
    common = constants.common(call, inputs.sinks, full_precision=not half)
    known = Constants(
        **common | {"key_block": min(common["key_block"], 512)},
        rest_block=padded(call.key_dim - 512) if call.key_dim > 512 else 0,
        page=call.page,
        rows=tile.rows,
        columns=tile.columns,
        size=size,
        group_block=group,
        row_blocks=-(-call.groups // group),
        range=keys,
        parts=count if split else 1,
        latent=call.latent,
        windowed=call.left is not None,
    )
    numbered = _numbered_tiles(call, where, size)
    parts, rows = known.parts, (call.tokens, call.heads)
    output = shape(*rows, call.value_dim, dtype=call.dtype)
    query = inputs.query[0]
    arrays = {
        "query": query if half else query.astype(jnp.float32),
        "key_pages": inputs.key_pages,
        "value_pages": inputs.value_pages,
        "sinks": inputs.sinks,
        "table": inputs.table,
        "cu_seqlens": inputs.cu_seqlens,
        "first": where.first,
        "ends": where.ends,
        **numbered,
    }
    sizes = {"M": call.places, "P": call.pages, "left": call.left or 0}
    results = _launch.launch(
        device.attend,
        {**arrays, **sizes},
        {
            "output": None if split else output,
            "top": shape(*rows, parts) if split else None,
            "total": shape(*rows, parts) if split else None,
            "bad": shape(*rows, parts, dtype=jnp.int32) if split else None,
            "sum": shape(*rows, parts, call.value_dim) if split else None,
        },
        constants=known,
        programs=len(numbered["tile_begin"]) * call.kv_heads * known.row_blocks * parts,
        tile=tile,
    )
    if not split:
        return results.output
    sums_of_parts = {"part_top": results.top, "part_total": results.total, "part_bad": results.bad, "sum": results.sum}
    ranges = {"real": (where.page < call.pages).astype(jnp.int32), "ranges": _ranges(call, where, size, keys)}
    joined = _launch.launch(
        device.join,
        {**sums_of_parts, **ranges, "sinks": inputs.sinks},
        {"output": output},
        constants=known,
        programs=call.tokens * call.heads,
        tile=Tile(1, warps=4 if call.value_dim > 128 else 1),
    )
    return joined.output


def _rows_and_queries(call: Call, tile: Tile) -> tuple[int, int]:
    """The rows that a query takes in a tile, those of the heads that share a key head, and the queries of a tile."""
    group = min(padded(call.groups, 1), tile.rows)
    return group, tile.rows // group


def _numbered_tiles(call: Call, where: Places, size: int) -> dict[str, Array]:
    """The sequence of each tile of queries, -1 for none, and the position at which the tile begins."""
    ends, shift = tiles(where, size)
    # a sequence may begin and end inside a tile
    most = call.tokens // size + 2 * min(call.sequences, call.tokens)
    number = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    known = jnp.minimum(sequence, call.sequences - 1)
    begin = (number + shift[known]) * size
    return {"tile_sequence": jnp.where(sequence < call.sequences, sequence, -1), "tile_begin": begin.astype(jnp.int32)}


def _ranges(call: Call, where: Places, size: int, keys: int) -> Array:
    """How many ranges of keys each token's tile visits, `[T]`."""
    begin = where.position // size * size
    low = 0 if call.left is None else jnp.maximum(begin - call.left, 0) // keys
    high = -(-jnp.minimum(begin + size, call.places * call.page) // keys)
    return jnp.maximum(high - low, 0).astype(jnp.int32)
