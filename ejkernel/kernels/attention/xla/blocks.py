"""The forward and the backward pass of blockwise attention, with the online softmax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels import _varying
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.dropout import kept
from ejkernel.kernels.attention.inputs import Inputs, alike, cotangents, heads_first, heads_last
from ejkernel.kernels.attention.xla import few_queries
from ejkernel.kernels.attention.xla.problem import Columns, Problem, Rows, finite, over_keys, problem
from ejkernel.kernels.attention.xla.rounding import for_softmax, rounded


def forward(
    call: Call, inputs: Inputs, every_block: bool = False, few: bool = False, apart: bool = False
) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and the `top` and `total` of each row of scores, `[B, S, H]`.

    `top` is the largest score or sink, a constant to derivatives, and `total` the sum of `exp(score - top)`; both are 0
    where there is nothing to sum. They stay apart, as `top + log(total)` forgets the total where scores are huge: the
    row would no longer sum to 1.

    With `apart`, packed sequences share no block: then JAX can differentiate it forwards without leaks between them.
    With `every_block`, keys out of sight are visited too: then loops have a fixed length, and JAX can differentiate it
    any number of times.
    With `few`, products are those of `few_queries`, and keys are visited all at once.
    """
    p = problem(call, inputs, few, apart=apart or every_block)

    def block(_: None, xs: tuple[Rows, Array]) -> Any:
        rows, query = xs
        query = jnp.where(rows.real, query, 0)

        def visit(columns: Columns, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, sums = carry
            scores, _ = _scores(call, query, columns, few)
            new_top = jnp.maximum(top, lax.stop_gradient(scores).max(-1, keepdims=True))
            base = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights, shrink = jnp.exp(scores - base), jnp.exp(top - base).astype(call.wide)
            total = total * shrink + weights.sum(-1, keepdims=True, dtype=call.wide)
            weights = _drop(p, rows, columns, weights)
            if few:
                added = few_queries.weighted(call, weights, columns.value)
            elif p.mixed and not every_block:
                added = _weighted(call, columns.allowed, weights, columns.value)
            else:
                added = _matmul(call, _narrow(weights, columns.value), finite(p, columns.value))
            return new_top, total, sums * shrink + added

        shape = (*query.shape[:-1], 1)
        carry = jnp.full(shape, -jnp.inf, call.softmax_dtype), jnp.zeros(shape, call.wide)
        sums = jnp.zeros((*query.shape[:-1], call.value_dim), call.wide)
        carry = _varying.like((*carry, sums), query)
        return None, _finish(p, *over_keys(p, rows, visit, carry, every_block))

    _, results = lax.scan(jax.checkpoint(block) if every_block else block, None, (p.rows, p.layout.split(p.query, 3)))
    output, top, total = (p.layout.join(each, 3, call.queries) for each in results)
    if (inside := _inside(inputs)) is not None:
        # padding, which sinks have reached
        top, total = jnp.where(inside, top, 0), jnp.where(inside, total, 0)
    output = output if p.alive is None else jnp.where(p.alive, output, 0)
    return heads_last(call, output).astype(call.residual_dtype), heads_last(call, top), heads_last(call, total)


def backward(
    call: Call, inputs: Inputs, output: Array, top: Array, total: Array, d_output: Array, d_total: Array
) -> Inputs:
    """Cotangents of `inputs` from the results of `forward`, and from the cotangents of the output and the total."""
    p = problem(call, inputs)
    output, d_output, top, total, d_total = (heads_first(call, x) for x in (output, d_output, top, total, d_total))
    d_output = d_output if p.alive is None else jnp.where(p.alive, d_output, 0)
    # what the softmax takes off the gradient of each score, with what comes in by way of the total
    mean = d_output.astype(call.wide) * output.astype(call.wide)
    # a query that may attend nowhere has output 0 and takes no gradient, not even a NaN
    mean = jnp.where(p.real, (mean if p.segments is None else jnp.where(output == 0, 0, mean)).sum(-1), 0)
    mean = jnp.where(total == 0, 0, mean - d_total * total)
    share = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))  # of the largest score
    d_output = d_output.astype(call.value_dtype)

    def block(carry: Any, xs: Any) -> Any:
        rows, query, d_output, top, share, mean = xs
        query, d_output = jnp.where(rows.real, query, 0), jnp.where(rows.real, d_output, 0)

        def visit(columns: Columns, carry: Any) -> Any:
            d_key, d_value, d_query, d_bias = carry
            scores, slope = _scores(call, query, columns)
            weights = _shares(scores.astype(call.wide), top, share)
            d_weights = _drop(p, rows, columns, _matmul(call, d_output, columns.value.swapaxes(-1, -2)))
            # selecting, not the weights' 0, keeps a NaN in `d_weights` from pairs that may not attend
            d_scores = jnp.where(columns.allowed, weights * (d_weights - mean), 0)
            if d_bias is not None:
                d_bias = _add_bias(d_bias, d_scores, columns.at)
            d_scores = d_scores * call.scale if slope is None else d_scores * slope * call.scale
            weights = jnp.where(columns.allowed, _drop(p, rows, columns, weights), 0)
            d_value = _add_keys(call, d_value, columns, _narrow(weights, d_output), finite(p, d_output))
            if p.mixed:
                d_value = _add_nan(d_value, columns, d_output)
            d_key = _add_keys(call, d_key, columns, _narrow_gradient(d_scores, query), finite(p, query))
            d_query = d_query + _matmul(call, _narrow_gradient(d_scores, columns.key), finite(p, columns.key))
            return d_key, d_value, d_query, d_bias

        mine = _varying.like((jnp.zeros(query.shape, call.wide), _no_bias(p, rows)), query)
        *carry, d_query, d_bias = over_keys(p, rows, visit, (*carry, *mine))
        return tuple(carry), (d_query.astype(query.dtype), d_bias)

    of_rows = top[..., None], share[..., None], mean[..., None]
    split = (p.layout.split(each, 3) for each in (p.query, d_output, *of_rows))
    zeros = _varying.like((jnp.zeros(p.key.shape, call.wide), jnp.zeros(p.value.shape, call.wide)), p.query)
    (d_key, d_value), (d_query, d_bias) = lax.scan(block, zeros, (p.rows, *split))
    d_query = p.layout.join(d_query, 3, call.queries)
    if p.alive is not None and p.seen is not None:
        d_query = jnp.where(p.alive, d_query, 0)
        d_key, d_value = jnp.where(p.seen, d_key, 0), jnp.where(p.seen, d_value, 0)
    found = {"query": heads_last(call, d_query), "key": d_key.swapaxes(1, 2), "value": d_value.swapaxes(1, 2)}
    if p.bias is not None:
        found["bias"] = d_bias.sum(0) if p.bias.shape[3] == 1 else p.layout.join(d_bias, 3, call.queries)
    if p.sinks is not None:
        weights = _shares(p.sinks, top[..., None], share[..., None])  # [B, Hkv, G, S, sinks]
        found["sinks"] = _sum_to(-weights * mean[..., None], p.sinks.shape)
    return cotangents(inputs, found)


