"""One gate a key dim. How strong a chunk's gates are says relative to which tokens its decays are taken."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.chunks.pallas.device import products
from ejkernel.kernels.chunks.pallas.device.chunk import Chunk, Cotangents, causal
from ejkernel.kernels.chunks.pallas.device.products import (
    F32,
    LOWEST,
    Digits,
    cumsum_rows,
    cumsum_tiles,
    index,
    matmul,
    matmul_nt,
    matmul_tn,
    rounded,
    sums_to_end,
)

# What gates are, by how much they forget at most: little in half a chunk, little in a tile of tokens, or anything.
# Bounded ones are those of models that have `g = -5 · sigmoid(…)`: a tile has 8 tokens, which may forget 55 nats.
MILD, BOUNDED, STRONG = 0, 1, 2


def is_mild(middle: jax.Array, end: jax.Array, gates: jax.Array, limit: float) -> jax.Array:
    """Which dims' gates forget at most `exp(-limit)` in either half of a chunk `[1, K]`."""
    # so that a NaN is not mild
    return (-middle <= limit) & (middle - end <= limit) & (gates.max(0, keepdims=True) <= 0)


def kinds(gates: jax.Array, limits: tuple[float, float], reverse: bool) -> jax.Array:
    """What each dim's gates in a chunk are `[1, K]`; `limits` are those of half a chunk and of a tile."""
    middle, end = _middle_and_end(cumsum_rows(gates, reverse), reverse)
    least = cumsum_tiles(gates, reverse).min(0, keepdims=True)
    # so that a NaN is strong: a sum of it is one, but the least number may be another
    bounded = (-least <= limits[1]) & (end <= 0) & (gates.max(0, keepdims=True) <= 0)
    return jnp.where(is_mild(middle, end, gates, limits[0]), MILD, jnp.where(bounded, BOUNDED, STRONG)).astype(F32)


