"""The walk of a recurrence token after token, which a CPU is faster at than at chunks of small states.

It still goes by chunks, of which each belongs to one sequence: between them states are reset, and drift is made up for.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks import layout
from ejkernel.kernels.chunks.layout import Chunks, chunk_size
from ejkernel.kernels.chunks.walk import Call, States, entered, met_by

# `step(arrays of one token, what is kept of the state before it)` gives the output and the state after it.
Step = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
# The log decays of a chunk's key and value dims as they are visited, `[rows, H, C, ·]`.
Gates = Callable[[Chunks], tuple[jax.Array | None, jax.Array | None]]


def forward(
    call: Call,
    step: Step,
    arrays: Any,
    gates: Gates,
    starts: jax.Array | None,
    first: jax.Array,
    cu_seqlens: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The results, as `walk.forward` gives them, for `arrays [B, T, ...]`. Reverse-mode derivatives it has none."""
    where, shape = layout.chunks(call, cu_seqlens), (call.batch, call.tokens, call.heads, call.value_dim)

    def visit(carried: tuple[States, jax.Array], chunk: Chunks) -> tuple[tuple[States, jax.Array], None]:
        states, output = carried
        met = met_by(call, states, chunk, starts, chunk.first)
        log_decays = gates(jax.tree.map(lambda x: x[None], chunk))
        # once for the chunk: token by token XLA would take an exponential where it is multiplied
        factors = jax.tree.map(jnp.exp, log_decays)

        def token(i: jax.Array, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, output = both
            at = chunk.high - 1 - i if call.reverse else chunk.low + i
            place = chunk.start + chunk_size(call) - 1 - at if call.reverse else at - chunk.start
            own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, 1, 1), arrays)
            factor = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, 2, keepdims=False), factors)
            for each in _beside_states(factor):
                # what never wrote may grow at any rate, also at one that overflows
                state = jnp.where(state == 0, 0, each * state)
            read, state = step(own, state)
            return state, lax.dynamic_update_slice_in_dim(output, read, at, 1)

        left, output = lax.fori_loop(0, chunk.high - chunk.low, token, (met, output))
        if len(where.start) > 1 and call.state_dtype == np.float32:
            for missing in _beside_states(jax.tree.map(_missing, log_decays, factors)):
                left = left + missing * left
        return (states.after(left, chunk), output), None

    carried = entered(call, first), jnp.zeros_like(first, call.dtype, shape=shape)
    if len(where.start) == 1:  # without a loop around the loop, which copies states
        (states, output), _ = visit(carried, jax.tree.map(lambda x: x[0], where))
        return output, states.final
    (states, output), _ = lax.scan(visit, carried, where, reverse=call.reverse)
    return output, states.final


def _beside_states(by_dims: tuple[jax.Array | None, jax.Array | None]) -> list[jax.Array]:
    """What there is of `[rows, H, 1 or K]` and `[rows, H, V]`, to be multiplied with states."""
    by_key, by_value = by_dims
    found = [] if by_key is None else [by_key[..., :, None]]
    return found if by_value is None else [*found, by_value[..., None, :]]


def _missing(log_decay: jax.Array, factor: jax.Array) -> jax.Array:
    """By how much a chunk's rounded factors decay states too much.

    A factor just below 1 is off by up to 3e-8 of it, and where all are alike so are their errors: over a hundred
    thousand tokens that are kept for as long they would add up to a few thousandths.
    """
    # others forget before this matters
    near = jnp.abs(log_decay) < 1 / 16
    return jnp.where(near, log_decay - _log_near_one(factor), 0).sum(2)


def _log_near_one(factor: jax.Array) -> jax.Array:
    """`log` from 0.93 to 1.07, to less than a tenth of a rounding of `factor`; XLA's own takes ten times as long."""
    x = factor - 1  # exact
    terms = [(-1) ** (n + 1) / n for n in range(1, 8)]
    return x * functools.reduce(lambda sum, term: sum * x + term, reversed(terms), jnp.zeros_like(x))