def _shares(scores: Array, top: Array, share: Array) -> Array:
    """The weights, from the largest score of each row and its weight."""
    # huge scores may be rounded otherwise than when their largest was found, and must not exceed it
    return jnp.exp(jnp.minimum(scores - top, 0)) * share


def _scores(call: Call, query: Array, columns: Columns, few: bool = False) -> tuple[Array, Array | None]:
    """The scores `[B, Hkv, G, Bq, Bk]`, `-inf` where a pair may not attend, and the slope of the soft cap."""
    if few:
        scores = few_queries.scores(call, query, columns.key) * call.scale
    else:
        scores = _matmul(call, query, columns.key.swapaxes(-1, -2)) * call.scale
    slope = None
    if call.soft_cap is not None:
        bent = jnp.tanh(scores / call.soft_cap)
        scores, slope = call.soft_cap * bent, 1 - bent**2
    scores = rounded(scores)
    if columns.bias is not None:
        scores = scores + columns.bias.astype(scores.dtype)
    # mask before exp: a masked inf would make the gradient NaN
    if slope is not None:
        slope = jnp.where(columns.allowed, slope, 0)
    return jnp.where(columns.allowed, for_softmax(call, scores), -jnp.inf), slope


def _matmul(call: Call, rows: Array, columns: Array) -> Array:
    """`[B, Hkv, G, Bq, X]` times `[B, Hkv, X, Y]`, a group's rows in one matmul."""
    product = jnp.matmul(*alike(_flat(rows), columns), preferred_element_type=call.wide, precision=call.precision)
    return product.reshape(*rows.shape[:-1], columns.shape[-1])


