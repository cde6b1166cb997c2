"""Softmax attention that holds every weight at once, and returns them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.dropout import kept
from ejkernel.kernels.attention.inputs import alike
from ejkernel.kernels.attention.masks import allowed_pairs, by_group, live, live_by_position


def run(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    sinks: Array | None,
    dropout_key: Array | None,
) -> tuple[Array, Array]:
    """The output `[B, S, H, Dv]` and the weights `[B, H, S, L]`."""
    # heads first and a group's queries in one matmul: nothing of size S×L is ever transposed
    query = query.reshape(call.batch, call.queries, call.kv_heads, call.groups, call.key_dim)
    query = query.transpose(0, 2, 3, 1, 4)  # [B, Hkv, G, S, D]
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)  # [B, Hkv, L, ·]
    allowed = allowed_pairs(call, mask)
    positions = live_by_position(call) if mask is None or allowed is None else live(allowed)
    if positions is not None:
        # what cannot attend or be attended to must not matter even if it is NaN, and 0 · NaN would let it
        alive, seen = positions
        query, key, value = jnp.where(alive, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)

    weights = _weights(call, query, key, allowed, bias, sinks)  # [B, Hkv, G, S, L]
    if call.dropout:
        assert dropout_key is not None
        stays = kept(call, dropout_key, jnp.arange(call.queries), jnp.arange(call.keys))
        weights = jnp.where(stays, weights / (1 - call.dropout), 0)

    rows = weights.reshape(call.batch, call.kv_heads, call.groups * call.queries, call.keys)
    # half-precision values keep their half-precision matmul, summed in float32
    rows = rows.astype(value.dtype) if value.dtype.itemsize == 2 else rows
    pair = alike(rows, value)
    output = jnp.einsum("bnsl,bnld->bnsd", *pair, preferred_element_type=call.wide, precision=call.precision)
    output = output.reshape(*weights.shape[:-1], call.value_dim)
    if positions is not None:
        output = jnp.where(alive, output, 0)
    output = output.transpose(0, 3, 1, 2, 4).reshape(call.batch, call.queries, call.heads, call.value_dim)
    weights = weights.reshape(call.batch, call.heads, call.queries, call.keys)
    return output.astype(call.dtype), weights.astype(call.dtype)


def _weights(
    call: Call, query: Array, key: Array, allowed: Array | None, bias: Array | None, sinks: Array | None
) -> Array:
    rows = query.reshape(call.batch, call.kv_heads, call.groups * call.queries, call.key_dim)
    pair = alike(rows, key)
    scores = jnp.einsum("bnsd,bnld->bnsl", *pair, preferred_element_type=call.wide, precision=call.precision)
    scores = scores.reshape(*query.shape[:-1], call.keys) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    if bias is not None:
        scores = scores + by_group(call, bias, 1).astype(scores.dtype)
    scores = scores.astype(call.softmax_dtype)
    if allowed is not None:
        # mask before exp: a masked inf would make the gradient NaN
        scores = jnp.where(allowed, scores, -jnp.inf)
    sinks = jnp.zeros((1, 0)) if sinks is None else sinks
    extra = by_group(call, sinks, 0)[None, :, :, None].astype(call.softmax_dtype)  # [1, Hkv, G, 1, sinks]
    return _softmax(scores, extra)[0]


@jax.custom_jvp
def _softmax(scores: Array, extra: Array) -> tuple[Array, Array]:
    """Softmax over `scores` and `extra` together along the last axis; both weights are 0 where all are `-inf`."""
    lowest = -jnp.inf
    top = jnp.maximum(scores.max(-1, keepdims=True, initial=lowest), extra.max(-1, keepdims=True, initial=lowest))
    top = jnp.where(top == lowest, 0, top)
    scores, extra = jnp.exp(scores - top), jnp.exp(extra - top)
    total = scores.sum(-1, keepdims=True) + extra.sum(-1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    return scores / total, extra / total


# two weights instead of every intermediate kept for the backward pass, and rules that never divide by a total of 0
@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
    weights, extra = _softmax(*primals)
    d_scores, d_extra = tangents
    mean = (weights * d_scores).sum(-1, keepdims=True) + (extra * d_extra).sum(-1, keepdims=True)
    return (weights, extra), (weights * (d_scores - mean), extra * (d_extra - mean))
