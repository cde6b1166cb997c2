"""How a call is cut for a TPU: as the linear recurrence, in blocks of fewer chunks, which are more work each."""

from dataclasses import replace

import jax

from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.linear_recurrence.pallas import plan
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes

CHUNKS = 2  # a visit, at most


def sizes(call: Call, query: jax.Array, key: jax.Array, value: jax.Array) -> Sizes:
    """How the call is cut."""
    found = plan.sizes(call, query, key, value)  # type: ignore[arg-type]
    large = call.dtype.itemsize == 4 or call.value_dim > plan.LANES
    # the smallest VMEM has to hold what is found of its chunks before their gradients are
    chunks = min(found.chunks, 1 if call.decay == "key" and large else CHUNKS)
    if found.chunk < plan.CHUNK:
        chunks = 2  # betas fill whole lanes
    return replace(found, chunks=chunks, masked=call.packed or call.tokens % (found.chunk * chunks) != 0)
