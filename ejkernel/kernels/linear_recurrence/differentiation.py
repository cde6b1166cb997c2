"""How the kernels of a call are run and differentiated: once by kernels, twice by XLA, and what `vmap` does to them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.folding import dense, foldable
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call


@dataclass(frozen=True)
class Kernels:
    """A platform's own forward and backward; `plan` is whatever else they want to know that is static.

    Attributes:
        forward: `forward(keep, call, plan, *arrays)` gives the output, the final states and, where `keep`, what the
            backward can use again.
        backward: `backward(wanted, call, plan, arrays, kept, doutput, dlast)` gives the cotangents of query, key,
            value, log decay (zeros unless `wanted`) and initial state.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def recurrence(kernels: Kernels, call: Call, plan: Any, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """Output and final states from query, key, value, log decay, initial state and borders.

    The log decay is that of the value dims, or a pair of that of the key dims and that, where value dims decay.
    """
    output, last, _ = _recurrence(kernels, call, plan, False, *arrays)
    return output, last


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Whether the gates' gradient is asked for; it costs about a quarter of the backward."""

    gate: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _recurrence(kernels: Kernels, call: Call, plan: Any, keep: bool, *arrays: Any) -> tuple[jax.Array, jax.Array, Any]:
    return foldable(functools.partial(kernels.forward, keep), call, plan)(*arrays)


def _recurrence_forward(kernels: Kernels, call: Call, plan: Any, keep: bool, *primals: Any) -> tuple[Any, Any]:
    arrays = jax.tree.map(lambda each: each.value, primals, is_leaf=lambda each: hasattr(each, "perturbed"))
    # calling the differentiable function again is what makes gradients of gradients work
    output, last, residuals = _recurrence(kernels, call, plan, True, *arrays)
    wanted = _Wanted(call.value_decay or (primals[3] is not None and primals[3].perturbed))
    return (output, last, residuals if keep else None), (tuple(arrays), residuals, wanted)


def _recurrence_backward(
    kernels: Kernels, call: Call, plan: Any, keep: bool, saved: Any, cotangents: Any
) -> tuple[Any, ...]:
    del keep
    arrays, residuals, wanted = saved
    doutput = dense(cotangents[0])
    dlast = None if isinstance(cotangents[1], jax.custom_derivatives.SymbolicZero) else cotangents[1]
    return (*_gradients(kernels, call, plan, wanted, arrays, residuals, doutput, dlast), None)


_recurrence.defvjp(_recurrence_forward, _recurrence_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gradients(
    kernels: Kernels,
    call: Call,
    plan: Any,
    wanted: _Wanted,
    arrays: Any,
    residuals: Any,
    doutput: jax.Array,
    dlast: jax.Array | None,
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay and initial state."""
    backward = functools.partial(kernels.backward, wanted.gate)
    return foldable(backward, call, plan)(arrays, residuals, doutput, dlast)


def _gradients_forward(kernels: Kernels, call: Call, plan: Any, wanted: _Wanted, *arguments: Any) -> tuple[Any, Any]:
    arrays, _, doutput, dlast = arguments
    return _gradients(kernels, call, plan, wanted, *arguments), (arrays, doutput, dlast)


def _gradients_backward(
    kernels: Kernels, call: Call, plan: Any, wanted: _Wanted, saved: Any, cotangents: Any
) -> tuple[Any, ...]:
    """Second derivatives are rare, so they go through the XLA implementation."""
    del kernels, plan
    (*inputs, cu_seqlens), doutput, dlast = saved

    def gradients(inputs: Any, doutput: jax.Array, dlast: jax.Array | None) -> Any:
        def output(query: Any, key: Any, value: Any, log_decay: Any, initial_state: Any) -> Any:
            both = isinstance(log_decay, tuple)
            decays = log_decay if both else (None, log_decay) if call.value_decay else (log_decay, None)
            return xla.run(call, query, key, value, *decays, initial_state, cu_seqlens)

        (_, last), pull = jax.vjp(output, *inputs)
        return pull((doutput, jnp.zeros_like(last) if dlast is None else dlast))

    results, pull = jax.vjp(gradients, tuple(inputs), doutput, dlast)
    if not wanted.gate and inputs[3] is not None:
        cotangents = (*cotangents[:3], jnp.zeros_like(results[3]), cotangents[4])
    dinputs, ddoutput, ddlast = pull(tuple(cotangents))
    return (*dinputs, None), None, ddoutput, ddlast


_gradients.defvjp(_gradients_forward, _gradients_backward)
