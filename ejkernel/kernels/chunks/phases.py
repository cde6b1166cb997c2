"""A recurrence that walks its chunks in two phases each way, for states that are known late.

The first phase finds what chunks do to any state and composes it. The second takes the right state through all of them,
and computes everything else.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels._phases import Phases
from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.layout import Chunks


@dataclass(frozen=True)
class Chunkwise:
    """A recurrence in chunks.

    Attributes:
        inputs: The arrays of a call that have gradients, the initial state last.
        mathematics: `mathematics(call)`: what a chunk does.
        chunk_of: `chunk_of(call, inputs, step)`: the arrays of a step's chunks.
        gradients: `gradients(call, inputs, cu_seqlens, met, cotangents, back)`.
        effect: `effect(call, inputs, cu_seqlens, passing, where)`: what all chunks do to states, from what takes a
            state through each.
    """

    inputs: Callable[..., Any]
    mathematics: Callable[..., Any]
    chunk_of: Callable[[Any, Any, Chunks], Any]
    gradients: Callable[..., Any]
    effect: Callable[..., jax.Array]


def of_chunks(op: Chunkwise) -> Phases:
    """The phases of a recurrence; nothing of a chunk is computed in both but states on their way through."""

    def begin(call: Any, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None) -> tuple[Any, jax.Array]:
        arrays, where = op.inputs(*inputs, None), layout.chunks(call, cu_seqlens)
        chunk = functools.partial(op.chunk_of, call, arrays)
        passing = walk.passing_of(call, op.mathematics(call), chunk, where)
        return passing, op.effect(call, arrays, cu_seqlens, passing, where)

    def finish(
        call: Any, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, passing: Any, start: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        arrays, where = op.inputs(*inputs, start), layout.chunks(call, cu_seqlens)
        starts = entering_states(call, start, arrays.gates, cu_seqlens)
        _, seen = walk.pass_all(call, op.mathematics(call).end, passing, where, starts)
        chunk = functools.partial(op.chunk_of, call, arrays)
        # the states that chunks met are kept
        return walk.outputs(call, op.mathematics(call), chunk, where, seen, cu_seqlens), seen[0]

    def begin_back(
        call: Any,
        inputs: tuple[Any, ...],
        cu_seqlens: jax.Array | None,
        start: jax.Array,
        met: jax.Array,
        d_output: jax.Array,
    ) -> tuple[Any, jax.Array]:
        arrays, where = op.inputs(*inputs, start), layout.chunks(call, cu_seqlens)
        chunk, mathematics = functools.partial(op.chunk_of, call, arrays), op.mathematics(call)
        returning = walk.returning_of(call, mathematics, chunk, where, met, d_output)
        d_entering, _ = walk.pass_all(call, mathematics.mirror, returning, where, jnp.zeros_like(start), back=True)
        # first gates do to cotangents on their way out what they do to states
        return returning, entering_states(call, d_entering, arrays.gates, cu_seqlens)

    def finish_back(
        call: Any,
        inputs: tuple[Any, ...],
        cu_seqlens: jax.Array | None,
        start: jax.Array,
        met: jax.Array,
        returning: Any,
        cotangents: tuple[jax.Array, jax.Array],
    ) -> tuple[Any, ...]:
        arrays, where = op.inputs(*inputs, start), layout.chunks(call, cu_seqlens)
        d_end = _varying.like(cotangents[1].astype(call.state_dtype), arrays.query)
        back = walk.pass_all(call, op.mathematics(call).mirror, returning, where, d_end, back=True)
        return tuple(op.gradients(call, arrays, cu_seqlens, met, (cotangents[0], d_end), back))[:-1]

    return Phases(begin, finish, begin_back, finish_back)
