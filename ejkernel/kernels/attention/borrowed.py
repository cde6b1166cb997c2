"""Kernels that others wrote, as ops that JAX can differentiate any number of times and map.

They have no tangents and no second derivative, and some batch only arrays that all have the batch. So `vmap` runs them
one by one, tangents come from another implementation, and second derivatives from XLA's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from ejkernel._dispatch import warn_of_tangents
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, differentiable


def _here(run: Callable[..., Any], instead: Callable[..., Any], *trees: Any) -> Any:
    return run(*trees)


def borrowed(
    direct: Callable[[Call, Inputs], Array],
    enter: Callable[..., Any] = _here,
    kernels: Callable[[Call], Callable[..., Any] | None] = lambda call: None,
) -> Op:
    """The op of a kernel that has its own gradient; its static facts are the `Call`.

    Args:
        direct: `direct(call, inputs)` gives the output, in the query's dtype.
        enter: `enter(run, instead, *trees)` is `run(*trees)`, or where the kernel cannot run `instead(*trees)`.
        kernels: `kernels(call)` is `run` of an implementation that has tangents; where it is `None`, XLA has them.
    """

    def with_pull(call: Call, inputs: Inputs) -> Any:
        """The output, and the function that takes its cotangent to those of the inputs."""
        return jax.vjp(lambda moving: direct(call, inputs._replace(**moving)), differentiable(inputs))

    def forward(call: Call, inputs: Inputs) -> Array:
        return enter(functools.partial(direct, call), functools.partial(_by_xla, call), inputs)

    def with_residuals(call: Call, inputs: Inputs) -> tuple[Array, list[Array]]:
        def run(inputs: Inputs) -> tuple[Array, list[Array]]:
            output, pull = with_pull(call, inputs)
            return output, jax.tree.leaves(pull)

        def instead(inputs: Inputs) -> tuple[Array, list[Array]]:
            residuals = jax.eval_shape(run, inputs)[1]
            return _by_xla(call, inputs), [jax.numpy.zeros(each.shape, each.dtype) for each in residuals]

        return enter(run, instead, inputs)

    def backward(call: Call, inputs: Inputs, residuals: list[Array], d_output: Array, wanted: Inputs) -> Inputs:
        def run(inputs: Inputs, residuals: list[Array], d_output: Array) -> dict[str, Array]:
            # only the function's arrays were kept; traced here again it costs nothing
            tree = jax.tree.structure(jax.eval_shape(functools.partial(with_pull, call), inputs)[1])
            return jax.tree.unflatten(tree, residuals)(d_output)[0]

        def instead(inputs: Inputs, residuals: list[Array], d_output: Array) -> dict[str, Array]:
            def output(moving: dict[str, Array]) -> Array:
                return _by_xla(call, inputs._replace(**moving))

            return jax.vjp(output, differentiable(inputs))[1](d_output)[0]

        return cotangents(inputs, enter(run, instead, inputs, residuals, d_output))

    def tangent(call: Call, inputs: Inputs, residuals: Any, tangents: Inputs) -> tuple[Array, Array]:
        run = kernels(call)
        if run is None:
            warn_of_tangents("tangents of flash_attention")
            return by_jvp(_by_xla)(call, inputs, residuals, tangents)
        return by_jvp(lambda call, inputs: run(call, *inputs).astype(inputs.query.dtype))(
            call, inputs, residuals, tangents
        )

    return Op(forward, _by_xla, with_residuals, backward, tangent, fold=lambda *_: None)


def _by_xla(call: Call, inputs: Inputs) -> Array:
    return xla.run(call, *inputs).astype(inputs.query.dtype)
