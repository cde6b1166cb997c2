"""The walk over chunks, one after the other, and its gradient."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla import decode, one_chunk, value_chunk

Results = tuple[jax.Array, jax.Array]


class Inputs(NamedTuple):
    """The arrays of a call that have gradients, or their cotangents, as `Call` describes them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    value_log_decay: jax.Array | None
    initial_state: jax.Array | None


def precision_of(call: Call) -> lax.Precision:
    # half-precision inputs are already coarser than one pass of a matrix unit
    return lax.Precision.DEFAULT if call.dtype.itemsize == 2 else lax.Precision.HIGHEST


def _mathematics(call: Call) -> tuple[ModuleType, one_chunk.Einsum]:
    """What to do with a chunk, and how to multiply there."""
    chunk = value_chunk if call.value_decay else one_chunk
    return chunk, functools.partial(jnp.einsum, precision=precision_of(call))


def initial_states(call: Call, inputs: Inputs) -> jax.Array:
    """Initial states `[slots, rows, H, K, V]`: a packed sequence has a slot, all rows of a batch share one."""
    lead = (call.sequences, 1) if call.packed else (1, call.batch)
    shape = (*lead, call.heads, call.key_dim, call.value_dim)
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(call.state_dtype).reshape(shape)
    return _varying.like(jnp.zeros(shape, call.state_dtype), inputs.query)


def _cut(call: Call, inputs: Inputs, chunk: Chunks, size: int) -> one_chunk.Chunk:
    """A slice of `size` tokens, head-first, heads repeated, in the dtype of the states."""

    def heads_first(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(layout.cut(call, chunk, x, size).astype(call.state_dtype), 2, 1)
        return jnp.repeat(x, call.heads // x.shape[1], axis=1)

    tokens = inputs._replace(initial_state=None)
    gamma = tokens.log_decay
    if call.decay == "constant" and gamma is not None:
        gamma = lax.dynamic_index_in_dim(gamma, chunk.sequence) if call.packed else gamma
        gamma = gamma.astype(call.state_dtype)[..., None, None]  # [rows, H, 1, 1]
        gamma = jnp.where(layout.visited(call, chunk, size)[:, None], gamma, 0)
        tokens = tokens._replace(log_decay=None)
    q, k, v, a, b, _ = jax.tree.map(heads_first, tokens)
    a = gamma if call.decay == "constant" else a[..., None] if call.decay == "head" else a
    return one_chunk.Chunk(q, k, v, a, b)


def _cut_step(call: Call, inputs: Inputs, chunks: Sequence[Chunks]) -> one_chunk.Chunk:
    """The chunks of a step, in the order they are visited, on a new first axis."""
    C = layout.chunk_size(call)
    if not layout.whole(call):
        return jax.tree.map(lambda *each: jnp.stack(each), *(_cut(call, inputs, chunk, C) for chunk in chunks))
    # one slice for all of them, which begins where the first of the tokens lies
    first = chunks[-1] if call.reverse else chunks[0]

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], len(chunks), C, x.shape[-1]), 2, 0)

    return jax.tree.map(split, _cut(call, inputs, first, len(chunks) * C))


