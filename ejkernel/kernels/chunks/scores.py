"""Scores of one chunk: products of queries with earlier keys, decayed by the gates between the two tokens.

Everything here is `[B, H, C, ·]` in the dtype of the states. A decay factor is a product of `exp(gate)`, or `exp` of a
sum of gates over a run of tokens, never a quotient. Where such a sum is a difference of running sums, these are exact
(`split`). So nothing overflows whatever the gates are, a reset (`-inf`) is an exact 0, and a huge gate costs its
neighbours no digits.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.blocks import Decays, all_decays, halves, in_first, in_second

# Inside blocks of this many tokens keys are decayed token by token: cheaper on a CPU than matrices this small.
BASE = 4

Einsum = Callable[..., jax.Array]


class Pairs(Protocol):
    """The keys of a chunk as its tokens see them."""

    @property
    def since(self) -> jax.Array:
        """The decay from the chunk's start through a token, `[B, H, C, 1 or K]`."""

    @property
    def until(self) -> jax.Array:
        """The decay after a token to the chunk's end."""

    def scores(self, query: jax.Array) -> jax.Array:
        """Products of queries with the keys up to them, decayed: `[B, H, C, C]`, 0 above the diagonal."""

    def gradients(self, query: jax.Array, d_scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cotangents of query and key from pairs of different tokens; only what is below the diagonal counts."""


def pairs(key: jax.Array, log_decay: jax.Array | None, einsum: Einsum) -> Pairs:
    """The pairs of a chunk's tokens, by how its memory fades."""
    if log_decay is None or log_decay.shape[-1] == 1:
        return _by_head(key, log_decay, einsum)
    return _by_key(key, log_decay, einsum)


class _ByHead(NamedTuple):
    """One decay a head and token, or none: the decays between all pairs of tokens are a matrix."""

    key: jax.Array
    decays: jax.Array | None  # [B, H, C, C]
    since: jax.Array
    until: jax.Array
    einsum: Einsum

    def scores(self, query: jax.Array) -> jax.Array:
        # selected before anything multiplies them: a pair that nobody reads may have overflowed
        products = jnp.where(_causal(query), self.einsum("...tk,...sk->...ts", query, self.key), 0)
        return products if self.decays is None else products * self.decays

    def gradients(self, query: jax.Array, d_scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_products = jnp.where(_causal(query, -1), d_scores, 0)
        d_products = d_products if self.decays is None else d_products * self.decays
        return (
            self.einsum("...ts,...sk->...tk", d_products, self.key),
            self.einsum("...ts,...tk->...sk", d_products, query),
        )


def _causal(x: jax.Array, shift: int = 0) -> np.ndarray:
    return np.tri(x.shape[-2], k=shift, dtype=bool)


def _by_head(key: jax.Array, log_decay: jax.Array | None, einsum: Einsum) -> _ByHead:
    if log_decay is None:
        one = jnp.ones((1, 1, key.shape[-2], 1), key.dtype)
        return _ByHead(key, None, one, one, einsum)
    decays, since, until = _decays_by_head(log_decay)
    return _ByHead(key, decays, since, until, einsum)


@jax.jit  # traced once, where forward and backward both need it
def _decays_by_head(log_decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decays between all pairs of tokens `[B, H, C, C]`, since the chunk's start and until its end, `[B, H, C, 1]`.

    A difference of running sums would lose what follows a huge gate, so it is taken of either part and added last.
    """
    C = log_decay.shape[-2]
    causal = np.tril(np.ones((C, C), log_decay.dtype))
    parts = jnp.concatenate(split(log_decay), -1)
    sums = jnp.einsum("tu,...ud->...td", causal, parts, precision=lax.Precision.HIGHEST)
    runs = sums[..., :, None, :] - sums[..., None, :, :]
    pairs = jnp.exp(jnp.where(causal > 0, runs[..., 0] + runs[..., 1], -jnp.inf))
    return pairs, jnp.exp(sums.sum(-1, keepdims=True)), pairs[..., -1, :, None]


class _ByKey(NamedTuple):
    """One decay a key dim: small blocks token by token, then pairs of blocks."""

    key: jax.Array
    log_decay: jax.Array
    decays: dict[int, Decays]  # by the size of a block
    decayed: list[jax.Array]  # keys of the smallest blocks, see `_keys_in_blocks`
    einsum: Einsum

    @property
    def since(self) -> jax.Array:
        return self.decays[self.key.shape[-2]].since

    @property
    def until(self) -> jax.Array:
        return self.decays[self.key.shape[-2]].until

    def scores(self, query: jax.Array) -> jax.Array:
        blocks = _scores_in_blocks(query, self.decayed, self.einsum)
        for size in self.sizes():
            _, later = halves(query * self.decays[size].since, size)
            corner = self.einsum("...tk,...sk->...ts", later, self.earlier(size))
            upper, lower = blocks[:, :, 0::2], blocks[:, :, 1::2]
            top = jnp.concatenate([upper, jnp.zeros_like(upper)], -1)
            blocks = jnp.concatenate([top, jnp.concatenate([corner, lower], -1)], -2)
        return blocks[:, :, 0]

    def gradients(self, query: jax.Array, d_scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        dq, dk = _gradients_in_blocks(query, d_scores, self.log_decay, self.decayed, self.einsum)
        for size in self.sizes():
            d_corner = corners(d_scores, size)
            _, later = halves(query * self.decays[size].since, size)
            read = self.einsum("...ts,...sk->...tk", d_corner, self.earlier(size))
            dq = dq + in_second(read) * self.decays[size].since
            dk = dk + in_first(self.einsum("...ts,...tk->...sk", d_corner, later)) * self.decays[size].until
        return dq, dk

    def sizes(self) -> list[int]:
        return list(self.decays)[:-1]

    def earlier(self, size: int) -> jax.Array:
        return halves(self.key * self.decays[size].until, size)[0]


def _by_key(key: jax.Array, log_decay: jax.Array, einsum: Einsum) -> _ByKey:
    base = min(BASE, key.shape[-2])
    return _ByKey(key, log_decay, all_decays(log_decay, base), _keys_in_blocks(key, log_decay, base), einsum)


def _in_blocks(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def _keys_in_blocks(key: jax.Array, log_decay: jax.Array, size: int) -> list[jax.Array]:
    """For each token of a block, the block's keys up to it, decayed to it: `[B, H, C/size, t+1, K]`."""
    key, step = _in_blocks(key, size), _in_blocks(jnp.exp(log_decay), size)
    decayed = [key[..., :1, :]]
    for t in range(1, size):
        decayed.append(jnp.concatenate([decayed[-1] * step[..., t : t + 1, :], key[..., t : t + 1, :]], -2))
    return decayed


def _scores_in_blocks(query: jax.Array, decayed: list[jax.Array], einsum: Einsum) -> jax.Array:
    """Scores inside blocks, `[B, H, C/size, size, size]`."""
    size = len(decayed)
    query = _in_blocks(query, size)
    rows = [einsum("...tk,...sk->...ts", query[..., t : t + 1, :], keys) for t, keys in enumerate(decayed)]
    return jnp.concatenate([jnp.pad(row, ((0, 0),) * 4 + ((0, size - 1 - t),)) for t, row in enumerate(rows)], -2)


def _gradients_in_blocks(
    query: jax.Array,
    d_scores: jax.Array,
    log_decay: jax.Array,
    decayed: list[jax.Array],
    einsum: Einsum,
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of query and key from pairs of different tokens of the same block, `[B, H, C, K]`."""
    size, shape = len(decayed), query.shape
    query, step = _in_blocks(query, size), _in_blocks(jnp.exp(log_decay), size)
    d_scores = diagonal_blocks(d_scores, size)
    dq, dk = [], []
    carried = jnp.zeros_like(query)  # cotangent of the keys decayed to token t, from the tokens after t
    for t in range(size - 1, 0, -1):
        row = d_scores[..., t : t + 1, :t]
        dq.append(einsum("...ts,...sk->...tk", row, decayed[t][..., :t, :]))
        dk.append(carried[..., t:, :])
        carried = (carried[..., :t, :] + row.mT * query[..., t : t + 1, :]) * step[..., t : t + 1, :]
    dq.append(jnp.zeros_like(carried))
    dk.append(carried)
    return jnp.concatenate(dq[::-1], -2).reshape(shape), jnp.concatenate(dk[::-1], -2).reshape(shape)


def total_decay(log_decay: jax.Array | None) -> jax.Array:
    """From a chunk's start to its end, `[B, H, 1 or K]`.

    By sums: a product of factors just below 1 is rounded down each time, and thousands of totals multiply a state.
    """
    if log_decay is None:
        return jnp.ones((1, 1, 1), np.float32)
    coarse, fine = split(log_decay)
    return jnp.exp(coarse.sum(-2)) * jnp.exp(fine.sum(-2))


def split(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gates as multiples of 1/256, whose sums are exact, and remainders, whose sums are tiny."""
    # sums of infinities would be NaN
    gates = jnp.maximum(log_decay, _lowest(log_decay))
    coarse = jnp.round(gates * 256) / 256
    return coarse, gates - coarse


def _lowest(log_decay: jax.Array) -> float:
    """Gates from here down forget everything: `exp` is exactly 0, whatever it is multiplied by."""
    return -200.0 if log_decay.dtype == jnp.float32 else -1600.0


def gate_gradient(
    log_decay: jax.Array, arriving: jax.Array, leaving: jax.Array, through: jax.Array, einsum: Einsum
) -> jax.Array:
    """Cotangent of a gate: all that flows across its token, from earlier writes to later reads, `[B, H, C, 1 or D]`.

    `arriving` counts what tokens of the chunk read less what they wrote for others of the chunk, so that what passes
    between two tokens on the same side cancels; `leaving` is what tokens wrote for later chunks, `through [B, H, D]`
    what earlier chunks wrote for later ones. A token's reading of itself crosses no gate and must not be in any of
    them: its rounding would drown small gradients.
    """
    if log_decay.shape[-1] == 1:
        arriving, leaving, through = (x.sum(-1, keepdims=True) for x in (arriving, leaving, through))
    ones = np.ones((arriving.shape[-2],) * 2, arriving.dtype)
    # a matrix for each head: with one for all XLA's CPU backend transposes arrays, which costs more than the product
    later, earlier = (jnp.broadcast_to(x, (*arriving.shape[:2], *x.shape)) for x in (np.triu(ones), np.tril(ones, -1)))
    after, before = einsum("...ts,...sd->...td", later, arriving), einsum("...ts,...sd->...td", earlier, leaving)
    flow = after + before + through[..., None, :]
    # across a gate that forgets everything nothing flows, and what cancels leaves no rounding
    return jnp.where(log_decay <= _lowest(log_decay), 0, flow)


def diagonal_blocks(x: jax.Array, size: int) -> jax.Array:
    """The blocks `[..., C/size, size, size]` on the diagonal of `x [..., C, C]`."""
    count = x.shape[-1] // size
    x = x.reshape(*x.shape[:-2], count, size, count, size)
    return jnp.moveaxis(jnp.diagonal(x, axis1=-4, axis2=-2), -1, -3)


def corners(x: jax.Array, size: int) -> jax.Array:
    """The lower left quarter of each diagonal block of `2 · size`, `[..., C/2/size, size, size]`."""
    return diagonal_blocks(x, 2 * size)[..., size:, :size]
