"""The walk over a recurrence's chunks, one after the other, and the walk back of its gradient.

`forward` and `backward` do all of it in one loop. Where the states that sequences start from are known late, the same
is done in parts: what each chunk does to any state (`transitions`, `transitions_back`), states through all chunks
(`pass_all`), and the rest of the chunks' work (`outputs`, and `backward` with what `pass_all` returned).

A `step` is the chunks that are computed together, see `layout.together`; `rows` are the batch's, 1 if packed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.scores import Einsum

# `carry_back(transition)`: the cotangent of the state at a chunk's end, and what `advance_back` returned beside it.
CarryBack = Callable[[Any], tuple[jax.Array, Any]]
# A recurrence's arrays of tokens by name: `[B, T, heads, ·]` of a call, `[rows · chunks, H, C, ·]` of a step's chunks.
Arrays = Any


@dataclass(frozen=True)
class ChunkMath:
    """What a recurrence does with one chunk.

    Attributes:
        effect: `effect(chunk, einsum)`: all that can be computed without the state at the chunk's start. Its attribute
            `transition` is what `advance` needs.
        advance: `advance(transition, state, einsum)`: the state at the chunk's end, and what else `output` needs.
        output: `output(effect, state, extra, einsum)`: what the tokens read, unscaled, from the state at the chunk's
            start and the second result of `advance`.
        advance_back: `advance_back(transition, d_state, einsum)`: the cotangent of the state at the chunk's start from
            that at its end, and what else `backward` needs.
        backward: `backward(chunk, state, d_output, carry_back, einsum)`: cotangents of the chunk's arrays, from that of
            the unscaled output. It passes its transition to the callback `carry_back`, which returns the cotangent of
            the state at the chunk's end and the second result of `advance_back`.
    """

    effect: Callable[..., Any]
    advance: Callable[..., tuple[jax.Array, Any]]
    output: Callable[..., jax.Array]
    advance_back: Callable[..., tuple[jax.Array, Any]]
    backward: Callable[..., Any]


def einsum_of(call: Call) -> Einsum:
    """How to multiply."""
    # half-precision inputs are already coarser than one pass of a matrix unit
    return _einsum(lax.Precision.DEFAULT if call.dtype.itemsize == 2 else lax.Precision.HIGHEST)


@functools.cache
def _einsum(precision: lax.Precision) -> Einsum:
    """The same function for all calls, so that what is traced for one serves the others."""
    return functools.partial(jnp.einsum, precision=precision)


class States(NamedTuple):
    """The carry of a walk: the current state and, if packed, the final states of sequences so far.

    The latter are written and never read during the walk, or XLA would copy all of them at every chunk.
    """

    current: jax.Array  # [rows, H, K, V]
    ends: jax.Array | None  # [N, H, K, V]

    @property
    def final(self) -> jax.Array:
        return self.current if self.ends is None else self.ends

    def after(self, state: jax.Array, chunk: Chunks) -> "States":
        """The carry after a chunk that ends with `state`."""
        if self.ends is None:
            return States(state, None)
        return States(state, lax.dynamic_update_slice_in_dim(self.ends, state, chunk.sequence, 0))


def _initial_carry(call: Call, starts: jax.Array) -> States:
    """The carry of a walk through sequences that start from `starts [N, H, K, V]`."""
    # sequences without a chunk end as they start
    return States(jnp.zeros_like(starts[:1]), starts) if call.packed else States(starts, None)


def _state_at_chunk(call: Call, states: States, chunk: Chunks, starts: jax.Array | None, back: bool) -> jax.Array:
    """The state at a chunk's start: the carried one or, if it is the first of its sequence, the sequence's."""
    if not call.packed:
        return states.current
    return start_of_chunk(states.current, chunk, starts, back)


def start_of_chunk(carried: jax.Array, chunk: Chunks, starts: jax.Array | None, back: bool) -> jax.Array:
    """`carried [1, H, K, V]`, or what a chunk starts from that is the first of its sequence, the last if `back`.

    If a row holds several sequences, the first of them starts from `starts` and the others from zeros.
    """
    start = zeros = jnp.zeros_like(carried)
    if starts is not None:
        start = lax.dynamic_index_in_dim(starts, chunk.sequence).astype(carried.dtype)
        row_first = chunk.row_last if back else chunk.row_first
        start = start if row_first is None else jnp.where(row_first, start, zeros)
    return jnp.where(chunk.last if back else chunk.first, start, carried)


def _by_steps(x: Any, together: int) -> Any:
    """`[chunks, ...]` as `[steps, chunks of a step, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), x)


def _flat(x: Any) -> Any:
    """`[a, b, ...]` as `[a · b, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)


