"""How the kernels of a call are run and differentiated: once by kernels, twice by XLA, and what `vmap` does to them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.folding import dense, foldable
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call


@dataclass(frozen=True)
class Kernels:
    """A platform's own forward and backward; `plan` is whatever else they want to know that is static.

    Attributes:
        forward: `forward(keep, call, plan, *arrays)` gives the output, the final states and, where `keep`, what the
            backward can use again.
        backward: `backward(call, plan, arrays, kept, doutput, dlast)` gives the cotangents of query, key, value, beta,
            log decay and initial state.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def recurrence(kernels: Kernels, call: Call, plan: Any, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output and final states from query, key, value, beta, log decay, initial state and borders."""
    output, last, _ = _recurrence(kernels, call, plan, False, *arrays)
    return output, last


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _recurrence(kernels: Kernels, call: Call, plan: Any, keep: bool, *arrays: Any) -> tuple[jax.Array, jax.Array, Any]:
    return foldable(functools.partial(kernels.forward, keep), call, plan)(*arrays)


def _recurrence_forward(kernels: Kernels, call: Call, plan: Any, keep: bool, *primals: Any) -> tuple[Any, Any]:
    arrays = [None if each is None else each.value for each in primals]
    # calling the differentiable function again is what makes gradients of gradients work
    output, last, kept = _recurrence(kernels, call, plan, True, *arrays)
    return (output, last, kept if keep else None), (tuple(arrays), kept)


def _recurrence_backward(
    kernels: Kernels, call: Call, plan: Any, keep: bool, saved: Any, cotangents: Any
) -> tuple[Any, ...]:
    arrays, kept = saved
    dlast = None if isinstance(cotangents[1], jax.custom_derivatives.SymbolicZero) else cotangents[1]
    return (*_gradients(kernels, call, plan, arrays, kept, dense(cotangents[0]), dlast), None)


_recurrence.defvjp(_recurrence_forward, _recurrence_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gradients(
    kernels: Kernels, call: Call, plan: Any, arrays: Any, kept: Any, doutput: jax.Array, dlast: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, beta, log decay and initial state."""
    return foldable(kernels.backward, call, plan)(arrays, kept, doutput, dlast)


def _gradients_forward(kernels: Kernels, call: Call, plan: Any, *arguments: Any) -> tuple[Any, Any]:
    arrays, _, doutput, dlast = arguments
    return _gradients(kernels, call, plan, *arguments), (arrays, doutput, dlast)


def _gradients_backward(kernels: Kernels, call: Call, plan: Any, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """Second derivatives are rare, so they go through the XLA implementation."""
    (*inputs, cu_seqlens), doutput, dlast = saved

    def gradients(inputs: Any, doutput: jax.Array, dlast: jax.Array | None) -> Any:
        (_, last), pull = jax.vjp(lambda *x: xla.run(call, *x, cu_seqlens), *inputs)
        return pull((doutput, jnp.zeros_like(last) if dlast is None else dlast))

    _, pull = jax.vjp(gradients, tuple(inputs), doutput, dlast)
    dinputs, ddoutput, ddlast = pull(tuple(cotangents))
    return (*dinputs, None), None, ddoutput, ddlast


_gradients.defvjp(_gradients_forward, _gradients_backward)
