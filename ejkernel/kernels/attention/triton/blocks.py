"""The kernels' passes as `xla.blocks` has them, for a ring of devices that merges what each block of keys gives."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, alike, cotangents
from ejkernel.kernels.attention.triton import backward as _backward
from ejkernel.kernels.attention.triton import forward as _forward
from ejkernel.kernels.attention.triton.launcher import LOG2E
from ejkernel.kernels.attention.triton.plan import Plan


def forward(call: Call, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and a reference and the sum of `exp(score - reference)`, `[B, S, H]`."""
    output, top, total = _forward.forward(call, Plan.of(call), _alike(inputs))
    return output, top.swapaxes(1, 2) / LOG2E, jnp.exp2(total.swapaxes(1, 2))


def backward(
    call: Call, inputs: Inputs, output: Array, top: Array, total: Array, d_output: Array, d_total: Array
) -> Inputs:
    """Cotangents of query, key and value; `output`, `top` and `total` may be over more keys than these."""
    del d_total  # the ring gives its caller no log-sum-exp
    dead = total == 0
    whole = jnp.where(dead, 0, top * LOG2E + jnp.log2(jnp.where(dead, 1, total))).swapaxes(1, 2)
    rows = output, whole, jnp.zeros_like(whole)
    gradients = _backward.backward(False, call, Plan.of(call), _alike(inputs), rows, d_output, None)
    return cotangents(inputs, {"query": gradients.query, "key": gradients.key, "value": gradients.value})


def _alike(inputs: Inputs) -> Inputs:
    query, key, value = alike(*inputs[:3])
    return inputs._replace(query=query, key=key, value=value)
