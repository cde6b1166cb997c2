"""The gated linear recurrence on TPUs, as Pallas kernels."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.kernels import recurrence
from ejkernel.kernels.chunks.pallas import plan, segments
from ejkernel.kernels.chunks.pallas.kernel_call import Inputs, Recurrence
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.value_decay:
        return "decay along the value dims (gv) has no Pallas kernel"
    return plan.supports(call)


def run(call: Call, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    query, key, value, log_decay, _, initial_state, cu_seqlens = arrays
    # a query that was scaled comes in float32; it may be rounded as its keys are
    half = call.dtype == key.dtype == value.dtype == jnp.bfloat16
    inner, inputs = plan.cast_inputs(call, Inputs(query, key, value, None, log_decay, initial_state, cu_seqlens), half)
    sizes = plan.sizes(segments.one_sequence(inner), inputs.query, inputs.key, inputs.value)
    output, final = recurrence(_KERNELS, inner, sizes, inputs)
    return output.astype(call.dtype), final


def _program() -> Any:
    return importlib.import_module("ejkernel.kernels.linear_recurrence.pallas.device.program").Linear


def _xla(call: Call, x: Inputs) -> tuple[jax.Array, jax.Array]:
    return xla.run(call, x.query, x.key, x.value, x.log_decay, None, x.initial_state, x.cu_seqlens)


_LINEAR = Recurrence("recurrence", _program, _xla)
_KERNELS = segments.kernels(_LINEAR)
