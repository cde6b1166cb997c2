"""One gate a key dim: a chunk with one reference where its gates are mild, and exactly where they are not."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.chunks.pallas.device.chunk import Chunk, Cotangents, causal
from ejkernel.kernels.chunks.pallas.device.products import (
    F32,
    LOWEST,
    cumsum_rows,
    index,
    matmul,
    matmul_nt,
    matmul_tn,
    sums_to_end,
)


class Mild(NamedTuple):
    """A chunk whose decays are taken relative to its middle."""

    chunk: Chunk
    operands: tuple[jax.Array, jax.Array]  # query and key before they are decayed
    since: jax.Array  # decay from the middle through a token, scaled [C, K]
    until: jax.Array  # decay after a token to the middle [C, K]
    strong: jax.Array  # 1 for dims whose gates are not mild after all, else 0 [1, K]

    @staticmethod
    def of(query: jax.Array, key: jax.Array, gates: jax.Array, scale: float, limit: float, reverse: bool) -> "Mild":
        C, dtype = len(query), query.dtype
        decays = cumsum_rows(gates, reverse)
        middle = decays[C // 2 : C // 2 + 1] if reverse else decays[C // 2 - 1 : C // 2]
        end = decays[:1] if reverse else decays[C - 1 :]
        # the scale costs nothing inside the exponent
        since = jnp.exp(decays - (middle - math.log(scale)))
        until = jnp.exp(middle - decays)
        operands, query, key = (query, key), (query * since).astype(dtype), (key * until).astype(dtype)
        scores = jnp.where(causal(C, reverse), matmul_nt(query, key), 0).astype(dtype)
        chunk = Chunk(scores, query, key, jnp.exp(middle), jnp.exp(end - middle), jnp.exp(end))
        # so that a NaN is not mild
        mild = (-middle <= limit) & (middle - end <= limit) & (gates.max(0, keepdims=True) <= 0)
        return Mild(chunk, operands, since, until, jnp.where(mild, 0.0, 1.0))

    def gradients(
        self, cotangents: Cotangents, d_state: jax.Array, state: jax.Array, reverse: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Cotangents of query, key and gates."""
        chunk, dtype = self.chunk, self.chunk.query.dtype
        d_scores = jnp.where(causal(len(chunk.scores), reverse), cotangents.scores, 0).astype(dtype)
        dq = matmul(d_scores, chunk.key) + cotangents.query
        dk = matmul_tn(d_scores, chunk.query) + cotangents.key
        # with the rounded operands, so that a token's own score cancels
        leaving = chunk.key.astype(F32) * cotangents.key
        inside = cumsum_rows(chunk.query.astype(F32) * dq - chunk.key.astype(F32) * dk, not reverse)
        through = _through(chunk, state, d_state)
        return dq * self.since, dk * self.until, inside + (leaving.sum(0, keepdims=True) + through)


def _through(chunk: Chunk, state: jax.Array, d_state: jax.Array) -> jax.Array:
    """What later chunks read of earlier ones, by key dim `[1, K]`."""
    assert chunk.total_decay is not None
    return (state * d_state).sum(0, keepdims=True) * chunk.total_decay


class Level(NamedTuple):
    """Pairs of neighbouring blocks of one size: tokens of the later block of a pair read those of the earlier one."""

    since: jax.Array  # decay from the border between the blocks through a later token [C, K], 0 for the others
    until: jax.Array  # decay after an earlier token to the border, 0 for the others
    visible: jax.Array  # which token reads which one across the border [C, C]


class Exact(NamedTuple):
    """A chunk whose decays are sums of gates over runs of tokens, never differences, whatever the gates are."""

    chunk: Chunk
    levels: list[Level]
    query: jax.Array  # scaled [C, K] in float32
    key: jax.Array  # [C, K] in float32
    since: jax.Array  # decay from the chunk's start through a token
    until: jax.Array  # decay after a token to the chunk's end
    gates: jax.Array
    scale: float
    joined: bool

    @staticmethod
    def of(query: jax.Array, key: jax.Array, gates: jax.Array, scale: float, reverse: bool, joined: bool) -> "Exact":
        C, dtype = len(query), query.dtype
        gates = jnp.maximum(gates, LOWEST)
        row = index(gates.shape, 0)
        # sums over the block that a token is in: through it, after it, and whole
        since, until, total = gates, jnp.zeros_like(gates), gates
        levels, size = [], 1
        while size < C:
            second = row & size != 0
            later = ~second if reverse else second
            neighbour = jnp.where(second, pltpu.roll(total, size, 0), pltpu.roll(total, C - size, 0))
            reader, read = index((C, C), 0), index((C, C), 1)
            if reverse:
                reader, read = read, reader
            visible = ((reader ^ read) < 2 * size) & (reader & size != 0) & (read & size == 0)
            levels.append(Level(jnp.where(later, jnp.exp(since), 0), jnp.where(later, 0, jnp.exp(until)), visible))
            since = jnp.where(later, since + neighbour, since)
            until = jnp.where(later, until, until + neighbour)
            total = total + neighbour
            size *= 2
        since, until, total = jnp.exp(since), jnp.exp(until), jnp.exp(total[:1])
        query, key = query.astype(F32) * scale, key.astype(F32)
        row, column = index((C, C), 0), index((C, C), 1)
        diagonal = (query * key).sum(1, keepdims=True)
        scores = jnp.where(row == column, diagonal, 0)
        for level in levels:
            products = matmul_nt((query * level.since).astype(dtype), (key * level.until).astype(dtype))
            scores = scores + jnp.where(level.visible, products, 0)
        operands = scores.astype(dtype), (query * since).astype(dtype), (key * until).astype(dtype)
        return Exact(Chunk(*operands, None, None, total), levels, query, key, since, until, gates, scale, joined)

    def gradients(
        self, cotangents: Cotangents, d_state: jax.Array, state: jax.Array, reverse: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Cotangents of query, key and gates."""
        dtype, C = self.chunk.query.dtype, len(self.query)
        dq, dk = jnp.zeros_like(self.query), jnp.zeros_like(self.key)
        for level in self.levels:
            later, earlier = (self.query * level.since).astype(dtype), (self.key * level.until).astype(dtype)
            d_scores = jnp.where(level.visible, cotangents.scores, 0).astype(dtype)
            dq = dq + matmul(d_scores, earlier) * level.since
            dk = dk + matmul_tn(d_scores, later) * level.until
        dq_state, dk_state = cotangents.query * self.since, cotangents.key * self.until
        inside = self.query * (dq + dq_state) - self.key * dk
        leaving = self.key * dk_state
        through = _through(self.chunk, state, d_state)
        inside = sums_to_end(self.gates, inside, 0, reverse) if self.joined else cumsum_rows(inside, not reverse)
        d_gates = inside + (cumsum_rows(leaving, reverse) - leaving) + through
        # across a gate that forgets everything nothing flows, and what cancels leaves no rounding
        d_gates = jnp.where(self.gates <= LOWEST, 0, d_gates)
        row, column = index((C, C), 0), index((C, C), 1)
        d_diagonal = jnp.where(row == column, cotangents.scores, 0).sum(1, keepdims=True)
        dq, dk = dq + dq_state + d_diagonal * self.key, dk + dk_state + d_diagonal * self.query
        return dq * self.scale, dk, d_gates
