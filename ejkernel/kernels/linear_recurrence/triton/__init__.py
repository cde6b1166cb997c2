"""The gated linear recurrence on NVIDIA GPUs, as Triton kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch, _varying
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.differentiation import Kernels, recurrence
from ejkernel.kernels.linear_recurrence.triton import passes
from ejkernel.kernels.linear_recurrence.triton.plan import Plan

_LARGEST_DIM = 256
_KERNELS = Kernels(passes.forward, passes.backward)
_DTYPES = {np.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float32)}


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.dtype not in _DTYPES:
        return f"dtype {call.dtype} is none of bfloat16, float16, float32"
    if call.value_decay:
        return "decay along the value dims (gv) has no Triton kernel"
    if max(call.key_dim, call.value_dim) > _LARGEST_DIM:
        return f"a head dim above {_LARGEST_DIM} (K={call.key_dim}, V={call.value_dim})"
    if 0 in (call.batch, call.tokens, call.heads, call.key_dim, call.value_dim, call.sequences):
        return "an array without elements"
    if call.scale == 0 or not np.isfinite(call.scale):
        return f"softmax_scale {call.scale}: the gradient kernels divide by it"
    return _launch.unavailable()


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
    del value_log_decay
    dtype = _common_dtype(call, query, key, value)
    tokens = [each.astype(dtype) for each in (query, key, value)]
    gates, state = _at_most_float32(log_decay), _at_most_float32(initial_state)
    arrays = _varying.align((*tokens, gates, state, cu_seqlens))
    inner = replace(call, dtype=dtype)
    output, last = recurrence(_KERNELS, inner, Plan.of(inner), *arrays)
    return output.astype(call.dtype), last


def _common_dtype(call: Call, query: jax.Array, key: jax.Array, value: jax.Array) -> np.dtype:
    """What the kernels multiply in, and so what they want of query, key and value alike."""
    if call.dtype == key.dtype == value.dtype == jnp.bfloat16:
        # a query that was scaled comes in float32; it may be rounded as its keys are, since bfloat16 has the range
        return call.dtype
    dtypes = {each.dtype for each in (query, key, value)}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= _DTYPES else np.dtype(np.float32)


def _at_most_float32(x: jax.Array | None) -> jax.Array | None:
    return x.astype(np.float32) if x is not None and x.dtype == np.float64 else x
