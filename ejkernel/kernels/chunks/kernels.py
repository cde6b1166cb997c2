"""The kernels of a recurrence as an op that JAX can differentiate and map.

Tangents of what the results are linear in are further runs of the kernels; other tangents, and derivatives beyond the
first, are XLA's.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch import warn_of_tangents
from ejkernel.kernels import _differentiable, _mapping
from ejkernel.kernels._mapping import fold_rows
from ejkernel.kernels._op import Op, by_jvp

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

    def tangent(static: tuple[Any, Any], inputs: Any, residuals: Any, tangents: Any) -> tuple[Results, Results]:
        moving = [name for name, each in zip(inputs._fields, tangents, strict=True) if each is not None]
        # what results are linear in, and if it is not the delta rule, keys
        linear = ("query", "value", "initial_state", *(() if getattr(inputs, "beta", None) is not None else ("key",)))
        if others := ["gates" if "decay" in name else name for name in moving if name not in linear]:
            warn_of_tangents(f"a recurrence's tangents by {' and '.join(dict.fromkeys(others))}")
            return by_jvp(reference)(static, inputs, residuals, tangents)
        return _linear_tangents(functools.partial(forward, static), inputs, tangents)

    return Op(forward, reference, with_residuals, backward, tangent, fold=_fold)


def _linear_tangents(run: Callable[[Any], Results], inputs: Any, tangents: Any) -> tuple[Results, Results]:
    """The results of `run`, and their tangents, each term of which is another run: one factor is a tangent there."""
    results, terms = run(inputs), []
    if tangents.query is not None:
        terms.append((run(inputs._replace(query=tangents.query))[0], jnp.zeros_like(results[1])))
    if tangents.key is not None:
        terms.append(run(inputs._replace(key=tangents.key, initial_state=None)))
    if tangents.value is not None or tangents.initial_state is not None:
        value = jnp.zeros_like(inputs.value) if tangents.value is None else tangents.value
        terms.append(run(inputs._replace(value=value, initial_state=tangents.initial_state)))
    return results, jax.tree.map(lambda *each: sum(each[1:], each[0]), *terms)


def foldable(function: Callable[..., Any], call: Any, plan: Any) -> Callable[..., Any]:
    """`function(call, plan, *arrays)` of the arrays alone, which `vmap` maps as it maps the op; for parts of it."""
    run = _mapping.foldable(lambda static, arrays: function(*static, *arrays), _fold, (call, plan))
    return lambda *arrays: run(arrays)


def _fold(static: tuple[Any, Any], size: int, inputs: Any, mapped: Any, wanted: Any) -> Any:
    """Rows join the batch; packed streams run one by one."""
    call, plan = static
    if call.packed:
        return None
    larger = replace(call, batch=call.batch * size, sequences=call.sequences * size)
    return (larger, plan), fold_rows(inputs, size, mapped)
