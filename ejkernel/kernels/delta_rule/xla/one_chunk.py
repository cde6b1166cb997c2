"""The delta rule inside one chunk of tokens, forward and backward; `docs/delta_rule.md` derives it.

It is the gated linear recurrence with values `U` in the place of `V`, which solve the unit lower triangular system
`(I + M) U = beta (V - (K ⊙ since) S)`. All arrays are `[B, H, C, ·]`, in the dtype of the states.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.chunks.scores import Einsum, Pairs, gate_gradient, pairs, total_decay
from ejkernel.kernels.chunks.triangular import inverse
from ejkernel.kernels.chunks.walk import CarryBack, ChunkMath


class Arrays(NamedTuple):
    """Arrays of tokens, or their cotangents; shapes are those of a chunk, with shared heads repeated."""

    query: jax.Array  # [B, H, C, K]
    key: jax.Array  # [B, H, C, K]
    value: jax.Array  # [B, H, C, V]
    beta: jax.Array  # [B, H, C, 1]
    log_decay: jax.Array | None  # [B, H, C, 1] or [B, H, C, K]


class Transition(NamedTuple):
    """Takes the state `S` at a chunk's start to `decay S + writtenᵀ U`, with `U = solution (value - recalled S)`."""

    decay: jax.Array  # [B, H, 1 or K, 1]
    written: jax.Array  # keys, decayed to the chunk's end [B, H, C, K]
    solution: jax.Array  # (I + M)⁻¹ diag(beta) [B, H, C, C]
    value: jax.Array  # [B, H, C, V]
    recalled: jax.Array  # keys, decayed from the chunk's start [B, H, C, K]


class Effect(NamedTuple):
    """A chunk's transition, and what its tokens read: `query S + scores U`."""

    query: jax.Array  # decayed from the chunk's start [B, H, C, K]
    scores: jax.Array  # P [B, H, C, C]
    transition: Transition


class TransitionBack(NamedTuple):
    """Takes the cotangent `dS` of the state at a chunk's end to that at its start, `decay dS + read - recalledᵀ dR`.

    `dR = solutionᵀ (dU + written dS)` is the cotangent of the system's right sides.
    """

    decay: jax.Array
    written: jax.Array
    solution: jax.Array  # (I + M)⁻¹
    du: jax.Array  # through the output [B, H, C, V]
    read: jax.Array  # through the output [B, H, K, V]
    recalled: jax.Array  # with beta


class _System(NamedTuple):
    """A chunk's decays between tokens, and its triangular system `I + M`."""

    between: Pairs
    overlaps: jax.Array  # M without beta: scores of keys with earlier keys [B, H, C, C]
    inverse: jax.Array  # (I + M)⁻¹ [B, H, C, C]


def _system(chunk: Arrays, einsum: Einsum) -> _System:
    between = pairs(chunk.key, chunk.log_decay, einsum)
    overlaps = jnp.where(_earlier(chunk), between.scores(chunk.key), 0)
    return _System(between, overlaps, inverse(chunk.beta * overlaps, einsum))


def _earlier(chunk: Arrays) -> np.ndarray:
    return np.tri(chunk.query.shape[-2], k=-1, dtype=bool)


def effect(chunk: Arrays, einsum: Einsum) -> Effect:
    """A chunk's transition and reads, which do not depend on the state at its start."""
    between, _, solution = _system(chunk, einsum)
    decay, k = total_decay(chunk.log_decay)[..., None], chunk.key
    transition = Transition(decay, k * between.until, solution * chunk.beta.mT, chunk.value, k * between.since)
    return Effect(chunk.query * between.since, between.scores(chunk.query), transition)


def advance(transition: Transition, state: jax.Array, einsum: Einsum) -> tuple[jax.Array, jax.Array]:
    """The state at the chunk's end, and U."""
    errors = transition.value - einsum("...tk,...kv->...tv", transition.recalled, state)
    u = einsum("...ts,...sv->...tv", transition.solution, errors)
    return transition.decay * state + einsum("...tk,...tv->...kv", transition.written, u), u


