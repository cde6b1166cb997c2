"""The gated linear recurrence in two phases each way; states are taken through chunks by sums of matrices alone."""

from typing import Any

import jax

from ejkernel.kernels.chunks import walk
from ejkernel.kernels.chunks.first_gates import initial_states
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.phases import Chunkwise, of_chunks
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla.recurrence import Inputs, chunk_of, gradients, mathematics


def _added(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, passing: Any, where: Chunks) -> jax.Array:
    """The states that tokens add; by what they multiply one, their gates tell."""
    return walk.pass_all(call, mathematics(call).end, passing, where, initial_states(call, inputs))[0]


PHASES = of_chunks(Chunkwise(Inputs, mathematics, chunk_of, gradients, _added))
