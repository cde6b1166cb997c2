"""A recurrence on XLA in two phases each way, for start states that are known late.

The first phase computes what chunks do to any state and composes it. The second carries the right states through all
chunks and computes everything else. Nothing else of a chunk is computed twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels._phases import CuSeqlens, Inputs, Phases
from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.recurrence import Recurrence, Results


def phases_from_chunks(recurrence: Recurrence, compose: Callable[..., jax.Array]) -> Phases:
    """The phases of a recurrence.

    `compose(call, inputs, cu_seqlens, transitions, where)` is what all chunks together do to the states, as
    `Phases.begin` returns it, from the transition of each.
    """

    def prepare(call: Any, inputs: Inputs, cu_seqlens: CuSeqlens, start: jax.Array | None) -> Any:
        named = recurrence.inputs(*inputs, start)
        return named, recurrence.arrays(call, named, cu_seqlens), layout.chunks(call, cu_seqlens), recurrence.math(call)

    def begin(call: Any, inputs: Inputs, cu_seqlens: CuSeqlens) -> tuple[Any, jax.Array]:
        named, arrays, where, math = prepare(call, inputs, cu_seqlens, None)
        transitions = walk.transitions(call, math, arrays, where)
        return transitions, compose(call, named, cu_seqlens, transitions, where)

    def finish(
        call: Any, inputs: Inputs, cu_seqlens: CuSeqlens, transitions: Any, start: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        named, arrays, where, math = prepare(call, inputs, cu_seqlens, start)
        starts = entering_states(call, start, named.gates, cu_seqlens)
        _, passed = walk.pass_all(call, math.advance, transitions, where, starts)
        # the residuals are the states at chunks' starts, as in `Recurrence.backward`
        return walk.outputs(call, math, arrays, where, passed, cu_seqlens), passed[0]

    def begin_back(
        call: Any, inputs: Inputs, cu_seqlens: CuSeqlens, start: jax.Array, residuals: jax.Array, d_output: jax.Array
    ) -> tuple[Any, jax.Array]:
        named, arrays, where, math = prepare(call, inputs, cu_seqlens, start)
        transitions = walk.transitions_back(call, math, arrays, where, residuals, d_output)
        d_starts, _ = walk.pass_all(call, math.advance_back, transitions, where, jnp.zeros_like(start), back=True)
        # first gates multiply cotangents of states as they do states
        return transitions, entering_states(call, d_starts, named.gates, cu_seqlens)

    def finish_back(
        call: Any,
        inputs: Inputs,
        cu_seqlens: CuSeqlens,
        start: jax.Array,
        residuals: jax.Array,
        transitions: Any,
        cotangents: Results,
    ) -> tuple[Any, ...]:
        named, _, where, math = prepare(call, inputs, cu_seqlens, start)
        d_final = _varying.like(cotangents[1].astype(call.state_dtype), named.query)
        passed = walk.pass_all(call, math.advance_back, transitions, where, d_final, back=True)
        d_inputs = recurrence.backward(call, named, cu_seqlens, residuals, (cotangents[0], d_final), passed)
        return tuple(d_inputs)[:-1]

    return Phases(begin, finish, begin_back, finish_back)
