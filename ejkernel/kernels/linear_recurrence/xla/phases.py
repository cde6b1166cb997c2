"""The gated linear recurrence in two phases each way."""

from typing import Any

import jax

from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.phases import phases_from_chunks
from ejkernel.kernels.chunks.walk import pass_all, zero_states
from ejkernel.kernels.linear_recurrence.call import Call, Inputs
from ejkernel.kernels.linear_recurrence.xla import one_chunk
from ejkernel.kernels.linear_recurrence.xla.recurrence import RECURRENCE


def _added(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, transitions: Any, where: Chunks) -> jax.Array:
    """The states that tokens add, `[N, H, K, V]`; the factor of a state depends on the gates alone."""
    return pass_all(call, one_chunk.advance, transitions, where, zero_states(call, inputs.query))[0]


PHASES = phases_from_chunks(RECURRENCE, _added)