def _rows_first(x: jax.Array) -> jax.Array:
    """`[chunks, rows, ...]` as `[rows · chunks, ...]`: in this order rows that are sharded stay where they are."""
    return _flat(jnp.swapaxes(x, 0, 1))


def _chunks_first(x: jax.Array, chunks: int) -> jax.Array:
    """Undoes `_rows_first`."""
    return jnp.swapaxes(x.reshape(-1, chunks, *x.shape[1:]), 0, 1)


def pass_step(
    call: Call,
    states: States,
    step: Chunks,
    starts: jax.Array | None,
    advance: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    transition: Any,
    back: bool,
) -> tuple[States, tuple[jax.Array, Any]]:
    """Carries states through a step's chunks by `advance(transition, state)`.

    The first chunk of sequence `n` (its last if `back`) starts from `starts[n]`, or from zeros. Returns the carry, and
    with a leading axis of chunks the state `[chunks, rows, H, K, V]` at each one's start and what `advance` returned
    beside the next.
    """

    def visit(states: States, each: tuple[Chunks, Any]) -> tuple[States, tuple[jax.Array, Any]]:
        chunk, transition = each
        state = _state_at_chunk(call, states, chunk, starts, back)
        following, extra = advance(transition, state)
        return states.after(following, chunk), (state, extra)

    rows, chunks = states.current.shape[0], len(step.start)

    def split(x: jax.Array) -> jax.Array:
        return _chunks_first(jnp.broadcast_to(x, (rows * chunks, *x.shape[1:])), chunks)

    each = step, jax.tree.map(split, transition)
    return lax.scan(visit, states, each, reverse=call.reverse != back, unroll=True)


def map_gates(function: Callable[[jax.Array], jax.Array], arrays: Arrays) -> Arrays:
    """`arrays` with `function` applied to the log decays among them."""
    names = [name for name in ("log_decay", "value_log_decay") if getattr(arrays, name, None) is not None]
    return arrays._replace(**{name: function(getattr(arrays, name)) for name in names})


def cut_step(call: Call, arrays: Arrays, step: Chunks) -> Arrays:
    """The arrays of a step's chunks as they are visited, `[rows · chunks, H, C, ·]`, in the dtype of the states.

    A sequence's first gates are 0: its start state has them already, see `first_gates`.
    """
    chunk = jax.tree.map(functools.partial(_cut_array, call, step), arrays)
    return without_first_gates(call, step, chunk)


