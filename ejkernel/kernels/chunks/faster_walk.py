"""Whether a CPU walks a recurrence token by token or chunk by chunk, as measured.

`faster_walk.json` has what `make cpu-map` found: by JAX release, kind of recurrence, packed or not and with gradients
or not, which of the two was faster at some numbers of heads, dims and tokens. A call goes by the one that is most like
it.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout, token_walk, walk
from ejkernel.kernels.chunks.first_gates import entered

Results = tuple[jax.Array, jax.Array]

FEW = 32  # tokens
# The most numbers in the states of all tokens, which gradients token by token keep: 64 MiB of them.
MOST_KEPT = 1 << 24


class Point(NamedTuple):
    """A call that was measured."""

    heads: int  # of all rows
    dim: int  # of keys and values
    tokens: int
    by_tokens: bool  # whether these were faster


def by_the_faster_walk(
    kind: Callable[[Any], str],
    token: Callable[..., tuple[token_walk.Write, Any, token_walk.Gates]],
    mathematics: Callable[[Any], walk.Mathematics],
    chunk_of: Callable[..., Any],
    gradients: Callable[..., Any],
) -> Callable[..., Results]:
    """`recurrence(call, inputs, cu_seqlens)`, with gradients, by what is faster on a CPU and by chunks elsewhere.

    Args:
        kind: which of the kinds that were measured a call is.
        token: `token(call, inputs, cu_seqlens)`: what a token writes, and all tokens' arrays and gates.
        mathematics: `mathematics(call)`: what is done with a chunk.
        chunk_of: `chunk_of(call, inputs, step)`: the arrays of a step's chunks.
        gradients: the cotangents of the inputs, by chunks from the states that these meet.
    """

    def by_tokens(call: Any, inputs: Any, cu_seqlens: jax.Array | None, walk_of: Callable[..., Any]) -> Any:
        """What this walk of `token_walk` makes of a call."""
        write, arrays, gates = token(call, inputs, cu_seqlens)
        starts, first = entered(call, inputs, cu_seqlens)
        return walk_of(call, write, starts is not None, (arrays, gates, first, cu_seqlens))

    def by_chunks(call: Any, inputs: Any, cu_seqlens: jax.Array | None, keep_states: bool) -> tuple[Results, Any]:
        """The results and, if kept, the states that chunks meet `[chunks, rows, H, K, V]`."""
        chunk, starts = functools.partial(chunk_of, call, inputs), entered(call, inputs, cu_seqlens)
        return walk.forward(call, mathematics(call), chunk, *starts, cu_seqlens, keep_states)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def recurrence(call: layout.Call, inputs: Any, cu_seqlens: jax.Array | None) -> Results:
        def tokens() -> Results:
            return by_tokens(call, inputs, cu_seqlens, token_walk.walked)

        def chunks() -> Results:
            return by_chunks(call, inputs, cu_seqlens, keep_states=False)[0]

        return _on_a_cpu(call, tokens, chunks) if goes_by_tokens(call, kind(call), gradient=False) else chunks()

    def forward(call: layout.Call, inputs: Any, cu_seqlens: jax.Array | None) -> tuple[Results, Any]:
        def tokens() -> tuple[Results, jax.Array]:
            return by_tokens(call, inputs, cu_seqlens, token_walk.keeping)

        def chunks() -> tuple[Results, jax.Array]:
            met = jax.eval_shape(tokens)[1]
            unused = _varying.like(jnp.zeros(met.shape, met.dtype), inputs[0])
            return by_chunks(call, inputs, cu_seqlens, keep_states=False)[0], unused

        if goes_by_tokens(call, kind(call), gradient=True):
            results, met = _on_a_cpu(call, tokens, chunks)
        else:
            results, met = by_chunks(call, inputs, cu_seqlens, keep_states=True)
        return results, (inputs, cu_seqlens, met)

    def backward(call: layout.Call, residuals: Any, cotangents: Results) -> tuple[Any, None]:
        inputs, cu_seqlens, met = residuals
        if not goes_by_tokens(call, kind(call), gradient=True):
            return gradients(call, inputs, cu_seqlens, met, cotangents), None

        def tokens() -> Any:
            shadow = functools.partial(token_walk.shadow, left=met)
            return jax.vjp(lambda inputs: by_tokens(call, inputs, cu_seqlens, shadow), inputs)[1](cotangents)[0]

        def chunks() -> Any:
            met = by_chunks(call, inputs, cu_seqlens, keep_states=True)[1]
            return gradients(call, inputs, cu_seqlens, met, cotangents)

        return _on_a_cpu(call, tokens, chunks), None

    recurrence.defvjp(forward, backward)
    return recurrence


def _on_a_cpu(call: layout.Call, by_tokens: Callable[[], Any], by_chunks: Callable[[], Any]) -> Any:
    """By tokens on a CPU; few of them everywhere, which spares JAX from tracing the other way as well."""
    if call.tokens <= FEW:
        return by_tokens()
    return lax.platform_dependent(cpu=by_tokens, default=by_chunks)


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


def goes_by_tokens(call: layout.Call, kind: str, gradient: bool) -> bool:
    """Whether a CPU goes token by token."""
    if _forced is not None:
        return _forced
    heads, state = layout.likely_rows(call) * call.heads, call.key_dim * call.value_dim
    if gradient and call.tokens * heads * state > MOST_KEPT:
        return False
    return chosen(kind, call.packed, gradient, heads, math.sqrt(state), call.tokens)


@functools.lru_cache(1024)
def chosen(
    kind: str, packed: bool, gradient: bool, heads: int, dim: float, tokens: int, release: str = jax.__version__
) -> bool:
    """What was faster for the call that is most like this one."""

    def distance(point: Point) -> tuple[float, bool]:
        # a dim counts twice in a state, and of great lengths it matters little how long they are
        far = abs(math.log2(heads / point.heads)) + 2 * abs(math.log2(dim / point.dim))
        # halfway between two, chunks: they gain more as calls grow
        return far + abs(math.log2(min(tokens, 8192) / min(point.tokens, 8192))), point.by_tokens

    return min(measured(release)[kind, packed, gradient], key=distance).by_tokens


@functools.cache
def measured(release: str) -> dict[tuple[str, bool, bool], list[Point]]:
    """The table for a release of JAX: that of the newest one measured that is not newer, or the oldest."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text())
    releases = sorted(table, key=_numbers)
    older = [each for each in releases if _numbers(each) <= _numbers(release)]
    kinds = table[older[-1] if older else releases[0]]
    return {
        (kind, what.startswith("packed"), what.endswith("gradient")): [Point(*point) for point in points]
        for kind, found in kinds.items()
        for what, points in found.items()
    }


def _numbers(release: str) -> list[int]:
    return [int(each) for each in release.split(".")[:2]]
