"""Device code: a program convolves a block of tokens and channels, whose tokens lie along the sublanes.

Tokens are written to scratch memory in float32, from which loads that begin between sublanes give them delayed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.convolution.pallas.plan import EDGE, LANES, Sizes

F32 = jnp.float32
Masks = tuple[jax.Array, jax.Array] | None


class Place(NamedTuple):
    """Which block of a row it is, and whether there is one before it and behind it."""

    number: Any
    is_first: Any
    is_last: Any

    @staticmethod
    def of(axis: int) -> "Place":
        number = pl.program_id(axis)
        return Place(number, number == 0, number == pl.num_programs(axis) - 1)


class Block:
    """A program's arrays by name, one tile of lanes at a time."""

    def __init__(self, sizes: Sizes, names: tuple[str, ...], refs: tuple[Any, ...], place: Place) -> None:
        self.sizes, self.place = sizes, place
        self.arrays = dict(zip(names, refs, strict=True))

    def tiles(self) -> list[slice]:
        """The channels, so many that a token's are one row of registers."""
        return [slice(first, first + LANES) for first in range(0, self.sizes.channels, LANES)]

    def weights(self, tile: slice) -> list[jax.Array]:
        """The weight's rows, that of the token itself first."""
        taps = self.sizes.taps
        return [self.arrays["weight"][taps - 1 - lag : taps - lag, tile] for lag in range(taps)]

    def load_before(self, tile: slice) -> None:
        """Writes the tokens before the block to scratch memory: before a row's first ones its state, or 0."""
        before = self.arrays["before"][0, :, tile].astype(F32)[-EDGE:]
        self.arrays["tokens"][:EDGE] = jnp.where(self.place.is_first, 0.0, before)
        if "states" in self.arrays:

            @pl.when(self.place.is_first)
            def _() -> None:
                states = self.arrays["states"][0, :, tile].astype(F32)
                self.arrays["tokens"][EDGE - self.sizes.history : EDGE] = states

    def load_masks(self) -> None:
        """Turns positions, which lie along the lanes, into columns."""
        columns, shape = self.arrays["places"][0].T, self.arrays["masks"].shape[1:]
        for row in range(2):
            self.arrays["masks"][row] = jnp.broadcast_to(columns[: shape[0], row : row + 1], shape)

    def masks(self, first: Any, size: int) -> Masks:
        """Positions and use of so many tokens from the `first` on, the same in all lanes."""
        position, used = (self.arrays["masks"][row, pl.ds(first, size)] for row in range(2))
        return position, used

    def taps(self, first: Any, size: int, masks: Masks) -> list[jax.Array]:
        """So many tokens from the `first` on, delayed by 0 … `W - 1` tokens."""
        rows = [self.arrays["tokens"][pl.ds(first + EDGE - lag, size)] for lag in range(self.sizes.taps)]
        if masks is None:
            return rows
        return [jnp.where(masks[0] >= lag, row, 0.0) for lag, row in enumerate(rows)]

    def sums(self, taps: list[jax.Array], weights: list[jax.Array], tile: slice) -> jax.Array:
        """What is activated, always added up in the same order."""
        total = taps[0] * weights[0]
        for tap, weight in zip(taps[1:], weights[1:], strict=True):
            total = total + tap * weight
        return total + self.arrays["bias"][0:1, tile] if "bias" in self.arrays else total

    def over_rows(self, body: Callable[[Any, Any], Any], start: Any) -> Any:
        """`body(first, carry)` for each group of tokens."""
        rows = self.sizes.rows
        turns = self.sizes.tokens // rows

        def step(i: Any, carry: Any) -> Any:
            return body(pl.multiple_of(i * rows, rows), carry)

        return jax.lax.fori_loop(0, turns, step, start, unroll=min(2, turns))


def forward(sizes: Sizes, names: tuple[str, ...], plain: Any, *refs: Any) -> None:
    """The output of a block."""
    block = Block(sizes, names, refs, Place.of(2))

    def run(masked: bool) -> None:
        if masked:
            block.load_masks()
        for tile in block.tiles():
            _forward_tile(block, tile, masked)

    _by_need(sizes, plain, pl.program_id(0), block.place, run)


def _by_need(sizes: Sizes, plain: Any, row: Any, place: Place, run: Callable[[bool], None]) -> None:
    """Masks cost time, and most blocks need none."""
    if not sizes.masked:
        run(False)
        return
    needs = plain[row, place.number] == 0
    pl.when(needs)(lambda: run(True))
    pl.when(jnp.logical_not(needs))(lambda: run(False))


