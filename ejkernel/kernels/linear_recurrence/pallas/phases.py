"""The gated linear recurrence on TPUs in two phases each way, for states that are known late.

The first is a walk for states alone, which reads two arrays and the gates: of the products of a forward walk it has one
in four, of those of a backward walk one in ten.
"""

from dataclasses import replace
from typing import Any

import jax

from ejkernel.kernels._phases import phases_from_run
from ejkernel.kernels.chunks.folding import foldable
from ejkernel.kernels.linear_recurrence import pallas
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.pallas import passes, plan

_WHOLE = phases_from_run(pallas.run)


def begin(call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None) -> tuple[None, jax.Array]:
    """As `Phases.begin`."""
    inner, (*tokens, gates, borders) = pallas.served(call, *inputs[:4], cu_seqlens)
    run = foldable(passes.added, inner, plan.sizes(inner, *tokens))
    return None, run(*tokens[1:], gates, borders)


def begin_back(
    call: Call,
    inputs: tuple[Any, ...],
    cu_seqlens: jax.Array | None,
    start: jax.Array,
    kept: Any,
    d_output: jax.Array,
) -> tuple[None, jax.Array]:
    """As `Phases.begin_back`."""
    inner, (*tokens, gates, borders, d_output) = pallas.served(call, *inputs[:4], cu_seqlens, d_output)
    run = foldable(passes.returned, inner, plan.sizes(inner, *tokens))
    return None, run(tokens[0], d_output.astype(inner.dtype), gates, borders)


PHASES = replace(_WHOLE, begin=begin, begin_back=begin_back)
