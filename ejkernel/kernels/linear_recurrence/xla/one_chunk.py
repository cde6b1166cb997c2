"""The gated linear recurrence inside one chunk of tokens, forward and backward; `docs/linear_recurrence.md` derives it.

Everything here is `[B, H, C, ·]` in the dtype of the states.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.scores import Einsum, gate_gradient, pairs, total_decay
from ejkernel.kernels.chunks.walk import Mirror

Passing = tuple[jax.Array, jax.Array]  # what is kept of a state, and what is added to it


class Chunk(NamedTuple):
    """One chunk's arrays, key and value heads repeated for their query heads."""

    query: jax.Array  # [B, H, C, K]
    key: jax.Array  # [B, H, C, K]
    value: jax.Array  # [B, H, C, V]
    log_decay: jax.Array | None  # [B, H, C, 1] or [B, H, C, K]
    value_log_decay: jax.Array | None  # [B, H, C, V]


class Gradients(NamedTuple):
    """Cotangents of a chunk's arrays."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    value_log_decay: jax.Array | None


class Effect(NamedTuple):
    """What a chunk makes of any state `S` at its start: output `within + weight · query S`, end `kept S + written`."""

    query: jax.Array  # [B, H, C, K]
    weight: jax.Array | None  # [B, H, C, 1 or V]
    within: jax.Array  # [B, H, C, V]
    kept: jax.Array  # [B, H, 1 or K, 1 or V]
    written: jax.Array  # [B, H, K, V]

    @property
    def passing(self) -> Passing:
        """What takes a state from the chunk's start to its end."""
        return self.kept, self.written


def effect(chunk: Chunk, einsum: Einsum) -> Effect:
    """What a chunk does, whatever the state at its start."""
    q, k, v = chunk[:3]
    between = pairs(k, chunk.log_decay, einsum)
    scores, since, until = between.scores(q), between.since, between.until
    within = einsum("...ts,...sv->...tv", scores, v)
    written = einsum("...tk,...tv->...kv", k * until, v)
    kept = total_decay(chunk.log_decay)[..., None]
    if since.shape[-1] == 1:  # weighs what is read, which costs a pass less than weighing the queries
        return Effect(q, since, within, kept, written)
    return Effect(q * since, None, within, kept, written)


def end(passing: Passing, state: jax.Array, einsum: Einsum) -> tuple[jax.Array, None]:
    """The state at a chunk's end, or the cotangent of that at its start from that at its end."""
    kept, added = passing
    return kept * state + added, None


mirror = end


def output(effect: Effect, state: jax.Array, found: None, einsum: Einsum) -> jax.Array:
    """What the chunk's tokens read, unscaled."""
    read = einsum("...tk,...kv->...tv", effect.query, state)
    return effect.within + (read if effect.weight is None else read * effect.weight)


def backward(chunk: Chunk, state: jax.Array, d_output: jax.Array, mirrored: Mirror, einsum: Einsum) -> Gradients:
    """Cotangents, from those of the unscaled output and of the state at the chunk's end, which `mirrored` knows."""
    q, k, v, do = *chunk[:3], d_output
    between = pairs(k, chunk.log_decay, einsum)
    scores, since, until = between.scores(q), between.since, between.until
    total = total_decay(chunk.log_decay)[..., None]
    d_state, _ = mirrored((total, einsum("...tk,...tv->...kv", q * since, do)))
    d_scores = einsum("...tv,...sv->...ts", do, v)
    dq_pairs, dk_pairs = between.gradients(q, d_scores)
    dq_state = einsum("...tv,...kv->...tk", do, state) * since
    dk_state = einsum("...tv,...kv->...tk", v, d_state) * until
    dv = einsum("...ts,...tv->...sv", scores, do) + einsum("...tk,...kv->...tv", k * until, d_state)
    da = None
    if chunk.log_decay is not None:
        through = (total * state * d_state).sum(-1)
        da = gate_gradient(chunk.log_decay, q * (dq_pairs + dq_state) - k * dk_pairs, k * dk_state, through, einsum)
    own = jnp.diagonal(d_scores, axis1=-2, axis2=-1)[..., None]
    return Gradients(dq_pairs + dq_state + own * k, dk_pairs + dk_state + own * q, dv, da, None)