def _forward_tile(block: Block, tile: slice, masked: bool) -> None:
    arrays, sizes = block.arrays, block.sizes
    weights = block.weights(tile)
    block.load_before(tile)

    def step(first: Any, carry: None) -> None:
        rows = pl.ds(first, sizes.rows)
        own = arrays["x"][0, rows, tile].astype(F32)
        arrays["tokens"][pl.ds(first + EDGE, sizes.rows)] = own
        masks = block.masks(first, sizes.rows) if masked else None
        output = block.sums(block.taps(first, sizes.rows, masks), weights, tile)
        if sizes.silu:
            output = output * jax.nn.sigmoid(output)
        if masks is not None:
            output = jnp.where(masks[0] >= 0, output, 0.0)
        arrays["output"][0, rows, tile] = output.astype(arrays["output"].dtype)

    block.over_rows(step, None)


def backward(sizes: Sizes, names: tuple[str, ...], plain: Any, *refs: Any) -> None:
    """`d_x` of a block, and what its tokens contribute to `d_sums`: rows of the weight's cotangent and the bias's."""
    block = Block(sizes, names, refs, Place.of(2))

    @pl.when(block.place.is_first & (pl.program_id(1) == 0))
    def _() -> None:
        block.arrays["d_sums"][...] = jnp.zeros_like(block.arrays["d_sums"])

    def run(masked: bool) -> None:
        if masked:
            block.load_masks()
        for tile in block.tiles():
            _backward_tile(block, tile, masked)

    _by_need(sizes, plain, pl.program_id(1), block.place, run)


def _backward_tile(block: Block, tile: slice, masked: bool) -> None:
    arrays, sizes = block.arrays, block.sizes
    weights, has_bias = block.weights(tile), "bias" in arrays
    block.load_before(tile)

    def gradient(first: Any, size: int, x: jax.Array, d_output: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Cotangents of sums, which go to scratch memory, and the tokens that they are sums of."""
        masks = block.masks(first, size) if masked else None
        if masks is not None:  # outside of the row there may be anything
            x = jnp.where(masks[0] >= 0, x, 0.0)
        arrays["tokens"][pl.ds(first + EDGE, size)] = x
        taps = block.taps(first, size, masks)
        if sizes.silu:
            total = block.sums(taps, weights, tile)
            share = jax.nn.sigmoid(total)
            d_output = d_output * (share * (1.0 + total * (1.0 - share)))
        if masks is not None:
            d_output = jnp.where(masks[1] > 0, d_output, 0.0)
        arrays["d_tokens"][pl.ds(first, size)] = d_output
        return d_output, taps

    def step(first: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = pl.ds(first, sizes.rows)
        x, d_output = (arrays[name][0, rows, tile].astype(F32) for name in ("x", "d_output"))
        d_total, taps = gradient(first, sizes.rows, x, d_output)
        products = [d_total * tap for tap in taps[::-1]] + [d_total] * has_bias
        return tuple(
            each + product.reshape(-1, EDGE, LANES).sum(0) for each, product in zip(carry, products, strict=True)
        )

    nothing = jnp.zeros((EDGE, LANES), F32)
    found = block.over_rows(step, (nothing,) * (sizes.taps + has_bias))
    for i, each in enumerate(found):
        arrays["d_sums"][i : i + 1, tile] += each.sum(0, keepdims=True)
    behind = [arrays[name][0, :, tile].astype(F32)[:EDGE] for name in ("behind", "d_behind")]
    gradient(sizes.tokens, EDGE, *behind)

    @pl.when(block.place.is_last)
    def _() -> None:
        arrays["d_tokens"][sizes.tokens :] = nothing

    def write(first: Any, carry: None) -> None:
        total = arrays["d_tokens"][pl.ds(first, sizes.rows)] * weights[0]
        for lag in range(1, sizes.taps):
            later = arrays["d_tokens"][pl.ds(first + lag, sizes.rows)]
            if masked:
                later = jnp.where(arrays["masks"][0, pl.ds(first + lag, sizes.rows)] >= lag, later, 0.0)
            total = total + later * weights[lag]
        arrays["d_x"][0, pl.ds(first, sizes.rows), tile] = total.astype(arrays["d_x"].dtype)

    block.over_rows(write, None)
