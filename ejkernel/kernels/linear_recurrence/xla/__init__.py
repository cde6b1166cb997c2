"""The gated linear recurrence in plain JAX: chunk after chunk, with its own backward. Runs anywhere."""

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks.first_gates import initial_states
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla import decode
from ejkernel.kernels.linear_recurrence.xla.recurrence import Inputs, Results, recurrence


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """Output and final states; see `Call` for the arrays."""
    *inputs, cu_seqlens = _varying.align(arrays)
    operands = Inputs(*inputs)
    if 0 in (call.batch, call.tokens, call.heads, call.sequences, call.key_dim, call.value_dim):
        return _nothing(call, operands)
    if call.tokens == 1 and not call.packed:
        return decode.step(call, *operands)
    return recurrence(call, operands, cu_seqlens)


def _nothing(call: Call, inputs: Inputs) -> Results:
    """Nothing to write or to read: the states stay as they are."""
    output = jnp.zeros((call.batch, call.tokens, call.heads, call.value_dim), call.dtype)
    return output, initial_states(call, inputs)
