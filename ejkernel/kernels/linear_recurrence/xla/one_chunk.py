"""The gated linear recurrence inside one chunk of tokens, forward and backward; `docs/linear_recurrence.md` derives it.

Everything here is `[B, H, C, ·]` in the dtype of the states. A decay factor is a product of `exp(gate)`, or `exp` of a
sum of gates over a run of tokens, never a quotient. Where such a sum is a difference of running sums, these are exact
(`split`). So nothing overflows whatever the gates are, a reset (`-inf`) is an exact 0, and a huge gate costs its
neighbours no digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.blocks import all_decays, halves, in_first, in_second

# Inside blocks of this many tokens keys are decayed token by token: cheaper on a CPU than matrices this small.
BASE = 4

Einsum = Callable[..., jax.Array]

# The cotangent of the state at a chunk's end, from what the chunk keeps of it and adds to it for that at its start.
Mirror = Callable[[jax.Array, jax.Array], jax.Array]


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


class _Scores(NamedTuple):
    """What tokens of a chunk are to each other and to its ends."""

    scores: jax.Array  # decayed, causal [B, H, C, C]
    since: jax.Array  # decay from the chunk's start through a token, [B, H, C, 1 or K]
    until: jax.Array  # decay after a token to the chunk's end
    pair_gradients: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def effect(chunk: Chunk, einsum: Einsum) -> Effect:
    """What a chunk does, whatever the state at its start."""
    q, k, v = chunk[:3]
    scores, since, until, _ = _scores(chunk, einsum)
    within = einsum("...ts,...sv->...tv", scores, v)
    written = einsum("...tk,...tv->...kv", k * until, v)
    kept = total_decay(chunk.log_decay)[..., None]
    if since.shape[-1] == 1:  # weighs what is read, which costs a pass less than weighing the queries
        return Effect(q, since, within, kept, written)
    return Effect(q * since, None, within, kept, written)


def backward(chunk: Chunk, state: jax.Array, d_output: jax.Array, mirror: Mirror, einsum: Einsum) -> Gradients:
    """Cotangents, from those of the unscaled output and of the state at the chunk's end, which `mirror` knows."""
    q, k, v, do = *chunk[:3], d_output
    scores, since, until, pair_gradients = _scores(chunk, einsum)
    total = total_decay(chunk.log_decay)[..., None]
    d_state = mirror(total, einsum("...tk,...tv->...kv", q * since, do))
    dq_pairs, dk_pairs = pair_gradients(do)
    dq_state = einsum("...tv,...kv->...tk", do, state) * since
    dk_state = einsum("...tv,...kv->...tk", v, d_state) * until
    dv = einsum("...ts,...tv->...sv", scores, do) + einsum("...tk,...kv->...tv", k * until, d_state)
    da = None
    if chunk.log_decay is not None:
        through = (total * state * d_state).sum(-1)
        da = gate_gradient(chunk.log_decay, q * (dq_pairs + dq_state) - k * dk_pairs, k * dk_state, through, einsum)
    own = (do * v).sum(-1, keepdims=True)
    return Gradients(dq_pairs + dq_state + own * k, dk_pairs + dk_state + own * q, dv, da, None)


def total_decay(log_decay: jax.Array | None) -> jax.Array:
    """From a chunk's start to its end, `[B, H, 1 or K]`.

    By sums: a product of factors just below 1 is rounded down each time, and a state meets thousands of these totals.
    """
    if log_decay is None:
        return jnp.ones((1, 1, 1), np.float32)
    coarse, rest = split(log_decay)
    return jnp.exp(coarse.sum(-2)) * jnp.exp(rest.sum(-2))