def _flat(x: Array) -> Array:
    """`[B, Hkv, G, Bq, X]` to `[B, Hkv, G·Bq, X]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _narrow(x: Array, partner: Array) -> Array:
    """Weights join half-precision partners in a half-precision matmul, summed in float32."""
    return x.astype(partner.dtype) if partner.dtype.itemsize == 2 else x


def _narrow_gradient(x: Array, partner: Array) -> Array:
    """The same for gradients of scores, for which float16 has not the range."""
    return x if partner.dtype == jnp.float16 else _narrow(x, partner)


def _drop(p: Problem, rows: Rows, columns: Columns, x: Array) -> Array:
    """`x`, a block of weights or of their gradients, after dropout."""
    if p.dropout_key is None:
        return x
    return jnp.where(kept(p.call, p.dropout_key, rows.token, columns.position), x / (1 - p.call.dropout), 0)


def _finish(p: Problem, top: Array, total: Array, sums: Array) -> tuple[Array, Array, Array]:
    """Output, top and total of a block of queries whose keys are all summed up: the sinks join in."""
    dead, top = total == 0, top.astype(p.call.wide)
    if p.sinks is not None:
        new_top = jnp.maximum(top, lax.stop_gradient(p.sinks).max(-1, keepdims=True))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)
        shrink = jnp.exp(top - base)
        total = total * shrink + jnp.exp(p.sinks - base).sum(-1, keepdims=True)
        sums, top = sums * shrink, new_top
    output = jnp.where(dead, 0, sums / jnp.where(dead, 1, total))
    return output, jnp.where(total == 0, 0, top)[..., 0], total[..., 0]


def _add_keys(call: Call, sums: Array, columns: Columns, weights: Array, rows: Array) -> Array:
    """`sums`, `[B, Hkv, L, ·]`, with this block's keys' share of `weights`ᵀ `rows` added."""
    pair = alike(_flat(weights), _flat(rows))
    share = jnp.einsum("bnqk,bnqd->bnkd", *pair, preferred_element_type=call.wide, precision=call.precision)
    at, size = columns.at, share.shape[2]
    # a block may hold keys of the next sequence, which a NaN of this one must not reach
    share = jnp.where(columns.new, share, 0) + lax.dynamic_slice_in_dim(sums, at, size, 2)
    return lax.dynamic_update_slice_in_dim(sums, share, at, 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weighted(call: Call, allowed: Array, weights: Array, value: Array) -> Array:
    """The sum of values by weights, where a block holds several sequences.

    A value that is not finite makes NaN of the rows that may attend to it, and of no others: 0 times it is not 0.
    """
    real = jnp.isfinite(value)
    sums = _matmul(call, _narrow(weights, value), jnp.where(real, value, 0))
    seen = (allowed & ~real.all(-1)[:, :, None, None]).any(-1, keepdims=True)
    return jnp.where(seen, jnp.nan, sums)


@_weighted.defjvp
def _(call: Call, primals: tuple[Array, Array, Array], tangents: tuple[Any, Array, Array]) -> tuple[Array, Array]:
    # by the same rule, as tangents may be NaN too; nothing transposes it
    (allowed, weights, value), (_, d_weights, d_value) = primals, tangents
    moved = _weighted(call, allowed, d_weights, value) + _weighted(call, allowed, weights, d_value)
    return _weighted(call, *primals), moved


def _add_nan(sums: Array, columns: Columns, rows: Array) -> Array:
    """`sums`, `[B, Hkv, L, .]`, with NaN for keys of this block that rows which are not finite may attend to."""
    bad = ~jnp.isfinite(rows).all(-1, keepdims=True)  # [B, Hkv, G, Bq, 1]
    seen = (columns.allowed & bad).any((2, 3))[..., None]
    kept = lax.dynamic_slice_in_dim(sums, columns.at, seen.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(sums, jnp.where(seen, jnp.nan, kept), columns.at, 2)


def _inside(inputs: Inputs) -> Array | None:
    """Which queries belong to a sequence, broadcasting to `[B, Hkv, G, S]`; `None` if all do."""
    if inputs.segment_ids is not None:
        return (inputs.segment_ids >= 0)[:, None, None]
    if inputs.cu_seqlens is None:
        return None
    end = inputs.cu_seqlens[-1]
    return jnp.arange(inputs.query.shape[1], dtype=end.dtype) < end


def _no_bias(p: Problem, rows: Rows) -> Array | None:
    """Zeros for the bias gradient of a block of queries, with all its keys."""
    if p.bias is None:
        return None
    queries = 1 if p.bias.shape[3] == 1 else rows.token.shape[0]
    return jnp.zeros((*p.bias.shape[:3], queries, p.bias.shape[4]), p.call.wide)


def _add_bias(sums: Array, d_scores: Array, at: Array) -> Array:
    if sums.shape[4] == 1:
        return sums + _sum_to(d_scores, sums.shape)
    share = _sum_to(d_scores, (*sums.shape[:4], d_scores.shape[4]))
    share = share + lax.dynamic_slice_in_dim(sums, at, share.shape[4], 4)
    return lax.dynamic_update_slice_in_dim(sums, share, at, 4)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which `shape` has one entry."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True)
