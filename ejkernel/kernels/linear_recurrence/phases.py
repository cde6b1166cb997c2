"""The phases of an implementation that runs a call as a whole, with one run in the backward for states alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._phases import CuSeqlens, Inputs, Phases, Run, phases_from_run
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.xla_utils.utils import prepare_sequence_ids


@cache
def phases_from_reversed_runs(run: Run) -> Phases:
    """The phases of `run`, whose `begin_back` is a forward run: a third of the time of the gradient.

    Cotangents of states are the states of a run in the other direction, with queries as keys and the output's cotangent
    as values.
    """

    def begin_back(
        call: Call, inputs: Inputs, cu_seqlens: CuSeqlens, start: jax.Array, residuals: Any, d_output: jax.Array
    ) -> tuple[None, jax.Array]:
        query, key, _, log_decay, value_log_decay = inputs
        # a gate comes before its token's write and so, in the other direction, after it
        if call.decay != "constant":
            log_decay = _shifted(call, log_decay, cu_seqlens)
        gates = log_decay, _shifted(call, value_log_decay, cu_seqlens)
        back = replace(call, reverse=not call.reverse)
        _, d_starts = run(back, key, query, d_output, *gates, None, cu_seqlens)
        return None, entering_states(call, call.scale * d_starts, inputs[3:], cu_seqlens)

    return replace(phases_from_run(run), begin_back=begin_back)


def _shifted(call: Call, gates: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array | None:
    """For each token the gates `[B, T, …]` of the one that is visited next in its sequence, or 0."""
    if gates is None:
        return None
    shifted = jnp.roll(gates, 1 if call.reverse else -1, 1)
    token = jnp.arange(call.tokens)
    last = token == (0 if call.reverse else call.tokens - 1)
    if cu_seqlens is not None:
        sequence = prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)
        last |= sequence != jnp.roll(sequence, 1 if call.reverse else -1)
    # selected, not multiplied: gates of another sequence may be anything
    return jnp.where(last.reshape(1, -1, *(1,) * (gates.ndim - 2)), 0, shifted)
