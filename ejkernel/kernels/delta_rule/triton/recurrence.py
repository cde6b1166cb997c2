"""How the kernels of a call are run and differentiated: once by kernels, twice by XLA, and what `vmap` does to them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.folding import dense, foldable
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton import passes
from ejkernel.kernels.delta_rule.triton.launcher import Plan


def recurrence(call: Call, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output and final states from query, key, value, beta, log decay, initial state and borders."""
    output, last, _ = _recurrence(call, Plan.of(call), False, *arrays)
    return output, last


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _recurrence(call: Call, plan: Plan, keep: bool, *arrays: Any) -> tuple[jax.Array, jax.Array, Any]:
    return foldable(functools.partial(passes.forward, keep), call, plan)(*arrays)


def _recurrence_forward(call: Call, plan: Plan, keep: bool, *primals: Any) -> tuple[Any, Any]:
    arrays = [None if each is None else each.value for each in primals]
    # calling the differentiable function again is what makes gradients of gradients work
    output, last, kept = _recurrence(call, plan, True, *arrays)
    return (output, last, kept if keep else None), (tuple(arrays), kept)


def _recurrence_backward(call: Call, plan: Plan, keep: bool, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, kept = saved
    dlast = None if isinstance(cotangents[1], jax.custom_derivatives.SymbolicZero) else cotangents[1]
    return (*_gradients(call, plan, arrays, kept, dense(cotangents[0]), dlast), None)


_recurrence.defvjp(_recurrence_forward, _recurrence_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(
    call: Call, plan: Plan, arrays: Any, kept: Any, doutput: jax.Array, dlast: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, beta, log decay and initial state."""
    return foldable(passes.backward, call, plan)(arrays, kept, doutput, dlast)


def _gradients_forward(call: Call, plan: Plan, *arguments: Any) -> tuple[Any, Any]:
    arrays, _, doutput, dlast = arguments
    return _gradients(call, plan, *arguments), (arrays, doutput, dlast)


def _gradients_backward(call: Call, plan: Plan, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """Second derivatives are rare, so they go through the XLA implementation."""
    (*inputs, cu_seqlens), doutput, dlast = saved

    def gradients(inputs: Any, doutput: jax.Array, dlast: jax.Array | None) -> Any:
        (_, last), pull = jax.vjp(lambda *x: xla.run(call, *x, cu_seqlens), *inputs)
        return pull((doutput, jnp.zeros_like(last) if dlast is None else dlast))

    _, pull = jax.vjp(gradients, tuple(inputs), doutput, dlast)
    dinputs, ddoutput, ddlast = pull(tuple(cotangents))
    return (*dinputs, None), None, ddoutput, ddlast


_gradients.defvjp(_gradients_forward, _gradients_backward)
