"""The gated linear recurrence on TPUs, as Pallas kernels."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _varying
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.differentiation import Kernels, recurrence
from ejkernel.kernels.linear_recurrence.pallas import passes, plan

_KERNELS = Kernels(passes.forward, passes.backward)


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.value_decay:
        return "decay along the value dims (gv) has no Pallas kernel"
    return plan.supports(call)


def run(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    initial_state: jax.Array | None,
    cu_seqlens: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    inner, served_arrays = served(call, query, key, value, log_decay, initial_state, cu_seqlens)
    output, last = recurrence(_KERNELS, inner, plan.sizes(inner, *served_arrays[:3]), *served_arrays)
    return output.astype(call.dtype), last


def served(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, *others: Any) -> tuple[Call, list[Any]]:
    """A call and its arrays in dtypes that the kernels have."""
    # a query that was scaled comes in float32; it may be rounded as its keys are
    half = call.dtype == key.dtype == value.dtype == jnp.bfloat16
    dtype = np.dtype(jnp.bfloat16 if half else np.float32)
    arrays = [*(each.astype(dtype) for each in (query, key, value)), *map(plan.served, others)]
    return replace(call, dtype=dtype), list(_varying.align(tuple(arrays)))
