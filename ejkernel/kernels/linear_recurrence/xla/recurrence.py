"""What the gated linear recurrence is: its tokens' arrays, its chunks and what a token writes."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.recurrence import Recurrence
from ejkernel.kernels.chunks.token_walk import of_heads
from ejkernel.kernels.chunks.walk import ChunkMath
from ejkernel.kernels.linear_recurrence.call import Call, Inputs
from ejkernel.kernels.linear_recurrence.xla import one_chunk, value_chunk
from ejkernel.kernels.linear_recurrence.xla.one_chunk import Arrays
from ejkernel.xla_utils.utils import prepare_sequence_ids


def _arrays(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> Arrays:
    log_decay = inputs.log_decay
    if log_decay is not None and call.decay == "constant":
        log_decay = _of_tokens(call, log_decay.astype(call.state_dtype), cu_seqlens)
    if log_decay is not None and call.decay != "key":
        log_decay = log_decay[..., None]
    return Arrays(inputs.query, inputs.key, inputs.value, log_decay, inputs.value_log_decay)


def _of_tokens(call: Call, gamma: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Constant log decays of sequences `[N, H]` as those of tokens `[B, T, H]`."""
    if cu_seqlens is None:
        return jnp.broadcast_to(gamma[:, None], (call.batch, call.tokens, call.heads))
    return gamma.at[prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)].get(mode="clip")[None]


def _math(call: Call) -> ChunkMath:
    return value_chunk.MATH if call.value_decay else one_chunk.MATH


def _write(call: Call, token: Arrays, state: jax.Array) -> jax.Array:
    # no einsum: its gradients would be products too small to be worth it
    return state + of_heads(call, token.key)[..., :, None] * of_heads(call, token.value)[..., None, :]


RECURRENCE = Recurrence(Inputs, _arrays, _math, _write)
