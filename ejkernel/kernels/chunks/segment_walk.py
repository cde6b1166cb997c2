"""The walk over the chunks of rows that hold several sequences each, and the walk back of its gradient.

Rows lie behind each other as one stream of tokens, whose chunks never cross a border between sequences: so nothing of
one sequence reaches another. How many chunks there are is known when the program runs; a loop visits these and no
others.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout, walk
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.segments import runs
from ejkernel.kernels.chunks.walk import Arrays, ChunkMath, States


class Stream(NamedTuple):
    """The rows of a call as one stream.

    The states of chunks that are not visited first of their sequence are kept for the walk back. In a row they start at
    least a chunk's size apart, so the tokens before one, counted in chunks, are a place of its own. The other states,
    which nobody reads, go to the row's last place.
    """

    call: Call  # one row, packed
    chunks: Chunks  # [bound] each; those past the end hold nothing and count as the last one's
    places: jax.Array  # where states of chunks are kept, [bound]
    steps: jax.Array  # how many steps have chunks
    reverse: bool

    def step(self, i: jax.Array, back: bool) -> tuple[Chunks, jax.Array]:
        """The chunks of the step that is visited after `i` others, and their places."""
        G = layout.together(self.call)
        i = self.steps - 1 - i if self.reverse != back else i
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * G, G), (self.chunks, self.places))


def _stream(call: Call, ids: jax.Array) -> Stream:
    B, T = call.batch, call.tokens
    flat = replace(call, batch=1, tokens=B * T, sequences=B, packed=True, segmented=False)
    C, G = layout.chunk_size(flat), layout.together(flat)
    found = runs(ids)
    token = jnp.arange(T, dtype=np.int32)[None]
    starts = (found.valid & ((token - found.begin) % C == 0)).reshape(-1)
    bound, count = -(-(B * T) // G) * G, starts.sum(dtype=np.int32)
    (low,) = jnp.nonzero(starts, size=bound)
    number = jnp.arange(bound, dtype=np.int32)
    exists = number < count
    low = low.astype(np.int32)[jnp.clip(number, 0, jnp.maximum(count - 1, 0))]
    row = low // T
    begin, end = (x.reshape(-1)[low] for x in (found.begin, found.end))
    row_begin, row_end = (x[row, 0] for x in (found.row_begin, found.row_end))
    offset, at = row * T, low % T
    high = jnp.minimum(at + C, end)
    ends = exists & (at == begin), exists & (high == end)
    of_row = begin == row_begin, end == row_end
    first, last = ends[::-1] if call.reverse else ends
    row_first, row_last = of_row[::-1] if call.reverse else of_row
    here, behind = jnp.where(exists, low, B * T), jnp.where(exists, offset + high, B * T)
    visited_first = offset + (end - 1 if call.reverse else begin)
    start = jnp.minimum(here, B * T - C)
    chunks = Chunks(row, start, here, behind, visited_first, first, last, row_first, row_last)
    place = jnp.where(first | ~exists, _places(call) - 1, at // C)
    return Stream(flat, chunks, row * _places(call) + place, (count + G - 1) // G, call.reverse)


def _places(call: Call) -> int:
    """How many states are kept of a row: by its own tokens, so that parts of a batch keep as many as the whole."""
    row = replace(call, batch=1, sequences=1, packed=True, segmented=False)
    return -(-call.tokens // layout.chunk_size(row)) + 1


def _flat(x: Any) -> Any:
    """`[B, T, ...]` as `[1, B · T, ...]`."""
    return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), x)


def forward(
    call: Call, math: ChunkMath, arrays: Arrays, starts: jax.Array | None, ids: jax.Array, keep_states: bool
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """The results and, if kept, states at chunks' starts `[B · places, H, K, V]`; as `walk.forward`."""
    stream, einsum = _stream(call, ids), walk.einsum_of(call)
    flat, arrays, query = stream.call, _flat(arrays), arrays.query
    advance = functools.partial(math.advance, einsum=einsum)

    def visit(i: jax.Array, carry: Any) -> Any:
        states, output, kept = carry
        step, places = stream.step(i, back=False)
        effects = math.effect(walk.cut_step(flat, arrays, step), einsum)
        states, (at_start, extra) = walk.pass_step(flat, states, step, starts, advance, effects.transition, back=False)
        output = layout.put(flat, step, output, walk.step_output(flat, math, effects, at_start, extra))
        if keep_states:
            for state, place in zip(at_start, places, strict=True):
                kept = lax.dynamic_update_index_in_dim(kept, state, place, 0)
        return states, output, kept

    ends = walk.zero_states(call, query) if starts is None else starts
    output = jnp.zeros((1, flat.tokens, call.heads, call.value_dim), call.dtype)
    kept = jnp.zeros((call.batch * _places(call), *ends.shape[1:]), ends.dtype) if keep_states else None
    carry = States(jnp.zeros_like(ends[:1]), ends), *_varying.like((output, kept), query)
    states, output, kept = lax.fori_loop(0, stream.steps, visit, carry)
    return (output.reshape(call.batch, call.tokens, *output.shape[2:]), states.final), kept


def backward(
    call: Call,
    math: ChunkMath,
    arrays: Arrays,
    starts: jax.Array | None,
    kept: jax.Array,
    ids: jax.Array,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Arrays, jax.Array]:
    """Cotangents of the arrays, and of the states that rows start from; the latter are only right if there are any."""
    stream, einsum = _stream(call, ids), walk.einsum_of(call)
    flat, arrays, d_output = stream.call, _flat(arrays), _flat(cotangents[0])
    d_final = _varying.like(cotangents[1].astype(call.state_dtype), kept)
    advance = functools.partial(math.advance_back, einsum=einsum)

    def visit(i: jax.Array, carry: tuple[States, Arrays]) -> tuple[States, Arrays]:
        d_states, d_arrays = carry
        step, places = stream.step(i, back=True)
        states = [
            walk.start_of_chunk(lax.dynamic_index_in_dim(kept, place), _chunk(step, j), starts, back=False)
            for j, place in enumerate(places)
        ]

        def carry_back(transition: Any) -> tuple[jax.Array, Any]:
            nonlocal d_states
            d_states, stacked = walk.pass_step(flat, d_states, step, d_final, advance, transition, back=True)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)

        chunk, do = walk.cut_step(flat, arrays, step), walk.d_step_output(flat, step, d_output)
        d_chunk = math.backward(chunk, jnp.concatenate(states), do, carry_back, einsum)
        d_chunk = walk.without_first_gates(flat, step, d_chunk)
        pieces = jax.tree.map(functools.partial(walk.uncut, flat), arrays, d_chunk)
        return d_states, jax.tree.map(functools.partial(layout.put, flat, step), d_arrays, pieces)

    carry = (
        States(jnp.zeros_like(d_final[:1]), None if starts is None else d_final),
        jax.tree.map(jnp.zeros_like, arrays),
    )
    d_states, d_arrays = lax.fori_loop(0, stream.steps, visit, carry)
    d_arrays = jax.tree.map(lambda x: x.reshape(call.batch, call.tokens, *x.shape[2:]), d_arrays)
    return d_arrays, d_states.final


def _chunk(step: Chunks, j: int) -> Chunks:
    return jax.tree.map(lambda x: x[j], step)
