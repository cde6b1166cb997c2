"""One gate a head and token, or none: the decays between a chunk's tokens are a matrix, exact for any gate."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_recurrence.pallas.device.chunk import Chunk, Mirrored
from ejkernel.kernels.linear_recurrence.pallas.device.key_gates import LOWEST, causal
from ejkernel.kernels.linear_recurrence.pallas.device.products import F32, index, pairs, rows, running_sums_along, sums


class Decays(NamedTuple):
    """Log decays of several heads in one chunk: running sums of gates, in two parts that are added last."""

    gates: jax.Array  # [heads, C]
    coarse: jax.Array  # sums of the gates' multiples of 1/256, which are exact [heads, C]
    rest: jax.Array  # and of what is left, which are tiny
    down: jax.Array  # both, transposed [C, 2 heads]

    @staticmethod
    def of(gates: jax.Array, reverse: bool) -> "Decays":
        gates = jnp.maximum(gates, LOWEST)
        coarse = jnp.round(gates * 256) / 256
        coarse, rest = (running_sums_along(x, reverse) for x in (coarse, gates - coarse))
        return Decays(gates, coarse, rest, jnp.concatenate([coarse, rest], 0).T)

    def parts(self, head: int) -> list[tuple[jax.Array, jax.Array]]:
        """Both parts of a head, down the tokens in every lane `[C, C]` and along them `[1, C]`."""
        heads, C = self.gates.shape
        found = []
        for kind, along in enumerate((self.coarse, self.rest)):
            at = kind * heads + head
            down = jnp.broadcast_to(self.down[:, at : at + 1], (C, C))
            found.append((down, along[head : head + 1]))
        return found


def _as_wide(x: jax.Array, width: int) -> jax.Array:
    """`x [C, C]`, all of whose lanes are alike, in as many as `width`."""
    return jnp.concatenate([x] * -(-width // x.shape[1]), 1)[:, :width]


class Gated(NamedTuple):
    """A chunk with one gate a token, or none."""

    chunk: Chunk
    operands: tuple[jax.Array, jax.Array]  # query and key as they are
    decays: jax.Array | None  # between tokens, scaled [C, C]
    since: jax.Array | None  # from the chunk's start through a token, scaled [C, K]
    until: jax.Array | None  # after a token to the chunk's end [C, K]
    scale: float

    @staticmethod
    def of(query: jax.Array, key: jax.Array, decays: Decays | None, head: int, scale: float, reverse: bool) -> "Gated":
        (C, K), dtype = query.shape, query.dtype
        seen = causal(C, reverse)
        if decays is None:
            query = (query * scale).astype(dtype)
            scores = jnp.where(seen, pairs(query, key), 0).astype(dtype)
            return Gated(Chunk(scores, query, key, None, None, None), (query, key), None, None, None, scale)
        (coarse, coarse_along), (rest, rest_along) = decays.parts(head)
        # infinite perhaps where nothing is read, so it is selected what is
        factors = jnp.exp((coarse - coarse_along) + (rest - (rest_along - math.log(scale))))
        scores = jnp.where(seen, pairs(query, key) * factors, 0).astype(dtype)
        end = slice(0, 1) if reverse else slice(C - 1, C)
        coarse_end, rest_end = coarse_along[:, end], rest_along[:, end]
        # computed in all lanes, where the sums already are: spreading a column costs more than an exponential
        since = _as_wide(jnp.exp(coarse + (rest + math.log(scale))), K)
        until = _as_wide(jnp.exp((coarse_end - coarse) + (rest_end - rest)), K)
        total = jnp.exp(coarse_end) * jnp.exp(rest_end)
        chunk = Chunk(scores, (query * since).astype(dtype), (key * until).astype(dtype), None, None, total)
        return Gated(chunk, (query, key), factors, since, until, scale)

    def gradients(
        self, mirrored: Mirrored, d_state: jax.Array, state: jax.Array, reverse: bool
    ) -> tuple[jax.Array, jax.Array, "Flow | None"]:
        """Cotangents of query and key, and what crosses the gates."""
        query, key = self.operands
        chunk, dtype, C = self.chunk, query.dtype, len(query)
        seen = causal(C, reverse)
        if self.decays is None or self.since is None or self.until is None or chunk.total is None:
            d_scores = jnp.where(seen, mirrored.scores, 0).astype(dtype)
            dq = (rows(d_scores, key) + mirrored.query) * self.scale
            return dq, sums(d_scores, query) + mirrored.key, None
        d_products = jnp.where(seen, mirrored.scores * self.decays, 0).astype(dtype)
        dq_state, dk_state = mirrored.query * self.since, mirrored.key * self.until
        dq, dk = rows(d_products, key) + dq_state, sums(d_products, query) + dk_state
        # what each pair carries, rounded once, so that what passes between two tokens on one side of a gate cancels;
        # what a token reads of itself crosses no gate
        carried = mirrored.scores * chunk.scores.astype(F32)
        carried = jnp.where(seen & (index((C, C), 0) != index((C, C), 1)), carried, 0).astype(dtype)
        ones, across = jnp.ones((8, C), dtype), jnp.ones((8, query.shape[1]), dtype)
        between = pairs(ones, carried)[:1] - rows(ones, carried)[:1]
        arriving = between + pairs(across, (query * dq_state).astype(dtype))[:1]
        leaving = pairs(across, (key * dk_state).astype(dtype))[:1]
        through = (state * d_state).sum(keepdims=True) * chunk.total
        return dq, dk, Flow(arriving, leaving, through)


class Flow(NamedTuple):
    """What crosses a chunk's gates, by where it comes from; of one head, or of several below one another."""

    arriving: jax.Array  # what a token reads of earlier ones less what it wrote for later ones, in the chunk [heads, C]
    leaving: jax.Array  # what a token wrote for later chunks [heads, C]
    through: jax.Array  # from earlier chunks to later ones [heads, 1]

    def across(self, reverse: bool) -> jax.Array:
        """The gradient of each gate."""
        earlier = running_sums_along(self.leaving, reverse) - self.leaving
        return running_sums_along(self.arriving, not reverse) + earlier + self.through
