"""The gated linear recurrence on NVIDIA GPUs in two phases each way, for states that are known late.

Time is cut in segments, and what these do to a state is computed in the first phase, before the walks that need the
state. So no work is done twice, and none that a device alone would not do.
"""

import functools
from collections.abc import Callable
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


def _phase(own: Callable[..., Any]) -> Callable[..., Any]:
    """A phase of `Phases`: `own`, but for gates of value dims, whose kernels run a call as a whole."""
    whole = getattr(phases_from_reversed_runs(triton.run), own.__name__)

    @functools.wraps(own)
    def phase(call: Call, *arrays: Any) -> Any:
        return whole(call, *arrays) if call.value_decay else own(call, *arrays)

    return phase


@_phase
def begin(call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None) -> tuple[Any, jax.Array]:
    inner, arrays = _cast_inputs(call, inputs, cu_seqlens)
    *carry, added = foldable(passes.begin, inner, Plan.of(inner))(*arrays)
    return tuple(carry), added


@_phase
def finish(
    call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, carry: Any, start: jax.Array
) -> tuple[jax.Array, Any]:
    inner, (_, _, value, _, borders, start) = _cast_inputs(call, inputs, cu_seqlens, start)
    output, residuals = foldable(passes.finish, inner, Plan.of(inner))(value, start, borders, *carry)
    return output.astype(call.dtype), residuals


@_phase
def begin_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    residuals: Any,
    d_output: jax.Array,
) -> tuple[Any, jax.Array]:
    inner, (*_, borders, d_output) = _cast_inputs(call, inputs, cu_seqlens, d_output)
    return foldable(passes.begin_back, inner, Plan.of(inner))(borders, residuals, d_output.astype(inner.dtype))


@_phase
def finish_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    residuals: Any,
    carry: Any,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Any, ...]:
    inner, (*arrays, borders, start, d_output, d_end) = _cast_inputs(call, inputs, cu_seqlens, start, *cotangents)
    query, key, value, log_decay = arrays
    operands = Inputs(query, key, value, log_decay, None, start, borders)
    wanted = Inputs(*(each is not None for each in operands))  # type: ignore[arg-type]
    run = foldable(partial(passes.backward, wanted), inner, Plan.of(inner))
    d_inputs = run(operands, residuals, d_output.astype(inner.dtype), d_end, carry)
    return *(d if d is None else d.astype(x.dtype) for d, x in zip(d_inputs[:4], inputs[:4], strict=True)), None


def _cast_inputs(
    call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, *others: jax.Array
) -> tuple[Call, list[Any]]:
    """The call as kernels have it, with query, key, value, log decay, borders and others."""
    return triton.cast_inputs(call, *inputs[:4], cu_seqlens, *others)


PHASES = Phases(begin, finish, begin_back, finish_back)
