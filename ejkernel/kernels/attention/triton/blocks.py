"""The kernels' passes with the interface of `xla.blocks`, for a ring of devices that merges blocks of keys."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, to_common_dtype
from ejkernel.kernels.attention.triton import backward as _backward
from ejkernel.kernels.attention.triton import forward as _forward
from ejkernel.kernels.attention.triton.launcher import LOG2E
from ejkernel.kernels.attention.triton.plan import Plan


def forward(call: Call, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and `top` and the sum of `exp(score - top)`, `[B, S, H]`; `top` is any number."""
    output, lse, lse_rest = _forward.forward(call, Plan.of(call), _to_common_dtype(inputs))
    return output, lse.swapaxes(1, 2) / LOG2E, jnp.exp2(lse_rest.swapaxes(1, 2))


def backward(
    call: Call, inputs: Inputs, output: Array, top: Array, total: Array, d_output: Array, d_total: Array
) -> Inputs:
    """Cotangents of query, key and value; `output`, `top` and `total` may be over more keys than `inputs` has."""
    del d_total  # the ring gives its caller no log-sum-exp
    dead = total == 0
    lse = jnp.where(dead, 0, top * LOG2E + jnp.log2(jnp.where(dead, 1, total))).swapaxes(1, 2)
    results = output, lse, jnp.zeros_like(lse)
    gradients = _backward.backward(False, call, Plan.of(call), _to_common_dtype(inputs), results, d_output, None)
    return cotangents(inputs, {"query": gradients.query, "key": gradients.key, "value": gradients.value})


def _to_common_dtype(inputs: Inputs) -> Inputs:
    query, key, value = to_common_dtype(*inputs[:3])
    return inputs._replace(query=query, key=key, value=value)
