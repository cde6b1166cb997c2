"""The walk over chunks, one after the other, and its gradient."""

import functools
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
    """Initial states `[N, H, K, V]`."""
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(call.state_dtype)
    shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
    return _varying.like(jnp.zeros(shape, call.state_dtype), inputs.query)


def _entering(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> jax.Array | None:
    """Initial states as the first tokens' gates leave them. The walk then takes these gates for 0.

    So no factor reaches back beyond a sequence's first token: without a state there, or with zeros, a gate whose `exp`
    is infinite would give 0 · inf.
    """
    state = inputs.initial_state
    if state is None:
        return None

    def of_first_tokens(gates: jax.Array) -> jax.Array:
        if cu_seqlens is None:
            return gates[:, -1 if call.reverse else 0]
        at = cu_seqlens[1:] - 1 if call.reverse else cu_seqlens[:-1]
        return gates[0].at[jnp.clip(at, 0, call.tokens - 1)].get(mode="promise_in_bounds")

    decay, by_value = inputs.log_decay, inputs.value_log_decay
    if decay is not None and call.decay != "constant":
        decay = of_first_tokens(decay)
    if by_value is not None:
        by_value = of_first_tokens(by_value)
    if cu_seqlens is not None:
        some = cu_seqlens[1:] > cu_seqlens[:-1]
        decay, by_value = jax.tree.map(
            lambda x: jnp.where(some.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), (decay, by_value)
        )
    return decode.decayed(call, state, decay, by_value)


class _States(NamedTuple):
    """What a walk carries: the state of the sequence it is in and, if packed, those that sequences ended with.

    The latter are written and never read on the way, or XLA would copy all of them at every chunk.
    """

    current: jax.Array  # [rows, H, K, V]
    ends: jax.Array | None  # [N, H, K, V]

    @property
    def final(self) -> jax.Array:
        return self.current if self.ends is None else self.ends


def _by_steps(x: Any, together: int) -> Any:
    """`[chunks, ...]` as `[steps, chunks of a step, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), x)


def _pass(
    call: Call, states: _States, step: Chunks, starts: jax.Array | None, kept: jax.Array, added: jax.Array, back: bool
) -> tuple[_States, jax.Array]:
    """States after a step whose chunks keep and add so much, and what each of them met, `[chunks, rows, H, K, V]`.

    The first chunk of sequence `n`, or `back` its last, meets `starts[n]`, or zeros.
    """

    def visit(states: _States, each: tuple[Chunks, jax.Array, jax.Array]) -> tuple[_States, jax.Array]:
        chunk, kept, added = each
        met, ends = states
        if call.packed:
            start = jnp.zeros_like(met) if starts is None else lax.dynamic_index_in_dim(starts, chunk.sequence)
            met = jnp.where(chunk.last if back else chunk.first, start.astype(met.dtype), met)
        left = kept * met + added
        if ends is not None:
            ends = lax.dynamic_update_slice_in_dim(ends, left, chunk.sequence, 0)
        return _States(left, ends), met

    rows, chunks = states.current.shape[0], len(step.start)

    def by_chunk(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (chunks * rows, *x.shape[1:]))
        return x.reshape(chunks, rows, *x.shape[1:])

    each = step, by_chunk(kept), by_chunk(added)
    return lax.scan(visit, states, each, reverse=call.reverse != back, unroll=True)


def _cut(call: Call, step: Chunks, x: jax.Array) -> jax.Array:
    """The tokens of a step's chunks as they are visited, `[chunks · rows, H, C, ·]`, in the dtype of the states."""
    x = layout.cut(call, step, x).astype(call.state_dtype)
    x = jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 2, 1)
    x = jnp.repeat(x, call.heads // x.shape[1], axis=1)
    return jnp.flip(x, 2) if call.reverse else x


def _by_token(call: Call, flags: jax.Array) -> jax.Array:
    """`[chunks, C]` of a step beside what `_cut` gives."""
    chunks, C = flags.shape
    flags = jnp.broadcast_to(flags[:, None], (chunks, call.batch, C)).reshape(chunks * call.batch, 1, C, 1)
    return jnp.flip(flags, 2) if call.reverse else flags


def _chunk(call: Call, inputs: Inputs, step: Chunks) -> one_chunk.Chunk:
    """All that a step's chunks read; a sequence's first gates are in the state that it is entered with."""
    a, b = inputs.log_decay, inputs.value_log_decay
    first = _by_token(call, layout.first_visited(call, step))
    if call.decay == "constant" and a is not None:
        a = a[step.sequence] if call.packed else jnp.tile(a, (len(step.start), 1))
        unseen = first | ~_by_token(call, layout.visited(call, step))
        a = jnp.where(unseen, 0, a.astype(call.state_dtype)[:, :, None, None])
    elif a is not None:
        a = jnp.where(first, 0, _cut(call, step, a[..., None] if call.decay == "head" else a))
    b = None if b is None else jnp.where(first, 0, _cut(call, step, b))
    q, k, v = (_cut(call, step, x) for x in inputs[:3])
    return one_chunk.Chunk(q, k, v, a, b)


def _walk(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, keep_states: bool) -> tuple[Results, Any]:
    """The results and, if kept, the states that chunks meet `[chunks, rows, H, K, V]`."""
    where = layout.chunks(call, cu_seqlens)
    mathematics, einsum = _mathematics(call)
    together = layout.together(call)
    starts = _entering(call, inputs, cu_seqlens)

    def visit(states: _States, step: Chunks) -> tuple[_States, Any]:
        effects = mathematics.effect(_chunk(call, inputs, step), einsum)
        states, met = _pass(call, states, step, starts, effects.kept, effects.written, back=False)
        read = einsum("...tk,...kv->...tv", effects.query, met.reshape(-1, *met.shape[2:]))
        output = effects.within + (read if effects.weight is None else read * effects.weight)
        output = jnp.flip(output, 2) if call.reverse else output
        output = jnp.moveaxis(call.scale * output, 1, 2).astype(call.dtype)
        output = output.reshape(*met.shape[:2], *output.shape[1:])  # [chunks, rows, C, H, V]
        return states, (output, met if keep_states else None)

    # Several chunks a step without gradients: XLA's CPU backend copies the carried states once a step and runs products
    # of different chunks at once, each of which it runs on one core. More would outgrow the caches.
    unroll = 1 if keep_states else max(1, 4 // together)
    first = initial_states(call, inputs._replace(initial_state=starts))
    # sequences without a chunk end as they begin
    states = _States(jnp.zeros_like(first[:1]), first) if call.packed else _States(first, None)
    states, (pieces, met) = lax.scan(visit, states, _by_steps(where, together), reverse=call.reverse, unroll=unroll)
    output = layout.put_together(call, where, cu_seqlens, pieces.reshape(-1, *pieces.shape[2:]))
    met = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), met)
    return (output, states.final), met


