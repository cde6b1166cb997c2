"""The forward of a CPU without gradients: every row and head on matrices of its own.

Up to JAX 0.11 XLA's CPU backend multiplies a batch of small matrices on one core, and runs operations side by side
only while more than eight of them wait. So nothing is batched here: a step takes `LANES` chunks, of as many rows and
heads as there are and then of as many chunks of each, and every one of them goes through products of its own.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.linear_recurrence import xla_chunk, xla_layout
from ejkernel.kernels.linear_recurrence._call import Call

# Twice as many are no faster; half as many are a tenth slower, and compile in half the time.
LANES = 32

# One reference serves a whole chunk of key decays if no more than this adds up in either half of it and no query or key
# is larger than that: factors then stay below e^60, and what is multiplied by them below float32's largest number.
MILD, MODERATE = 60.0, 1e12

Pair = tuple[jax.Array, jax.Array]
# One state a row and head, and one output a chunk, in the order of the visits.
Visited = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]

_dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def pays(call: Call) -> bool:
    """Whether a CPU is faster this way than with all rows and heads in one product, without gradients; measured.

    Not for small states, where what one would notice are the seconds to compile it; nor where the CPU is only there
    beside a GPU, whose calls would have to trace it too.
    """
    if call.packed or call.value_decay or call.state_dtype != np.float32:
        return False
    if jax.__version_info__ >= (0, 12) or jax.default_backend() != "cpu":
        return False
    return call.tokens >= 8 * xla_layout.LARGEST_CHUNK and call.key_dim * call.value_dim >= 128 * 128


def taken(call: Call) -> int:
    """How many tokens the steps take, of those visited first; fewer than a step are left."""
    step = _lanes(call)[1] * xla_layout.chunk_size(call)
    return call.tokens // step * step


def _lanes(call: Call) -> tuple[int, int]:
    """How many rows and heads a step takes, and how many chunks of each, a power of two."""
    rows = max(n for n in range(1, LANES + 1) if call.batch * call.heads % n == 0)
    # at most 8, so that a short call takes as long to compile as a long one
    chunks = min(LANES // rows, call.tokens // xla_layout.chunk_size(call), 8)
    return rows, 1 << (chunks.bit_length() - 1)


def walk(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array | None, starts: jax.Array
) -> Pair:
    """The output, 0 for tokens that are not taken, and the states `[B, H, K, V]` behind the last that is."""
    C, (rows, chunks) = xla_layout.chunk_size(call), _lanes(call)
    steps, offset = taken(call) // (chunks * C), call.tokens - taken(call) if call.reverse else 0
    in_order = range(chunks)[::-1] if call.reverse else range(chunks)
    gates = _gates(call, query, log_decay)
    taken_gates = lax.slice_in_dim(gates, offset, offset + taken(call), axis=1)
    if call.decay == "key":
        mild = _are_mild(call, query, key, taken_gates)
    else:
        by_chunk = _by_chunk(call, taken_gates)
        _, since, until = xla_chunk.decays_by_head(by_chunk)

    def visit(first: jax.Array, carry: tuple[tuple[jax.Array, ...], jax.Array], step: jax.Array) -> tuple[tuple, None]:
        """A step of the rows and heads from `first` on."""

        def place(i: int, c: int | jax.Array, heads: int) -> tuple:
            row, head = (first + i) // call.heads, (first + i) % call.heads
            return row, offset + (step * chunks + c) * C, head // (call.heads // heads), 0

        def cut(x: jax.Array, i: int, c: int | jax.Array) -> jax.Array:
            x = lax.dynamic_slice(x, place(i, c, x.shape[2]), (1, C, 1, x.shape[3]))
            x = x.reshape(C, -1).astype(call.state_dtype)
            return jnp.flip(x, 0) if call.reverse else x

        def one_by_one(advance: Callable[[int, int, jax.Array], Pair], starts: tuple[jax.Array, ...]) -> Visited:
            states, outputs = list(starts), []
            for c in in_order:
                for i in range(rows):
                    output, states[i] = advance(i, c, states[i])
                    outputs.append(output)
            return tuple(states), tuple(outputs)

        def of_head(i: int, c: int, state: jax.Array) -> Pair:
            q, k, v = (cut(x, i, c) for x in (query, key, value))
            at = first + i, step * chunks + c, 0, 0
            to, after = (lax.dynamic_slice(x, at, (1, 1, C, 1)).reshape(C, 1) for x in (since, until))
            output = _dot(_dot(q, k.T) * pairs[i, c], v) + to * _dot(q, state)
            return output, to[-1] * state + _dot(k.T, after * v)

        def of_mild_key(i: int, c: int, state: jax.Array) -> Pair:
            q, k, v, a = (cut(x, i, c) for x in (query, key, value, gates))
            return _split_in_the_middle(q, k, v, a, state)

        def of_key(starts: tuple[jax.Array, ...]) -> Visited:
            """All rows and heads of a chunk in one product after all: one by one, the many blocks compile too long."""

            def advance(states: jax.Array, c: jax.Array) -> Pair:
                q, k, v, a = (jnp.stack([cut(x, i, c) for i in range(rows)])[None] for x in (query, key, value, gates))
                effect = xla_chunk.effect(xla_chunk.Chunk(q, k, v, a, None), _einsum)
                output = effect.within + _einsum("...tk,...kv->...tv", effect.query, states)
                return effect.kept * states + effect.written, output[0]

            states, outputs = lax.scan(advance, jnp.stack(starts)[None], jnp.asarray(in_order))
            return tuple(states[0]), tuple(outputs.reshape(-1, C, call.value_dim))

        states, output = carry
        if call.decay == "key":
            states, outputs = lax.cond(mild[step], functools.partial(one_by_one, of_mild_key), of_key, states)
        else:
            # of all lanes, and from a slice that was written to memory: inside of a lane `exp` is not vectorised
            own = lax.dynamic_slice(by_chunk, (first, step * chunks, 0, 0), (rows, chunks, C, 1))
            pairs = xla_chunk.decays_by_head(own)[0]
            states, outputs = one_by_one(of_head, states)
        for x, (c, i) in zip(outputs, ((c, i) for c in in_order for i in range(rows)), strict=True):
            x = (call.scale * (jnp.flip(x, 0) if call.reverse else x)).astype(call.dtype)
            output = lax.dynamic_update_slice(output, x[None, :, None], place(i, c, call.heads))
        return (states, output), None

    def visit_all(output: jax.Array, some: Pair) -> Pair:
        """All steps of some rows and heads."""
        first, starts = some
        body = functools.partial(visit, first)
        (ends, output), _ = lax.scan(body, (tuple(starts), output), jnp.arange(steps), reverse=call.reverse)
        return output, jnp.stack(ends)

    output = jnp.zeros((call.batch, call.tokens, call.heads, call.value_dim), call.dtype)
    starts = starts.reshape(-1, rows, call.key_dim, call.value_dim)
    output, ends = lax.scan(visit_all, _varying.like(output, query), (rows * jnp.arange(len(starts)), starts))
    return output, ends.reshape(call.batch, call.heads, call.key_dim, call.value_dim)


def _gates(call: Call, query: jax.Array, log_decay: jax.Array | None) -> jax.Array:
    """The log decay of every token, `[B, T, H]` or `[B, T, H, K]`, in the dtype of the states."""
    shape = call.batch, call.tokens, call.heads
    if log_decay is None:
        return _varying.like(jnp.zeros(shape, call.state_dtype), query)
    log_decay = log_decay.astype(call.state_dtype)
    return jnp.broadcast_to(log_decay[:, None], shape) if call.decay == "constant" else log_decay


def _by_chunk(call: Call, gates: jax.Array) -> jax.Array:
    """`[B, T, H]` as `[B · H, chunks, C, 1]`, a chunk's in the order they are visited."""
    gates = jnp.moveaxis(gates, 2, 1).reshape(call.batch * call.heads, -1, xla_layout.chunk_size(call), 1)
    return jnp.flip(gates, 2) if call.reverse else gates


