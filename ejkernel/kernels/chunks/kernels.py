"""The kernels of a recurrence as an op that JAX can differentiate and map: derivatives beyond the first are XLA's."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _differentiable
from ejkernel.kernels._differentiable import Op, fold_rows

Results = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Kernels:
    """A platform's own forward and backward pass; `plan` is whatever else they want to know that is static.

    Attributes:
        forward: `forward(keep, call, plan, inputs)` gives the output, the final states and, where `keep`, residuals.
            `inputs` is a named tuple of the call's arrays.
        backward: `backward(wanted, call, plan, inputs, residuals, d_output, d_final)` gives the cotangents, named as
            the inputs. `wanted`, too, is named so, and says which cotangents are asked for; `d_final` may be `None`.
        reference: `reference(call, inputs)` gives output and final states by XLA.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    reference: Callable[..., Results]


def recurrence(kernels: Kernels, call: Any, plan: Any, inputs: Any) -> Results:
    """Output and final states."""
    return _differentiable.call(_op(kernels), (call, plan), inputs)


@functools.cache  # equal kernels are the same op, so that nothing is traced again
def _op(kernels: Kernels) -> Op:
    def forward(static: tuple[Any, Any], inputs: Any) -> Results:
        return kernels.forward(False, *static, inputs)[:2]

    def with_residuals(static: tuple[Any, Any], inputs: Any) -> tuple[Results, Any]:
        output, final, residuals = kernels.forward(True, *static, inputs)
        return (output, final), residuals

    def backward(static: tuple[Any, Any], inputs: Any, residuals: Any, cotangents: Any, wanted: Any) -> Any:
        call, (d_output, d_final) = static[0], cotangents
        if d_output is None:
            shape = (call.batch, call.tokens, call.heads, call.value_dim)
            d_output = jnp.zeros(shape, call.dtype)
        return kernels.backward(wanted, *static, inputs, residuals, d_output, d_final)

    def reference(static: tuple[Any, Any], inputs: Any) -> Results:
        return kernels.reference(static[0], inputs)

    return Op(forward, with_residuals, backward, reference, fold=_fold)


def foldable(function: Callable[..., Any], call: Any, plan: Any) -> Callable[..., Any]:
    """`function(call, plan, *arrays)` of the arrays alone, which `vmap` maps as it maps the op; for parts of it."""
    run = _differentiable.foldable(lambda static, arrays: function(*static, *arrays), _fold, (call, plan))
    return lambda *arrays: run(arrays)


def _fold(static: tuple[Any, Any], size: int, inputs: Any, mapped: Any, wanted: Any) -> Any:
    """Rows join the batch; packed streams run one by one."""
    call, plan = static
    if call.packed:
        return None
    larger = replace(call, batch=call.batch * size, sequences=call.sequences * size)
    return (larger, plan), fold_rows(inputs, size, mapped)