def split(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gates as multiples of 1/256, whose sums are exact, and rests, whose sums are tiny."""
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
    ones = np.ones((arriving.shape[-2],) * 2, arriving.dtype)
    after = einsum("ts,...sd->...td", np.triu(ones), arriving)
    before = einsum("ts,...sd->...td", np.tril(ones, -1), leaving)
    flow = after + before + through[..., None, :]
    flow = flow.sum(-1, keepdims=True) if log_decay.shape[-1] == 1 else flow
    # across a gate that forgets everything nothing flows, and what cancels leaves no rounding
    return jnp.where(log_decay <= _lowest(log_decay), 0, flow)


def _scores(chunk: Chunk, einsum: Einsum) -> _Scores:
    if chunk.log_decay is None or chunk.log_decay.shape[-1] == 1:
        return _scores_by_head(chunk, einsum)
    return _scores_by_key(chunk, chunk.log_decay, einsum)


def _scores_by_head(chunk: Chunk, einsum: Einsum) -> _Scores:
    """One decay a head and token, or none: the decays between all pairs of tokens are a matrix."""
    q, k, v = chunk[:3]
    causal = np.tril(np.ones((q.shape[-2],) * 2, bool))
    earlier = np.tril(causal, -1)
    # selected before anything multiplies them: a pair that nobody reads may have overflowed
    products = jnp.where(causal, einsum("...tk,...sk->...ts", q, k), 0)
    pairs: jax.Array | float = 1.0
    if chunk.log_decay is None:
        since = until = jnp.ones((1, 1, q.shape[-2], 1), q.dtype)
    else:
        pairs, since, until = _decays_by_head(chunk.log_decay)

    def pair_gradients(do: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_products = jnp.where(earlier, einsum("...tv,...sv->...ts", do, v), 0) * pairs
        return einsum("...ts,...sk->...tk", d_products, k), einsum("...ts,...tk->...sk", d_products, q)

    return _Scores(products * pairs, since, until, pair_gradients)


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


def _scores_by_key(chunk: Chunk, log_decay: jax.Array, einsum: Einsum) -> _Scores:
    """One decay a key dim: small blocks token by token, then pairs of blocks."""
    q, k, v = chunk[:3]
    base = min(BASE, q.shape[-2])
    decays = all_decays(log_decay, base)
    *sizes, C = decays
    decayed = _keys_in_blocks(k, log_decay, base)
    blocks = _scores_in_blocks(q, decayed, einsum)
    levels = []
    for size in sizes:
        _, later = halves(q * decays[size].since, size)
        earlier, _ = halves(k * decays[size].until, size)
        levels.append((size, later, earlier))
        corner = einsum("...tk,...sk->...ts", later, earlier)
        upper, lower = blocks[:, :, 0::2], blocks[:, :, 1::2]
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], -1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, lower], -1)], -2)

    def pair_gradients(do: jax.Array) -> tuple[jax.Array, jax.Array]:
        dq, dk = _pair_gradients_in_blocks(q, v, do, log_decay, decayed, einsum)
        for size, later, earlier in levels:
            (values, _), (_, d_read) = halves(v, size), halves(do, size)
            d_scores = einsum("...tv,...sv->...ts", d_read, values)
            dq = dq + in_second(einsum("...ts,...sk->...tk", d_scores, earlier)) * decays[size].since
            dk = dk + in_first(einsum("...ts,...tk->...sk", d_scores, later)) * decays[size].until
        return dq, dk

    return _Scores(blocks[:, :, 0], decays[C].since, decays[C].until, pair_gradients)


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


def _pair_gradients_in_blocks(
    query: jax.Array,
    value: jax.Array,
    d_output: jax.Array,
    log_decay: jax.Array,
    decayed: list[jax.Array],
    einsum: Einsum,
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of query and key from pairs of different tokens of the same block, `[B, H, C, K]`."""
    size, shape = len(decayed), query.shape
    query, step = _in_blocks(query, size), _in_blocks(jnp.exp(log_decay), size)
    d_scores = einsum("...tv,...sv->...ts", _in_blocks(d_output, size), _in_blocks(value, size))
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
