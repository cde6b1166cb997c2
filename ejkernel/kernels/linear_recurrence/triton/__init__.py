"""The gated linear recurrence on NVIDIA GPUs, as Triton kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch, _varying
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton.recurrence import recurrence

_LARGEST_DIM = 256
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.dtype not in [jnp.dtype(each) for each in _DTYPES]:
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
    arrays = _varying.align((query, key, value, log_decay, initial_state, cu_seqlens))
    return recurrence(call, *arrays)