def _are_mild(call: Call, query: jax.Array, key: jax.Array, gates: jax.Array) -> jax.Array:
    """Whether one reference is safe for all chunks of a step, `[steps]`."""
    half = xla_layout.chunk_size(call) // 2
    gates = gates.reshape(call.batch, -1, half, call.heads, call.key_dim)
    # XLA's CPU backend takes ten times as long for a sum over an axis in the middle
    sums = lax.fori_loop(1, half, lambda i, total: total + jnp.abs(gates[:, :, i]), jnp.abs(gates[:, :, 0]))
    moderate = jnp.maximum(jnp.abs(query).max(), jnp.abs(key).max()) <= MODERATE
    # a NaN is neither mild nor moderate
    return (sums.max((0, 2, 3)) <= MILD).reshape(-1, 2 * _lanes(call)[1]).all(1) & moderate


@jax.jit  # traced once for all lanes
def _split_in_the_middle(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, state: jax.Array) -> Pair:
    """Output and next state of a chunk whose key decays are mild."""
    C = len(q)
    causal, late = np.tril(np.ones((C, C), q.dtype)), np.arange(C) >= C // 2
    # which gates lie between a token and the middle, with the sign turned before it
    between = np.where(late[:, None], causal * late, (causal - 1) * ~late).astype(q.dtype)
    gates = jnp.concatenate(xla_chunk.split(log_decay), 1)
    sums = _dot(between, gates)
    early = gates[:1] - sums[:1]  # all gates before the middle
    factor = _exp(sums)
    # transposed in memory: XLA's CPU backend is faster at products of which no side is transposed
    read, written = q * factor, lax.optimization_barrier((k / factor).T)
    scores = jnp.where(causal > 0, _dot(read, written), 0)
    output = _dot(scores, v) + _dot(read, _exp(early).T * state)
    return output, _exp(early + sums[-1:]).T * state + factor[-1:].T * _dot(written, v)


def _exp(parts: jax.Array) -> jax.Array:
    """`exp` of exact sums and, beside them, of those of the rests: at most 1/8, so a polynomial will do."""
    coarse, rest = jnp.split(parts, 2, -1)
    return jnp.exp(coarse) * (1 + rest * (1 + rest * (1 / 2 + rest * (1 / 6 + rest * (1 / 24 + rest / 120)))))
