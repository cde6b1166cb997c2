"""The gated linear recurrence on TPUs, as Pallas kernels."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.pallas import passes, plan
from ejkernel.kernels.chunks.pallas.kernel_call import Inputs, Recurrence
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.differentiation import Kernels, recurrence


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
    inner, inputs = plan.cast_inputs(call, _inputs(query, key, value, log_decay, initial_state, cu_seqlens), half)
    sizes = plan.sizes(inner, inputs.query, inputs.key, inputs.value)
    output, final = recurrence(_KERNELS, inner, sizes, *inputs[:3], *inputs[4:])
    return output.astype(call.dtype), final


def _program() -> Any:
    return importlib.import_module("ejkernel.kernels.linear_recurrence.pallas.device.program").Linear


def _xla(call: Call, x: Inputs) -> tuple[jax.Array, jax.Array]:
    return xla.run(call, x.query, x.key, x.value, x.log_decay, None, x.initial_state, x.cu_seqlens)


_LINEAR = Recurrence("recurrence", _program, _xla)


def _inputs(query: Any, key: Any, value: Any, *others: Any) -> Inputs:
    return Inputs(query, key, value, None, *others)


def _forward(keep: bool, call: Call, sizes: plan.Sizes, *arrays: Any) -> tuple[Any, ...]:
    return passes.forward(_LINEAR, keep, call, sizes, _inputs(*arrays))


def _backward(
    gate: bool, call: Call, sizes: plan.Sizes, arrays: Any, block_states: Any, d_output: Any, d_final: Any
) -> tuple[Any, ...]:
    inputs = _inputs(*arrays)
    d = passes.backward(_LINEAR, call, sizes, inputs, block_states, d_output, d_final, gate)
    if inputs.log_decay is not None and not gate:
        d = d._replace(log_decay=jnp.zeros_like(inputs.log_decay))
    return d.query, d.key, d.value, d.log_decay, d.initial_state


_KERNELS = Kernels(_forward, _backward)