def _cut_array(call: Call, step: Chunks, x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(_rows_first(layout.cut(call, step, x).astype(call.state_dtype)), 2, 1)
    x = jnp.repeat(x, call.heads // x.shape[1], axis=1)
    return jnp.flip(x, 2) if call.reverse else x


def without_first_gates(call: Call, step: Chunks, chunk: Arrays) -> Arrays:
    """A step's arrays, or their cotangents, with 0 for the gates of sequences' first tokens."""
    first = layout.first_visited(call, step)
    first = jnp.broadcast_to(first[None], (call.batch, *first.shape)).reshape(-1, 1, first.shape[1], 1)
    first = jnp.flip(first, 2) if call.reverse else first
    return map_gates(lambda x: jnp.where(first, 0, x), chunk)


def forward(
    call: Call,
    math: ChunkMath,
    arrays: Arrays,
    starts: jax.Array | None,
    cu_seqlens: jax.Array | None,
    keep_states: bool,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """The results and, if kept, the states at chunks' starts `[chunks, rows, H, K, V]`.

    Sequences start from `starts [N, H, K, V]`, which have their first gates in them, or from zeros.
    """
    where, einsum, together = layout.chunks(call, cu_seqlens), einsum_of(call), layout.together(call)

    def visit(states: States, step: Chunks) -> tuple[States, Any]:
        effects = math.effect(cut_step(call, arrays, step), einsum)
        advance = functools.partial(math.advance, einsum=einsum)
        states, (chunk_states, extra) = pass_step(call, states, step, starts, advance, effects.transition, back=False)
        output = step_output(call, math, effects, chunk_states, extra)
        return states, (output, chunk_states if keep_states else None)

    # Several chunks a step without gradients: XLA's CPU backend copies the carried states once a step and runs products
    # of different chunks at once, each of which it runs on one core. More would outgrow the caches.
    unroll = 1 if keep_states else max(1, 4 // together)
    carry = _initial_carry(call, zero_states(call, arrays.query) if starts is None else starts)
    states, stacked = lax.scan(visit, carry, _by_steps(where, together), reverse=call.reverse, unroll=unroll)
    pieces, chunk_states = _flat(stacked)
    return (layout.put_together(call, where, cu_seqlens, pieces), states.final), chunk_states


def zero_states(call: Call, like: jax.Array) -> jax.Array:
    """States `[N, H, K, V]` of zeros that vary over the mesh axes that `like` does."""
    shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
    return _varying.like(jnp.zeros(shape, call.state_dtype), like)


def step_output(call: Call, math: ChunkMath, effects: Any, chunk_states: jax.Array, extra: Any) -> jax.Array:
    """What the tokens of a step's chunks read, `[chunks, rows, C, H, V]`."""
    output = math.output(effects, _rows_first(chunk_states), jax.tree.map(_rows_first, extra), einsum_of(call))
    output = jnp.flip(output, 2) if call.reverse else output
    return _chunks_first(jnp.moveaxis(call.scale * output, 1, 2).astype(call.dtype), len(chunk_states))


def transitions(call: Call, math: ChunkMath, arrays: Arrays, where: Chunks) -> Any:
    """What carries a state through each step's chunks, `[steps, …]`."""

    def visit(step: Chunks) -> Any:
        return math.effect(cut_step(call, arrays, step), einsum_of(call)).transition

    return lax.map(visit, _by_steps(where, layout.together(call)))


def transitions_back(
    call: Call, math: ChunkMath, arrays: Arrays, where: Chunks, chunk_states: jax.Array, d_output: jax.Array
) -> Any:
    """What carries the cotangent of a state back through each step's chunks, `[steps, …]`."""
    einsum = einsum_of(call)

    def visit(step: tuple[Chunks, jax.Array]) -> Any:
        chunks, states = step[0], _rows_first(step[1])
        passed = []

        def carry_back(transition: Any) -> tuple[jax.Array, Any]:
            passed.append(transition)
            return math.advance_back(transition, jnp.zeros_like(states), einsum)

        # only the value passed to `carry_back` is used; XLA removes the rest
        math.backward(cut_step(call, arrays, chunks), states, d_step_output(call, chunks, d_output), carry_back, einsum)
        return passed[0]

    return lax.map(visit, _by_steps((where, chunk_states), layout.together(call)))


def pass_all(
    call: Call,
    advance: Callable[..., tuple[jax.Array, Any]],
    transition: Any,
    where: Chunks,
    starts: jax.Array,
    back: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    """Carries states through all chunks by `advance(transition, state, einsum)`, from `starts [N, H, K, V]`.

    Returns the states of sequences after their last chunk, and for all chunks the states `[chunks, rows, H, K, V]` at
    their starts and what `advance` returned beside the next. `back` goes from the ends of sequences to their starts.
    """
    together = len(where.start) // len(jax.tree.leaves(transition)[0])
    advance = functools.partial(advance, einsum=einsum_of(call))

    def visit(states: States, step: tuple[Chunks, Any]) -> tuple[States, Any]:
        return pass_step(call, states, step[0], starts, advance, step[1], back)

    steps = _by_steps(where, together), transition
    states, stacked = lax.scan(visit, _initial_carry(call, starts), steps, reverse=call.reverse != back)
    return states.final, _flat(stacked)


def outputs(
    call: Call,
    math: ChunkMath,
    arrays: Arrays,
    where: Chunks,
    passed: tuple[jax.Array, Any],
    cu_seqlens: jax.Array | None,
) -> jax.Array:
    """The output, from the second result of `pass_all`."""

    def visit(step: tuple[Chunks, tuple[jax.Array, Any]]) -> jax.Array:
        chunks, passed = step
        return step_output(call, math, math.effect(cut_step(call, arrays, chunks), einsum_of(call)), *passed)

    pieces = lax.map(visit, _by_steps((where, passed), layout.together(call)))
    return layout.put_together(call, where, cu_seqlens, _flat(pieces))


def d_step_output(call: Call, chunks: Chunks, d_output: jax.Array) -> jax.Array:
    """The cotangent of what a step's chunks read, unscaled."""
    return call.scale * _cut_array(call, chunks, d_output)


def backward(
    call: Call,
    math: ChunkMath,
    arrays: Arrays,
    chunk_states: jax.Array,
    cu_seqlens: jax.Array | None,
    cotangents: tuple[jax.Array, jax.Array],
    stateful: bool,
    passed: tuple[jax.Array, tuple[jax.Array, Any]] | None = None,
) -> tuple[Arrays, jax.Array]:
    """Cotangents of the arrays, and of the states that sequences start from.

    The latter are only right for packed calls if `stateful`. `passed` is what `pass_all` returned on its way back, if
    it went before.
    """
    d_output, d_final = cotangents[0], _varying.like(cotangents[1].astype(call.state_dtype), chunk_states)
    d_starts, known = (None, None) if passed is None else passed
    where, einsum, together = layout.chunks(call, cu_seqlens), einsum_of(call), layout.together(call)

    def visit(d_states: States, step: Any) -> tuple[States, Arrays]:
        chunks, states, known = step

        def carry_back(transition: Any) -> tuple[jax.Array, Any]:
            nonlocal d_states
            if known is not None:
                return jax.tree.map(_rows_first, known)
            advance = functools.partial(math.advance_back, einsum=einsum)
            d_states, stacked = pass_step(call, d_states, chunks, d_final, advance, transition, back=True)
            return jax.tree.map(_rows_first, stacked)

        chunk, do = cut_step(call, arrays, chunks), d_step_output(call, chunks, d_output)
        d_chunk = math.backward(chunk, _rows_first(states), do, carry_back, einsum)
        d_chunk = without_first_gates(call, chunks, d_chunk)
        return d_states, jax.tree.map(functools.partial(uncut, call), arrays, d_chunk)

    ends = d_final if stateful else None
    d_states = States(jnp.zeros_like(d_final[:1]), ends) if call.packed else States(d_final, None)
    steps = _by_steps((where, chunk_states, known), together)
    d_states, pieces = lax.scan(visit, d_states, steps, reverse=not call.reverse)
    d_arrays = jax.tree.map(functools.partial(layout.put_together, call, where, cu_seqlens), _flat(pieces))
    return d_arrays, d_states.final if d_starts is None else d_starts


def uncut(call: Call, like: jax.Array, x: jax.Array) -> jax.Array:
    """A step's cotangents of `like [B, T, heads, ...]` as `[chunks, B, C, heads, ...]`, summed over shared heads."""
    heads = like.shape[2]
    x = x.reshape(x.shape[0], heads, call.heads // heads, *x.shape[2:]).sum(2)
    x = jnp.moveaxis(jnp.flip(x, 2) if call.reverse else x, 1, 2).astype(like.dtype)
    x = x.reshape(like.shape[0], -1, x.shape[1], *like.shape[2:])
    return jnp.swapaxes(x, 0, 1)
