"""What a chunk of tokens does to a state, whatever its gates are, forward and backward.

States are `[V, K]` here, so that a decay of each key dim lies along the lanes.
"""

from typing import NamedTuple

import jax

from ejkernel.kernels.linear_recurrence.pallas.device.products import pairs, rows, sums


class Chunk(NamedTuple):
    """A chunk's scores, and its queries and keys as states meet them, the operands in what is multiplied in.

    Its tokens read `scores · value + query (entering ⊙ S)ᵀ` of a state `S`, and leave
    `total ⊙ S + leaving ⊙ valueᵀ key`.
    """

    scores: jax.Array  # [C, C]
    query: jax.Array  # [C, K]
    key: jax.Array  # [C, K]
    entering: jax.Array | None  # [1, K]
    leaving: jax.Array | None  # [1, K]
    total: jax.Array | None  # [1, K] or [1, 1]


def scaled(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """`x · factor`, if there is one."""
    return x if factor is None else x * factor


def read(chunk: Chunk, value: jax.Array, state: jax.Array) -> jax.Array:
    """The output of a chunk's tokens."""
    seen = scaled(state, chunk.entering).astype(value.dtype)
    return rows(chunk.scores, value) + pairs(chunk.query, seen)


def written(chunk: Chunk, value: jax.Array, state: jax.Array) -> jax.Array:
    """The state at the chunk's end."""
    return scaled(state, chunk.total) + scaled(sums(value, chunk.key), chunk.leaving)


class Mirrored(NamedTuple):
    """Cotangents that any chunk has, whatever its gates are."""

    scores: jax.Array  # [C, C], not masked
    query: jax.Array  # [C, K], of the query as states meet it
    key: jax.Array  # [C, K], of the key as states meet it
    value: jax.Array  # [C, V]
    state: jax.Array  # [V, K], at the chunk's start


def mirrored(chunk: Chunk, value: jax.Array, state: jax.Array, d_output: jax.Array, d_state: jax.Array) -> Mirrored:
    """Cotangents from those of the output and of the state at the chunk's end."""
    dtype = value.dtype
    seen = scaled(state, chunk.entering).astype(dtype)
    met = scaled(d_state, chunk.leaving).astype(dtype)
    return Mirrored(
        pairs(d_output, value),
        rows(d_output, seen),
        rows(value, met),
        sums(chunk.scores, d_output) + pairs(chunk.key, met),
        scaled(d_state, chunk.total) + scaled(sums(d_output, chunk.query), chunk.entering),
    )
