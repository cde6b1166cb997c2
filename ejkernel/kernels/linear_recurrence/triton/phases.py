"""The gated linear recurrence on NVIDIA GPUs in two phases each way, for states that are known late.

Where time is cut in segments, kernels find what these do to a state before the walks that need the right one, whatever
becomes known when: then nothing is done in both phases, and nothing that one device alone would not do.
"""

from functools import partial
from typing import Any

import jax

from ejkernel.kernels._phases import Phases
from ejkernel.kernels.chunks.kernels import foldable
from ejkernel.kernels.linear_recurrence import triton
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.phases import phases_from_reversed_runs
from ejkernel.kernels.linear_recurrence.triton import passes
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs
from ejkernel.kernels.linear_recurrence.triton.plan import Plan

# of gates of value dims, whose kernels run a call as a whole
_OTHERS = phases_from_reversed_runs(triton.run)


def begin(call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None) -> tuple[Any, jax.Array]:
    """As `Phases.begin`."""
    if call.value_decay:
        return _OTHERS.begin(call, inputs, cu_seqlens)
    inner, arrays = _cast_inputs(call, inputs, cu_seqlens)
    folded, own, added = foldable(passes.begin, inner, Plan.of(inner))(*arrays)
    return (folded, own), added


def finish(
    call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, memory: Any, start: jax.Array
) -> tuple[jax.Array, Any]:
    """As `Phases.finish`."""
    if call.value_decay:
        return _OTHERS.finish(call, inputs, cu_seqlens, memory, start)
    inner, (_, _, value, _, borders, start) = _cast_inputs(call, inputs, cu_seqlens, start)
    output, kept = foldable(passes.finish, inner, Plan.of(inner))(value, start, borders, *memory)
    return output.astype(call.dtype), kept


def begin_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    kept: Any,
    d_output: jax.Array,
) -> tuple[Any, jax.Array]:
    """As `Phases.begin_back`."""
    if call.value_decay:
        return _OTHERS.begin_back(call, inputs, cu_seqlens, start, kept, d_output)
    inner, (*_, borders, d_output) = _cast_inputs(call, inputs, cu_seqlens, d_output)
    return foldable(passes.begin_back, inner, Plan.of(inner))(borders, kept, d_output.astype(inner.dtype))


def finish_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    kept: Any,
    own: Any,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Any, ...]:
    """As `Phases.finish_back`."""
    if call.value_decay:
        return _OTHERS.finish_back(call, inputs, cu_seqlens, start, kept, own, cotangents)
    inner, (*arrays, borders, start, d_output, d_end) = _cast_inputs(call, inputs, cu_seqlens, start, *cotangents)
    query, key, value, log_decay = arrays
    operands = Inputs(query, key, value, log_decay, None, start, borders)
    wanted = Inputs(*(each is not None for each in operands))  # type: ignore[arg-type]
    run = foldable(partial(passes.backward, wanted), inner, Plan.of(inner))
    found = run(operands, kept, d_output.astype(inner.dtype), d_end, own)
    return *(d if d is None else d.astype(x.dtype) for d, x in zip(found[:4], inputs[:4], strict=True)), None


def _cast_inputs(
    call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, *others: jax.Array
) -> tuple[Call, list[Any]]:
    """The call as kernels have it, with query, key, value, log decay, borders and others."""
    return triton.cast_inputs(call, *inputs[:4], cu_seqlens, *others)


PHASES = Phases(begin, finish, begin_back, finish_back)