def _middle_and_end(decays: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """The decays through a chunk's first half and through all of it `[1, K]`."""
    C = len(decays)
    if reverse:
        return decays[C // 2 : C // 2 + 1], decays[:1]
    return decays[C // 2 - 1 : C // 2], decays[C - 1 :]


class Mild(NamedTuple):
    """A chunk whose decays are taken relative to its middle."""

    chunk: Chunk
    operands: tuple[jax.Array, jax.Array]  # query and key before they are decayed
    since: jax.Array  # decay from the middle through a token, scaled [C, K]
    until: jax.Array  # decay after a token to the middle [C, K]
    kinds: jax.Array  # `MILD`, or `STRONG` for dims whose gates are not mild after all [1, K]

    @staticmethod
    def of(query: jax.Array, key: jax.Array, gates: jax.Array, scale: float, limit: float, reverse: bool) -> "Mild":
        C, dtype = len(query), query.dtype
        decays = cumsum_rows(gates, reverse)
        middle, end = _middle_and_end(decays, reverse)
        # the scale costs nothing inside the exponent
        since = jnp.exp(decays - (middle - math.log(scale)))
        until = jnp.exp(middle - decays)
        operands, query, key = (query, key), (query * since).astype(dtype), (key * until).astype(dtype)
        scores = jnp.where(causal(C, reverse), matmul_nt(query, key), 0).astype(dtype)
        chunk = Chunk(scores, query, key, jnp.exp(middle), jnp.exp(end - middle), jnp.exp(end))
        kinds = jnp.where(is_mild(middle, end, gates, limit), MILD, STRONG).astype(F32)
        return Mild(chunk, operands, since, until, kinds)

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


class Pairs(NamedTuple):
    """Some pairs of tokens, whose decays are taken relative to a token between them or near them.

    If there are `readers`, only these rows read; a row is a token. If there are `others`, only these are read.
    """

    since: jax.Array  # decay from the reference through a token that reads [rows, K], 0 if it reads none
    until: jax.Array  # decay after a token that is read to the reference [rows, K], 0 if it is not
    visible: jax.Array  # which token reads which one [rows, C]
    readers: "Rows | None" = None
    others: "Rows | None" = None

    def add_scores(
        self, scores: list[Any], queries: Sequence[jax.Array], key: jax.Array, digits: Digits
    ) -> list[jax.Array]:
        """Scores `[C, C]`, these pairs included."""
        found = digits.product(self._reading(queries), self._read(key, digits), matmul_nt)
        if self.others and digits.split:
            found = found + self.others.beside(found)
        each = jnp.split(found, len(queries))
        return [_add(x, self._seen(found), self.readers) for x, found in zip(scores, each, strict=True)]

    def add_gradients(
        self,
        d_queries: list[Any],
        d_key: Any,
        queries: Sequence[jax.Array],
        key: jax.Array,
        d_scores: Sequence[jax.Array],
        digits: Digits,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Cotangents of queries and keys, these pairs included."""
        d_pairs = jnp.concatenate([self._seen(_rows(each, self.readers)) for each in d_scores], 0)
        d_read = digits.product(_rows(d_pairs.T, self.others), self._reading(queries), matmul)
        if self.others and digits.split:
            d_pairs = d_pairs + self.others.complement.beside(d_pairs)
        d_reading = jnp.split(digits.product(d_pairs, self._read(key, digits), matmul), len(queries))
        d_queries = [_add(x, each * self.since, self.readers) for x, each in zip(d_queries, d_reading, strict=True)]
        return d_queries, _add(d_key, d_read * self.until, self.others)

    def _reading(self, queries: Sequence[jax.Array]) -> jax.Array:
        """Decayed queries, of those that read; several kinds of them, one below the other."""
        return jnp.concatenate([_rows(query, self.readers) * self.since for query in queries], 0)

    def _read(self, key: jax.Array, digits: Digits) -> jax.Array:
        """Decayed keys `[C, K]`; if only half of them are read and have two parts, the second is in the other half."""
        decayed = _rows(key, self.others) * self.until
        if self.others is None:
            return decayed
        if digits.split is None:
            return self.others.join(decayed, jnp.zeros_like(decayed))
        return self.others.join(*digits.split(decayed, 2))

    def _seen(self, x: jax.Array) -> jax.Array:
        """`x [rows, C]` where it is visible, else 0."""
        return jnp.where(self.visible, x, 0)


class Rows(NamedTuple):
    """The first or the second of each two blocks of so many rows, each a whole number of tiles."""

    size: int
    second: bool

    @property
    def complement(self) -> "Rows":
        return Rows(self.size, not self.second)

    def of(self, x: jax.Array) -> jax.Array:
        starts = range(self.size * self.second, len(x), 2 * self.size)
        return jnp.concatenate([x[at : at + self.size] for at in starts], 0)

    def join(self, rows: jax.Array, others: jax.Array) -> jax.Array:
        """All rows, from these and the others."""
        pair = (others, rows) if self.second else (rows, others)
        starts = range(0, len(rows), self.size)
        return jnp.concatenate([each[at : at + self.size] for at in starts for each in pair], 0)

    def beside(self, x: jax.Array) -> jax.Array:
        """Columns of the other blocks where these are."""
        return pltpu.roll(x, self.size if self.second else x.shape[1] - self.size, 1)


def _rows(x: jax.Array, rows: Rows | None) -> jax.Array:
    """Some rows of `x`, or all."""
    return x if rows is None else rows.of(x)


class Blocks(NamedTuple):
    """Decays by blocks of 2, 4, 8, … tokens: tokens of a block's later half read those of its earlier half.

    They are relative to the middle of the block, so they are sums of gates over runs of tokens, never differences, and
    at most 1 if gates are at most 0. If gates are bounded, the smallest blocks are two tiles of tokens, and all
    of their pairs are relative to their middle.
    """

    pairs: list[Pairs]
    since: jax.Array  # decay from the chunk's start through a token [C, K]
    until: jax.Array  # decay after a token to the chunk's end
    total: jax.Array  # [1, K]
    kinds: jax.Array  # [1, K]
    bounded: bool
    gates: jax.Array | None  # if some of them may part sequences

    @staticmethod
    def of(
        gates: jax.Array, bounded: bool, limits: tuple[float, float], reverse: bool, joined: bool = False
    ) -> "Blocks":
        C, TILE = len(gates), products.TILE
        found = kinds(gates, limits, reverse)
        if not bounded:
            gates = jnp.maximum(gates, LOWEST)
        parting = gates if joined and not bounded else None
        # sums over the block that a token is in: through it, after it, and whole
        since, until, total, size = gates, jnp.zeros_like(gates), gates, 1
        if bounded:
            since, size = cumsum_tiles(gates, reverse), TILE
            ends = [since[at : at + 1] for at in range(0 if reverse else TILE - 1, C, TILE)]
            total = jnp.concatenate([jnp.broadcast_to(end, (TILE, gates.shape[1])) for end in ends], 0)
            until = total - since
        row, column = index((C, C), 0), index((C, C), 1)
        pairs, zeros, decays, join = [], jnp.zeros_like(gates), jnp.exp, jnp.add

        def of_halves(later: jax.Array, earlier: jax.Array) -> jax.Array:
            return _of_halves(*((earlier, later) if reverse else (later, earlier)), size)

        while size < C:
            if bounded and size == TILE:
                through = of_halves(since, -until)
                for rows in Rows(2 * TILE, False), Rows(2 * TILE, True):
                    of_rows, some = rows.of(through), rows.of(row)
                    read = column[: len(some)]
                    visible = ((some ^ read) < 2 * TILE) & ((some <= read) if reverse else (some >= read))
                    pairs.append(Pairs(jnp.exp(of_rows), jnp.exp(-of_rows), visible, rows, rows))
                # products of decays from here on, not sums: their exponentials are there
                since, until, total = jnp.exp(since), jnp.exp(until), jnp.exp(total)
                decays, join = jnp.asarray, jnp.multiply
            elif size % (2 * TILE):
                decay, second = decays(of_halves(since, until)), column if reverse else row
                visible = ((row ^ column) < 2 * size) & (second & size != 0) & ((row ^ column) & size != 0)
                pairs.append(Pairs(of_halves(decay, zeros), of_halves(zeros, decay), visible))
            else:
                decay, later = decays(of_halves(since, until)), Rows(size, not reverse)
                some, earlier = later.of(row), later.complement
                visible = (some ^ column[: len(some)]) & -size == size
                pairs.append(Pairs(later.of(decay), earlier.of(decay), visible, later, earlier))
            neighbour = _swapped(total, size)
            since, until = of_halves(join(since, neighbour), since), of_halves(until, join(until, neighbour))
            total = join(total, neighbour)
            size *= 2
        return Blocks(pairs, decays(since), decays(until), decays(total[:1]), found, bounded, parting)

    def scores(self, queries: Sequence[jax.Array], key: jax.Array, digits: Digits) -> list[jax.Array]:
        """Those of several kinds of queries with the same keys `[C, C]`; all are float32."""
        scores: list[Any] = [None if self.bounded else _own_scores(query, key) for query in queries]
        for pairs in self.pairs:
            scores = pairs.add_scores(scores, queries, key, digits)
        return scores

    def score_gradients(
        self, queries: Sequence[jax.Array], key: jax.Array, d_scores: Sequence[jax.Array], digits: Digits
    ) -> tuple[list[jax.Array], jax.Array]:
        """Cotangents of queries and keys, from those of their scores but for tokens' own, which cross no gate."""
        d_queries: list[Any] = [None for _ in queries]
        d_key: Any = None
        d_scores = [jnp.where(_own(len(key)), 0, each) for each in d_scores]
        for pairs in self.pairs:
            d_queries, d_key = pairs.add_gradients(d_queries, d_key, queries, key, d_scores, digits)
        return d_queries, d_key

    def gate_gradient(
        self, inside: jax.Array, leaving: jax.Array, through: jax.Array, exact: bool, reverse: bool
    ) -> jax.Array:
        """That of the gates, the sum of all products that cross one.

        `inside` is what a token reads of earlier ones less what later ones of the chunk read of it, `leaving` what
        later chunks read of it `[C, K]`, `through` what later chunks read of earlier ones `[1, K]`. Unless it is to be
        `exact`, it may be off by float32's rounding of all that leaves.
        """
        if self.bounded and not exact:
            return cumsum_rows(inside - leaving, not reverse) + (leaving.sum(0, keepdims=True) + through)
        if self.gates is None:
            inside = cumsum_rows(inside, not reverse)
        else:
            inside = sums_to_end(self.gates, inside, 0, reverse)
        return inside + (cumsum_rows(leaving, reverse) - leaving) + through


def _add(x: jax.Array | None, y: jax.Array, rows: Rows | None) -> jax.Array:
    """`x + y`, `y` being all rows or some; `None` is nothing."""
    if rows is None:
        return y if x is None else x + y
    if x is None:
        return rows.join(y, jnp.zeros_like(y))
    return rows.join(rows.of(x) + y, rows.complement.of(x))


def _of_halves(second: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Rows of `second` in the second of each two blocks of so many rows, of `first` in the first."""
    if size % products.TILE:
        return jnp.where(index(first.shape, 0) & size != 0, second, first)
    starts = range(0, len(first), size)
    return jnp.concatenate([(second if at & size else first)[at : at + size] for at in starts], 0)


def _swapped(x: jax.Array, size: int) -> jax.Array:
    """Each two blocks of so many rows, the second one first."""
    C = len(x)
    if size % products.TILE:
        return _of_halves(pltpu.roll(x, size, 0), pltpu.roll(x, C - size, 0), size)
    return jnp.concatenate([x[at ^ size : (at ^ size) + size] for at in range(0, C, size)], 0)


def _own(C: int) -> jax.Array:
    """Where a token reads itself."""
    return index((C, C), 0) == index((C, C), 1)


def _own_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Those of tokens with themselves, on the diagonal."""
    return jnp.where(_own(len(key)), (query * key).sum(1, keepdims=True), 0)


class Blockwise(NamedTuple):
    """A chunk whose decays are taken by blocks."""

    chunk: Chunk
    operands: tuple[jax.Array, jax.Array]  # query, scaled, and key in float32
    blocks: Blocks
    scale: float

    @staticmethod
    def of(
        query: jax.Array, key: jax.Array, scores: jax.Array, blocks: Blocks, scale: float, dtype: jax.typing.DTypeLike
    ) -> "Blockwise":
        """From a scaled query, key and their scores in float32; the matrix unit's operands have `dtype`."""
        scores, reading, read = (x.astype(dtype) for x in (scores, query * blocks.since, key * blocks.until))
        return Blockwise(Chunk(scores, reading, read, None, None, blocks.total), (query, key), blocks, scale)

    @property
    def kinds(self) -> jax.Array:
        return self.blocks.kinds

    @property
    def since(self) -> jax.Array:
        return self.blocks.since

    @property
    def until(self) -> jax.Array:
        return self.blocks.until

    def own_gradients(self, d_scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cotangents of the scaled query and of the key from tokens' own scores."""
        query, key = self.operands
        diagonal = jnp.where(_own(len(d_scores)), d_scores, 0).sum(1, keepdims=True)
        return diagonal * key, diagonal * query

    def gradients(
        self, cotangents: Cotangents, d_state: jax.Array, state: jax.Array, reverse: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Cotangents of query, key and gates."""
        query, key = self.operands
        digits = rounded(self.chunk.query.dtype)
        (dq,), dk = self.blocks.score_gradients((query,), key, (cotangents.scores,), digits)
        dq, dk_left = dq + cotangents.query * self.since, cotangents.key * self.until
        through = _through(self.chunk, state, d_state)
        exact = self.chunk.query.dtype == F32
        d_gates = self.blocks.gate_gradient(query * dq - key * dk, key * dk_left, through, exact, reverse)
        own_query, own_key = self.own_gradients(cotangents.scores)
        return (dq + own_query) * self.scale, dk + dk_left + own_key, d_gates
