"""The walk over chunks, one after the other, that every recurrence takes, and the way back of its gradient.

`forward` and `backward` do all of it in one loop. Where the states that sequences start from are known late, the same
is done in parts: what chunks do to any state (`passing_of`, `returning_of`), states through all chunks (`pass_all`),
and the rest of the chunks' work (`outputs`, `backward` told what they met).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout
from ejkernel.kernels.chunks.layout import Chunks
from ejkernel.kernels.chunks.scores import Einsum

# The cotangent of the state at a chunk's end, from what takes it to that at its start, with what that found.
Mirror = Callable[[Any], tuple[jax.Array, Any]]


class Call(layout.Call, Protocol):
    """What the walk needs to know of a recurrence's call."""

    @property
    def decay(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def state_dtype(self) -> np.dtype: ...


class Mathematics(Protocol):
    """What a recurrence does with one chunk; a module has it.

    `effect` is all that can be known of a chunk without the state at its start. Its `passing` is what `end` needs to
    take a state to the chunk's end; what this finds on its way and others need is the second of what it gives. `output`
    is what the tokens read of a state, told this too. `backward` gives the cotangents of the chunk's arrays from those
    of the unscaled output and of the state at the chunk's end; the latter it is told by `mirrored`, once it has said by
    what `mirror` takes it on to that of the state at the chunk's start, with what `mirror` found on its way.
    """

    def effect(self, chunk: Any, einsum: Einsum) -> Any: ...
    def end(self, passing: Any, state: jax.Array, einsum: Einsum) -> tuple[jax.Array, Any]: ...
    def output(self, effect: Any, state: jax.Array, found: Any, einsum: Einsum) -> jax.Array: ...
    def mirror(self, passing: Any, d_state: jax.Array, einsum: Einsum) -> tuple[jax.Array, Any]: ...
    def backward(self, chunk: Any, state: jax.Array, d_output: jax.Array, mirrored: Mirror, einsum: Einsum) -> Any: ...


def einsum_of(call: Call) -> Einsum:
    """How to multiply."""
    # half-precision inputs are already coarser than one pass of a matrix unit
    return _einsum(lax.Precision.DEFAULT if call.dtype.itemsize == 2 else lax.Precision.HIGHEST)


@functools.cache
def _einsum(precision: lax.Precision) -> Einsum:
    """The same function for all calls, so that what is traced for one serves the others."""
    return functools.partial(jnp.einsum, precision=precision)


class States(NamedTuple):
    """What a walk carries: the state of the sequence it is in and, if packed, those that sequences ended with.

    The latter are written and never read on the way, or XLA would copy all of them at every chunk.
    """

    current: jax.Array  # [rows, H, K, V]
    ends: jax.Array | None  # [N, H, K, V]

    @property
    def final(self) -> jax.Array:
        return self.current if self.ends is None else self.ends

    def after(self, left: jax.Array, chunk: Chunks) -> "States":
        """States after a chunk that leaves this one."""
        if self.ends is None:
            return States(left, None)
        return States(left, lax.dynamic_update_slice_in_dim(self.ends, left, chunk.sequence, 0))


def met_by(call: Call, states: States, chunk: Chunks, starts: jax.Array | None, new: jax.Array) -> jax.Array:
    """The state that a chunk meets: its sequence's start, or zeros, where that is `new`."""
    met = states.current
    if not call.packed:
        return met
    start = jnp.zeros_like(met) if starts is None else lax.dynamic_index_in_dim(starts, chunk.sequence)
    return jnp.where(new, start.astype(met.dtype), met)


def _by_steps(x: Any, together: int) -> Any:
    """`[chunks, ...]` as `[steps, chunks of a step, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), x)


def _flat(x: Any) -> Any:
    """`[a, b, ...]` as `[a · b, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)


def rows_first(x: jax.Array) -> jax.Array:
    """`[chunks, rows, ...]` as `[rows · chunks, ...]`: in this order rows that are sharded stay where they are."""
    return _flat(jnp.swapaxes(x, 0, 1))


def by_chunk(x: jax.Array, chunks: int) -> jax.Array:
    """Undoes `rows_first`."""
    return jnp.swapaxes(x.reshape(-1, chunks, *x.shape[1:]), 0, 1)


def _pass(
    call: Call,
    states: States,
    step: Chunks,
    starts: jax.Array | None,
    advance: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    passing: Any,
    back: bool,
) -> tuple[States, tuple[jax.Array, Any]]:
    """States after a step that `advance(passing, state)` takes them through chunk by chunk, and what each chunk met.

    The latter is `[chunks, rows, H, K, V]`, and with it comes what was found on the way. The first chunk of sequence
    `n`, or `back` its last, meets `starts[n]`, or zeros.
    """

    def visit(states: States, each: tuple[Chunks, Any]) -> tuple[States, tuple[jax.Array, Any]]:
        chunk, passing = each
        met = met_by(call, states, chunk, starts, chunk.last if back else chunk.first)
        left, found = advance(passing, met)
        return states.after(left, chunk), (met, found)

    rows, chunks = states.current.shape[0], len(step.start)

    def split(x: jax.Array) -> jax.Array:
        return by_chunk(jnp.broadcast_to(x, (rows * chunks, *x.shape[1:])), chunks)

    each = step, jax.tree.map(split, passing)
    return lax.scan(visit, states, each, reverse=call.reverse != back, unroll=True)


def cut(call: Call, step: Chunks, x: jax.Array) -> jax.Array:
    """The tokens of a step's chunks as they are visited, `[rows · chunks, H, C, ·]`, in the dtype of the states."""
    x = jnp.moveaxis(rows_first(layout.cut(call, step, x).astype(call.state_dtype)), 2, 1)
    x = jnp.repeat(x, call.heads // x.shape[1], axis=1)
    return jnp.flip(x, 2) if call.reverse else x


def by_token(call: Call, flags: jax.Array) -> jax.Array:
    """`[chunks, C]` of a step beside what `cut` gives."""
    chunks, C = flags.shape
    flags = jnp.broadcast_to(flags[None], (call.batch, chunks, C)).reshape(call.batch * chunks, 1, C, 1)
    return jnp.flip(flags, 2) if call.reverse else flags


def without_first(call: Call, step: Chunks, gates: Any) -> Any:
    """Gates as `cut` gives them, or cotangents, 0 for first tokens: these are in the states that are entered with."""
    first = by_token(call, layout.first_visited(call, step))
    return jax.tree.map(lambda x: jnp.where(first, 0, x), gates)


def of_dims(call: Call, log_decay: jax.Array | None) -> jax.Array | None:
    """The log decays of tokens, `[B, T, H, 1 or K]`."""
    return log_decay if log_decay is None or call.decay == "key" else log_decay[..., None]


def forward(
    call: Call,
    mathematics: Mathematics,
    chunk: Callable[[Chunks], Any],
    starts: jax.Array | None,
    first: jax.Array,
    cu_seqlens: jax.Array | None,
    keep_states: bool,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """The results and, if kept, the states that chunks meet `[chunks, rows, H, K, V]`.

    `chunk` gives the arrays of a step's chunks; sequences are entered with `starts`, or with zeros if there are none;
    `first [N, H, K, V]` is either.
    """
    where, einsum, together = layout.chunks(call, cu_seqlens), einsum_of(call), layout.together(call)

    def visit(states: States, step: Chunks) -> tuple[States, Any]:
        effects = mathematics.effect(chunk(step), einsum)
        advance = functools.partial(mathematics.end, einsum=einsum)
        states, (met, found) = _pass(call, states, step, starts, advance, effects.passing, back=False)
        output = _output(call, mathematics, effects, met, found)
        return states, (output, met if keep_states else None)

    # Several chunks a step without gradients: XLA's CPU backend copies the carried states once a step and runs products
    # of different chunks at once, each of which it runs on one core. More would outgrow the caches.
    unroll = 1 if keep_states else max(1, 4 // together)
    states, kept = lax.scan(
        visit, entered(call, first), _by_steps(where, together), reverse=call.reverse, unroll=unroll
    )
    pieces, met = _flat(kept)
    return (layout.put_together(call, where, cu_seqlens, pieces), states.final), met


def entered(call: Call, first: jax.Array) -> States:
    """What a walk begins with, `first [N, H, K, V]` being what sequences are entered with."""
    # sequences without a chunk end as they begin
    return States(jnp.zeros_like(first[:1]), first) if call.packed else States(first, None)


def _output(call: Call, mathematics: Mathematics, effects: Any, met: jax.Array, found: Any) -> jax.Array:
    """What the tokens of a step's chunks read, `[chunks, rows, C, H, V]`."""
    output = mathematics.output(effects, rows_first(met), jax.tree.map(rows_first, found), einsum_of(call))
    output = jnp.flip(output, 2) if call.reverse else output
    return by_chunk(jnp.moveaxis(call.scale * output, 1, 2).astype(call.dtype), len(met))


def passing_of(call: Call, mathematics: Mathematics, chunk: Callable[[Chunks], Any], where: Chunks) -> Any:
    """What takes a state through each step's chunks, `[steps, …]`."""

    def visit(step: Chunks) -> Any:
        return mathematics.effect(chunk(step), einsum_of(call)).passing

    return lax.map(visit, _by_steps(where, layout.together(call)))


def returning_of(
    call: Call,
    mathematics: Mathematics,
    chunk: Callable[[Chunks], Any],
    where: Chunks,
    met: jax.Array,
    d_output: jax.Array,
) -> Any:
    """What takes the cotangent of a state back through each step's chunks, `[steps, …]`."""
    einsum = einsum_of(call)

    def visit(step: tuple[Chunks, jax.Array]) -> Any:
        chunks, met = step
        said = []

        def mirrored(passing: Any) -> tuple[jax.Array, Any]:
            said.append(passing)
            return mathematics.mirror(passing, jnp.zeros_like(rows_first(met)), einsum)

        # of which nothing but what it says is used, so that XLA leaves out the rest
        mathematics.backward(chunk(chunks), rows_first(met), _d_output(call, chunks, d_output), mirrored, einsum)
        return said[0]

    return lax.map(visit, _by_steps((where, met), layout.together(call)))


def pass_all(
    call: Call,
    advance: Callable[..., tuple[jax.Array, Any]],
    passing: Any,
    where: Chunks,
    starts: jax.Array,
    back: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    """The states that sequences end with, and what chunks meet `[chunks, rows, H, K, V]` and find on the way.

    `advance(passing, state, einsum)`, which may be a recurrence's `end`, takes them through a chunk. Sequences are
    entered with `starts [N, H, K, V]`; `back` at their ends, on the way to their starts.
    """
    together = len(where.start) // len(jax.tree.leaves(passing)[0])
    advance = functools.partial(advance, einsum=einsum_of(call))

    def visit(states: States, step: tuple[Chunks, Any]) -> tuple[States, Any]:
        return _pass(call, states, step[0], starts, advance, step[1], back)

    steps = _by_steps(where, together), passing
    states, seen = lax.scan(visit, entered(call, starts), steps, reverse=call.reverse != back)
    return states.final, _flat(seen)


def outputs(
    call: Call,
    mathematics: Mathematics,
    chunk: Callable[[Chunks], Any],
    where: Chunks,
    seen: tuple[jax.Array, Any],
    cu_seqlens: jax.Array | None,
) -> jax.Array:
    """The output, from what chunks meet and what was found on the way."""

    def visit(step: tuple[Chunks, tuple[jax.Array, Any]]) -> jax.Array:
        chunks, seen = step
        return _output(call, mathematics, mathematics.effect(chunk(chunks), einsum_of(call)), *seen)

    pieces = lax.map(visit, _by_steps((where, seen), layout.together(call)))
    return layout.put_together(call, where, cu_seqlens, _flat(pieces))


def _d_output(call: Call, chunks: Chunks, d_output: jax.Array) -> jax.Array:
    """The cotangent of what a step's chunks read, unscaled."""
    return call.scale * cut(call, chunks, d_output)


def backward(
    call: Call,
    mathematics: Mathematics,
    chunk: Callable[[Chunks], Any],
    give: Callable[[Chunks, Any], Any],
    met: jax.Array,
    cu_seqlens: jax.Array | None,
    cotangents: tuple[jax.Array, jax.Array],
    stateful: bool,
    back: tuple[jax.Array, tuple[jax.Array, Any]] | None = None,
) -> tuple[Any, jax.Array]:
    """What `give(chunks, gradients)` makes of all steps, `[chunks, ...]`, and cotangents of the states entered with.

    Those of packed calls are only right if `stateful`: nobody else needs them. `back` is what `pass_all` gave on the
    way back, if that is behind us.
    """
    d_output, d_final = cotangents[0], _varying.like(cotangents[1].astype(call.state_dtype), met)
    d_entering, seen = (None, None) if back is None else back
    where, einsum, together = layout.chunks(call, cu_seqlens), einsum_of(call), layout.together(call)

    def visit(d_states: States, step: Any) -> tuple[States, Any]:
        chunks, met, known = step

        def mirrored(passing: Any) -> tuple[jax.Array, Any]:
            nonlocal d_states
            if known is not None:
                return jax.tree.map(rows_first, known)
            advance = functools.partial(mathematics.mirror, einsum=einsum)
            d_states, found = _pass(call, d_states, chunks, d_final, advance, passing, back=True)
            return jax.tree.map(rows_first, found)

        do = _d_output(call, chunks, d_output)
        grads = mathematics.backward(chunk(chunks), rows_first(met), do, mirrored, einsum)
        return d_states, give(chunks, grads)

    ends = d_final if stateful else None
    d_states = States(jnp.zeros_like(d_final[:1]), ends) if call.packed else States(d_final, None)
    d_states, given = lax.scan(visit, d_states, _by_steps((where, met, seen), together), reverse=not call.reverse)
    return _flat(given), d_states.final if d_entering is None else d_entering


def heads_last(call: Call, like: jax.Array, x: jax.Array) -> jax.Array:
    """A step's cotangents of `like [B, T, heads, ...]`, `[chunks, B, C, ...]`: heads that share one are summed."""
    heads = like.shape[2]
    x = x.reshape(x.shape[0], heads, call.heads // heads, *x.shape[2:]).sum(2)
    x = jnp.moveaxis(jnp.flip(x, 2) if call.reverse else x, 1, 2).astype(like.dtype)
    x = x.reshape(like.shape[0], -1, x.shape[1], *like.shape[2:])
    return jnp.swapaxes(x, 0, 1)
