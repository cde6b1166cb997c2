"""The delta rule in one chunk of tokens, whatever its gates are; `docs/delta_rule.md` derives it.

What tokens read is the linear recurrence's, with values replaced by what they really add, `u`. What keys recall is the
same once more with keys for queries, and stands in the triangular system that the `u` solve. States are `[V, K]`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.delta_rule.pallas.device.inverse import inverse
from ejkernel.kernels.delta_rule.pallas.device.parts import Product, by_parts, fine, rest
from ejkernel.kernels.linear_recurrence.pallas.device import chunk as chunks
from ejkernel.kernels.linear_recurrence.pallas.device.chunk import Mirrored
from ejkernel.kernels.linear_recurrence.pallas.device.head_gates import Flow, Gated
from ejkernel.kernels.linear_recurrence.pallas.device.key_gates import Exact, Mild, causal
from ejkernel.kernels.linear_recurrence.pallas.device.products import F32, index, pairs, rows, sums

Scored = Gated | Mild | Exact


class Gradients(NamedTuple):
    """Cotangents of a chunk's arrays, of what its gates let through, and of the state at its start."""

    query: jax.Array  # [C, K]
    key: jax.Array  # [C, K]
    value: jax.Array  # [C, V]
    beta: jax.Array  # [1, C]
    gates: Any  # as those of `Gated` and the others
    state: jax.Array  # [V, K]


class Beta(NamedTuple):
    """A head's betas in a chunk."""

    down: jax.Array  # [C, 1]
    along: jax.Array  # [1, C]


