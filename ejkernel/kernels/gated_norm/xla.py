"""A gated norm in plain JAX."""

from typing import Any

import jax
import numpy as np

from ejkernel._normalization import normalized
from ejkernel.kernels.gated_norm.call import Call, Inputs


def run(call: Call, *arrays: Any) -> jax.Array:
    """Arrays as `Inputs` lists them."""
    return gated_norm(call, Inputs(*arrays))


def gated_norm(call: Call, inputs: Inputs) -> jax.Array:
    x, gate = (each.astype(call.wide) for each in inputs[:2])
    gate = jax.nn.silu(gate) if call.activation == "silu" else jax.nn.sigmoid(gate)
    if inputs.value is not None and inputs.skip is not None:
        x = x + _over_tokens(call, inputs.skip) * inputs.value.astype(call.wide)
    if call.gate_first:
        x = x * gate
    x = normalized(x, call.dim * call.epsilon) * np.sqrt(call.dim).astype(call.wide)
    x = x * _over_tokens(call, inputs.scale)
    return (x if call.gate_first else x * gate).astype(call.dtype)


def _over_tokens(call: Call, parameter: jax.Array) -> jax.Array:
    return parameter.astype(call.wide).reshape(1, 1, -1, call.dim)
