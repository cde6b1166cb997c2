"""The delta rule on TPUs, as Pallas kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _varying
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.differentiation import Kernels, recurrence
from ejkernel.kernels.delta_rule.pallas import passes, plan
from ejkernel.kernels.linear_recurrence.pallas.plan import scale_served

_KERNELS = Kernels(passes.forward, passes.backward)
_DTYPES = {np.dtype(each) for each in (jnp.bfloat16, jnp.float32)}
_LARGEST_DIM = 256
_LARGEST_KEYED = 128  # key dims that have gates: more do not fit the smallest VMEM


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.dtype not in _DTYPES:
        return f"dtype {call.dtype} is none of bfloat16, float32"
    if any(dim % 64 or not 0 < dim <= _LARGEST_DIM for dim in (call.key_dim, call.value_dim)):
        return f"head dims K={call.key_dim}, V={call.value_dim}; it takes multiples of 64 up to {_LARGEST_DIM}"
    keyed = _LARGEST_KEYED, _LARGEST_KEYED if call.dtype.itemsize == 4 else _LARGEST_DIM
    if call.decay == "key" and (call.key_dim > keyed[0] or call.value_dim > keyed[1]):
        return f"key gates with head dims K={call.key_dim}, V={call.value_dim}; it takes up to {keyed[0]}, {keyed[1]}"
    if jax.export.is_symbolic_dim(call.batch):
        return "a batch that is known only when the program runs"
    if 0 in (call.batch, call.tokens, call.heads, call.sequences):
        return "an array without elements"
    if call.tokens == 1 and not call.packed:
        return "one token, which XLA takes in one step"
    return scale_served(call.scale)


def run(call: Call, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    query, key, value, beta, log_decay, state, cu_seqlens = arrays
    # a query or key that was normalized or scaled comes in float32; it may be rounded as the values are
    half = call.dtype == value.dtype == jnp.bfloat16  # type: ignore[union-attr]
    dtype = np.dtype(jnp.bfloat16 if half else np.float32)
    tokens = [each.astype(dtype) for each in (query, key, value)]  # type: ignore[union-attr]
    rest = [x if x is None or x.dtype in _DTYPES else x.astype(np.float32) for x in (beta, log_decay, state)]
    served = _varying.align((*tokens, *rest, cu_seqlens))
    inner = replace(call, dtype=dtype)
    output, last = recurrence(_KERNELS, inner, plan.sizes(inner, *served[:3]), *served)
    return output.astype(call.dtype), last


def run_or_xla(call: Call, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The same of any call: where tokens are sharded, one that is served comes once with more value dims."""
    return (run if supports(call) is None else xla.run)(call, *arrays)
