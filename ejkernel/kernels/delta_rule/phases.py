"""The phases of an implementation that runs a call as a whole."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp

from ejkernel.kernels._phases import CuSeqlens, Inputs, Phases, Run, phases_from_run
from ejkernel.kernels.delta_rule.call import Call


@cache
def phases_from_wide_states(run: Run) -> Phases:
    """The phases of `run`, of which the first gives the matrix that tokens multiply states by, and the state they add.

    From a unit matrix, with values of 0, `run` ends with the matrix; from a state of 0, with the added state. So one
    run from states `[I, 0]` with values `[0, v]` ends with both, beside each other.
    """

    def begin(call: Call, inputs: Inputs, cu_seqlens: CuSeqlens) -> tuple[None, jax.Array]:
        query, key, value, *gates = inputs
        N, H, K, V = call.sequences, call.heads, call.key_dim, call.value_dim
        wide = replace(call, value_dim=K + V)
        values = jnp.concatenate([jnp.zeros((*value.shape[:-1], K), value.dtype), value], -1)
        unit = jnp.broadcast_to(jnp.eye(K, K + V, dtype=call.state_dtype), (N, H, K, K + V))
        return None, run(wide, query, key, values, *gates, unit, cu_seqlens)[1]

    return replace(phases_from_run(run), begin=begin)
