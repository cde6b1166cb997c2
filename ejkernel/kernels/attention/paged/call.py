"""A call of attention over pages: its static facts, its arrays, and where its tokens lie."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from ejkernel.xla_utils.utils import prepare_sequence_ids

# no sequence is longer, and sums of two such numbers stay within int32
LONGEST = 2**30


class Inputs(NamedTuple):
    """The arrays of a call."""

    query: Array  # [1, T, H, D]
    key: Array | None  # [1, T, Hkv, D]; `None` only reads
    value: Array | None  # [1, T, Hkv, Dv]; `None` if values are part of keys, or only reads
    key_pages: Array  # [P, page, Hkv, D]
    value_pages: Array | None  # [P, page, Hkv, Dv]
    sinks: Array | None  # [1 or Hkv or H, sinks]
    table: Array  # int32 [N, M]
    lengths: Array  # int32 [N]
    cu_seqlens: Array  # int32 [N + 1]


@dataclass(frozen=True)
class Call:
    """Static facts of one call; the arrays of `Inputs` travel beside it.

    The results are the output `[1, T, H, Dv]` in `dtype`, and the pages of keys and of values (or `None`).
    """

    tokens: int
    sequences: int
    places: int  # columns of the table
    pages: int
    page: int  # tokens in one
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: np.dtype
    cached: tuple[np.dtype, ...]  # those of the pages
    wide: np.dtype  # of scores and sums: float32, or float64 if anything is float64
    scale: float
    writes: bool
    latent: bool  # whether values are the first dims of keys
    scaled: bool = False  # whether the scale is an array: the query is then multiplied by it already, and `wide`
    soft_cap: float | None = None
    left: int | None = None  # how far back a query sees
    sinks: int | None = None

    instead: ClassVar[str] = (
        "Shard heads that the axis divides, or have devices with pages of their own by jax.shard_map"
    )
    written: ClassVar[tuple[str, ...]] = ("key_pages", "value_pages")
    batch: ClassVar[int] = 1

    @property
    def groups(self) -> int:
        """How many query heads each key/value head serves."""
        return self.heads // self.kv_heads

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        # every device holds a single head that all queries share
        heads = "H" if self.kv_heads > 1 else "X"
        tokens, pages = f"BT{heads}D", f"PS{heads}D"
        arrays = {"query": "BTHD", "key": tokens, "value": tokens, "key_pages": pages, "value_pages": pages}
        return {**arrays, "sinks": "HZ", "table": "NM", "lengths": "N", "cu_seqlens": "N"}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> "Call":
        """One device's part of the call, where so many devices share its `heads`."""
        pages = shapes["key_pages"]
        assert pages is not None
        return replace(self, heads=self.heads // heads, kv_heads=pages[2])

    def result_specs(self, query: PartitionSpec) -> Any:
        """How the results are sharded where shardings are explicit and the query's is this."""
        pages = PartitionSpec(None, None, query[2] if self.kv_heads > 1 else None, None)
        return query, pages, None if self.latent else pages


class Places(NamedTuple):
    """Where new tokens, and the queries at them, lie in their sequences."""

    first: Array  # [N]: the position of each sequence's first query
    queries: Array  # [N]: how many queries each sequence has, 0 if more of them than tokens
    ends: Array  # [N]: how many tokens each sequence has, new ones included
    page: Array  # [T]: the page of each token, `P` where it has none
    row: Array  # [T]: each token's row in its page
    position: Array  # [T]: each token's position in its sequence
    real: Array  # [T]: whether the token belongs to a sequence, rather than to the padding


def places(call: Call, inputs: Inputs) -> Places:
    """Where a call's tokens lie; positions count from a sequence's first token."""
    cu = jnp.minimum(inputs.cu_seqlens, call.tokens)
    lengths = jnp.clip(inputs.lengths, -1, LONGEST)
    count = cu[1:] - cu[:-1]
    before = lengths if call.writes else lengths - count
    valid = before >= 0
    sequence = prepare_sequence_ids(cu, total_tokens=call.tokens)
    real = sequence < call.sequences
    sequence = jnp.minimum(sequence, call.sequences - 1)
    position = before[sequence] + jnp.arange(call.tokens, dtype=cu.dtype) - cu[sequence]
    page = page_of(call, inputs.table, position, sequence)
    page = jnp.where(real & valid[sequence], page, call.pages)
    ends = before + count
    return Places(before, jnp.where(valid, count, 0), ends, page, position % call.page, position, real)


def page_of(call: Call, table: Array, position: Array, *sequence: Array) -> Array:
    """The page of each position, from `table [M]` or from `table [N, M]` and the `sequence` of each; `P` for none."""
    place = position // call.page
    page = table.at[*sequence, jnp.clip(place, 0, call.places - 1)].get(mode="promise_in_bounds")
    has_page = (place >= 0) & (place < call.places) & (page >= 0) & (page < call.pages)
    return jnp.where(has_page, page, call.pages)


def tiles(where: Places, size: int) -> tuple[Array, Array]:
    """How the tiles of all sequences' queries are numbered, sequence after sequence.

    The first result, `[N]`, is the number past each sequence's last tile. The second, `[N]`, is to be added to a tile's
    number: the sum times `size` is the position at which the tile begins.
    """
    first, last = where.first // size, (where.first + where.queries - 1) // size
    # a sequence may begin and end inside a tile
    count = jnp.where(where.queries > 0, last - first + 1, 0)
    ends = jnp.cumsum(count)
    return ends, first - (ends - count)
