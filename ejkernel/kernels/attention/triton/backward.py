"""The backward pass as launches of Triton kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._launch import shape
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group, live_tokens
from ejkernel.kernels.attention.triton.launcher import Launcher, device
from ejkernel.kernels.attention.triton.plan import FILL, ROWS, Plan
from ejkernel.kernels.attention.xla.layout import seen_keys
from ejkernel.xla_utils.utils import cdiv

_TERMS = 16  # as in `device.backward`


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
    dtype, rows = inputs.query.dtype, shape(*top.shape)
    # bfloat16 has float32's range: what is taken off the scores can travel with them, unless dropout comes in between
    folded = dtype == jnp.bfloat16 and not call.dropout
    given = {"top": top, "total": total, "d_output": d_output, "d_lse": d_lse}
    mean, terms = launcher.launch(
        device("backward").row_means,
        {"output": output, "cu_seqlens": launcher.inputs.cu_seqlens, **given},
        {"mean": rows, "terms": shape(*top.shape, _TERMS, dtype=dtype) if folded else None},
        programs=call.batch * cdiv(call.queries, ROWS.rows) * call.heads,
        tile=ROWS,
        folded=folded,
        has_d_lse=d_lse is not None,
    )
    given |= {"mean": mean, "terms": terms}
    tile = plan.config.query
    d_query, flow = launcher.launch(
        device("backward").query_gradient,
        launcher.arrays | given | launcher.ranges(tile.columns),
        {"d_query": shape(*inputs.query.shape, dtype=dtype), "flow": None if inputs.sinks is None else rows},
        programs=launcher.blocks(tile.rows) * call.heads,
        tile=tile,
        has_d_lse=d_lse is not None,
    )
    d_key, d_value = _keys(launcher, given, folded)
    return Gradients(d_query, d_key, d_value, _bias(launcher, given) if of_bias else None, flow)


def _keys(launcher: Launcher, given: dict[str, Any], folded: bool) -> tuple[Array, Array]:
    """The gradients of key and value, in one pass or one for each."""
    call, inputs, plan = launcher.call, launcher.inputs, launcher.plan
    tile, parts = plan.config.key, plan.head_parts
    dtype = inputs.query.dtype if parts == 1 else jnp.float32
    d_key, d_value = (shape(parts, *each.shape, dtype=dtype) for each in (inputs.key, inputs.value))

    arrays = launcher.arrays | given | launcher.ranges(tile.rows, of_keys=False)

    def launch(of_key: bool, of_value: bool) -> Any:
        return launcher.launch(
            device("backward").key_gradients,
            arrays,
            {"d_key": d_key if of_key else None, "d_value": d_value if of_value else None},
            programs=launcher.blocks(tile.columns, of_keys=True) * call.kv_heads * parts,
            tile=tile,
            parts=parts,
            of_key=of_key,
            of_value=of_value,
            folded=folded,
        )

    found = (launch(True, False).d_key, launch(False, True).d_value) if plan.config.apart else launch(True, True)
    return _summed(found[0]), _summed(found[1])


def _bias(launcher: Launcher, given: dict[str, Any]) -> Array:
    call, inputs, tile = launcher.call, launcher.inputs, launcher.plan.config.bias
    assert inputs.bias is not None
    offset = jnp.zeros(1, jnp.int32) if inputs.query_offset is None else inputs.query_offset
    bounds = seen_keys(call, inputs.cu_seqlens, inputs.cu_seqlens_kv, offset)
    start, stop = (each.astype(jnp.int32) for each in bounds)
    n_rows, heads, queries, keys = inputs.bias.shape
    programs = n_rows * heads * cdiv(queries, tile.rows) * cdiv(keys, tile.columns)
    parts = cdiv(FILL, programs)
    (found,) = launcher.launch(
        device("bias").bias_gradient,
        {"start": start, "stop": stop, **launcher.arrays, **given},
        {"d_bias": shape(parts, *inputs.bias.shape, dtype=inputs.bias.dtype if parts == 1 else jnp.float32)},
        programs=programs * parts,
        tile=tile,
        parts=parts,
        bounds_by_row=start.shape[0] > 1,
    )
    return _summed(found)[..., : call.keys]


def _summed(parts: Array) -> Array:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)