def advance_back(transition: TransitionBack, d_state: jax.Array, einsum: Einsum) -> tuple[jax.Array, jax.Array]:
    """The cotangent of the state at the chunk's start, and that of the system's right sides."""
    du = transition.du + einsum("...tk,...kv->...tv", transition.written, d_state)
    dr = einsum("...ts,...tv->...sv", transition.solution, du)
    through = transition.decay * d_state + transition.read
    return through - einsum("...tk,...tv->...kv", transition.recalled, dr), dr


def compose(transition: Transition, later: jax.Array, einsum: Einsum) -> tuple[jax.Array, None]:
    """The chunk's transition composed with `later`, that of the chunks after it, both `[B, H, K + V, K]`.

    Rows are those of the matrix that a state is multiplied by, transposed, then of the state that is added, transposed.
    In this direction the added state costs only one product with the values.
    """
    K = transition.recalled.shape[-1]
    du = einsum("...tk,...kj->...tj", transition.written, later[..., :K, :])
    dr = einsum("...ts,...tj->...sj", transition.solution, du)
    read = jnp.concatenate([-transition.recalled, transition.value], -1)
    decayed = jnp.concatenate([transition.decay * later[..., :K, :], later[..., K:, :]], -2)
    return decayed + einsum("...tk,...tj->...kj", read, dr), None


def output(effect: Effect, state: jax.Array, u: jax.Array, einsum: Einsum) -> jax.Array:
    """The chunk's output, unscaled."""
    read = einsum("...tk,...kv->...tv", effect.query, state)
    return read + einsum("...ts,...sv->...tv", effect.scores, u)


def backward(chunk: Arrays, state: jax.Array, d_output: jax.Array, carry_back: CarryBack, einsum: Einsum) -> Arrays:
    """Cotangents of the chunk's arrays, from those of the unscaled output and of the state at the chunk's end."""
    q, k, v, beta, do = *chunk[:4], d_output
    between, overlaps, solution = _system(chunk, einsum)
    since, until = between.since, between.until
    scores = between.scores(q)
    errors = v - einsum("...tk,...kv->...tv", k * since, state)  # the errors
    u = einsum("...ts,...sv->...tv", solution, beta * errors)
    du = einsum("...ts,...tv->...sv", scores, do)
    read = einsum("...tk,...tv->...kv", q * since, do)
    total = total_decay(chunk.log_decay)[..., None]
    d_state, dr = carry_back(TransitionBack(total, k * until, solution, du, read, beta * (k * since)))
    d_scores = einsum("...tv,...sv->...ts", do, u)
    # strictly below the diagonal, which is 1 whatever the keys are
    d_below = jnp.where(_earlier(chunk), -einsum("...tv,...sv->...ts", dr, u), 0)
    d_beta = (dr * errors).sum(-1, keepdims=True) + (d_below * overlaps).sum(-1, keepdims=True)
    dq_pairs, dk_read = between.gradients(q, d_scores)
    dk_row, dk_column = between.gradients(k, beta * d_below)
    if chunk.log_decay is None:
        # one product of twice the rows, since a CPU packs the state once for it
        both = einsum("...tv,...kv->...tk", jnp.concatenate([do, dr], -2), state)
        dq_state, dk_start = both[..., : q.shape[-2], :], -beta * both[..., q.shape[-2] :, :]
    else:
        dq_state = einsum("...tv,...kv->...tk", do, state) * since
        dk_start = -einsum("...tv,...kv->...tk", beta * dr, state) * since
    dk_end = einsum("...tv,...kv->...tk", u, d_state) * until
    da = None
    if chunk.log_decay is not None:
        arriving = q * (dq_pairs + dq_state) + k * (dk_row + dk_start - dk_read - dk_column)
        da = gate_gradient(chunk.log_decay, arriving, k * dk_end, (total * state * d_state).sum(-1), einsum)
    d_diagonal = jnp.diagonal(d_scores, axis1=-2, axis2=-1)[..., None]
    dq = dq_pairs + dq_state + d_diagonal * k
    dk = dk_read + dk_row + dk_column + dk_start + dk_end + d_diagonal * q
    return Arrays(dq, dk, beta * dr, d_beta, da)


MATH = ChunkMath(effect, advance, output, advance_back, backward)
