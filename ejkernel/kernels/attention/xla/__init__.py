"""Softmax attention in blocks: memory linear in the number of tokens, and no work for keys out of sight.

Gradients recompute the weights from two numbers of each row of scores: the maximum, `top`, and the sum of
`exp(score - top)`, `total`, both 0 where there is nothing to sum. Derivatives take `top` for a constant.
"""

import functools
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group
from ejkernel.kernels.attention.xla import blocks, few_queries


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def run(call: Call, *arrays: Array | None) -> Any:
    """The output `[B, S, H, Dv]`; with `return_lse` also the log-sum-exp `[B, S, H]`."""
    inputs = Inputs(*arrays)  # type: ignore[arg-type]
    if 0 in (call.batch, call.queries, call.keys):
        output, lse = _empty(call, inputs.sinks)
    else:
        output, lse = _differentiable.call(OP, call, _varying.align(inputs))
    output = output.astype(call.dtype)
    return (output, lse) if call.return_lse else output


def _empty(call: Call, sinks: Array | None) -> tuple[Array, Array]:
    lse = jnp.full((1, 1), -jnp.inf) if sinks is None else jax.nn.logsumexp(by_group(call, sinks, 0), -1)
    lse = jnp.broadcast_to(lse, (call.batch, call.queries, call.kv_heads, call.groups))
    lse = lse.reshape(call.batch, call.queries, call.heads).astype(call.wide)
    return jnp.zeros((*lse.shape, call.value_dim), call.dtype), lse


def _forward(call: Call, inputs: Inputs) -> tuple[Array, Array]:
    return _with_residuals(call, inputs)[0]


def _with_residuals(call: Call, inputs: Inputs) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Output and log-sum-exp, and the maximum and the total that the log-sum-exp is made of."""
    if few_queries.applies(call):
        few, many = (functools.partial(blocks.forward, call, inputs, few=each) for each in (True, False))
        output, top, total = lax.platform_dependent(cpu=few, default=many)
    else:
        output, top, total = blocks.forward(call, inputs)
    return (output, _log_sum_exp(top, total)), (top, total)


def _backward(call: Call, inputs: Inputs, residuals: Any, cotangents: Any, wanted: Inputs) -> Inputs:
    (output, (top, total)), (d_output, d_lse) = residuals, cotangents
    d_output = jnp.zeros_like(output) if d_output is None else d_output
    d_total = jnp.zeros_like(total) if d_lse is None else jnp.where(total == 0, 0, d_lse / total)
    return blocks.backward(call, inputs, output, top, total, d_output, d_total)


def _differentiable_forward(call: Call, inputs: Inputs, **how: bool) -> tuple[Array, Array]:
    """`_forward` as code that JAX can differentiate, see `blocks.forward`."""
    output, top, total = blocks.forward(call, inputs, **how)
    return output, _log_sum_exp(top, total)


def _log_sum_exp(top: Array, total: Array) -> Array:
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))


OP = Op(
    _forward,
    functools.partial(_differentiable_forward, every_block=True),
    _with_residuals,
    _backward,
    by_jvp(functools.partial(_differentiable_forward, apart=True)),
    keeps=itemgetter(0),
)