def _walk(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, keep_states: bool) -> tuple[Results, Any]:
    """The results and, if kept, the state at the start of every chunk `[chunks, rows, H, K, V]`."""
    where = layout.chunks(call, cu_seqlens)
    mathematics, einsum = _mathematics(call)
    together = layout.together(call)

    def visit(states: jax.Array, step: Chunks) -> tuple[jax.Array, Any]:
        order = range(together)[::-1] if call.reverse else range(together)
        chunks = [jax.tree.map(lambda x, i=i: x[i], step) for i in order]
        effects = jax.vmap(functools.partial(mathematics.effect, einsum=einsum))(_cut_step(call, inputs, chunks))
        starts = []
        for i, chunk in enumerate(chunks):
            starts.append(
                lax.dynamic_index_in_dim(states, chunk.sequence, keepdims=False) if call.packed else states[0]
            )
            end = effects.kept[i] * starts[i] + effects.written[i]
            states = lax.dynamic_update_index_in_dim(states, end, chunk.sequence, 0) if call.packed else end[None]
        read = einsum("...tk,...kv->...tv", effects.query, jnp.stack(starts))
        output = effects.within + (read if effects.weight is None else read * effects.weight)
        output = jnp.moveaxis(call.scale * output, 2, 3).astype(call.dtype)  # [chunks, rows, C, H, V]
        # in the order of the tokens again
        kept = (output, jnp.stack(starts) if keep_states else None)
        return states, jax.tree.map(lambda x: jnp.flip(x, 0), kept) if call.reverse else kept

    # Several chunks a step without gradients: XLA's CPU backend copies the carried states once a step and runs products
    # of different chunks at once, each of which it runs on one core. More would outgrow the caches.
    unroll = 1 if keep_states else max(1, 4 // together)
    steps = jax.tree.map(lambda x: x.reshape(-1, together), where)
    states, kept = lax.scan(visit, initial_states(call, inputs), steps, reverse=call.reverse, unroll=unroll)
    pieces, starts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
    output = layout.put_together(call, where, cu_seqlens, pieces)
    return (output, states.reshape(call.sequences, *states.shape[2:])), starts


def _primal(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> Results:
    def by_chunks() -> Results:
        return _walk(call, inputs, cu_seqlens, keep_states=False)[0]

    def by_tokens() -> Results:
        return decode.steps(call, *inputs[:-1], initial_states(call, inputs)[0], precision=precision_of(call))

    if decode.pays(call):
        return lax.platform_dependent(cpu=by_tokens, default=by_chunks)
    return by_chunks()


def _forward(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[Results, Any]:
    results, starts = _walk(call, inputs, cu_seqlens, keep_states=True)
    return results, (inputs, cu_seqlens, starts)


def _backward(call: Call, residuals: Any, cotangents: Results) -> tuple[Inputs, None]:
    inputs, cu_seqlens, starts = residuals
    d_output, d_final = cotangents
    where, C = layout.chunks(call, cu_seqlens), layout.chunk_size(call)
    mathematics, einsum = _mathematics(call)
    constant = call.decay == "constant"
    # constant decays are summed apart, initial states come out of the walk
    tokens = inputs._replace(initial_state=None, log_decay=None if constant else inputs.log_decay)

    def heads_last(like: jax.Array, x: jax.Array) -> jax.Array:
        """Cotangent of one chunk of an input: heads that share a key or value summed."""
        x = x.reshape(x.shape[0], like.shape[2], -1, *x.shape[2:]).sum(2)
        x = jnp.moveaxis(x, 1, 2).astype(like.dtype)
        return x.reshape(*x.shape[:2], *like.shape[2:])

    def visit(d_states: jax.Array, step: tuple[Chunks, jax.Array]) -> tuple[jax.Array, Any]:
        chunk, start = step
        d_end = lax.dynamic_index_in_dim(d_states, chunk.sequence, keepdims=False)
        do = jnp.moveaxis(call.scale * layout.cut(call, chunk, d_output, C).astype(call.state_dtype), 2, 1)
        grads = mathematics.backward(_cut(call, inputs, chunk, C), start, do, d_end, einsum)
        d_states = lax.dynamic_update_index_in_dim(d_states, grads.state, chunk.sequence, 0)
        of_tokens = Inputs(grads.query, grads.key, grads.value, grads.log_decay, grads.value_log_decay, None)
        d_gamma = None
        if constant:
            own = layout.visited(call, chunk, C)[:, None]
            d_gamma = jnp.where(own, grads.log_decay, 0).sum((-2, -1))
            of_tokens = of_tokens._replace(log_decay=None)
        return d_states, (jax.tree.map(heads_last, tokens, of_tokens), d_gamma)

    slots = initial_states(call, inputs)
    d_states = _varying.like(d_final.astype(slots.dtype).reshape(slots.shape), inputs.query)
    d_states, (pieces, d_gamma) = lax.scan(visit, d_states, (where, starts), reverse=not call.reverse)
    grads = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), pieces)
    if constant:
        by_slot = jnp.zeros_like(d_gamma, shape=(slots.shape[:3])).at[where.sequence].add(d_gamma)
        grads = grads._replace(log_decay=by_slot.reshape(inputs.log_decay.shape).astype(inputs.log_decay.dtype))
    if inputs.initial_state is not None:
        state = inputs.initial_state
        grads = grads._replace(initial_state=d_states.reshape(state.shape).astype(state.dtype))
    return grads, None


recurrence = jax.custom_vjp(_primal, nondiff_argnums=(0,))
recurrence.defvjp(_forward, _backward)