def _primal(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> Results:
    def by_chunks() -> Results:
        return _walk(call, inputs, cu_seqlens, keep_states=False)[0]

    def by_tokens() -> Results:
        return decode.steps(call, *inputs[:-1], initial_states(call, inputs), precision=precision_of(call))

    if decode.pays(call):
        return lax.platform_dependent(cpu=by_tokens, default=by_chunks)
    return by_chunks()


def _forward(call: Call, inputs: Inputs, cu_seqlens: jax.Array | None) -> tuple[Results, Any]:
    results, starts = _walk(call, inputs, cu_seqlens, keep_states=True)
    return results, (inputs, cu_seqlens, starts)


def _backward(call: Call, residuals: Any, cotangents: Results) -> tuple[Inputs, None]:
    inputs, cu_seqlens, starts = residuals
    d_output, d_final = cotangents
    d_final = _varying.like(d_final.astype(call.state_dtype), inputs.query)
    where, together = layout.chunks(call, cu_seqlens), layout.together_backwards(call)
    mathematics, einsum = _mathematics(call)
    constant, stateful = call.decay == "constant", inputs.initial_state is not None
    # constant decays are summed apart, initial states come out of the walk
    tokens = inputs._replace(initial_state=None, log_decay=None if constant else inputs.log_decay)

    def heads_last(like: jax.Array, x: jax.Array) -> jax.Array:
        """Cotangent of an input of a step: heads that share a key or value summed, `[chunks, rows, C, ...]`."""
        heads = like.shape[2]
        x = x.reshape(x.shape[0], heads, call.heads // heads, *x.shape[2:]).sum(2)
        x = jnp.moveaxis(jnp.flip(x, 2) if call.reverse else x, 1, 2).astype(like.dtype)
        return x.reshape(together, like.shape[0], x.shape[1], *like.shape[2:])

    def visit(d_states: _States, step: tuple[Chunks, jax.Array]) -> tuple[_States, Any]:
        chunks, met = step

        def mirror(kept: jax.Array, added: jax.Array) -> jax.Array:
            nonlocal d_states
            d_states, d_met = _pass(call, d_states, chunks, d_final, kept, added, back=True)
            return d_met.reshape(-1, *d_met.shape[2:])

        do = call.scale * _cut(call, chunks, d_output)
        met = met.reshape(-1, *met.shape[2:])
        grads = mathematics.backward(_chunk(call, inputs, chunks), met, do, mirror, einsum)
        first = _by_token(call, layout.first_visited(call, chunks))
        d_decay, d_value_decay = jax.tree.map(
            lambda x: jnp.where(first, 0, x), (grads.log_decay, grads.value_log_decay)
        )
        of_tokens = Inputs(grads.query, grads.key, grads.value, d_decay, d_value_decay, None)
        d_gamma = None
        if constant:
            own = _by_token(call, layout.visited(call, chunks))
            d_gamma = jnp.where(own, d_decay, 0).sum((-2, -1)).reshape(together, -1, call.heads)
            of_tokens = of_tokens._replace(log_decay=None)
        return d_states, (jax.tree.map(heads_last, tokens, of_tokens), d_gamma)

    d_states = (
        _States(jnp.zeros_like(d_final[:1]), d_final if stateful else None) if call.packed else _States(d_final, None)
    )
    steps = _by_steps((where, starts), together)
    d_states, (pieces, d_gamma) = lax.scan(visit, d_states, steps, reverse=not call.reverse)
    pieces, d_gamma = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (pieces, d_gamma))
    grads = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), pieces)
    if constant:
        gamma = inputs.log_decay
        if call.packed:
            d_gamma = jnp.zeros_like(d_gamma, shape=gamma.shape).at[where.sequence].add(d_gamma[:, 0])
        else:
            d_gamma = d_gamma.sum(0)
        grads = grads._replace(log_decay=d_gamma.astype(gamma.dtype))
    if stateful:
        grads = _through_first_gates(call, inputs, cu_seqlens, grads, d_states.final)
    return grads, None


def _through_first_gates(
    call: Call, inputs: Inputs, cu_seqlens: jax.Array | None, grads: Inputs, d_entering: jax.Array
) -> Inputs:
    """`grads` with what `_entering` adds to them."""

    def entering(decay: jax.Array | None, value_decay: jax.Array | None, state: jax.Array) -> jax.Array | None:
        moving = inputs._replace(log_decay=decay, value_log_decay=value_decay, initial_state=state)
        return _entering(call, moving, cu_seqlens)

    d_decay, d_value_decay, d_state = jax.vjp(entering, *inputs[3:])[1](d_entering)

    d_decay, d_value_decay = jax.tree.map(jnp.add, (d_decay, d_value_decay), (grads.log_decay, grads.value_log_decay))
    return grads._replace(log_decay=d_decay, value_log_decay=d_value_decay, initial_state=d_state)


recurrence = jax.custom_vjp(_primal, nondiff_argnums=(0,))
recurrence.defvjp(_forward, _backward)
