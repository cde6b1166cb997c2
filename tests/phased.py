"""An implementation of a recurrence by its phases, as on a slice of the tokens that is all of them."""

import importlib

import jax
import jax.numpy as jnp

RECURRENCE = importlib.import_module("ejkernel.parallel.linear_attention").RECURRENCE


def in_phases(implementation):
    """`run(call, *arrays)` as the implementation's own."""
    phases = implementation.phases

    def run(call, *arrays):
        *inputs, start, cu_seqlens = arrays
        if start is None:
            start = jnp.zeros((call.sequences, call.heads, call.key_dim, call.value_dim), call.state_dtype)

        @jax.custom_vjp
        def whole(inputs, start):
            return forward(inputs, start)[0]

        def forward(inputs, start):
            memory, keeping, added = RECURRENCE.begin(implementation, call, inputs, cu_seqlens)
            output, kept = phases.finish(call, inputs, cu_seqlens, memory, start)
            return (output, RECURRENCE.algebra.keep(keeping, start) + added), (inputs, start, kept, keeping)

        def backward(saved, cotangents):
            inputs, start, kept, keeping = saved
            memory, d_start = phases.begin_back(call, inputs, cu_seqlens, start, kept, cotangents[0])
            d_inputs = phases.finish_back(call, inputs, cu_seqlens, start, kept, memory, cotangents)
            return d_inputs, RECURRENCE.algebra.keep(keeping, cotangents[1]) + d_start

        whole.defvjp(forward, backward)
        return whole(tuple(inputs), start)

    return run
