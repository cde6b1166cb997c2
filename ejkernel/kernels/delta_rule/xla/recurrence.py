"""The delta rule of a whole call and its gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.faster_walk import Walk, by_the_faster_walk
from ejkernel.kernels.chunks.first_gates import decayed, of_first_tokens
from ejkernel.kernels.chunks.layout import Chunks
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


def initial_states(call: Call, inputs: Inputs) -> jax.Array:
    """Initial states `[N, H, K, V]`."""
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(call.state_dtype)
    shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
    return _varying.like(jnp.zeros(shape, call.state_dtype), inputs.query)


def entering_states(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> jax.Array | None:
    """The states that sequences are entered with, if there are initial ones."""
    if inputs.initial_state is None:
        return None
    gates = None if inputs.log_decay is None else of_first_tokens(call, inputs.log_decay, cu_seqlens)
    return decayed(inputs.initial_state.astype(call.state_dtype), *decode.beside_states(call, gates))


def chunk_of(call: Call, inputs: Inputs, step: Chunks) -> one_chunk.Chunk:
    """All that a step's chunks read; a sequence's first gates are in the state that it is entered with."""
    q, k, v, beta = (walk.cut(call, step, x) for x in (*inputs[:3], inputs.beta[..., None]))
    a = inputs.log_decay
    if a is not None:
        first = walk.by_token(call, layout.first_visited(call, step))
        a = jnp.where(first, 0, walk.cut(call, step, a[..., None] if call.decay == "head" else a))
    return one_chunk.Chunk(q, k, v, beta, a)


def _entered(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[jax.Array | None, jax.Array]:
    """What sequences are entered with, if there are initial states, and that or zeros."""
    starts = entering_states(call, inputs, cu_seqlens)
    return starts, initial_states(call, inputs._replace(initial_state=starts))


def _by_chunks(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, keep_states: bool) -> tuple[Results, Any]:
    """The results and, if kept, the states that chunks meet `[chunks, rows, H, K, V]`."""
    chunk = functools.partial(chunk_of, call, inputs)
    entered = _entered(call, inputs, cu_seqlens)
    return walk.forward(call, one_chunk, chunk, *entered, cu_seqlens, keep_states)


def _by_tokens(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, walk_of: Walk) -> Any:
    """What this walk makes of them."""
    a, einsum = inputs.log_decay, walk.einsum_of(call)
    gates = a[..., None] if call.decay == "head" and a is not None else a, None

    def step(token: tuple[jax.Array, ...], kept: jax.Array) -> Results:
        query, key, value, beta = token
        return decode.corrected(call, query, key, value, beta, kept, einsum)

    starts, first = _entered(call, inputs, cu_seqlens)
    return walk_of(call, step, starts is not None, (inputs[:4], gates, first, cu_seqlens))


def gradients(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, met: jax.Array, cotangents: Results, back: Any = None
) -> Inputs:
    """Cotangents of the inputs, where chunks have `met` these states; `back` is as in `walk.backward`."""
    d_output, d_final = cotangents
    d_final = _varying.like(d_final.astype(call.state_dtype), inputs.query)
    tokens = inputs._replace(initial_state=None)

    def give(chunks: Chunks, grads: one_chunk.Gradients) -> Inputs:
        first = walk.by_token(call, layout.first_visited(call, chunks))
        d_decay = None if grads.log_decay is None else jnp.where(first, 0, grads.log_decay)
        of_tokens = Inputs(*grads[:4], d_decay, None)
        return jax.tree.map(functools.partial(walk.heads_last, call), tokens, of_tokens)

    chunk, stateful = functools.partial(chunk_of, call, inputs), inputs.initial_state is not None
    pieces, d_entering = walk.backward(
        call, one_chunk, chunk, give, met, cu_seqlens, (d_output, d_final), stateful, back
    )
    where = layout.chunks(call, cu_seqlens)
    grads = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), pieces)
    if stateful:

        def entering(decay: jax.Array | None, state: jax.Array) -> jax.Array | None:
            return entering_states(call, inputs._replace(log_decay=decay, initial_state=state), cu_seqlens)

        d_decay, d_state = jax.vjp(entering, inputs.log_decay, inputs.initial_state)[1](d_entering)
        d_decay = jax.tree.map(jnp.add, d_decay, grads.log_decay)
        grads = grads._replace(log_decay=d_decay, initial_state=d_state)
    return grads


recurrence = by_the_faster_walk(lambda call: "delta", _by_tokens, _by_chunks, gradients)
