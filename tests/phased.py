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
            carry, transition, added = RECURRENCE.begin(implementation, call, inputs, cu_seqlens)
            output, residuals = phases.finish(call, inputs, cu_seqlens, carry, start)
            return (output, RECURRENCE.algebra.apply(transition, start) + added), (inputs, start, residuals, transition)

        def backward(saved, cotangents):
            inputs, start, residuals, transition = saved
            carry, d_start = phases.begin_back(call, inputs, cu_seqlens, start, residuals, cotangents[0])
            d_inputs = phases.finish_back(call, inputs, cu_seqlens, start, residuals, carry, cotangents)
            return d_inputs, RECURRENCE.algebra.apply(transition, cotangents[1]) + d_start

        whole.defvjp(forward, backward)
        return whole(tuple(inputs), start)

    return run