class Delta(NamedTuple):
    """A chunk: its tokens add `added - taken (entering ⊙ S)ᵀ` to a state `S` that they meet.

    And they read `reads beta value + query (entering ⊙ S)ᵀ`. That is what they read of what is added, but where keys
    resemble each other most of it cancels, and has done so here before anything is rounded.
    """

    reading: Scored
    recalling: Scored
    value: jax.Array  # [C, V]
    beta: Beta
    overlaps: jax.Array  # of keys with those of earlier tokens, decayed [C, C] in float32
    inverse: jax.Array  # (I + beta overlaps)⁻¹, in float32
    added: jax.Array  # [C, V] in float32
    taken: jax.Array  # [C, K]
    reads: jax.Array  # [C, C] in float32
    query: jax.Array  # [C, K]

    @staticmethod
    def of(reading: Scored, recalling: Scored, value: jax.Array, beta: Beta, reverse: bool) -> "Delta":
        """From the scores of queries and of keys with keys."""
        exact = value.dtype == F32
        overlaps = jnp.where(_earlier(len(value), reverse), _unrounded(recalling), 0)
        system = beta.down * overlaps
        found = inverse(system.T, exact).T if reverse else inverse(system, exact)
        solution, recalled = found * beta.along, recalling.chunk.query
        added = fine(solution, value, exact)
        taken = fine(solution, recalled, exact).astype(value.dtype)
        scores = jnp.where(causal(len(value), reverse), _unrounded(reading), 0)
        reads = fine(scores, found, exact)
        query = reading.chunk.query - fine(reads * beta.along, recalled, exact)
        return Delta(reading, recalling, value, beta, overlaps, found, added, taken, reads, query.astype(value.dtype))

    def _seen(self, state: jax.Array) -> jax.Array:
        entering = self.recalling.chunk.entering
        return (state if entering is None else state * entering).astype(self.value.dtype)

    def adds(self, state: jax.Array) -> jax.Array:
        """What tokens add, `u`, in float32."""
        return self.added - pairs(self.taken, self._seen(state))

    def read(self, state: jax.Array) -> jax.Array:
        """The output of the chunk's tokens."""
        reads = (self.reads * self.beta.along).astype(self.value.dtype)
        return rows(reads, self.value) + pairs(self.query, self._seen(state))

    def written(self, u: jax.Array, state: jax.Array) -> jax.Array:
        """The state at the chunk's end."""
        return chunks.written(self.reading.chunk, u.astype(self.value.dtype), state)

    def gradients(
        self, u: jax.Array, state: jax.Array, d_output: jax.Array, d_state: jax.Array, reverse: bool
    ) -> Gradients:
        """Cotangents from those of the output and of the state at the chunk's end."""
        dtype, recalling = self.value.dtype, self.recalling
        exact, seen = dtype == F32, self._seen(state)
        mirrored = chunks.mirrored(self.reading.chunk, u.astype(dtype), state, d_output, d_state)
        entering, leaving = recalling.chunk.entering, recalling.chunk.leaving
        met = (d_state if leaving is None else d_state * leaving).astype(dtype)
        mirrored = mirrored._replace(scores=fine(d_output, u, exact, pairs), key=fine(u, met, exact))
        lost = sums(mirrored.value.astype(dtype), self.taken)
        d_start = mirrored.state - (lost if entering is None else lost * entering)
        # of the system's right sides, from what is read and from what is written
        written = pairs(self.reading.chunk.key, met)
        dr = fine(self.reads, d_output, exact, sums) + fine(self.inverse, written, exact, sums)
        wanted = self.value - pairs(recalling.chunk.query.astype(dtype), seen)
        d_below = jnp.where(_earlier(len(u), reverse), -fine(dr, u, exact, pairs), 0)
        d_beta = _row_sums(dr * wanted, exact) + _row_sums(d_below * self.overlaps, exact)
        d_value = self.beta.down * dr
        d_recalled = -rows(d_value.astype(dtype), seen)
        none = jnp.zeros((1, 1), F32)
        back = Mirrored(self.beta.down * d_below, d_recalled, jnp.zeros_like(d_recalled), none, none)
        flow: Any
        more: Any
        dq, dk, flow = self.reading.gradients(mirrored, d_state, state, reverse)
        if not exact:
            dq = dq + self._finer(mirrored.scores, reverse)
        dk_recalling, dk_recalled, more = recalling.gradients(back, none, none, reverse)
        if isinstance(self.reading, Mild | Exact):
            flow = flow + more
        elif flow is not None:
            flow = self._flow(mirrored, back, (state * d_state).sum(keepdims=True), reverse)
        return Gradients(dq, dk + dk_recalling + dk_recalled, d_value, d_beta, flow, d_start)

    def _finer(self, d_scores: jax.Array, reverse: bool) -> jax.Array:
        """What rounding the scores' cotangents has left of the queries': much, where keys resemble each other."""
        reading, key = self.reading, self.reading.chunk.key
        d_scores = jnp.where(causal(len(d_scores), reverse), d_scores, 0)
        if isinstance(reading, Mild):
            return rows(rest(d_scores), key) * reading.since
        if isinstance(reading, Exact):
            return jnp.zeros_like(reading.query)
        if reading.decays is None:
            return rows(rest(d_scores), key) * reading.scale
        return rows(rest(jnp.where(causal(len(d_scores), reverse), d_scores * reading.decays, 0)), reading.operands[1])

    def _flow(self, mirrored: Mirrored, back: Mirrored, through: jax.Array, reverse: bool) -> Flow:
        """What crosses the gates of a head: what is read and what is recalled cancel, so they are rounded together."""
        reading: Any = self.reading
        recalling: Any = self.recalling
        query, key = reading.operands
        exact = self.value.dtype == F32
        carried = mirrored.scores * _unrounded(reading) + back.scores * self.overlaps
        # what a token reads of itself crosses no gate
        carried = jnp.where(_earlier(len(carried), reverse), carried, 0)
        entering = query * (mirrored.query * reading.since) + key * (back.query * recalling.since)
        arriving = _row_sums(carried, exact) - _column_sums(carried, exact) + _row_sums(entering, exact)
        leaving = _row_sums(key * (mirrored.key * reading.until), exact)
        return Flow(arriving, leaving, through * reading.chunk.total)


def _earlier(size: int, reverse: bool) -> jax.Array:
    row, column = index((size, size), 0), index((size, size), 1)
    return row < column if reverse else row > column


def _unrounded(scored: Scored) -> jax.Array:
    """Scores in float32: a system is solved as it is, not as its entries round."""
    if isinstance(scored, Gated):
        products = pairs(*scored.operands)
        return products if scored.decays is None else products * scored.decays
    if isinstance(scored, Mild):
        return pairs(scored.chunk.query, scored.chunk.key)
    return scored.chunk.scores.astype(F32)


def _row_sums(x: jax.Array, exact: bool) -> jax.Array:
    """Sums of the rows of `x [C, ·]`, along the lanes `[1, C]`."""
    return _of_ones(x, exact, pairs)


def _column_sums(x: jax.Array, exact: bool) -> jax.Array:
    """Sums of the columns of `x`, along the lanes."""
    return _of_ones(x, exact, rows)


def _of_ones(x: jax.Array, exact: bool, product: Product) -> jax.Array:
    width = x.shape[1] if product is pairs else len(x)
    ones = jnp.ones((8, width), F32 if exact else jnp.bfloat16)
    return (product(ones, x) if exact else by_parts(ones, x, product=product))[:1]
