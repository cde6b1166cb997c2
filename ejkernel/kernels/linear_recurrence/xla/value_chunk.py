"""`one_chunk` for calls whose value dims decay too: scores then differ from one value dim to the next.

So a pair of neighbouring blocks has a product of its own: values decay to the border between them, outputs from there.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.blocks import Decays, all_decays, halves, in_first, in_second
from ejkernel.kernels.chunks.scores import Einsum, gate_gradient, total_decay
from ejkernel.kernels.chunks.walk import CarryBack
from ejkernel.kernels.linear_recurrence.xla import one_chunk
from ejkernel.kernels.linear_recurrence.xla.one_chunk import Arrays, Effect


def _decays(chunk: Arrays) -> tuple[dict[int, Decays], dict[int, Decays]]:
    """Of the key dims (one for all of them where they share it) and of the value dims, in blocks of 1, 2, 4, …, C."""
    assert chunk.value_log_decay is not None
    log_decay = chunk.log_decay
    if log_decay is None:
        log_decay = jnp.zeros((*chunk.query.shape[:3], 1), chunk.query.dtype)
    return all_decays(log_decay, 1), all_decays(chunk.value_log_decay, 1)


def _total_decay(chunk: Arrays) -> jax.Array:
    return total_decay(chunk.log_decay)[..., :, None] * total_decay(chunk.value_log_decay)[..., None, :]


def effect(chunk: Arrays, einsum: Einsum) -> Effect:
    """As `one_chunk.effect`."""
    q, k, v = chunk[:3]
    by_key, by_value = _decays(chunk)
    *sizes, C = by_key
    within = (q * k).sum(-1, keepdims=True) * v
    for size in sizes:
        _, later = halves(q * by_key[size].since, size)
        earlier, _ = halves(k * by_key[size].until, size)
        values, _ = halves(v * by_value[size].until, size)
        scores = einsum("...tk,...sk->...ts", later, earlier)
        within = within + in_second(einsum("...ts,...sv->...tv", scores, values)) * by_value[size].since
    a, b = by_key[C], by_value[C]
    written = einsum("...tk,...tv->...kv", k * a.until, v * b.until)
    return Effect(q * a.since, b.since, within, _total_decay(chunk), written)


def backward(chunk: Arrays, state: jax.Array, d_output: jax.Array, carry_back: CarryBack, einsum: Einsum) -> Arrays:
    """As `one_chunk.backward`."""
    assert chunk.value_log_decay is not None
    q, k, v, do = *chunk[:3], d_output
    by_key, by_value = _decays(chunk)
    *sizes, C = by_key
    dq, dk = jnp.zeros_like(q), jnp.zeros_like(k)
    dv = output = jnp.zeros_like(v)  # like dq and dk, without a token's reading of itself
    for size in sizes:
        a, b = by_key[size], by_value[size]
        _, later = halves(q * a.since, size)
        earlier, _ = halves(k * a.until, size)
        values, _ = halves(v * b.until, size)
        _, d_read = halves(do * b.since, size)
        scores = einsum("...tk,...sk->...ts", later, earlier)
        d_scores = einsum("...tv,...sv->...ts", d_read, values)
        dq = dq + in_second(einsum("...ts,...sk->...tk", d_scores, earlier)) * a.since
        dk = dk + in_first(einsum("...ts,...tk->...sk", d_scores, later)) * a.until
        dv = dv + in_first(einsum("...ts,...tv->...sv", scores, d_read)) * b.until
        output = output + in_second(einsum("...ts,...sv->...tv", scores, values)) * b.since
    a, b = by_key[C], by_value[C]
    total = _total_decay(chunk)
    d_state, _ = carry_back((total, einsum("...tk,...tv->...kv", q * a.since, do * b.since)))
    dq_state = einsum("...tv,...kv->...tk", do * b.since, state) * a.since
    dk_state = einsum("...tv,...kv->...tk", v * b.until, d_state) * a.until
    dv_state = einsum("...tk,...kv->...tv", k * a.until, d_state) * b.until
    output = output + einsum("...tk,...kv->...tv", q * a.since, state) * b.since
    through = total * state * d_state
    da = None
    if chunk.log_decay is not None:
        da = gate_gradient(chunk.log_decay, q * (dq + dq_state) - k * dk, k * dk_state, through.sum(-1), einsum)
    db = gate_gradient(chunk.value_log_decay, do * output - v * dv, v * dv_state, through.sum(-2), einsum)
    own_score, d_own_score = (q * k).sum(-1, keepdims=True), (do * v).sum(-1, keepdims=True)
    dq, dk, dv = dq + dq_state + d_own_score * k, dk + dk_state + d_own_score * q, dv + dv_state + own_score * do
    return Arrays(dq, dk, dv, da, db)


MATH = replace(one_chunk.MATH, effect=effect, backward=backward)
