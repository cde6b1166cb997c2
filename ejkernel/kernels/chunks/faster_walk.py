"""Whether a CPU walks a recurrence token by token or chunk by chunk where nobody asks for gradients, as measured.

`faster_walk.json` has what `make cpu-map` found: by JAX release, kind of recurrence and packed or not, which of the two
was faster at some numbers of heads, dims and tokens. A call goes by the one that is most like it. With gradients chunks
are faster almost everywhere, and states of chunks are what a backward can start from.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
from jax import lax

from ejkernel.kernels.chunks import layout

Results = tuple[jax.Array, jax.Array]


class Point(NamedTuple):
    """A call that was measured."""

    heads: int  # of all rows
    dim: int  # of keys and values
    tokens: int
    by_tokens: bool  # whether these were faster


def faster(call: layout.Call, kind: str, by_tokens: Callable[[], Results], by_chunks: Callable[[], Results]) -> Results:
    """The results, by what is faster on a CPU, and by chunks elsewhere."""
    if _by_tokens(call, kind):
        return lax.platform_dependent(cpu=by_tokens, default=by_chunks)
    return by_chunks()


_forced: bool | None = None


@contextmanager
def forced(by_tokens: bool) -> Iterator[None]:
    """Calls that are traced inside go token by token, or by chunks, whatever was measured; to measure and to test."""
    global _forced
    before, _forced = _forced, by_tokens
    jax.clear_caches()
    try:
        yield
    finally:
        _forced = before
        jax.clear_caches()


def _by_tokens(call: layout.Call, kind: str) -> bool:
    if _forced is not None:
        return _forced
    heads = layout.likely_rows(call) * call.heads
    return chosen(kind, call.packed, heads, math.sqrt(call.key_dim * call.value_dim), call.tokens)


@functools.lru_cache(1024)
def chosen(kind: str, packed: bool, heads: int, dim: float, tokens: int, release: str = jax.__version__) -> bool:
    """What was faster for the call that is most like this one."""

    def distance(point: Point) -> float:
        # a dim counts twice in a state, and of lengths above a few chunks' it matters little how long they are
        far = abs(math.log2(heads / point.heads)) + 2 * abs(math.log2(dim / point.dim))
        return far + abs(math.log2(min(tokens, 2048) / min(point.tokens, 2048)))

    return min(measured(release)[kind, packed], key=distance).by_tokens


@functools.cache
def measured(release: str) -> dict[tuple[str, bool], list[Point]]:
    """The table for a release of JAX: that of the newest one measured that is not newer, or the oldest."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text())
    releases = sorted(table, key=_numbers)
    older = [each for each in releases if _numbers(each) <= _numbers(release)]
    kinds = table[older[-1] if older else releases[0]]
    return {
        (kind, what == "packed"): [Point(*point) for point in points]
        for kind, found in kinds.items()
        for what, points in found.items()
    }


def _numbers(release: str) -> list[int]:
    return [int(each) for each in release.split(".")[:2]]
