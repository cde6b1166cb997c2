"""The delta rule in plain JAX: chunk after chunk, with its own backward. Runs anywhere."""

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks.first_gates import decayed
from ejkernel.kernels.chunks.walk import einsum_of
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.xla.recurrence import (
    Inputs,
    Results,
    decay_beside_states,
    initial_states,
    recurrence,
)


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """Output and final states; see `Call` for the arrays."""
    *inputs, cu_seqlens = _varying.align(arrays)
    operands = Inputs(*inputs)
    if 0 in (call.batch, call.tokens, call.heads, call.sequences, call.key_dim, call.value_dim):
        output = jnp.zeros((call.batch, call.tokens, call.heads, call.value_dim), call.dtype)
        return output, initial_states(call, operands)
    if call.tokens == 1 and not call.packed:
        return _step(call, operands)
    return recurrence(call, operands, cu_seqlens)


def _step(call: Call, inputs: Inputs) -> Results:
    """One token a sequence: the state is read, decayed, corrected and queried in one pass."""
    einsum = einsum_of(call)

    def of_heads(x: jax.Array) -> jax.Array:
        x = x[:, 0].astype(call.state_dtype)
        return jnp.repeat(x, call.heads // x.shape[1], axis=1)

    q, k, v, beta = (of_heads(x) for x in inputs[:4])
    state = initial_states(call, inputs)
    if inputs.initial_state is not None:
        gates = None if inputs.log_decay is None else inputs.log_decay[:, 0]
        state = decayed(state, *decay_beside_states(call, gates))
    error = beta[..., None] * (v - einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., :, None] * error[..., None, :]
    output = call.scale * einsum("bhk,bhkv->bhv", q, state)
    return output[:, None].astype(call.dtype), state
