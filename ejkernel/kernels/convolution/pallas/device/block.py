"""Device code: a program convolves a block of tokens and channels, with tokens along the sublanes.

Tokens are written to scratch memory in float32. Loads from there at shifted rows give the tokens delayed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.convolution.pallas.plan import EDGE, LANES, Sizes

F32 = jnp.float32
Masks = tuple[jax.Array, jax.Array] | None


class Block:
    """A program's arrays by name, and the index of its block of tokens in the row."""

    def __init__(self, sizes: Sizes, names: tuple[str, ...], refs: tuple[Any, ...]) -> None:
        self.sizes, self.arrays = sizes, dict(zip(names, refs, strict=True))
        self.number = pl.program_id(2)
        self.is_first, self.is_last = self.number == 0, self.number == pl.num_programs(2) - 1

    def tiles(self) -> list[slice]:
        """The channels in tiles of `LANES`."""
        return [slice(first, first + LANES) for first in range(0, self.sizes.channels, LANES)]

    def weights(self, tile: slice) -> list[jax.Array]:
        """The weight's rows, in order of their lags."""
        taps = self.sizes.taps
        return [self.arrays["weight"][taps - 1 - lag : taps - lag, tile] for lag in range(taps)]

    def load_before(self, tile: slice) -> None:
        """Writes the tokens before the block to scratch memory; before the row's first block its state, or 0."""
        before = self.arrays["before"][0, :, tile].astype(F32)[-EDGE:]
        self.arrays["tokens"][:EDGE] = jnp.where(self.is_first, 0.0, before)
        if "states" in self.arrays:

            @pl.when(self.is_first)
            def _() -> None:
                states = self.arrays["states"][0, :, tile].astype(F32)
                self.arrays["tokens"][EDGE - self.sizes.history : EDGE] = states

    def load_masks(self) -> None:
        """Transposes positions and use, which lie along the lanes, to lie along the sublanes."""
        columns, shape = self.arrays["places"][0].T, self.arrays["masks"].shape[1:]
        for row in range(2):
            self.arrays["masks"][row] = jnp.broadcast_to(columns[: shape[0], row : row + 1], shape)

    def masks(self, first: Any, size: int) -> Masks:
        """Positions and use of `size` tokens from `first` on, the same in all lanes."""
        position, used = (self.arrays["masks"][row, pl.ds(first, size)] for row in range(2))
        return position, used

    def taps(self, first: Any, size: int, masks: Masks) -> list[jax.Array]:
        """`size` tokens from `first` on, delayed by 0 to `W - 1` tokens."""
        rows = [self.arrays["tokens"][pl.ds(first + EDGE - lag, size)] for lag in range(self.sizes.taps)]
        if masks is None:
            return rows
        return [jnp.where(masks[0] >= lag, row, 0.0) for lag, row in enumerate(rows)]

    def sums(self, taps: list[jax.Array], weights: list[jax.Array], tile: slice) -> jax.Array:
        """The sums before the activation, always added up in the same order."""
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
    _run_tiles(Block(sizes, names, refs), plain, 0, _forward_tile)


def _run_tiles(block: Block, plain: Any, row_axis: int, run: Callable[[Block, slice, bool], None]) -> None:
    """Runs all tiles, without masks if the block needs none, as most do: masks cost time."""

    def tiles(masked: bool) -> None:
        if masked:
            block.load_masks()
        for tile in block.tiles():
            run(block, tile, masked)

    if not block.sizes.masked:
        tiles(False)
        return
    needs_masks = plain[pl.program_id(row_axis), block.number] == 0
    pl.when(needs_masks)(lambda: tiles(True))
    pl.when(jnp.logical_not(needs_masks))(lambda: tiles(False))


def _forward_tile(block: Block, tile: slice, masked: bool) -> None:
    arrays, sizes = block.arrays, block.sizes
    weights = block.weights(tile)
    block.load_before(tile)

    def step(first: Any, carry: None) -> None:
        rows = pl.ds(first, sizes.rows)
        arrays["tokens"][pl.ds(first + EDGE, sizes.rows)] = arrays["x"][0, rows, tile].astype(F32)
        masks = block.masks(first, sizes.rows) if masked else None
        output = block.sums(block.taps(first, sizes.rows, masks), weights, tile)
        if sizes.silu:
            output = output * jax.nn.sigmoid(output)
        if masks is not None:
            output = jnp.where(masks[0] >= 0, output, 0.0)
        arrays["output"][0, rows, tile] = output.astype(arrays["output"].dtype)

    block.over_rows(step, None)


def backward(sizes: Sizes, names: tuple[str, ...], plain: Any, *refs: Any) -> None:
    """`d_x` of a block, and its tokens' part of `d_sums`: the rows of the weight's cotangent, then the bias's."""
    block = Block(sizes, names, refs)

    @pl.when(block.is_first & (pl.program_id(1) == 0))
    def _() -> None:
        block.arrays["d_sums"][...] = jnp.zeros_like(block.arrays["d_sums"])

    _run_tiles(block, plain, 1, _backward_tile)


def _backward_tile(block: Block, tile: slice, masked: bool) -> None:
    arrays, sizes = block.arrays, block.sizes
    weights, has_bias = block.weights(tile), "bias" in arrays
    block.load_before(tile)

    def gradient(first: Any, size: int, x: jax.Array, d_output: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The cotangents of sums, which are also written to scratch memory, and the tokens in each sum."""
        masks = block.masks(first, size) if masked else None
        if masks is not None:  # tokens past the end of the row are undefined
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

    zeros = jnp.zeros((EDGE, LANES), F32)
    partial_sums = block.over_rows(step, (zeros,) * (sizes.taps + has_bias))
    for i, each in enumerate(partial_sums):
        arrays["d_sums"][i : i + 1, tile] += each.sum(0, keepdims=True)
    behind = [arrays[name][0, :, tile].astype(F32)[:EDGE] for name in ("behind", "d_behind")]
    gradient(sizes.tokens, EDGE, *behind)

    @pl.when(block.is_last)
    def _() -> None:
        arrays["d_tokens"][sizes.tokens :] = zeros

    def write(first: Any, carry: None) -> None:
        total = arrays["d_tokens"][pl.ds(first, sizes.rows)] * weights[0]
        for lag in range(1, sizes.taps):
            later = arrays["d_tokens"][pl.ds(first + lag, sizes.rows)]
            if masked:
                later = jnp.where(arrays["masks"][0, pl.ds(first + lag, sizes.rows)] >= lag, later, 0.0)
            total = total + later * weights[lag]
        arrays["d_x"][0, pl.ds(first, sizes.rows), tile] = total.astype(arrays["d_x"].dtype)

    block.over_rows(write, None)
