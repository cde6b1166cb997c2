"""How the kernels of a call are run and differentiated: once by kernels, twice by XLA, and what `vmap` does to them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, differentiable
from ejkernel.kernels.attention.masks import by_group
from ejkernel.kernels.attention.triton.backward import backward
from ejkernel.kernels.attention.triton.forward import forward
from ejkernel.kernels.attention.triton.launcher import LOG2E
from ejkernel.kernels.attention.triton.plan import Plan


def attend(call: Call, inputs: Inputs) -> tuple[Array, Array]:
    """The output `[B, S, H, Dv]` and the log-sum-exp `[B, S, H]`."""
    output, top, total = _attend(call, Plan.of(call), inputs)
    # the gradient of the whole is that of `total`
    lse = (jax.lax.stop_gradient(top) + total).swapaxes(1, 2) / LOG2E
    if inputs.cu_seqlens is not None:
        token = jnp.arange(call.queries, dtype=inputs.cu_seqlens.dtype)
        lse = jnp.where((token >= inputs.cu_seqlens[-1])[None, :, None], -jnp.inf, lse)
    return output, lse


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Whether the bias' gradient is asked for; it costs as much as all the others."""

    bias: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(call: Call, plan: Plan, inputs: Inputs) -> tuple[Array, Array, Array]:
    return _foldable(forward, call, plan)(inputs)


def _attend_forward(call: Call, plan: Plan, primals: Any) -> Any:
    inputs: Any = Inputs(*(None if each is None else each.value for each in primals))  # type: ignore[arg-type]
    # calling the differentiable function again is what makes gradients of gradients work
    results = _attend(call, plan, inputs)
    return results, (inputs, results, _Wanted(primals.bias is not None and primals.bias.perturbed))


def _attend_backward(call: Call, plan: Plan, saved: Any, d_results: Any) -> tuple[Inputs]:
    inputs, results, wanted = saved
    d_output, _, d_total = d_results
    absent = jax.custom_derivatives.SymbolicZero
    d_output = jnp.zeros(d_output.shape, d_output.dtype) if isinstance(d_output, absent) else d_output
    d_lse = None if isinstance(d_total, absent) else d_total * LOG2E
    return (_gradients(call, plan, wanted, inputs, results, d_output, d_lse),)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gradients(
    call: Call,
    plan: Plan,
    wanted: _Wanted,
    inputs: Inputs,
    results: tuple[Array, Array, Array],
    d_output: Array,
    d_lse: Array | None,
) -> Inputs:
    """Cotangents of `inputs`."""
    function = functools.partial(backward, wanted.bias)
    found = _foldable(function, call, plan)(inputs, results, d_output, d_lse)
    gradients = {name: getattr(found, name) for name in ("query", "key", "value")}
    if inputs.bias is not None:
        gradients["bias"] = found.bias if wanted.bias else jnp.zeros_like(inputs.bias)
    if inputs.sinks is not None:
        gradients["sinks"] = _of_sinks(call, inputs.sinks, *results[1:], found.flow)
    return cotangents(inputs, gradients)


def _of_sinks(call: Call, sinks: Array, top: Array, total: Array, mean: Array) -> Array:
    """The sinks' gradient: each takes its share of what the softmax takes off the scores of a row."""
    total = jnp.where(total == -jnp.inf, 0, total)
    rows = (each.reshape(call.batch, call.kv_heads, call.groups, -1) for each in (top, total, mean))
    top, total, mean = (each[..., None] for each in rows)
    split = by_group(call, sinks.astype(jnp.float32), 0)[None, :, :, None]
    share = -jnp.exp2(split * LOG2E - top - total) * mean  # [B, Hkv, G, S, sinks]
    axes = (0, 3, *(axis for axis in (1, 2) if split.shape[axis] == 1))
    return share.sum(axes)


def _gradients_forward(call: Call, plan: Plan, wanted: _Wanted, *arguments: Any) -> Any:
    inputs, _, d_output, d_lse = arguments
    return _gradients(call, plan, wanted, *arguments), (inputs, d_output, d_lse)


def _gradients_backward(call: Call, plan: Plan, wanted: _Wanted, saved: Any, dd_inputs: Inputs) -> Any:
    """Second derivatives are rare, so they go through the XLA implementation."""
    inputs, d_output, d_lse = saved
    call = replace(call, dtype=call.residual_dtype, return_lse=True)

    def gradients(moving: Any, d_output: Array, d_lse: Array | None) -> Any:
        def results(moving: Any) -> Any:
            return xla.run(call, *inputs._replace(**moving))

        (_, lse), pull = jax.vjp(results, moving)
        return pull((d_output, jnp.zeros_like(lse) if d_lse is None else d_lse.swapaxes(1, 2)))[0]

    moving = differentiable(inputs)
    _, pull = jax.vjp(gradients, moving, d_output, d_lse)
    given = {name: getattr(dd_inputs, name) for name in moving}
    if inputs.bias is not None and not wanted.bias:
        given["bias"] = jnp.zeros_like(inputs.bias)
    d_moving, dd_output, dd_lse = pull(given)
    # the results are functions of the inputs: their share is in `d_moving`
    return cotangents(inputs, d_moving), None, dd_output, dd_lse


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _foldable(function: Callable[..., Any], call: Call, plan: Plan) -> Callable[..., Any]:
    """`function(call, plan, inputs, …)` that `vmap` maps: rows join the batch, or run one by one where they cannot."""

    @jax.custom_batching.custom_vmap
    def mapped(*arguments: Any) -> Any:
        return function(call, plan, *arguments)

    @mapped.def_vmap
    def rule(axis_size: int, is_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        def spread(x: Array, batched: bool) -> Array:
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        if not _folds(call, is_batched[0], gradients=len(arguments) > 1):
            spreaded = jax.tree.map(spread, arguments, tuple(is_batched))
            results = jax.lax.map(lambda each: mapped(*each), spreaded)
            return results, jax.tree.map(lambda _: True, results)

        def fold(x: Array, batched: bool) -> Array:
            return spread(x, batched).reshape(-1, *x.shape[1 + batched :])

        inputs, batched = arguments[0], is_batched[0]
        folded = jax.tree.map(fold, arguments, tuple(is_batched))
        # one for all rows stays one for all
        shared = {name: getattr(inputs, name) for name in ("mask", "bias", "sinks") if getattr(batched, name) is False}
        inputs = folded[0]._replace(**shared)
        if inputs.query_offset is not None:
            offset = jnp.broadcast_to(spread(arguments[0].query_offset, batched.query_offset), (axis_size, call.batch))
            inputs = inputs._replace(query_offset=offset.reshape(-1))
        larger = replace(
            call,
            batch=call.batch * axis_size,
            mask_shape=None if inputs.mask is None else inputs.mask.shape,
            bias_shape=None if inputs.bias is None else inputs.bias.shape,
        )
        results = _foldable(function, larger, plan)(inputs, *folded[1:])
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _folds(call: Call, batched: Inputs, gradients: bool) -> bool:
    """Whether rows of a mapped call can join its batch: nothing that they share may need a copy or a gradient each."""
    if call.sequences is not None or call.dropout or batched.sinks:
        return False
    pairs = [(call.mask_shape, batched.mask, False), (call.bias_shape, batched.bias, gradients)]
    return all(
        shape is None or (shape[0] == call.batch if each else shape[0] == 1 and not moves)
        for shape, each, moves in pairs
    )
