"""The gated linear recurrence inside one chunk of tokens, forward and backward; `docs/linear_recurrence.md` derives it.

Everything here is `[B, H, C, ·]` in the dtype of the states.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.scores import Einsum, gate_gradient, pairs, total_decay
from ejkernel.kernels.chunks.walk import CarryBack, ChunkMath

# What takes a state `S` to the chunk's end, or its cotangent to the chunk's start: `S` times the first plus the second.
Transition = tuple[jax.Array, jax.Array]


class Arrays(NamedTuple):
    """Arrays of tokens, or their cotangents; shapes are those of a chunk, with shared heads repeated."""

    query: jax.Array  # [B, H, C, K]
    key: jax.Array  # [B, H, C, K]
    value: jax.Array  # [B, H, C, V]
    log_decay: jax.Array | None  # [B, H, C, 1] or [B, H, C, K]
    value_log_decay: jax.Array | None  # [B, H, C, V]


class Effect(NamedTuple):
    """What a chunk does to any state `S` at its start: output `within + weight · query S`, end `decay S + written`."""

    query: jax.Array  # [B, H, C, K]
    weight: jax.Array | None  # [B, H, C, 1 or V]
    within: jax.Array  # [B, H, C, V]
    decay: jax.Array  # [B, H, 1 or K, 1 or V]
    written: jax.Array  # [B, H, K, V]

    @property
    def transition(self) -> Transition:
        return self.decay, self.written


def effect(chunk: Arrays, einsum: Einsum) -> Effect:
    """The effect of a chunk on any state at its start."""
    q, k, v = chunk[:3]
    between = pairs(k, chunk.log_decay, einsum)
    scores, since, until = between.scores(q), between.since, between.until
    within = einsum("...ts,...sv->...tv", scores, v)
    written = einsum("...tk,...tv->...kv", k * until, v)
    decay = total_decay(chunk.log_decay)[..., None]
    if since.shape[-1] == 1:  # weighs what is read, which costs a pass less than weighing the queries
        return Effect(q, since, within, decay, written)
    return Effect(q * since, None, within, decay, written)


def advance(transition: Transition, state: jax.Array, einsum: Einsum) -> tuple[jax.Array, None]:
    """The state at a chunk's end, or the cotangent of that at its start from that at its end."""
    decay, added = transition
    return decay * state + added, None


def output(effect: Effect, state: jax.Array, extra: None, einsum: Einsum) -> jax.Array:
    """What the chunk's tokens read, unscaled."""
    read = einsum("...tk,...kv->...tv", effect.query, state)
    return effect.within + (read if effect.weight is None else read * effect.weight)


def backward(chunk: Arrays, state: jax.Array, d_output: jax.Array, carry_back: CarryBack, einsum: Einsum) -> Arrays:
    """Cotangents of the chunk's arrays, from those of the unscaled output and of the state at the chunk's end."""
    q, k, v, do = *chunk[:3], d_output
    between = pairs(k, chunk.log_decay, einsum)
    scores, since, until = between.scores(q), between.since, between.until
    total = total_decay(chunk.log_decay)[..., None]
    d_state, _ = carry_back((total, einsum("...tk,...tv->...kv", q * since, do)))
    d_scores = einsum("...tv,...sv->...ts", do, v)
    dq_pairs, dk_pairs = between.gradients(q, d_scores)
    dq_state = einsum("...tv,...kv->...tk", do, state) * since
    dk_state = einsum("...tv,...kv->...tk", v, d_state) * until
    dv = einsum("...ts,...tv->...sv", scores, do) + einsum("...tk,...kv->...tv", k * until, d_state)
    da = None
    if chunk.log_decay is not None:
        through = (total * state * d_state).sum(-1)
        da = gate_gradient(chunk.log_decay, q * (dq_pairs + dq_state) - k * dk_pairs, k * dk_state, through, einsum)
    d_diagonal = jnp.diagonal(d_scores, axis1=-2, axis2=-1)[..., None]
    return Arrays(dq_pairs + dq_state + d_diagonal * k, dk_pairs + dk_state + d_diagonal * q, dv, da, None)


MATH = ChunkMath(effect, advance, output, advance, backward)
