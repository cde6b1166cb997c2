"""The gated linear recurrence of a whole call and its gradient."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.faster_walk import by_the_faster_walk
from ejkernel.kernels.chunks.first_gates import Gates, through_first_gates
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.token_walk import Write
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

    @property
    def gates(self) -> Gates:
        return self.log_decay, self.value_log_decay


def mathematics(call: Call) -> ModuleType:
    return value_chunk if call.value_decay else one_chunk


def chunk_of(call: Call, inputs: Inputs, step: Chunks) -> one_chunk.Chunk:
    """All that a step's chunks read; a sequence's first gates are in the state that it is entered with."""
    cut = functools.partial(walk.cut, call, step)
    a, b = inputs.gates
    if call.decay == "constant" and a is not None:
        a = a[step.sequence] if call.packed else jnp.repeat(a, len(step.start), axis=0)
        own = walk.by_token(call, layout.visited(call, step))
        gates = jnp.where(own, a.astype(call.state_dtype)[:, :, None, None], 0), jax.tree.map(cut, b)
    else:
        gates = jax.tree.map(cut, (walk.of_dims(call, a), b))
    return one_chunk.Chunk(*(cut(x) for x in inputs[:3]), *walk.without_first(call, step, gates))


def _of_tokens(call: Call, gamma: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Constant log decays of sequences `[N, H]` as those of tokens `[B, T, H]`."""
    if cu_seqlens is None:
        return jnp.broadcast_to(gamma[:, None], (call.batch, call.tokens, call.heads))
    return gamma.at[prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)].get(mode="clip")[None]


def _token(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[Write, Any, Gates]:
    """What a token writes, and all tokens' arrays and gates."""
    a, b = inputs.gates
    if call.decay == "constant" and a is not None:
        a = _of_tokens(call, a, cu_seqlens)

    def write(token: Any, kept: jax.Array) -> jax.Array:
        key, value = token
        return decode.written(call, key, value, kept)

    return write, inputs[:3], (walk.of_dims(call, a), b)


def _kind(call: Call) -> str:
    return "value" if call.value_decay else "key" if call.decay == "key" else "head"


def gradients(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, met: jax.Array, cotangents: Results, back: Any = None
) -> Inputs:
    """Cotangents of the inputs, where chunks have `met` these states; `back` is as in `walk.backward`."""
    constant, stateful = call.decay == "constant", inputs.initial_state is not None
    # constant decays are summed apart, initial states come out of the walk
    tokens = inputs._replace(initial_state=None, log_decay=None if constant else inputs.log_decay)

    def give(chunks: Chunks, grads: one_chunk.Gradients) -> tuple[Inputs, jax.Array | None]:
        d_decay, d_value_decay = walk.without_first(call, chunks, (grads.log_decay, grads.value_log_decay))
        of_tokens = Inputs(grads.query, grads.key, grads.value, d_decay, d_value_decay, None)
        d_gamma = None
        if constant:
            own = walk.by_token(call, layout.visited(call, chunks))
            d_gamma = walk.by_chunk(jnp.where(own, d_decay, 0).sum((-2, -1)), len(chunks.start))
            of_tokens = of_tokens._replace(log_decay=None)
        return jax.tree.map(functools.partial(walk.heads_last, call), tokens, of_tokens), d_gamma

    chunk = functools.partial(chunk_of, call, inputs)
    (pieces, d_gamma), d_entering = walk.backward(
        call, mathematics(call), chunk, give, met, cu_seqlens, cotangents, stateful, back
    )
    where = layout.chunks(call, cu_seqlens)
    grads = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), pieces)
    if constant and (gamma := inputs.log_decay) is not None:
        if call.packed:
            d_gamma = jnp.zeros_like(d_gamma, shape=gamma.shape).at[where.sequence].add(d_gamma[:, 0])
        else:
            d_gamma = d_gamma.sum(0)
        grads = grads._replace(log_decay=d_gamma.astype(gamma.dtype))
    (d_decay, d_value_decay), d_state = through_first_gates(call, inputs, cu_seqlens, grads.gates, d_entering)
    return grads._replace(log_decay=d_decay, value_log_decay=d_value_decay, initial_state=d_state)


recurrence = by_the_faster_walk(_kind, _token, mathematics, chunk_of, gradients)
