"""Softmax attention that holds every weight at once, and returns them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._op import Op
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.dropout import kept
from ejkernel.kernels.attention.inputs import alike, heads_first, heads_last
from ejkernel.kernels.attention.masks import allowed_pairs, by_group, live, live_by_position
from ejkernel.kernels.attention.xla import few_queries
from ejkernel.kernels.attention.xla.rounding import for_softmax, rounded


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
    """What `run` gives."""
    query = heads_first(call, query)  # [B, Hkv, G, S, D]
    allowed = allowed_pairs(call, mask)
    positions = live_by_position(call) if mask is None or allowed is None else live(allowed)
    if positions is not None:
        # what cannot attend or be attended to must not matter even if it is NaN, and 0 · NaN would let it
        alive, seen = positions
        query = jnp.where(alive, query, 0)
    else:
        seen = None

    weights = _weights(call, _scores(call, query, key, seen), allowed, bias, sinks)  # [B, Hkv, G, S, L]
    if call.dropout:
        assert dropout_key is not None
        stays = kept(call, dropout_key, jnp.arange(call.queries), jnp.arange(call.keys))
        weights = jnp.where(stays, weights / (1 - call.dropout), 0)

    output = _weighted(call, weights, value, seen)  # [B, Hkv, G, S, Dv]
    if positions is not None:
        output = jnp.where(alive, output, 0)
    output = heads_last(call, output)
    weights = weights.reshape(call.batch, call.heads, call.queries, call.keys)
    return output.astype(call.dtype), weights.astype(call.dtype)


def _scores(call: Call, query: Array, key: Array, seen: Array | None) -> Array:
    """Products of queries `[B, Hkv, G, S, D]` and keys `[B, L, Hkv, D]`, `[B, Hkv, G, S, L]`."""

    def plain(query: Array, key: Array, seen: Array | None) -> Array:
        key = key.swapaxes(1, 2)  # [B, Hkv, L, D]
        return _matmul(call, "bnsd,bnld->bnsl", query, key if seen is None else jnp.where(seen, key, 0))

    if few_queries.pays(call):
        return few_queries.on_cpu(functools.partial(few_queries.scores, call), plain)(query, key, seen)
    return plain(query, key, seen)


def _weighted(call: Call, weights: Array, value: Array, seen: Array | None) -> Array:
    """The sum of values `[B, L, Hkv, Dv]` by weights `[B, Hkv, G, S, L]`, `[B, Hkv, G, S, Dv]`."""

    def plain(weights: Array, value: Array, seen: Array | None) -> Array:
        value = value.swapaxes(1, 2)  # [B, Hkv, L, Dv]
        return _sum(call, weights, value if seen is None else jnp.where(seen, value, 0))

    if few_queries.pays(call):
        return few_queries.on_cpu(functools.partial(few_queries.weighted, call), plain)(weights, value, seen)
    return plain(weights, value, seen)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum(call: Call, weights: Array, value: Array) -> Array:
    """Half-precision values keep their half-precision matmul, summed in float32."""
    return _matmul(call, "bnsl,bnld->bnsd", _narrow(weights, value), value)


@_sum.defjvp
def _(call: Call, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (weights, value), (d_weights, d_value) = primals, tangents
    # with a scaled loss, float16 has no numbers for the weights' gradient where it has some for all that comes of it
    d_weights = d_weights if value.dtype == jnp.float16 else _narrow(d_weights, value)
    moved = _matmul(call, "bnsl,bnld->bnsd", d_weights, value)
    return _sum(call, weights, value), moved + _matmul(call, "bnsl,bnld->bnsd", _narrow(weights, value), d_value)


def _narrow(weights: Array, value: Array) -> Array:
    return weights.astype(value.dtype) if value.dtype.itemsize == 2 else weights


def _matmul(call: Call, product: str, rows: Array, columns: Array) -> Array:
    """A group's queries in one matmul: nothing of size S×L is ever transposed."""
    pair = alike(rows.reshape(*rows.shape[:2], call.groups * call.queries, rows.shape[-1]), columns)
    found = jnp.einsum(product, *pair, preferred_element_type=call.wide, precision=call.precision)
    return found.reshape(*rows.shape[:-1], found.shape[-1])


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
    # only the function's arrays were kept; traced here again it costs nothing
    results, pull = jax.eval_shape(functools.partial(_with_pull, call), arrays)
    full = tuple(
        _varying.like(jnp.zeros(x.shape, x.dtype), arrays[0]) if each is None else each
        for each, x in zip(cotangents, results, strict=True)
    )
    (found,) = jax.tree.unflatten(jax.tree.structure(pull), residuals)(full)
    return tuple(found.get(i) for i in range(len(arrays)))


OP = Op(_forward, _forward, _with_residuals, _backward)
