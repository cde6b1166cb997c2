"""Softmax attention in blocks: memory linear in the number of tokens, and no work for keys out of sight.

Gradients recompute the weights from what is kept of each row of scores: its largest, `top`, and the sum of
`exp(score - top)`, `total`, both 0 where there is nothing to sum. Derivatives take `top` for a constant.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels import _varying
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, differentiable
from ejkernel.kernels.attention.masks import by_group
from ejkernel.kernels.attention.xla import blocks, few_queries


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def run(call: Call, *arrays: Array | None) -> Any:
    """The output `[B, S, H, Dv]`, with `return_lse` and the log of the softmax's denominator `[B, S, H]`."""
    inputs = Inputs(*arrays)  # type: ignore[arg-type]
    if 0 in (call.batch, call.queries, call.keys):
        output, lse = _empty(call, inputs.sinks)
    else:
        output, top, total = _attend(call, _varying.align(inputs))
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))
    output = output.astype(call.dtype)
    return (output, lse) if call.return_lse else output


def _empty(call: Call, sinks: Array | None) -> tuple[Array, Array]:
    lse = jnp.full((1, 1), -jnp.inf) if sinks is None else jax.nn.logsumexp(by_group(call, sinks, 0), -1)
    lse = jnp.broadcast_to(lse, (call.batch, call.queries, call.kv_heads, call.groups))
    lse = lse.reshape(call.batch, call.queries, call.heads).astype(call.wide)
    return jnp.zeros((*lse.shape, call.value_dim), call.dtype), lse


def _primal(call: Call, inputs: Inputs) -> tuple[Array, Array, Array]:
    if few_queries.pays(call):
        few, many = (functools.partial(blocks.forward, call, inputs, few=each) for each in (True, False))
        return lax.platform_dependent(cpu=few, default=many)
    return blocks.forward(call, inputs)


def _forward(call: Call, inputs: Inputs) -> Any:
    # `_attend`, not `_primal`: differentiating this again must not meet loops of unknown length
    results = _attend(call, inputs)
    return results, (inputs, *results)


def _backward(call: Call, residuals: Any, d_results: Any) -> tuple[Inputs]:
    d_output, _, d_total = d_results
    return (_gradients(call, *residuals, d_output, d_total),)


_attend = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _gradients_primal(call: Call, *arguments: Any) -> Inputs:
    return blocks.backward(call, *arguments)


def _gradients_forward(call: Call, *arguments: Any) -> Any:
    inputs, _, _, _, d_output, d_total = arguments
    return _gradients(call, *arguments), (inputs, d_output, d_total)


def _gradients_backward(call: Call, residuals: Any, dd_inputs: Inputs) -> Any:
    """Second derivatives, by JAX, of the same blocks in loops of fixed length."""
    inputs, *d_results = residuals
    moving = differentiable(inputs)

    def gradients(moving: Any, d_results: Any) -> Any:
        def results(moving: Any) -> Any:
            output, _, total = blocks.forward(call, inputs._replace(**moving), every_block=True)
            return output, total

        return jax.vjp(results, moving)[1](d_results)[0]

    _, pull = jax.vjp(gradients, moving, tuple(d_results))
    d_moving, (dd_output, dd_total) = pull({name: getattr(dd_inputs, name) for name in moving})
    # the output, top and total are functions of the inputs: their share is in `d_moving`
    return cotangents(inputs, d_moving), None, None, None, dd_output, dd_total


_gradients = jax.custom_vjp(_gradients_primal, nondiff_argnums=(0,))
_gradients.defvjp(_gradients_forward, _gradients_backward)
