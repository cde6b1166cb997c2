"""Softmax attention that holds every weight at once, and returns them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._op import Op
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.dropout import keep_mask
from ejkernel.kernels.attention.inputs import heads_first, heads_last
from ejkernel.kernels.attention.masks import allowed_pairs, by_group, live, live_by_position
from ejkernel.kernels.attention.xla import few_queries
from ejkernel.kernels.attention.xla.products import grouped_product, narrow, narrow_gradient
from ejkernel.kernels.attention.xla.softmax import for_softmax, rounded


def run(call: Call, *arrays: Array | None) -> tuple[Array, Array]:
    """The output `[B, S, H, Dv]` and the weights `[B, H, S, L]`; arrays as `Call` lists them, up to the random key."""
    return _differentiable.call(OP, call, _varying.align(arrays))


def _attend(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    sinks: Array | None,
    dropout_key: Array | None,
) -> tuple[Array, Array]:
    """The results of `run`, from the arrays by name."""
    query = heads_first(call, query)  # [B, Hkv, G, S, D]
    allowed = allowed_pairs(call, mask)
    positions = live_by_position(call) if mask is None or allowed is None else live(allowed)
    live_queries, live_keys = (None, None) if positions is None else positions
    # what cannot attend or be attended to must not matter even if it is NaN, and 0 · NaN would let it
    query = query if live_queries is None else jnp.where(live_queries, query, 0)
    weights = _weights(call, _scores(call, query, key, live_keys), allowed, bias, sinks)  # [B, Hkv, G, S, L]
    if call.dropout:
        assert dropout_key is not None
        mask = keep_mask(call, dropout_key, jnp.arange(call.queries), jnp.arange(call.keys))
        weights = jnp.where(mask, weights / (1 - call.dropout), 0)

    output = _weighted(call, weights, value, live_keys)  # [B, Hkv, G, S, Dv]
    output = output if live_queries is None else jnp.where(live_queries, output, 0)
    output = heads_last(call, output)
    weights = weights.reshape(call.batch, call.heads, call.queries, call.keys)
    return output.astype(call.dtype), weights.astype(call.dtype)


def _scores(call: Call, query: Array, key: Array, live: Array | None) -> Array:
    """Products of queries `[B, Hkv, G, S, D]` and keys `[B, L, Hkv, D]`, `[B, Hkv, G, S, L]`."""

    def plain(query: Array, key: Array, live: Array | None) -> Array:
        return grouped_product(call, "bnsd,bnld->bnsl", query, _live_heads_first(key, live))

    if few_queries.applies(call):
        return few_queries.on_cpu(functools.partial(few_queries.scores, call), plain)(query, key, live)
    return plain(query, key, live)


def _weighted(call: Call, weights: Array, value: Array, live: Array | None) -> Array:
    """The sum of values `[B, L, Hkv, Dv]` by weights `[B, Hkv, G, S, L]`, `[B, Hkv, G, S, Dv]`."""

    def plain(weights: Array, value: Array, live: Array | None) -> Array:
        return _times_values(call, weights, _live_heads_first(value, live))

    if few_queries.applies(call):
        return few_queries.on_cpu(functools.partial(few_queries.weighted, call), plain)(weights, value, live)
    return plain(weights, value, live)


def _live_heads_first(x: Array, live: Array | None) -> Array:
    """Keys or values `[B, L, Hkv, ·]` as `[B, Hkv, L, ·]`, 0 for those that no query may attend to."""
    x = x.swapaxes(1, 2)
    return x if live is None else jnp.where(live, x, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _times_values(call: Call, weights: Array, value: Array) -> Array:
    return grouped_product(call, "bnsl,bnld->bnsd", narrow(weights, value), value)


@_times_values.defjvp
def _(call: Call, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (weights, value), (d_weights, d_value) = primals, tangents
    moved = grouped_product(call, "bnsl,bnld->bnsd", narrow_gradient(d_weights, value), value)
    by_value = grouped_product(call, "bnsl,bnld->bnsd", narrow(weights, value), d_value)
    return _times_values(call, weights, value), moved + by_value


def _weights(call: Call, scores: Array, allowed: Array | None, bias: Array | None, sinks: Array | None) -> Array:
    scores = scores * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    scores = rounded(scores)
    if bias is not None:
        scores = scores + by_group(call, bias, 1).astype(scores.dtype)
    scores = for_softmax(call, scores)
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


def _forward(call: Call, arrays: Any) -> tuple[Array, Array]:
    return _attend(call, *arrays)


def _with_pull(call: Call, arrays: Any) -> Any:
    """Output and weights, and the function that takes their cotangents to those of the arrays that have some."""
    moving = {i: x for i, x in enumerate(arrays) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)}
    return jax.vjp(lambda moving: _attend(call, *(moving.get(i, x) for i, x in enumerate(arrays))), moving)


def _with_residuals(call: Call, arrays: Any) -> tuple[tuple[Array, Array], list[Array]]:
    results, pull = _with_pull(call, arrays)
    return results, jax.tree.leaves(pull)


def _backward(call: Call, arrays: Any, residuals: list[Array], cotangents: Any, wanted: Any) -> Any:
    # residuals are the function's arrays alone; its structure is traced again, which costs nothing when the call runs
    results, pull = jax.eval_shape(functools.partial(_with_pull, call), arrays)
    full = tuple(
        _varying.like(jnp.zeros(x.shape, x.dtype), arrays[0]) if each is None else each
        for each, x in zip(cotangents, results, strict=True)
    )
    (gradients,) = jax.tree.unflatten(jax.tree.structure(pull), residuals)(full)
    return tuple(gradients.get(i) for i in range(len(arrays)))


OP = Op(_forward, _forward, _with_residuals, _backward)
