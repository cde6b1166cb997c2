"""The delta rule on TPUs, as Pallas kernels."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.kernels import recurrence
from ejkernel.kernels.chunks.pallas import plan, segments
from ejkernel.kernels.chunks.pallas.kernel_call import Inputs, Recurrence
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call

CHUNKS = 2  # a block, at most
_LARGEST_GATED = 128  # key dims that have gates: more do not fit the smallest VMEM


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    K, V = _LARGEST_GATED, _LARGEST_GATED if call.dtype.itemsize == 4 else plan.LARGEST_DIM
    if call.decay == "key" and (call.key_dim > K or call.value_dim > V):
        return f"key gates with head dims K={call.key_dim}, V={call.value_dim}; it takes up to {K}, {V}"
    return plan.supports(call)


def sizes(call: Call, query: jax.Array, key: jax.Array, value: jax.Array) -> plan.Sizes:
    """How a call is tiled: chunks are more work than the linear recurrence's, so blocks have fewer of them."""
    large = call.dtype.itemsize == 4 or call.value_dim > plan.LANES
    # the smallest VMEM has to hold what a block's chunks keep until their gradients are computed
    return plan.sizes(call, query, key, value, 1 if call.decay == "key" and large else CHUNKS)


def run(call: Call, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    inputs = Inputs(*arrays)
    # a query or key that was normalized or scaled comes in float32; it may be rounded as the values are
    half = call.dtype == inputs.value.dtype == jnp.bfloat16
    inner, inputs = plan.cast_inputs(call, inputs, half)
    cut = sizes(segments.one_sequence(inner), inputs.query, inputs.key, inputs.value)
    output, final = recurrence(_KERNELS, inner, cut, inputs)
    return output.astype(call.dtype), final


def run_or_xla(call: Call, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """As `run`, of any call: where tokens are sharded, a call that is supported comes once with more value dims."""
    return (run if supports(call) is None else xla.run)(call, *arrays)


def _program() -> Any:
    return importlib.import_module("ejkernel.kernels.delta_rule.pallas.device.program").DeltaRule


_DELTA_RULE = Recurrence("delta", _program, lambda call, inputs: xla.run(call, *inputs))
_KERNELS = segments.kernels(_DELTA_RULE)
