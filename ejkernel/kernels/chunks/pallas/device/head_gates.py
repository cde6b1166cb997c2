"""One gate a head and token, or none: the decays between a chunk's tokens are a matrix, exact for any gate."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.pallas.device.chunk import Chunk, Cotangents, causal
from ejkernel.kernels.chunks.pallas.device.products import (
    F32,
    LOWEST,
    cumsum_from,
    cumsum_lanes,
    index,
    matmul,
    matmul_nt,
    matmul_tn,
    sums_to_end,
)


class Decays(NamedTuple):
    """Log decays of several heads in one chunk: cumulative sums of gates, in two parts that are added last."""

    gates: jax.Array  # [heads, C]
    coarse: jax.Array  # sums of the gates' multiples of 1/256, which are exact [heads, C]
    fine: jax.Array  # sums of the remainders, which are tiny [heads, C]
    transposed: jax.Array  # both [C, 2 heads]

    @staticmethod
    def of(gates: jax.Array, reverse: bool, joined: bool) -> "Decays":
        gates = jnp.maximum(gates, LOWEST)
        coarse = jnp.round(gates * 256) / 256
        fine = gates - coarse
        if joined:
            # these are not exact, and one sequence is not to change another's
            fine = cumsum_from(jnp.where(gates <= LOWEST, 1.0, 0.0), fine, 1, reverse)
        else:
            fine = cumsum_lanes(fine, reverse)
        coarse = cumsum_lanes(coarse, reverse)
        return Decays(gates, coarse, fine, jnp.concatenate([coarse, fine], 0).T)

    def parts(self, head: int) -> list[tuple[jax.Array, jax.Array]]:
        """Coarse and fine sums of a head, each with tokens as rows `[C, C]` (all lanes equal) and as lanes `[1, C]`."""
        heads, C = self.gates.shape
        both = (head, self.coarse), (heads + head, self.fine)
        rows = (jnp.broadcast_to(self.transposed[:, at : at + 1], (C, C)) for at, _ in both)
        return [(row, sums[head : head + 1]) for row, (_, sums) in zip(rows, both, strict=True)]


def _widened(x: jax.Array, width: int) -> jax.Array:
    """`x [C, C]`, whose lanes are all equal, with `width` of them."""
    return jnp.concatenate([x] * -(-width // x.shape[1]), 1)[:, :width]


class Gated(NamedTuple):
    """A chunk with one gate a token, or none; its reference is the chunk's start for queries and its end for keys."""

    chunk: Chunk
    operands: tuple[jax.Array, jax.Array]  # query and key before they are decayed
    decays: jax.Array | None  # between tokens, scaled [C, C]
    since: jax.Array | None  # from the chunk's start through a token, scaled [C, K]
    until: jax.Array | None  # after a token to the chunk's end [C, K]
    scale: float

    @staticmethod
    def of(query: jax.Array, key: jax.Array, decays: Decays | None, head: int, scale: float, reverse: bool) -> "Gated":
        (C, K), dtype = query.shape, query.dtype
        visible = causal(C, reverse)
        if decays is None:
            query = (query * scale).astype(dtype)
            scores = jnp.where(visible, matmul_nt(query, key), 0).astype(dtype)
            return Gated(Chunk(scores, query, key, None, None, None), (query, key), None, None, None, scale)
        (coarse, coarse_lanes), (fine, fine_lanes) = decays.parts(head)
        # may be infinite where nothing is visible, hence a select and no product with a mask
        factors = jnp.exp((coarse - coarse_lanes) + (fine - (fine_lanes - math.log(scale))))
        scores = jnp.where(visible, matmul_nt(query, key) * factors, 0).astype(dtype)
        end = slice(0, 1) if reverse else slice(C - 1, C)
        coarse_end, fine_end = coarse_lanes[:, end], fine_lanes[:, end]
        # computed in all lanes, where the sums already are: broadcasting a column costs more than an exponential
        since = _widened(jnp.exp(coarse + (fine + math.log(scale))), K)
        until = _widened(jnp.exp((coarse_end - coarse) + (fine_end - fine)), K)
        total = jnp.exp(coarse_end) * jnp.exp(fine_end)
        chunk = Chunk(scores, (query * since).astype(dtype), (key * until).astype(dtype), None, None, total)
        return Gated(chunk, (query, key), factors, since, until, scale)

    def gradients(
        self, cotangents: Cotangents, d_state: jax.Array, state: jax.Array, reverse: bool
    ) -> tuple[jax.Array, jax.Array, "Flow | None"]:
        """Cotangents of query and key, and the parts of the gates' gradient."""
        query, key = self.operands
        chunk, dtype, C = self.chunk, query.dtype, len(query)
        visible = causal(C, reverse)
        if self.decays is None or self.since is None or self.until is None or chunk.total_decay is None:
            d_scores = jnp.where(visible, cotangents.scores, 0).astype(dtype)
            dq = (matmul(d_scores, key) + cotangents.query) * self.scale
            return dq, matmul_tn(d_scores, query) + cotangents.key, None
        d_products = jnp.where(visible, cotangents.scores * self.decays, 0).astype(dtype)
        dq_state, dk_state = cotangents.query * self.since, cotangents.key * self.until
        dq, dk = matmul(d_products, key) + dq_state, matmul_tn(d_products, query) + dk_state
        # rounded once, so that pairs of tokens on one side of a gate cancel; a token's own score crosses no gate
        crossing = cotangents.scores * chunk.scores.astype(F32)
        crossing = jnp.where(visible & (index((C, C), 0) != index((C, C), 1)), crossing, 0).astype(dtype)
        ones, key_ones = jnp.ones((8, C), dtype), jnp.ones((8, query.shape[1]), dtype)
        between = matmul_nt(ones, crossing)[:1] - matmul(ones, crossing)[:1]
        inside = between + matmul_nt(key_ones, (query * dq_state).astype(dtype))[:1]
        leaving = matmul_nt(key_ones, (key * dk_state).astype(dtype))[:1]
        through = (state * d_state).sum(keepdims=True) * chunk.total_decay
        return dq, dk, Flow(inside, leaving, through)


class Flow(NamedTuple):
    """Parts of the gradient of gates, of one head or several; a gate's is the sum of all products that cross it."""

    inside: jax.Array  # what a token reads of earlier ones less what later ones of the chunk read of it [heads, C]
    leaving: jax.Array  # what later chunks read of a token [heads, C]
    through: jax.Array  # what later chunks read of earlier ones [heads, 1]

    def gate_gradient(self, gates: jax.Array, reverse: bool, joined: bool) -> jax.Array:
        """From the gates themselves, where rows hold sequences that these part."""
        earlier = cumsum_lanes(self.leaving, reverse) - self.leaving
        inside = sums_to_end(gates, self.inside, 1, reverse) if joined else cumsum_lanes(self.inside, not reverse)
        return inside + earlier + self.through
