"""Attention over pages on NVIDIA GPUs, as Triton kernels; XLA writes the new tokens into their pages.

As on XLA, a query gets the same bits in every call: tiles of queries, blocks of keys and the ranges that are summed
apart are cut at fixed positions of a sequence, and their sizes are a matter of heads and dims alone.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import _launch, _varying
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._shared_memory import LARGE, MEMORY
from ejkernel.kernels.attention.paged import xla
from ejkernel.kernels.attention.paged.call import Call, Inputs, Places, places

DEVICE = "ejkernel.kernels.attention.paged.triton.device.pages"
_LARGEST = {"D": 576, "Dv": 512}

# Keys that are summed up apart, so that few queries of many keys fill a GPU.
RANGE = 1024
# The most bytes of sums over ranges: with more queries there are programs enough without.
LARGEST_SUMS = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What kernels are compiled for; device code gets it as `CALL`."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_block: int  # dims, padded
    rest_block: int  # those past the first 512, or 0
    value_block: int
    page: int
    rows: int  # of a tile: queries times heads of a group
    columns: int  # keys of a block
    size: int  # queries of a tile
    group_block: int  # rows of a query
    row_blocks: int  # tiles that the heads of a group take
    range: int
    parts: int  # programs that ranges are dealt out to: one each, or one for all
    latent: bool
    windowed: bool
    sinks: int
    sink_heads: int
    sink_block: int
    scale: float
    cap: float
    precision: str


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


def tile_of(call: Call) -> Tile:
    """The tile, a matter of dims, dtypes and device alone.

    64 rows are what a warpgroup multiplies; most are idle in decoding.
    """
    largest = padded(max(min(call.key_dim, 512), call.value_dim))
    bytes_each = 2 if _half(call) else 4
    row = largest * bytes_each  # of a tile
    if row <= 256:
        return Tile(64, 64, warps=4, stages=2)
    large = MEMORY.get(_launch.capability() or 90) == LARGE
    if bytes_each == 4 and not large:
        return Tile(32, 16, warps=4) if row <= 512 else Tile(16, 16, warps=4)
    if row <= 512:
        return Tile(64, 32, warps=8, stages=2 if large else 1)
    if row <= 1024:
        return Tile(64, 32, warps=8) if large else Tile(32, 16, warps=4)
    return Tile(32, 16, warps=8)


def _half(call: Call) -> bool:
    """Whether products are of half precision: all arrays have one dtype."""
    return call.dtype.itemsize == 2 and set(call.cached) == {call.dtype} and not call.scaled


@dataclass(frozen=True)
class Plan:
    """How a call is cut: tiles, keys of a range, and the most bytes of sums over ranges."""

    tile: Tile
    keys: int = RANGE
    largest_sums: int = LARGEST_SUMS


def run(call: Call, *arrays: Array | None, plan: Plan | None = None) -> Any:
    """Output, and pages of keys and values; `plan` is for tests."""
    inputs = Inputs(*arrays)  # type: ignore[arg-type]
    where = places(call, inputs)
    inputs = xla.write(call, inputs, where)
    output = _attend(call, _varying.align(inputs), where, plan or Plan(tile_of(call)))
    return xla.finished(call, output, where)[None], inputs.key_pages, inputs.value_pages


def _attend(call: Call, inputs: Inputs, where: Places, plan: Plan) -> Array:
    tile, keys = plan.tile, plan.keys
    device = importlib.import_module(DEVICE)
    group = min(padded(call.groups, 1), tile.rows)
    size = tile.rows // group
    count = -(-call.places * call.page // keys)
    if call.left is not None:
        count = min(count, (call.left + size) // keys + 2)
    sums = count * call.tokens * call.heads * (call.value_dim + 3) * 4
    half = _half(call)
    constants = Constants(
        heads=call.heads,
        kv_heads=call.kv_heads,
        key_dim=call.key_dim,
        value_dim=call.value_dim,
        key_block=min(padded(call.key_dim), 512),
        rest_block=padded(call.key_dim - 512) if call.key_dim > 512 else 0,
        value_block=padded(call.value_dim),
        page=call.page,
        rows=tile.rows,
        columns=tile.columns,
        size=size,
        group_block=group,
        row_blocks=-(-call.groups // group),
        range=keys,
        parts=count if 1 < count and sums <= plan.largest_sums else 1,
        latent=call.latent,
        windowed=call.left is not None,
        sinks=call.sinks or 0,
        sink_heads=1 if inputs.sinks is None else inputs.sinks.shape[0],
        sink_block=padded(call.sinks or 1, 1),
        scale=float(call.scale),
        cap=float(call.soft_cap or 0.0),
        precision="ieee" if half else "tf32x3",
    )
    tiles = _tiles(call, where, size)
    parts, rows = constants.parts, (call.tokens, call.heads)
    split = parts > 1
    output = shape(*rows, call.value_dim, dtype=call.dtype)
    query = inputs.query[0]
    given = {
        "query": query if half else query.astype(jnp.float32),
        "key_pages": inputs.key_pages,
        "value_pages": inputs.value_pages,
        "sinks": inputs.sinks,
        "table": inputs.table,
        "cu_seqlens": inputs.cu_seqlens,
        "first": where.first,
        "ends": where.ends,
        **tiles,
    }
    sizes = {"M": call.places, "P": call.pages, "left": call.left or 0}
    found = _launch.launch(
        device.attend,
        {**given, **sizes},
        {
            "output": None if split else output,
            "top": shape(*rows, parts) if split else None,
            "total": shape(*rows, parts) if split else None,
            "bad": shape(*rows, parts, dtype=jnp.int32) if split else None,
            "sum": shape(*rows, parts, call.value_dim) if split else None,
        },
        constants=constants,
        programs=len(tiles["tile_begin"]) * call.kv_heads * constants.row_blocks * parts,
        tile=tile,
    )
    if not split:
        return found.output
    sums_of_parts = {"part_top": found.top, "part_total": found.total, "part_bad": found.bad, "sum": found.sum}
    ranges = {"real": (where.page < call.pages).astype(jnp.int32), "ranges": _ranges(call, where, size, keys)}
    joined = _launch.launch(
        device.join,
        {**sums_of_parts, **ranges, "sinks": inputs.sinks},
        {"output": output},
        constants=constants,
        programs=call.tokens * call.heads,
        tile=Tile(1, warps=4 if call.value_dim > 128 else 1),
    )
    return joined.output


def _tiles(call: Call, where: Places, size: int) -> dict[str, Array]:
    """The sequence of each tile of queries, -1 for none, and the position at which it begins."""
    first, last = where.first // size, (where.first + where.queries - 1) // size
    count = jnp.where(where.queries > 0, last - first + 1, 0)
    ends = jnp.cumsum(count)
    # a sequence may begin and end inside a tile
    most = call.tokens // size + 2 * min(call.sequences, call.tokens)
    number = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    known = jnp.minimum(sequence, call.sequences - 1)
    begin = (first[known] + number - (ends - count)[known]) * size
    return {"tile_sequence": jnp.where(sequence < call.sequences, sequence, -1), "tile_begin": begin.astype(jnp.int32)}


def _ranges(call: Call, where: Places, size: int, keys: int) -> Array:
    """How many ranges of keys each token's tile visits, `[T]`."""
    begin = where.position // size * size
    low = 0 if call.left is None else jnp.maximum(begin - call.left, 0) // keys
    high = -(-jnp.minimum(begin + size, call.places * call.page) // keys)
    return jnp.maximum(high - low, 0).astype(jnp.int32)
