"""Kernels of other libraries, as ops that JAX can differentiate any number of times and map.

These kernels have gradients, but no tangents and no second derivatives, and some batch only arrays that all have the
batch. So `vmap` runs them one by one, tangents come from another implementation, and second derivatives from XLA's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel._dispatch import warn_of_tangents
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, differentiable


def _run(run: Callable[..., Any], fallback: Callable[..., Any], *trees: Any) -> Any:
    return run(*trees)


def borrowed(
    direct: Callable[[Call, Inputs], Array],
    enter: Callable[..., Any] = _run,
    with_tangents: Callable[[Call], Callable[..., Any] | None] = lambda call: None,
) -> Op:
    """The op of a kernel that has its own gradient; its static facts are the `Call`.

    Args:
        direct: `direct(call, inputs)` gives the output, in the query's dtype.
        enter: `enter(run, fallback, *trees)` is `run(*trees)`, or `fallback(*trees)` where the kernel cannot run.
        with_tangents: `with_tangents(call)` is `run` of an implementation that has tangents, or `None` for XLA's.
    """

    def vjp(call: Call, inputs: Inputs) -> Any:
        """The output, and the function that takes its cotangent to those of the inputs."""
        return jax.vjp(lambda moving: direct(call, inputs._replace(**moving)), differentiable(inputs))

    def forward(call: Call, inputs: Inputs) -> Array:
        return enter(functools.partial(direct, call), functools.partial(_by_xla, call), inputs)

    def with_residuals(call: Call, inputs: Inputs) -> tuple[Array, list[Array]]:
        def run(inputs: Inputs) -> tuple[Array, list[Array]]:
            output, pull = vjp(call, inputs)
            return output, jax.tree.leaves(pull)

        def fallback(inputs: Inputs) -> tuple[Array, list[Array]]:
            residuals = jax.eval_shape(run, inputs)[1]
            return _by_xla(call, inputs), [jnp.zeros(each.shape, each.dtype) for each in residuals]

        return enter(run, fallback, inputs)

    def backward(call: Call, inputs: Inputs, residuals: list[Array], d_output: Array, wanted: Inputs) -> Inputs:
        def run(inputs: Inputs, residuals: list[Array], d_output: Array) -> dict[str, Array]:
            # residuals are the function's arrays alone; its structure is traced again, which costs no time later
            tree = jax.tree.structure(jax.eval_shape(functools.partial(vjp, call), inputs)[1])
            return jax.tree.unflatten(tree, residuals)(d_output)[0]

        def fallback(inputs: Inputs, residuals: list[Array], d_output: Array) -> dict[str, Array]:
            pull = jax.vjp(lambda moving: _by_xla(call, inputs._replace(**moving)), differentiable(inputs))[1]
            return pull(d_output)[0]

        return cotangents(inputs, enter(run, fallback, inputs, residuals, d_output))

    def tangent(call: Call, inputs: Inputs, residuals: Any, tangents: Inputs) -> tuple[Array, Array]:
        run = with_tangents(call)
        if run is None:
            run = xla.run
            warn_of_tangents("tangents of flash_attention")
        return by_jvp(functools.partial(_by, run))(call, inputs, residuals, tangents)

    return Op(forward, _by_xla, with_residuals, backward, tangent, fold=lambda *_: None)


def _by(run: Callable[..., Any], call: Call, inputs: Inputs) -> Array:
    """The output by the `run` of an implementation, in the query's dtype."""
    return run(call, *inputs).astype(inputs.query.dtype)


_by_xla = functools.partial(_by, xla.run)
