"""The backward pass as launches of Triton kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton.launcher import Launcher, device
from ejkernel.kernels.attention.triton.plan import FILL, Plan
from ejkernel.kernels.attention.xla.layout import seen_keys
from ejkernel.xla_utils.utils import cdiv

_TERMS = 16  # as in `backward_kernels`


class Gradients(NamedTuple):
    """What the kernels find: gradients shaped as what they belong to, and `[B, H, S]`."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    mean: Array  # what the softmax takes off the gradient of a row's scores


def backward(
    of_bias: bool,
    call: Call,
    plan: Plan,
    inputs: Inputs,
    results: tuple[Array, Array, Array],
    d_output: Array,
    d_lse: Array | None,
) -> Gradients:
    """The gradients of query, key, value and, if asked for, bias, from what `forward` gave and cotangents.

    `d_lse` is `[B, H, S]`.
    """
    launcher = Launcher.of(call, plan, inputs)
    output, top, total = results
    tile, dtype = plan.config.query, inputs.query.dtype
    # bfloat16 has float32's range: what is taken off the scores can travel with them, unless dropout comes in between
    folded = dtype == jnp.bfloat16 and not call.dropout
    d_query, mean, terms = launcher.launch(
        device("backward").query_gradient,
        *launcher.tokens,
        *launcher.places,
        *(output, top, total, d_output, d_lse),
        *launcher.sizes,
        outputs=[
            launcher.like(*inputs.query.shape, dtype=dtype),
            launcher.like(*top.shape),
            launcher.like(*((*top.shape, _TERMS) if folded else (1,)), dtype=dtype),
        ],
        programs=launcher.blocks(tile.queries) * call.heads,
        tile=tile,
        DLSE=d_lse is not None,
        FOLDED=folded,
    )
    tile, parts = plan.config.key, plan.head_parts
    shapes = [(parts, *each.shape) for each in (inputs.key, inputs.value)]
    d_key, d_value = launcher.launch(
        device("backward").key_gradients,
        *launcher.tokens,
        *launcher.places,
        *(top, total, mean, terms, d_output),
        *launcher.sizes,
        call.batch,
        outputs=[launcher.like(*each, dtype=dtype if parts == 1 else jnp.float32) for each in shapes],
        programs=launcher.blocks(tile.keys, of_keys=True) * call.kv_heads * parts,
        tile=tile,
        PARTS=parts,
        FOLDED=folded,
    )
    d_bias = _bias(launcher, (top, total, mean), d_output) if of_bias else None
    return Gradients(d_query, _summed(d_key), _summed(d_value), d_bias, mean)


def _bias(launcher: Launcher, rows: tuple[Array, Array, Array], d_output: Array) -> Array:
    call, inputs, tile = launcher.call, launcher.inputs, launcher.plan.config.bias
    assert inputs.bias is not None
    offset = jnp.zeros(1, jnp.int32) if inputs.query_offset is None else inputs.query_offset
    start, stop = (each.astype(jnp.int32) for each in seen_keys(call, *launcher.borders, offset))
    n_rows, heads, queries, keys = inputs.bias.shape
    programs = n_rows * heads * cdiv(queries, tile.queries) * cdiv(keys, tile.keys)
    parts = cdiv(FILL, programs)
    (found,) = launcher.launch(
        device("bias").bias_gradient,
        *launcher.tokens,
        *(start, stop, *rows, d_output),
        *(call.batch, call.queries, call.keys),
        outputs=[launcher.like(parts, *inputs.bias.shape)],
        programs=programs * parts,
        tile=tile,
        PARTS=parts,
        BOUNDS_BY_ROW=start.shape[0] > 1,
    )
    return _summed(found)


def _summed(parts: Array) -> Array:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)
