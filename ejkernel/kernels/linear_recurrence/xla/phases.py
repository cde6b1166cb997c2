"""The gated linear recurrence in two phases each way, for states that are known late; nothing is computed in both.

The first phase finds what chunks do to any state and takes one through all of them, which is sums of matrices a chunk.
The second does this again with the right state, and everything else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla.recurrence import (
    Inputs,
    chunk_of,
    entering_states,
    gradients,
    initial_states,
    mathematics,
)


def begin(call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None) -> tuple[Any, jax.Array]:
    """As `Phases.begin`."""
    arrays = Inputs._make((*inputs, None))
    where = layout.chunks(call, cu_seqlens)
    passing = walk.passing_of(call, mathematics(call), functools.partial(chunk_of, call, arrays), where)
    added, _ = walk.pass_all(call, mathematics(call), passing, where, initial_states(call, arrays))
    return passing, added


def finish(
    call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, passing: Any, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `Phases.finish`; the states that chunks met are kept."""
    arrays = Inputs._make((*inputs, start))
    where = layout.chunks(call, cu_seqlens)
    starts = entering_states(call, arrays, cu_seqlens)
    assert starts is not None
    _, seen = walk.pass_all(call, mathematics(call), passing, where, starts)
    chunk = functools.partial(chunk_of, call, arrays)
    return walk.outputs(call, mathematics(call), chunk, where, seen, cu_seqlens), seen[0]


def begin_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    met: jax.Array,
    d_output: jax.Array,
) -> tuple[Any, jax.Array]:
    """As `Phases.begin_back`."""
    arrays = Inputs._make((*inputs, start))
    where = layout.chunks(call, cu_seqlens)
    chunk = functools.partial(chunk_of, call, arrays)
    returning = walk.returning_of(call, mathematics(call), chunk, where, met, d_output)
    d_entering, _ = walk.pass_all(call, mathematics(call), returning, where, jnp.zeros_like(start), back=True)
    # what a gate takes of a state it takes of its cotangent too
    d_start = entering_states(call, arrays._replace(initial_state=d_entering), cu_seqlens)
    assert d_start is not None
    return returning, d_start


def finish_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    met: jax.Array,
    returning: Any,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Any, ...]:
    """As `Phases.finish_back`."""
    arrays = Inputs._make((*inputs, start))
    d_end = _varying.like(cotangents[1].astype(call.state_dtype), arrays.query)
    back = walk.pass_all(call, mathematics(call), returning, layout.chunks(call, cu_seqlens), d_end, back=True)
    return tuple(gradients(call, arrays, cu_seqlens, met, (cotangents[0], d_end), back))[:-1]
