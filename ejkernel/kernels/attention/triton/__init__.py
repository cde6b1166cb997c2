"""Softmax attention on NVIDIA GPUs, as Triton kernels."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels import _launch, _varying
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton.differentiation import attend
from ejkernel.kernels.attention.triton.plan import decodes, operand_dtype, padded_dims

_LARGEST_DIM, _LARGEST_FLOAT32_DIM = 512, 256


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if (refused := _launch.refused_dtype(operand_dtype(call), call.dtype)) is not None:
        return refused
    if call.softmax_dtype != np.float32:
        return f"softmax_dtype {call.softmax_dtype}; it takes float32"
    if max(call.key_dim, call.value_dim) > _LARGEST_DIM:
        return f"a head dim above {_LARGEST_DIM} (D={call.key_dim}, Dv={call.value_dim})"
    if operand_dtype(call) == np.float32 and max(call.key_dim, call.value_dim) > _LARGEST_FLOAT32_DIM:
        return f"float32 with a head dim above {_LARGEST_FLOAT32_DIM} (D={call.key_dim}, Dv={call.value_dim})"
    sizes = (call.batch, call.queries, call.keys, call.heads, call.key_dim, call.value_dim, call.sequences, call.sinks)
    if not all(isinstance(each, int | None) for each in sizes):
        return "a symbolic size"
    return _launch.refusal([call.dtype], sizes)


def slowest(call: Call) -> str | None:
    """The dtype and dims of `call` for which XLA was measured to be faster, or `None`."""
    if decodes(call) or operand_dtype(call) != np.float32 or padded_dims(call) <= 256:
        return None
    return f"float32 with head dims {call.key_dim} and {call.value_dim}"


def run(call: Call, *arrays: Array | None) -> Any:
    """The output `[B, S, H, Dv]`; with `return_lse` also the log-sum-exp `[B, S, H]`."""
    inputs: Inputs = _varying.align(Inputs(*arrays))  # type: ignore[arg-type]
    dtype = operand_dtype(call)
    query, key, value = (each.astype(dtype) for each in inputs[:3])
    inputs = inputs._replace(query=query, key=key, value=value)
    if inputs.bias is not None and inputs.bias.dtype == jnp.float64:
        inputs = inputs._replace(bias=inputs.bias.astype(jnp.float32))  # as wide as the scores it is added to
    output, lse = attend(call, inputs)
    output = output.astype(call.dtype)
    return (output, lse) if call.return_lse else output
