"""The delta rule of a whole call and its gradient."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax

from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.faster_walk import by_the_faster_walk
from ejkernel.kernels.chunks.first_gates import Gates, through_first_gates
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.token_walk import Write
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.xla import decode, one_chunk

Results = tuple[jax.Array, jax.Array]


class Inputs(NamedTuple):
    """The arrays of a call that have gradients, or their cotangents, as `Call` describes them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    initial_state: jax.Array | None

    @property
    def gates(self) -> Gates:
        return self.log_decay, None


def mathematics(call: Call) -> ModuleType:
    return one_chunk


def chunk_of(call: Call, inputs: Inputs, step: Chunks) -> one_chunk.Chunk:
    """All that a step's chunks read; a sequence's first gates are in the state that it is entered with."""
    whole = one_chunk.Chunk(*inputs[:3], inputs.beta[..., None], walk.of_dims(call, inputs.log_decay))
    chunk = jax.tree.map(functools.partial(walk.cut, call, step), whole)
    return chunk._replace(log_decay=walk.without_first(call, step, chunk.log_decay))


def _token(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[Write, Any, Gates]:
    """What a token writes, and all tokens' arrays and gates."""
    einsum = walk.einsum_of(call)

    def write(token: Any, kept: jax.Array) -> jax.Array:
        key, value, beta = token
        return decode.corrected(call, key, value, beta, kept, einsum)

    return write, inputs[:4], (walk.of_dims(call, inputs.log_decay), None)


def gradients(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, met: jax.Array, cotangents: Results, back: Any = None
) -> Inputs:
    """Cotangents of the inputs, where chunks have `met` these states; `back` is as in `walk.backward`."""
    tokens = inputs._replace(initial_state=None)

    def give(chunks: Chunks, grads: one_chunk.Gradients) -> Inputs:
        of_tokens = Inputs(*grads[:4], walk.without_first(call, chunks, grads.log_decay), None)
        return jax.tree.map(functools.partial(walk.heads_last, call), tokens, of_tokens)

    chunk, stateful = functools.partial(chunk_of, call, inputs), inputs.initial_state is not None
    pieces, d_entering = walk.backward(call, one_chunk, chunk, give, met, cu_seqlens, cotangents, stateful, back)
    where = layout.chunks(call, cu_seqlens)
    grads = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), pieces)
    (d_decay, _), d_state = through_first_gates(call, inputs, cu_seqlens, grads.gates, d_entering)
    return grads._replace(log_decay=d_decay, initial_state=d_state)


recurrence = by_the_faster_walk(lambda call: "delta", _token, mathematics, chunk_of, gradients)
