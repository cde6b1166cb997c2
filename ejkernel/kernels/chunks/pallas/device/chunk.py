"""What a chunk of tokens does to a state, whatever its gates are. States are `[V, K]`: key dims lie along the lanes."""

from typing import NamedTuple

import jax

from ejkernel.kernels.chunks.pallas.device.products import index


class Chunk(NamedTuple):
    """A chunk's scores, and its decayed queries and keys, as the matrix unit's operands.

    Decays are taken relative to a reference token, so the output for a state `S` at the chunk's start is
    `scores value + query (start_decay ⊙ S)ᵀ`, and the state at its end `total_decay ⊙ S + end_decay ⊙ valueᵀ key`.
    """

    scores: jax.Array  # [C, C]
    query: jax.Array  # [C, K], decayed since the reference
    key: jax.Array  # [C, K], decayed until the reference
    start_decay: jax.Array | None  # from the chunk's start to the reference [1, K]
    end_decay: jax.Array | None  # from the reference to the chunk's end [1, K]
    total_decay: jax.Array | None  # [1, K] or [1, 1]


class Cotangents(NamedTuple):
    """Those that a chunk has whatever its gates are."""

    scores: jax.Array  # [C, C], not masked
    query: jax.Array  # [C, K], of the decayed query
    key: jax.Array  # [C, K], of the decayed key


def scaled(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """`x · factor`, if there is one."""
    return x if factor is None else x * factor


def causal(size: int, reverse: bool, strict: bool = False) -> jax.Array:
    """Which token sees which `[size, size]`; itself unless `strict`."""
    row, column = index((size, size), 0), index((size, size), 1)
    if strict:
        return row < column if reverse else row > column
    return row <= column if reverse else row >= column
