"""The delta rule as a recurrence: its tokens' arrays, its chunks' mathematics, and one token's write."""

import jax

from ejkernel.kernels.chunks.recurrence import Recurrence
from ejkernel.kernels.chunks.token_walk import of_heads
from ejkernel.kernels.chunks.walk import ChunkMath, einsum_of
from ejkernel.kernels.delta_rule.call import Call, Inputs
from ejkernel.kernels.delta_rule.xla import one_chunk
from ejkernel.kernels.delta_rule.xla.one_chunk import Arrays


def _arrays(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> Arrays:
    log_decay = inputs.log_decay
    if log_decay is not None and call.decay != "key":
        log_decay = log_decay[..., None]
    return Arrays(inputs.query, inputs.key, inputs.value, inputs.beta[..., None], log_decay)


def _math(call: Call) -> ChunkMath:
    return one_chunk.MATH


def _write(call: Call, token: Arrays, state: jax.Array) -> jax.Array:
    key, value, beta = (of_heads(call, x) for x in (token.key, token.value, token.beta))
    error = beta * (value - einsum_of(call)("bhk,bhkv->bhv", key, state))
    return state + key[..., :, None] * error[..., None, :]


RECURRENCE = Recurrence(Inputs, _arrays, _math, _write)
