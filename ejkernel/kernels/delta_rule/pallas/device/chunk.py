"""The delta rule in one chunk of tokens, whatever its gates are; `docs/delta_rule.md` derives it.

What tokens read is the linear recurrence's, with values replaced by what they really add, `u`. What keys recall is the
same once more with keys for queries, and stands in the triangular system that the `u` solve. States are `[V, K]`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.delta_rule.pallas.device.inverse import inverse
from ejkernel.kernels.delta_rule.pallas.device.parts import fine
from ejkernel.kernels.linear_recurrence.pallas.device.chunk import Mirrored, scaled
from ejkernel.kernels.linear_recurrence.pallas.device.head_gates import Flow, Gated
from ejkernel.kernels.linear_recurrence.pallas.device.key_gates import Exact, Mild, causal
from ejkernel.kernels.linear_recurrence.pallas.device.products import F32, index, pairs, running_sums, sums

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
        solution, recalled = found * beta.along, _met(recalling)[0]
        added, taken = fine(solution, value, exact), fine(solution, recalled, exact)
        scores = jnp.where(causal(len(value), reverse), _unrounded(reading), 0)
        reads = fine(scores, found, exact)
        query = _met(reading)[0] - fine(reads * beta.along, recalled, exact)
        return Delta(reading, recalling, value, beta, overlaps, found, added, taken, reads, query)

    @property
    def _exact(self) -> bool:
        return self.value.dtype == F32

    def _seen(self, state: jax.Array) -> jax.Array:
        return scaled(state, self.recalling.chunk.entering)

    def adds(self, state: jax.Array) -> jax.Array:
        """What tokens add, `u`, in float32."""
        return self.added - fine(self.taken, self._seen(state), self._exact, pairs)

    def read(self, state: jax.Array) -> jax.Array:
        """The output of the chunk's tokens."""
        reads = fine(self.reads * self.beta.along, self.value, self._exact)
        return reads + fine(self.query, self._seen(state), self._exact, pairs)

    def written(self, u: jax.Array, state: jax.Array) -> jax.Array:
        """The state at the chunk's end."""
        chunk, key = self.reading.chunk, _met(self.reading)[1]
        return scaled(state, chunk.total) + scaled(fine(u, key, self._exact, sums), chunk.leaving)

    def gradients(
        self, u: jax.Array, state: jax.Array, d_output: jax.Array, d_state: jax.Array, reverse: bool
    ) -> Gradients:
        """Cotangents from those of the output and of the state at the chunk's end."""
        reading, recalling, exact, seen = self.reading, self.recalling, self._exact, self._seen(state)
        entering, leaving, total = recalling.chunk.entering, recalling.chunk.leaving, recalling.chunk.total
        met = scaled(d_state, leaving)
        written = fine(_met(reading)[1], met, exact, pairs)
        d_start = fine(d_output, self.query, exact, sums) - fine(written, self.taken, exact, sums)
        d_start = scaled(d_state, total) + scaled(d_start, entering)
        # of the system's right sides, from what is read and from what is written
        dr = fine(self.reads, d_output, exact, sums) + fine(self.inverse, written, exact, sums)
        wanted = self.value - fine(_met(recalling)[0], seen, exact, pairs)
        d_scores = jnp.where(causal(len(u), reverse), fine(d_output, u, exact, pairs), 0)
        d_below = jnp.where(_earlier(len(u), reverse), -fine(dr, u, exact, pairs), 0)
        d_beta = _row_sums(dr * wanted, exact) + _row_sums(d_below * self.overlaps, exact)
        d_value = self.beta.down * dr
        none = jnp.zeros((1, 1), F32)
        read = Mirrored(d_scores, fine(d_output, seen, exact), fine(u, met, exact), none, none)
        recalled = Mirrored(self.beta.down * d_below, -fine(d_value, seen, exact), jnp.zeros_like(read.key), none, none)
        dq: jax.Array
        flow: Any
        if isinstance(reading, Exact) and isinstance(recalling, Exact):
            dq, early, flow = reading.gradients(read, d_state, state, reverse)
            late, more, back = recalling.gradients(recalled, none, none, reverse)
            dk, flow = early + late + more, flow + back
        else:
            dq, late, early, leaving = self._of_scores(read, recalled)
            dk = late + early + leaving
            flow = self._flow(dq, late - early, leaving, u * written, state * d_state, reverse)
        return Gradients(dq, dk, d_value, d_beta, flow, d_start)

    def _of_scores(self, read: Mirrored, recalled: Mirrored) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Cotangents of queries, of keys that recall, and of keys that are read, in the chunk and after it."""
        reading: Any = self.reading
        recalling: Any = self.recalling
        dq, early = _of_pairs(reading, read.scores, self._exact)
        late, more = _of_pairs(recalling, recalled.scores, self._exact)
        dq = dq + scaled(read.query, reading.since)
        if reading.since is None:
            dq = dq * reading.scale
        late = late + scaled(recalled.query, recalling.since)
        return dq, late, early + more, scaled(read.key, reading.until)

    def _flow(
        self, dq: jax.Array, dk: jax.Array, leaving: jax.Array, left: jax.Array, through: jax.Array, reverse: bool
    ) -> Any:
        """What crosses the gates, if there are any.

        `dk` is the cotangent of keys that recall less that of keys that are read, in the chunk: what passes between two
        tokens after a gate is in that of both, and cancels. What tokens leave for later chunks comes by key dim, and
        by value dim as `left`, which cancels better: the systems' right sides are made of it.
        """
        reading: Any = self.reading
        (query, key), total = reading.operands, reading.chunk.total
        arriving = query * dq + key * dk
        if isinstance(reading, Mild):
            through = (key * leaving).sum(0, keepdims=True) + through.sum(0, keepdims=True) * total
            return running_sums(arriving - key * leaving, not reverse) + through
        if total is None:
            return None
        through = through.sum(keepdims=True) * total
        return Flow(_row_sums(arriving, self._exact), _row_sums(left, self._exact), through)


def _of_pairs(scored: Gated | Mild, d_scores: jax.Array, exact: bool) -> tuple[jax.Array, jax.Array]:
    """Cotangents of query and key from those of their scores, which are 0 where nothing is read."""
    if isinstance(scored, Mild):
        query, key = _met(scored)
        return fine(d_scores, key, exact) * scored.since, fine(d_scores, query, exact, sums) * scored.until
    query, key = scored.operands
    # decays may be infinite where nothing is read
    d_products = d_scores if scored.decays is None else jnp.where(d_scores == 0, 0, d_scores * scored.decays)
    return fine(d_products, key, exact), fine(d_products, query, exact, sums)


def _earlier(size: int, reverse: bool) -> jax.Array:
    row, column = index((size, size), 0), index((size, size), 1)
    return row < column if reverse else row > column


def _met(scored: Scored) -> tuple[jax.Array, jax.Array]:
    """Query and key as states meet them, before they are rounded."""
    query, key = (scored.query, scored.key) if isinstance(scored, Exact) else scored.operands
    return scaled(query, scored.since), scaled(key, scored.until)


def _unrounded(scored: Scored) -> jax.Array:
    """Scores in float32: a system is solved as it is, not as its entries round."""
    if isinstance(scored, Gated):
        products = pairs(*scored.operands)
        return products if scored.decays is None else products * scored.decays
    if isinstance(scored, Mild):
        query, key = _met(scored)
        return fine(query, key, scored.operands[0].dtype == F32, pairs)
    return scored.chunk.scores.astype(F32)


def _row_sums(x: jax.Array, exact: bool) -> jax.Array:
    """Sums of the rows of `x [C, ·]`, along the lanes `[1, C]`."""
    ones = jnp.ones((8, x.shape[1]), F32 if exact else jnp.bfloat16)
    return fine(ones, x, exact, pairs)[:1]
