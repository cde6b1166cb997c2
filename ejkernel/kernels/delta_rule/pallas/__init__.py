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
from ejkernel.kernels.linear_recurrence.pallas.plan import LARGEST_DIM, served
from ejkernel.kernels.linear_recurrence.pallas.plan import supports as supports_cut

_KERNELS = Kernels(passes.forward, passes.backward)
_LARGEST_KEYED = 128  # key dims that have gates: more do not fit the smallest VMEM


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    keyed = _LARGEST_KEYED, _LARGEST_KEYED if call.dtype.itemsize == 4 else LARGEST_DIM
    if call.decay == "key" and (call.key_dim > keyed[0] or call.value_dim > keyed[1]):
        return f"key gates with head dims K={call.key_dim}, V={call.value_dim}; it takes up to {keyed[0]}, {keyed[1]}"
    return supports_cut(call)  # type: ignore[arg-type]


def run(call: Call, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    query, key, value, beta, log_decay, state, cu_seqlens = arrays
    # a query or key that was normalized or scaled comes in float32; it may be rounded as the values are
    half = call.dtype == value.dtype == jnp.bfloat16  # type: ignore[union-attr]
    dtype = np.dtype(jnp.bfloat16 if half else np.float32)
    tokens = [each.astype(dtype) for each in (query, key, value)]  # type: ignore[union-attr]
    aligned = _varying.align((*tokens, *map(served, (beta, log_decay, state)), cu_seqlens))
    inner = replace(call, dtype=dtype)
    output, last = recurrence(_KERNELS, inner, plan.sizes(inner, *aligned[:3]), *aligned)
    return output.astype(call.dtype), last


def run_or_xla(call: Call, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The same of any call: where tokens are sharded, one that is served comes once with more value dims."""
    return (run if supports(call) is None else xla.run)(call, *arrays)
