"""The delta rule in two phases each way, for tokens on several devices; the systems of chunks are solved once.

A device's tokens multiply the state by a matrix and add a state. The first phase composes these of all chunks in one
walk; the second carries the state that the device starts from through the chunks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.phases import phases_from_chunks
from ejkernel.kernels.chunks.walk import pass_all
from ejkernel.kernels.delta_rule.call import Call, Inputs
from ejkernel.kernels.delta_rule.xla import one_chunk
from ejkernel.kernels.delta_rule.xla.recurrence import RECURRENCE


def _composed(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, transitions: Any, where: Chunks) -> jax.Array:
    """The matrices and the added states beside each other, `[N, H, K, K + V]`."""
    N, H, K, V = call.sequences, call.heads, call.key_dim, call.value_dim
    identity = jnp.broadcast_to(jnp.eye(K + V, K, dtype=call.state_dtype), (N, H, K + V, K))
    identity = _varying.like(identity, inputs.query)
    composed, _ = pass_all(call, one_chunk.compose, transitions, where, identity, back=True)
    # the matrix applies to states after their sequences' first gates
    matrix = entering_states(call, composed[..., :K, :], inputs.gates, cu_seqlens)
    return jnp.concatenate([matrix, composed[..., K:, :]], -2).mT


PHASES = phases_from_chunks(RECURRENCE, _composed)
