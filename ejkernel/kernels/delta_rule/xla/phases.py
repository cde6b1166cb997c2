"""The delta rule in two phases each way: the systems of chunks are solved once.

What tokens do to a state is to multiply it by a matrix and to add a state. To compose that of all chunks takes a walk,
and to take the right state through them another.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import walk
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.phases import Chunkwise, of_chunks
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.xla import one_chunk
from ejkernel.kernels.delta_rule.xla.recurrence import Inputs, chunk_of, gradients, mathematics


def _composed(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, passing: Any, where: Chunks) -> jax.Array:
    """Matrices and states beside each other, `[N, H, K, K + V]`."""
    N, H, K, V = call.sequences, call.heads, call.key_dim, call.value_dim
    nothing = jnp.broadcast_to(jnp.eye(K + V, K, dtype=call.state_dtype), (N, H, K + V, K))
    nothing = _varying.like(nothing, inputs.query)
    found, _ = walk.pass_all(call, one_chunk.compose, passing, where, nothing, back=True)
    # rows are of key dims of the state that is multiplied, after its first gates
    matrix = entering_states(call, found[..., :K, :], inputs.gates, cu_seqlens)
    return jnp.concatenate([matrix, found[..., K:, :]], -2).mT


PHASES = of_chunks(Chunkwise(Inputs, mathematics, chunk_of, gradients, _composed))
