"""The gated linear recurrence of a whole call and its gradient."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.faster_walk import Walk, by_the_faster_walk
from ejkernel.kernels.chunks.first_gates import decayed, of_first_tokens, where_there_are_tokens
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla import decode, one_chunk, value_chunk
from ejkernel.xla_utils.utils import prepare_sequence_ids

Results = tuple[jax.Array, jax.Array]


class Inputs(NamedTuple):
    """The arrays of a call that have gradients, or their cotangents, as `Call` describes them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    value_log_decay: jax.Array | None
    initial_state: jax.Array | None


def mathematics(call: Call) -> ModuleType:
    return value_chunk if call.value_decay else one_chunk


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
    decay, by_value = inputs.log_decay, inputs.value_log_decay
    if decay is not None:
        constant = call.decay == "constant"
        decay = (where_there_are_tokens if constant else functools.partial(of_first_tokens, call))(decay, cu_seqlens)
    if by_value is not None:
        by_value = of_first_tokens(call, by_value, cu_seqlens)
    return decayed(inputs.initial_state.astype(call.state_dtype), *decode.beside_states(call, decay, by_value))


def chunk_of(call: Call, inputs: Inputs, step: Chunks) -> one_chunk.Chunk:
    """All that a step's chunks read; a sequence's first gates are in the state that it is entered with."""
    a, b = inputs.log_decay, inputs.value_log_decay
    first = walk.by_token(call, layout.first_visited(call, step))
    if call.decay == "constant" and a is not None:
        a = a[step.sequence] if call.packed else jnp.repeat(a, len(step.start), axis=0)
        unseen = first | ~walk.by_token(call, layout.visited(call, step))
        a = jnp.where(unseen, 0, a.astype(call.state_dtype)[:, :, None, None])
    elif a is not None:
        a = jnp.where(first, 0, walk.cut(call, step, a[..., None] if call.decay == "head" else a))
    b = None if b is None else jnp.where(first, 0, walk.cut(call, step, b))
    q, k, v = (walk.cut(call, step, x) for x in inputs[:3])
    return one_chunk.Chunk(q, k, v, a, b)


def _entered(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[jax.Array | None, jax.Array]:
    """What sequences are entered with, if there are initial states, and that or zeros."""
    starts = entering_states(call, inputs, cu_seqlens)
    return starts, initial_states(call, inputs._replace(initial_state=starts))


def _by_chunks(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, keep_states: bool) -> tuple[Results, Any]:
    """The results and, if kept, the states that chunks meet `[chunks, rows, H, K, V]`."""
    chunk = functools.partial(chunk_of, call, inputs)
    entered = _entered(call, inputs, cu_seqlens)
    return walk.forward(call, mathematics(call), chunk, *entered, cu_seqlens, keep_states)


def _of_tokens(call: Call, gamma: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Constant log decays of sequences `[N, H]` as those of tokens `[B, T, H]`."""
    if cu_seqlens is None:
        return jnp.broadcast_to(gamma[:, None], (call.batch, call.tokens, call.heads))
    return gamma.at[prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)].get(mode="clip")[None]


def _by_tokens(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, walk_of: Walk) -> Any:
    """What this walk makes of them."""
    a, b, einsum = inputs.log_decay, inputs.value_log_decay, walk.einsum_of(call)
    if call.decay == "constant" and a is not None:
        a = _of_tokens(call, a, cu_seqlens)
    gates = a if a is None or call.decay == "key" else a[..., None], b

    def step(token: tuple[jax.Array, ...], kept: jax.Array) -> Results:
        query, key, value = token
        return decode.written(call, query, key, value, kept, einsum)

    starts, first = _entered(call, inputs, cu_seqlens)
    return walk_of(call, step, starts is not None, (inputs[:3], gates, first, cu_seqlens))


def _kind(call: Call) -> str:
    return "value" if call.value_decay else "key" if call.decay == "key" else "head"


def gradients(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, met: jax.Array, cotangents: Results, back: Any = None
) -> Inputs:
    """Cotangents of the inputs, where chunks have `met` these states; `back` is as in `walk.backward`."""
    d_output, d_final = cotangents
    d_final = _varying.like(d_final.astype(call.state_dtype), inputs.query)
    constant, stateful = call.decay == "constant", inputs.initial_state is not None
    # constant decays are summed apart, initial states come out of the walk
    tokens = inputs._replace(initial_state=None, log_decay=None if constant else inputs.log_decay)

    def give(chunks: Chunks, grads: one_chunk.Gradients) -> tuple[Inputs, jax.Array | None]:
        first = walk.by_token(call, layout.first_visited(call, chunks))
        decays = (grads.log_decay, grads.value_log_decay)
        d_decay, d_value_decay = jax.tree.map(lambda x: jnp.where(first, 0, x), decays)
        of_tokens = Inputs(grads.query, grads.key, grads.value, d_decay, d_value_decay, None)
        d_gamma = None
        if constant:
            own = walk.by_token(call, layout.visited(call, chunks))
            d_gamma = walk.by_chunk(jnp.where(own, d_decay, 0).sum((-2, -1)), len(chunks.start))
            of_tokens = of_tokens._replace(log_decay=None)
        return jax.tree.map(functools.partial(walk.heads_last, call), tokens, of_tokens), d_gamma

    chunk = functools.partial(chunk_of, call, inputs)
    (pieces, d_gamma), d_entering = walk.backward(
        call, mathematics(call), chunk, give, met, cu_seqlens, (d_output, d_final), stateful, back
    )
    where = layout.chunks(call, cu_seqlens)
    grads = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), pieces)
    if constant and (gamma := inputs.log_decay) is not None:
        if call.packed:
            d_gamma = jnp.zeros_like(d_gamma, shape=gamma.shape).at[where.sequence].add(d_gamma[:, 0])
        else:
            d_gamma = d_gamma.sum(0)
        grads = grads._replace(log_decay=d_gamma.astype(gamma.dtype))
    if stateful:
        grads = _through_first_gates(call, inputs, cu_seqlens, grads, d_entering)
    return grads


def _through_first_gates(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, grads: Inputs, d_entering: jax.Array
) -> Inputs:
    """`grads` with what `entering_states` adds to them."""

    def entering(decay: jax.Array | None, value_decay: jax.Array | None, state: jax.Array) -> jax.Array | None:
        moving = inputs._replace(log_decay=decay, value_log_decay=value_decay, initial_state=state)
        return entering_states(call, moving, cu_seqlens)

    d_decay, d_value_decay, d_state = jax.vjp(entering, *inputs[3:])[1](d_entering)

    d_decay, d_value_decay = jax.tree.map(jnp.add, (d_decay, d_value_decay), (grads.log_decay, grads.value_log_decay))
    return grads._replace(log_decay=d_decay, value_log_decay=d_value_decay, initial_state=d_state)


recurrence = by_the_faster_walk(_kind, _by_tokens, _by_chunks, gradients)
