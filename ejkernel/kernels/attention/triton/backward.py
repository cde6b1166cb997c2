"""The backward pass as launches of Triton kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group, live_tokens
from ejkernel.kernels.attention.triton.launcher import Launcher, device
from ejkernel.kernels.attention.triton.plan import FILL, ROWS, Plan
from ejkernel.kernels.attention.xla.layout import seen_keys
from ejkernel.xla_utils.utils import cdiv

_TERMS = 16  # as in `backward_kernels`


class Gradients(NamedTuple):
    """What the kernels find: gradients shaped as what they belong to, and `[B, H, S]`."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    flow: Array | None  # with sinks: what the softmax takes off the gradient of a row's scores


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
    if inputs.mask is not None:
        # as in the forward pass, and of these no gradient that another has is a product
        alive, seen = live_tokens(call, by_group(call, inputs.mask, 1))
        inputs = inputs._replace(query=jnp.where(alive, inputs.query, 0), key=jnp.where(seen, inputs.key, 0))
        d_output = jnp.where(alive, d_output, 0)
    launcher = Launcher.of(call, plan, inputs)
    output, top, total = results
    dtype, rows = inputs.query.dtype, launcher.like(*top.shape)
    # bfloat16 has float32's range: what is taken off the scores can travel with them, unless dropout comes in between
    folded = dtype == jnp.bfloat16 and not call.dropout
    of_lse = {"DLSE": d_lse is not None}
    mean, terms = launcher.launch(
        device("backward").row_means,
        *(output, top, d_output, d_lse, launcher.borders[0]),
        *(call.queries, call.sequences or 0),
        outputs=[rows, launcher.like(*((*top.shape, _TERMS) if folded else (1,)), dtype=dtype)],
        programs=call.batch * cdiv(call.queries, ROWS.queries) * call.heads,
        tile=ROWS,
        FOLDED=folded,
        **of_lse,
    )
    tile = plan.config.query
    d_query, flow = launcher.launch(
        device("backward").query_gradient,
        *launcher.tokens,
        *launcher.places,
        *(top, total, mean, d_output, d_lse),
        *launcher.sizes,
        outputs=[launcher.like(*inputs.query.shape, dtype=dtype), launcher.like(1) if inputs.sinks is None else rows],
        programs=launcher.blocks(tile.queries) * call.heads,
        tile=tile,
        **of_lse,
    )
    d_key, d_value = _keys(launcher, (top, total, mean, terms), d_output, FOLDED=folded)
    d_bias = _bias(launcher, (top, total, mean), d_output) if of_bias else None
    return Gradients(d_query, d_key, d_value, d_bias, None if inputs.sinks is None else flow)


def _keys(launcher: Launcher, rows: tuple[Array, ...], d_output: Array, **constants: Any) -> tuple[Array, Array]:
    """The gradients of key and value, in one pass or one for each."""
    call, inputs, plan = launcher.call, launcher.inputs, launcher.plan
    tile, parts = plan.config.key, plan.head_parts
    dtype = inputs.query.dtype if parts == 1 else jnp.float32
    d_key, d_value = (launcher.like(parts, *each.shape, dtype=dtype) for each in (inputs.key, inputs.value))

    def launch(of_key: bool, of_value: bool) -> Any:
        return launcher.launch(
            device("backward").key_gradients,
            *launcher.tokens,
            *launcher.places,
            *(*rows, d_output),
            *launcher.sizes,
            call.batch,
            outputs=[each if asked else launcher.like(1) for each, asked in ((d_key, of_key), (d_value, of_value))],
            programs=launcher.blocks(tile.keys, of_keys=True) * call.kv_heads * parts,
            tile=tile,
            PARTS=parts,
            OF_KEY=of_key,
            OF_VALUE=of_value,
            **constants,
        )

    found = (launch(True, False)[0], launch(False, True)[1]) if plan.config.apart else launch(True, True)
    return _summed(found[0]), _summed(found[1])


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
        outputs=[launcher.like(parts, *inputs.bias.shape, dtype=inputs.bias.dtype if parts == 1 else jnp.float32)],
        programs=programs * parts,
        tile=tile,
        PARTS=parts,
        BOUNDS_BY_ROW=start.shape[0] > 1,
    )
    return _summed(found)[..., : call.keys]


def _summed(parts: Array) -> Array:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)
