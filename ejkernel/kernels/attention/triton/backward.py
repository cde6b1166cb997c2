"""The backward pass as launches of Triton kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._launch import shape
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton.launcher import Launcher, device, without_masked
from ejkernel.kernels.attention.triton.plan import FILL, ROWS, Plan
from ejkernel.kernels.attention.xla.layout import seen_keys
from ejkernel.xla_utils.utils import cdiv

_TERMS = 16  # as in `device.backward`


class Gradients(NamedTuple):
    """Gradients, each shaped as its array, and with sinks the rows' deltas `[B, H, S]`, see `_sinks_gradient`."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sink_delta: Array | None


def backward(
    of_bias: bool,
    call: Call,
    plan: Plan,
    inputs: Inputs,
    results: tuple[Array, Array, Array],
    d_output: Array,
    d_lse: Array | None,
) -> Gradients:
    """The gradients of query, key, value and, with `of_bias`, bias, from the results of `forward` and cotangents.

    `d_lse` is `[B, H, S]`.
    """
    masked = without_masked(call, inputs, {"query": inputs.query, "key": inputs.key, "d_output": d_output})
    d_output = masked.pop("d_output")
    launcher = Launcher.of(call, plan, inputs._replace(**masked))
    output, lse, lse_rest = results
    dtype, rows = inputs.query.dtype, shape(*lse.shape)
    # products can subtract log-sum-exp and delta in bfloat16, which has float32's range, unless dropout comes between
    folded = dtype == jnp.bfloat16 and not call.dropout
    residuals = {"lse": lse, "lse_rest": lse_rest, "d_output": d_output, "d_lse": d_lse}
    delta, terms = launcher.launch(
        device("backward").row_deltas,
        {"output": output, "cu_seqlens": launcher.inputs.cu_seqlens, **residuals},
        {"delta": rows, "terms": shape(*lse.shape, _TERMS, dtype=dtype) if folded else None},
        programs=call.batch * cdiv(call.queries, ROWS.rows) * call.heads,
        tile=ROWS,
        folded=folded,
        has_d_lse=d_lse is not None,
    )
    residuals |= {"delta": delta, "terms": terms}
    tile = plan.config.query
    d_query, sink_delta = launcher.launch(
        device("backward").query_gradient,
        launcher.arrays | residuals | launcher.ranges(tile.columns),
        {"d_query": shape(*inputs.query.shape, dtype=dtype), "sink_delta": None if inputs.sinks is None else rows},
        programs=launcher.blocks(tile.rows) * call.heads,
        tile=tile,
        has_d_lse=d_lse is not None,
    )
    d_key, d_value = _keys(launcher, residuals, folded)
    return Gradients(d_query, d_key, d_value, _bias(launcher, residuals) if of_bias else None, sink_delta)


def _keys(launcher: Launcher, residuals: dict[str, Any], folded: bool) -> tuple[Array, Array]:
    """The gradients of key and value, in one pass or one for each."""
    call, inputs, plan = launcher.call, launcher.inputs, launcher.plan
    tile, parts = plan.config.key, plan.head_parts
    dtype = inputs.query.dtype if parts == 1 else jnp.float32
    d_key, d_value = (shape(parts, *each.shape, dtype=dtype) for each in (inputs.key, inputs.value))

    arrays = launcher.arrays | residuals | launcher.ranges(tile.rows, of_keys=False)

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

    parts_of = (launch(True, False).d_key, launch(False, True).d_value) if plan.config.apart else launch(True, True)
    return _summed(parts_of[0]), _summed(parts_of[1])


def _bias(launcher: Launcher, residuals: dict[str, Any]) -> Array:
    """The gradient of the bias, in parts that are then summed where there are too few programs for a GPU."""
    call, inputs, tile = launcher.call, launcher.inputs, launcher.plan.config.bias
    assert inputs.bias is not None
    offset = jnp.zeros(1, jnp.int32) if inputs.query_offset is None else inputs.query_offset
    bounds = seen_keys(call, inputs.cu_seqlens, inputs.cu_seqlens_kv, offset)
    start, stop = (each.astype(jnp.int32) for each in bounds)
    n_rows, heads, queries, keys = inputs.bias.shape
    programs = n_rows * heads * cdiv(queries, tile.rows) * cdiv(keys, tile.columns)
    parts = cdiv(FILL, programs)
    (d_bias,) = launcher.launch(
        device("bias").bias_gradient,
        {"start": start, "stop": stop, **launcher.arrays, **residuals},
        {"d_bias": shape(parts, *inputs.bias.shape, dtype=inputs.bias.dtype if parts == 1 else jnp.float32)},
        programs=programs * parts,
        tile=tile,
        parts=parts,
        bounds_by_row=start.shape[0] > 1,
    )
    return _summed(d_bias)[..., : call.keys]


def _summed(parts: Array) -> Array:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)
