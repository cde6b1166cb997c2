"""Decay factors of every key or value dim inside blocks of tokens, and blocks paired up to the whole chunk.

The causal triangle of a chunk is tiled by pairs of neighbouring blocks of 1, 2, 4, … tokens: in each pair the later
block's queries read the earlier block's keys, and the border between the two splits the decay of any such pair of
tokens into two factors, one for each side. Arrays are `[B, H, C, D]`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Decays(NamedTuple):
    """Decay factors inside aligned blocks of tokens."""

    since: jax.Array  # from the block's start through this token
    until: jax.Array  # after this token to the block's end


def halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The first and the second of each pair of blocks of `size` tokens, each `[B, H, C/2/size, size, D]`."""
    pairs = x.reshape(*x.shape[:2], -1, 2, size, x.shape[-1])
    return pairs[:, :, :, 0], pairs[:, :, :, 1]


def joined(first: jax.Array, second: jax.Array) -> jax.Array:
    """Undoes `halves`."""
    pairs = jnp.stack([first, second], 3)
    return pairs.reshape(*pairs.shape[:2], -1, pairs.shape[-1])


def in_first(x: jax.Array) -> jax.Array:
    """`x` in the first halves, 0 in the second."""
    return joined(x, jnp.zeros_like(x))


def in_second(x: jax.Array) -> jax.Array:
    """`x` in the second halves, 0 in the first."""
    return joined(jnp.zeros_like(x), x)


def all_decays(log_decay: jax.Array, smallest: int) -> dict[int, Decays]:
    """Decays in blocks of `smallest` tokens, of twice that, …, of the whole chunk; products only, so none overflows."""
    step = jnp.exp(log_decay)
    decays, size, by_size = Decays(step, jnp.ones_like(step)), 1, {}
    while True:
        if size >= smallest:
            by_size[size] = decays
        if size == log_decay.shape[-2]:
            return by_size
        decays, size = _widened(decays, size), 2 * size


def _widened(decays: Decays, size: int) -> Decays:
    """Decays in blocks of twice the size: the first block's total goes to the second's tokens, and the other way."""
    first, second = (half[..., -1:, :] for half in halves(decays.since, size))
    # factors of 1 and a product rather than pieces put together: XLA's CPU backend is much faster at it
    one = jnp.ones_like(first)
    return Decays(
        _scaled(decays.since, size, jnp.stack([one, first], 3)),
        _scaled(decays.until, size, jnp.stack([second, one], 3)),
    )


def _scaled(x: jax.Array, size: int, factors: jax.Array) -> jax.Array:
    """`x` with every block of `size` tokens multiplied by its factor, `[B, H, C/2/size, 2, 1, D]`."""
    return (x.reshape(*x.shape[:2], -1, 2, size, x.shape[-1]) * factors).reshape(x.shape)
