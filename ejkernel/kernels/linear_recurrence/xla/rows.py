"""The forward of a CPU without gradients: every row and head on matrices of its own, decays split once a chunk.

Up to JAX 0.11 XLA's CPU backend multiplies a batch of small matrices on one core, and runs operations side by side
only while more than eight of them wait. So nothing is batched here: a step takes `LANES` chunks, of as many rows and
heads as there are and then of as many chunks of each, and every one of them goes through products of its own.

The decay between two tokens is a quotient of two factors, which reach from each of them to the middle of the chunk.
That is half the work of `one_chunk`, and right for decays that are mild (`are_mild`), not for all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels import _varying
from ejkernel.kernels.chunks import layout
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla import one_chunk

# Half as many are a tenth slower with head decays, and compile in half the time. With key decays, for which there is
# more to compile, half as many do.
LANES = 64

# Decays are mild if no more than this adds up in any half of a chunk and no query or key is larger than that: factors
# then stay below e^60, and what is multiplied by one below float32's largest number.
MILD, MODERATE = 60.0, 1e12

_dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)


class Factors(NamedTuple):
    """Decays of a chunk, for one key dim each or for all of them."""

    from_middle: jax.Array  # from the middle to a token, the inverse of it before the middle, [..., C, 1 or K]
    to_middle: jax.Array  # from the chunk's start, [..., 1, 1 or K]
    total: jax.Array  # from start to end


def pays(call: Call) -> bool:
    """Whether a CPU is faster this way than with all rows and heads in one product, without gradients; measured.

    Not for small states, where what one would notice are the seconds to compile it; nor where the CPU is only there
    beside a GPU, whose calls would have to trace it too.
    """
    if call.packed or call.value_decay or call.state_dtype != np.float32:
        return False
    if jax.__version_info__ >= (0, 12) or jax.default_backend() != "cpu":
        return False
    return call.tokens >= 8 * layout.LARGEST_CHUNK and call.key_dim * call.value_dim >= 128 * 128


def taken(call: Call) -> int:
    """How many tokens the steps take, of those visited first; fewer than a step are left."""
    step = _lanes(call)[1] * layout.chunk_size(call)
    return call.tokens // step * step


def _lanes(call: Call) -> tuple[int, int]:
    """How many rows and heads a step takes, and how many chunks of each, a power of two."""
    lanes = LANES // 2 if call.decay == "key" else LANES
    rows = max(n for n in range(1, lanes + 1) if call.batch * call.heads % n == 0)
    # at most 8, so that a short call takes as long to compile as a long one
    chunks = min(lanes // rows, call.tokens // layout.chunk_size(call), 8)
    return rows, 1 << (chunks.bit_length() - 1)


def are_mild(call: Call, query: jax.Array, key: jax.Array, log_decay: jax.Array | None) -> jax.Array:
    """Whether this is right for a call, all chunks of it. A NaN is neither mild nor moderate."""
    half = layout.chunk_size(call) // 2
    gates = _taken(call, _gates(call, query, log_decay))
    gates = gates.reshape(call.batch, -1, half, *gates.shape[2:])
    # XLA's CPU backend takes ten times as long for a sum over an axis in the middle
    sums = lax.fori_loop(1, half, lambda i, total: total + jnp.abs(gates[:, :, i]), jnp.abs(gates[:, :, 0]))
    moderate = (jnp.abs(query).max() <= MODERATE) & (jnp.abs(key).max() <= MODERATE)
    return _everywhere((sums.max() <= MILD) & moderate)


@jax.custom_batching.custom_vmap
def _everywhere(condition: jax.Array) -> jax.Array:
    """One answer for a whole batch: with one each, `cond` would compute both of its branches."""
    return condition


@_everywhere.def_vmap
def _(size: int, in_batched: list[bool], condition: jax.Array) -> tuple[jax.Array, bool]:
    return _everywhere(condition.all()), False


def walk(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array | None, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output, 0 for tokens that are not taken, and the states `[B, H, K, V]` behind the last that is."""
    C, (rows, chunks) = layout.chunk_size(call), _lanes(call)
    steps, offset = taken(call) // (chunks * C), call.tokens - taken(call) if call.reverse else 0
    in_order = range(chunks)[::-1] if call.reverse else range(chunks)
    gates = _gates(call, query, log_decay)
    by_head = None if call.decay == "key" else _factors(_by_chunk(call, _taken(call, gates)))

    def visit(first: jax.Array, carry: tuple[tuple[jax.Array, ...], jax.Array], step: jax.Array) -> tuple[tuple, None]:
        """A step of the rows and heads from `first` on."""
        states, output = list(carry[0]), carry[1]

        def place(i: int, c: int, heads: int) -> tuple:
            row, head = (first + i) // call.heads, (first + i) % call.heads
            return row, offset + (step * chunks + c) * C, head // (call.heads // heads), 0

        def cut(x: jax.Array, i: int, c: int) -> jax.Array:
            x = lax.dynamic_slice(x, place(i, c, x.shape[2]), (1, C, 1, x.shape[3]))
            x = x.reshape(C, -1).astype(call.state_dtype)
            return jnp.flip(x, 0) if call.reverse else x

        def factors(i: int, c: int) -> Factors:
            if by_head is None:
                return _factors(cut(gates, i, c))
            at = first + i, step * chunks + c, 0, 0
            return jax.tree.map(lambda x: lax.dynamic_slice(x, at, (1, 1, *x.shape[2:]))[0, 0], by_head)

        for c in in_order:
            for i in range(rows):
                q, k, v = (cut(x, i, c) for x in (query, key, value))
                x, states[i] = _chunk(q, k, v, factors(i, c), states[i])
                x = (call.scale * (jnp.flip(x, 0) if call.reverse else x)).astype(call.dtype)
                output = lax.dynamic_update_slice(output, x[None, :, None], place(i, c, call.heads))
        return (tuple(states), output), None

    def visit_all(output: jax.Array, some: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
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


def _taken(call: Call, x: jax.Array) -> jax.Array:
    """The tokens that the steps take."""
    return x[:, call.tokens - taken(call) :] if call.reverse else x[:, : taken(call)]


def _by_chunk(call: Call, gates: jax.Array) -> jax.Array:
    """`[B, T, H]` as `[B · H, chunks, C, 1]`, a chunk's in the order they are visited."""
    gates = jnp.moveaxis(gates, 2, 1).reshape(call.batch * call.heads, -1, layout.chunk_size(call), 1)
    return jnp.flip(gates, 2) if call.reverse else gates


def _factors(gates: jax.Array) -> Factors:
    """Of mild gates `[..., C, D]`."""
    *lead, C, D = gates.shape
    # which gates of its half of a chunk lie between a token and the middle, with the sign turned before it
    late = np.tri(C // 2, dtype=gates.dtype)
    between = np.stack([late - 1, late])
    parts = [x.reshape(*lead, 2, C // 2, D) for x in one_chunk.split(gates)]
    sums = [jnp.matmul(between, x, precision=lax.Precision.HIGHEST).reshape(*lead, C, D) for x in parts]
    early = [x[..., 0, :1, :] - y[..., :1, :] for x, y in zip(parts, sums, strict=True)]
    total = [x + y[..., -1:, :] for x, y in zip(early, sums, strict=True)]
    return Factors(_exp(*sums), _exp(*early), _exp(*total))


def _exp(coarse: jax.Array, rest: jax.Array) -> jax.Array:
    """`exp` of an exact sum and the sum of its rests: at most 1/8, so a polynomial will do."""
    return jnp.exp(coarse) * (1 + rest * (1 + rest * (1 / 2 + rest * (1 / 6 + rest * (1 / 24 + rest / 120)))))


def _chunk(q: jax.Array, k: jax.Array, v: jax.Array, factors: Factors, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and next state of one chunk, `q [C, K]` and so on."""
    from_middle, to_middle, total = factors
    read, written = q * from_middle, k / from_middle
    if from_middle.shape[1] > 1:
        # transposed in memory: XLA's CPU backend is faster at products of which no side is transposed
        transposed = lax.optimization_barrier(written.T)
        at_start = _dot(read, to_middle.T * state)
    else:
        transposed, at_start = written.T, to_middle * _dot(read, state)
    # pairs that nobody reads may have overflowed
    scores = jnp.where(np.tri(len(q), dtype=bool), _dot(read, transposed), 0)
    return _dot(scores, v) + at_start, total.T * state + from_middle[-1:].T * _dot(transposed, v)
