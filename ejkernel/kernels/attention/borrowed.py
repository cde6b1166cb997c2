"""Kernels that others wrote, as functions that can be differentiated twice and mapped.

They have no second derivative, and some batch only arrays that all have the batch. So what touches them is opaque to
both: `vmap` loops, and second derivatives are those of the XLA implementation.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, differentiable


def _here(run: Callable[..., Any], instead: Callable[..., Any], *trees: Any) -> Any:
    del instead
    return run(*trees)


@dataclass(frozen=True)
class Borrowed:
    """A kernel that has its own gradient.

    Attributes:
        direct: `direct(call, inputs)` gives the output, in the query's dtype.
        enter: `enter(run, instead, *trees)` is `run(*trees)`, or where the kernel cannot run `instead(*trees)`.
    """

    direct: Callable[[Call, Inputs], Array]
    enter: Callable[..., Any] = _here


def _primal(borrowed: Borrowed, call: Call, inputs: Inputs) -> Array:
    """The output `[B, S, H, D]`."""
    run, instead = functools.partial(borrowed.direct, call), functools.partial(_output_by_xla, call)
    return _looped(borrowed, run, instead, inputs)


def _forward(borrowed: Borrowed, call: Call, inputs: Inputs) -> Any:
    output, kept = _keep(borrowed, call, inputs)
    return output, (inputs, kept)


def _backward(borrowed: Borrowed, call: Call, residuals: Any, d_output: Array) -> tuple[Inputs]:
    return (_pull(borrowed, call, *residuals, d_output),)


attend = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))
attend.defvjp(_forward, _backward)


def _looped(borrowed: Borrowed, run: Callable[..., Any], instead: Callable[..., Any], *trees: Any) -> Any:
    return jax.custom_batching.sequential_vmap(functools.partial(borrowed.enter, run, instead))(*trees)


def _with_pull(borrowed: Borrowed, call: Call, inputs: Inputs) -> Any:
    """The output, and the function that takes its cotangent to those of the inputs."""
    return jax.vjp(lambda moving: borrowed.direct(call, inputs._replace(**moving)), differentiable(inputs))


def _keep_primal(borrowed: Borrowed, call: Call, inputs: Inputs) -> tuple[Array, list[Array]]:
    """The output, and the arrays that the backward pass will need."""

    def run(inputs: Inputs) -> tuple[Array, list[Array]]:
        output, pull = _with_pull(borrowed, call, inputs)
        return output, jax.tree.leaves(pull)

    def instead(inputs: Inputs) -> tuple[Array, list[Array]]:
        kept = jax.eval_shape(run, inputs)[1]
        return _output_by_xla(call, inputs), [jax.numpy.zeros(each.shape, each.dtype) for each in kept]

    return _looped(borrowed, run, instead, inputs)


def _keep_forward(borrowed: Borrowed, call: Call, inputs: Inputs) -> Any:
    return _keep(borrowed, call, inputs), inputs


def _keep_backward(borrowed: Borrowed, call: Call, inputs: Inputs, d_results: Any) -> tuple[Inputs]:
    # what was kept has no cotangent: `_pull` counts its part in with the inputs'
    return (_by_xla(call, inputs, d_results[0]),)


_keep = jax.custom_vjp(_keep_primal, nondiff_argnums=(0, 1))
_keep.defvjp(_keep_forward, _keep_backward)


def _pull_primal(borrowed: Borrowed, call: Call, inputs: Inputs, kept: list[Array], d_output: Array) -> Inputs:
    """The cotangents of the inputs."""

    def run(inputs: Inputs, kept: list[Array], d_output: Array) -> dict[str, Array]:
        # the function itself cannot be kept, as `vmap` would trace it anew; traced here it costs nothing
        tree = jax.tree.structure(jax.eval_shape(functools.partial(_with_pull, borrowed, call), inputs)[1])
        return jax.tree.unflatten(tree, kept)(d_output)[0]

    def instead(inputs: Inputs, kept: list[Array], d_output: Array) -> dict[str, Array]:
        return differentiable(_by_xla(call, inputs, d_output))

    return cotangents(inputs, _looped(borrowed, run, instead, inputs, kept, d_output))


def _pull_forward(borrowed: Borrowed, call: Call, inputs: Inputs, kept: list[Array], d_output: Array) -> Any:
    return _pull(borrowed, call, inputs, kept, d_output), (inputs, d_output)


def _pull_backward(borrowed: Borrowed, call: Call, residuals: Any, dd_inputs: Inputs) -> Any:
    inputs, d_output = residuals
    moving = differentiable(inputs)

    def gradients(moving: dict[str, Array], d_output: Array) -> dict[str, Array]:
        return differentiable(_by_xla(call, inputs._replace(**moving), d_output))

    _, pull = jax.vjp(gradients, moving, d_output)
    d_moving, dd_output = pull({name: getattr(dd_inputs, name) for name in moving})
    return cotangents(inputs, d_moving), None, dd_output


_pull = jax.custom_vjp(_pull_primal, nondiff_argnums=(0, 1))
_pull.defvjp(_pull_forward, _pull_backward)


def _output_by_xla(call: Call, inputs: Inputs) -> Array:
    return xla.run(call, *inputs).astype(inputs.query.dtype)


def _by_xla(call: Call, inputs: Inputs, d_output: Array) -> Inputs:
    """The cotangents of the inputs, by the XLA implementation."""

    def output(moving: dict[str, Array]) -> Array:
        return xla.run(call, *inputs._replace(**moving)).astype(d_output.dtype)

    return cotangents(inputs, jax.vjp(output, differentiable(inputs))[1](d_output)[0])
