"""The forward and the backward pass of blockwise attention: the online softmax, and the weights computed once more."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels import _varying
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.dropout import keep_mask
from ejkernel.kernels.attention.inputs import Inputs, cotangents, heads_first, heads_last
from ejkernel.kernels.attention.masks import in_sequences
from ejkernel.kernels.attention.xla import few_queries
from ejkernel.kernels.attention.xla.problem import Columns, Problem, Rows, finite, over_keys, problem
from ejkernel.kernels.attention.xla.products import flat_rows, grouped_product, narrow, narrow_gradient, product
from ejkernel.kernels.attention.xla.softmax import for_softmax, online, rounded


def forward(
    call: Call, inputs: Inputs, every_block: bool = False, few: bool = False, apart: bool = False
) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and the maximum and the sum of each row's softmax, `[B, S, H]`.

    The maximum, `top`, is the largest score or sink, a constant to derivatives; the sum, `total`, is that of
    `exp(score - top)`. Both are 0 in a row with nothing to sum. They stay two numbers because `top + log(total)`
    forgets the total where scores are huge: the row's weights would no longer sum to 1.

    Args:
        call: The static facts.
        inputs: The arrays.
        every_block: Visit blocks of keys that are out of sight too. Loops then have a fixed length, and JAX can
            differentiate the pass any number of times.
        few: Multiply by `few_queries`, and visit all keys in sight at once.
        apart: Let no block hold several packed sequences. JAX can then differentiate the pass forwards without a NaN of
            one sequence in another's tangents.
    """
    p = problem(call, inputs, few, apart=apart or every_block)

    def block(_: None, xs: tuple[Rows, Array]) -> Any:
        rows, query = xs
        query = jnp.where(rows.in_reach, query, 0)

        def visit(columns: Columns, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, sums = carry
            scores, _ = _scores(call, query, columns, few)
            top, weights, shrink = online(top, scores)
            shrink = shrink.astype(call.wide)
            total = total * shrink + weights.sum(-1, keepdims=True, dtype=call.wide)
            weights = _drop(p, rows, columns, weights)
            if few:
                added = few_queries.weighted(call, weights, columns.value)
            elif p.mixed and not every_block:
                added = _weighted(call, columns.allowed, weights, columns.value)
            else:
                added = _times_values(call, weights, finite(p, columns.value))
            return top, total, sums * shrink + added

        shape = (*query.shape[:-1], 1)
        carry = jnp.full(shape, -jnp.inf, call.softmax_dtype), jnp.zeros(shape, call.wide)
        sums = jnp.zeros((*query.shape[:-1], call.value_dim), call.wide)
        carry = _varying.like((*carry, sums), query)
        return None, _finish(p, *over_keys(p, rows, visit, carry, every_block))

    _, results = lax.scan(jax.checkpoint(block) if every_block else block, None, (p.rows, p.layout.split(p.query, 3)))
    output, top, total = (p.layout.join(each, 3, call.queries) for each in results)
    if (inside := in_sequences(inputs)) is not None:
        # sinks have reached padding too
        top, total = (jnp.where(inside[:, None, None], x, 0) for x in (top, total))
    output = output if p.live_queries is None else jnp.where(p.live_queries, output, 0)
    return heads_last(call, output).astype(call.residual_dtype), heads_last(call, top), heads_last(call, total)


def backward(
    call: Call, inputs: Inputs, output: Array, top: Array, total: Array, d_output: Array, d_total: Array
) -> Inputs:
    """Cotangents of `inputs` from the results of `forward` and the cotangents of the output and of the total."""
    p = problem(call, inputs)
    output, d_output, top, total, d_total = (heads_first(call, x) for x in (output, d_output, top, total, d_total))
    d_output = d_output if p.live_queries is None else jnp.where(p.live_queries, d_output, 0)
    delta = d_output.astype(call.wide) * output.astype(call.wide)
    # a query that may attend nowhere has output 0 and takes no gradient, not even a NaN
    delta = jnp.where(p.in_reach, (delta if p.segments is None else jnp.where(output == 0, 0, delta)).sum(-1), 0)
    # with what the total's cotangent brings: all that the softmax subtracts from the gradients of a row's weights
    delta = jnp.where(total == 0, 0, delta - d_total * total)
    inverse = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
    d_output = d_output.astype(call.value_dtype)

    def block(carry: Any, xs: Any) -> Any:
        rows, query, d_output, top, inverse, delta = xs
        query, d_output = jnp.where(rows.in_reach, query, 0), jnp.where(rows.in_reach, d_output, 0)

        def visit(columns: Columns, carry: Any) -> Any:
            d_key, d_value, d_query, d_bias = carry
            scores, slope = _scores(call, query, columns)
            weights = _weights(scores.astype(call.wide), top, inverse)
            d_weights = grouped_product(call, "bnqd,bnkd->bnqk", d_output, columns.value)
            d_weights = _drop(p, rows, columns, d_weights)
            # selecting, not the weights' 0, keeps a NaN in `d_weights` from pairs that may not attend
            d_scores = jnp.where(columns.allowed, weights * (d_weights - delta), 0)
            if d_bias is not None:
                d_bias = _add_bias(d_bias, d_scores, columns.start)
            d_scores = d_scores * call.scale if slope is None else d_scores * slope * call.scale
            weights = jnp.where(columns.allowed, _drop(p, rows, columns, weights), 0)
            d_value = _add_keys(call, d_value, columns, narrow(weights, d_output), finite(p, d_output))
            if p.mixed:
                d_value = _add_nan(d_value, columns, d_output)
            d_key = _add_keys(call, d_key, columns, narrow_gradient(d_scores, query), finite(p, query))
            d_scores = narrow_gradient(d_scores, columns.key)
            d_query = d_query + grouped_product(call, "bnqk,bnkd->bnqd", d_scores, finite(p, columns.key))
            return d_key, d_value, d_query, d_bias

        sums = _varying.like((jnp.zeros(query.shape, call.wide), _zero_bias(p, rows)), query)
        *carry, d_query, d_bias = over_keys(p, rows, visit, (*carry, *sums))
        return tuple(carry), (d_query.astype(query.dtype), d_bias)

    row_sums = top[..., None], inverse[..., None], delta[..., None]
    split = (p.layout.split(each, 3) for each in (p.query, d_output, *row_sums))
    zeros = _varying.like((jnp.zeros(p.key.shape, call.wide), jnp.zeros(p.value.shape, call.wide)), p.query)
    (d_key, d_value), (d_query, d_bias) = lax.scan(block, zeros, (p.rows, *split))
    d_query = p.layout.join(d_query, 3, call.queries)
    if p.live_queries is not None and p.live_keys is not None:
        d_query = jnp.where(p.live_queries, d_query, 0)
        d_key, d_value = jnp.where(p.live_keys, d_key, 0), jnp.where(p.live_keys, d_value, 0)
    gradients = {"query": heads_last(call, d_query), "key": d_key.swapaxes(1, 2), "value": d_value.swapaxes(1, 2)}
    if p.bias is not None:
        gradients["bias"] = d_bias.sum(0) if p.bias.shape[3] == 1 else p.layout.join(d_bias, 3, call.queries)
    if p.sinks is not None:
        weights = _weights(p.sinks, top[..., None], inverse[..., None])  # [B, Hkv, G, S, sinks]
        gradients["sinks"] = _sum_to(-weights * delta[..., None], p.sinks.shape)
    return cotangents(inputs, gradients)


def _weights(scores: Array, top: Array, inverse: Array) -> Array:
    """The weights again, from the maximum of each row and the inverse of its total."""
    # huge scores may be rounded otherwise than when their maximum was taken, and must not exceed it
    return jnp.exp(jnp.minimum(scores - top, 0)) * inverse


def _scores(call: Call, query: Array, columns: Columns, few: bool = False) -> tuple[Array, Array | None]:
    """The scores `[B, Hkv, G, Bq, Bk]`, `-inf` where a pair may not attend, and the slope of the soft cap."""
    if few:
        scores = few_queries.scores(call, query, columns.key) * call.scale
    else:
        scores = grouped_product(call, "bnqd,bnkd->bnqk", query, columns.key) * call.scale
    slope = None
    if call.soft_cap is not None:
        tanh = jnp.tanh(scores / call.soft_cap)
        scores, slope = call.soft_cap * tanh, 1 - tanh**2
    scores = rounded(scores)
    if columns.bias is not None:
        scores = scores + columns.bias.astype(scores.dtype)
    # mask before exp: a masked inf would make the gradient NaN
    if slope is not None:
        slope = jnp.where(columns.allowed, slope, 0)
    return jnp.where(columns.allowed, for_softmax(call, scores), -jnp.inf), slope


def _times_values(call: Call, weights: Array, value: Array) -> Array:
    """`weights [B, Hkv, G, Bq, Bk]` times `value [B, Hkv, Bk, Dv]`."""
    return grouped_product(call, "bnqk,bnkd->bnqd", narrow(weights, value), value)


def _drop(p: Problem, rows: Rows, columns: Columns, x: Array) -> Array:
    """`x`, a block of weights or of their gradients, after dropout."""
    if p.dropout_key is None:
        return x
    mask = keep_mask(p.call, p.dropout_key, rows.token, columns.position)
    return jnp.where(mask, x / (1 - p.call.dropout), 0)


def _finish(p: Problem, top: Array, total: Array, sums: Array) -> tuple[Array, Array, Array]:
    """Output, top and total of a block of queries after its last keys: the sinks join in."""
    dead, top = total == 0, top.astype(p.call.wide)
    if p.sinks is not None:
        top, weights, shrink = online(top, p.sinks)
        total, sums = total * shrink + weights.sum(-1, keepdims=True), sums * shrink
    output = jnp.where(dead, 0, sums / jnp.where(dead, 1, total))
    return output, jnp.where(total == 0, 0, top)[..., 0], total[..., 0]


def _add_keys(call: Call, sums: Array, columns: Columns, weights: Array, rows: Array) -> Array:
    """`sums [B, Hkv, L, ·]` with `weights`ᵀ `rows` added at this block's keys."""
    added = product(call, "bnqk,bnqd->bnkd", flat_rows(weights), flat_rows(rows))
    start, size = columns.start, added.shape[2]
    # a block may hold keys of the next sequence, which a NaN of this one must not reach
    added = jnp.where(columns.new, added, 0) + lax.dynamic_slice_in_dim(sums, start, size, 2)
    return lax.dynamic_update_slice_in_dim(sums, added, start, 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weighted(call: Call, allowed: Array, weights: Array, value: Array) -> Array:
    """The sum of values by weights, where a block holds several sequences.

    A value that is not finite makes NaN of the rows that may attend to it, and of no others: 0 times it is not 0.
    """
    is_finite = jnp.isfinite(value)
    sums = _times_values(call, weights, jnp.where(is_finite, value, 0))
    spoilt = (allowed & ~is_finite.all(-1)[:, :, None, None]).any(-1, keepdims=True)
    return jnp.where(spoilt, jnp.nan, sums)


@_weighted.defjvp
def _(call: Call, primals: tuple[Array, Array, Array], tangents: tuple[Any, Array, Array]) -> tuple[Array, Array]:
    # by the same rule, as tangents may be NaN too; nothing transposes it
    (allowed, weights, value), (_, d_weights, d_value) = primals, tangents
    d_sums = _weighted(call, allowed, d_weights, value) + _weighted(call, allowed, weights, d_value)
    return _weighted(call, *primals), d_sums


def _add_nan(sums: Array, columns: Columns, rows: Array) -> Array:
    """`sums [B, Hkv, L, ·]` with NaN for keys of this block that a row of `rows` which is not finite may attend to."""
    bad = ~jnp.isfinite(rows).all(-1, keepdims=True)  # [B, Hkv, G, Bq, 1]
    spoilt = (columns.allowed & bad).any((2, 3))[..., None]
    block = lax.dynamic_slice_in_dim(sums, columns.start, spoilt.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(sums, jnp.where(spoilt, jnp.nan, block), columns.start, 2)


def _zero_bias(p: Problem, rows: Rows) -> Array | None:
    """Zeros for the bias gradient of a block of queries, with all its keys."""
    if p.bias is None:
        return None
    queries = 1 if p.bias.shape[3] == 1 else rows.token.shape[0]
    return jnp.zeros((*p.bias.shape[:3], queries, p.bias.shape[4]), p.call.wide)


def _add_bias(sums: Array, d_scores: Array, start: Array) -> Array:
    if sums.shape[4] == 1:
        return sums + _sum_to(d_scores, sums.shape)
    added = _sum_to(d_scores, (*sums.shape[:4], d_scores.shape[4]))
    added = added + lax.dynamic_slice_in_dim(sums, start, added.shape[4], 4)
    return lax.dynamic_update_slice_in_dim(sums, added, start, 4)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which `shape` has one entry."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True)
