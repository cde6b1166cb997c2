"""Softmax attention by cuDNN, through `jax.nn.dot_product_attention`, for the calls that it gets right.

The limits in `supports` are those of JAX 0.10 to 0.12, read from their sources, and then some: an option is in when a
test on a GPU compares its output and gradients with the oracle's.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels import _varying
from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents, differentiable, heads_last
from ejkernel.kernels.attention.masks import allowed_pairs, live

BACKEND: Any = "cudnn"  # what `jax.nn.dot_product_attention` calls it
HALF = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


def supports(call: Call) -> str | None:
    """Why cuDNN cannot serve `call`, or `None` if it can."""
    return _installed() or _options(call) or _bounds(call) or _pairs(call) or _arrays(call)


def _installed() -> str | None:
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(each) for each in plugins):
        return "JAX's CUDA plugin is not installed"
    return None


def _options(call: Call) -> str | None:
    lacks = {
        "logits_soft_cap": call.soft_cap is not None,
        "softmax_aux": call.sinks is not None,
        "dropout that its backward pass can repeat": call.dropout > 0,
        "cu_seqlens": call.sequences is not None,
        "query_offset": call.offset,
        # it comes rounded to the output's dtype, and without a gradient
        "return_lse": call.return_lse,
        "a softmax_dtype other than float32": call.softmax_dtype != np.float32,
    }
    return next((f"it has no {option}" for option, asked in lacks.items() if asked), None)


def _bounds(call: Call) -> str | None:
    if call.left is None and call.right is None:
        return None
    if call.right != 0:
        return "its sliding_window needs causal, or a right bound of 0"
    return f"causal with {call.queries} queries and {call.keys} keys" if call.queries != call.keys else None


def _pairs(call: Call) -> str | None:
    for name, shape in (("attention_mask", call.mask_shape), ("bias", call.bias_shape)):
        if shape is None:
            continue
        if shape[1] not in (1, call.heads):
            return f"{name} with {shape[1]} heads; it takes 1 or {call.heads}"
        if shape[2:] != (call.queries, call.keys):
            return f"{name} broadcast over queries or keys"
    if call.bias_shape is not None and call.bias_shape[:2] != (1, call.heads):
        return f"bias {list(call.bias_shape)}; its gradient needs one for all rows, with {call.heads} heads"
    if call.bias_shape is not None and call.mask_shape is not None and call.mask_shape[0] != 1:
        return f"attention_mask with {call.mask_shape[0]} rows beside a bias; its gradient needs one for all rows"
    if call.bias_dtype not in (None, call.query_dtype):
        return f"bias in {call.bias_dtype}, query in {call.query_dtype}"
    return None


def _arrays(call: Call) -> str | None:
    dtypes = {call.query_dtype, call.key_dtype, call.value_dtype}
    if len(dtypes) > 1 or call.query_dtype not in HALF:
        return f"{'/'.join(sorted(map(str, dtypes)))} arrays; it takes float16 or bfloat16, all alike"
    if call.dtype not in HALF:
        return f"output in {call.dtype}; its own is {call.query_dtype}"
    if 0 in (call.batch, call.queries, call.keys):
        return "an empty array"
    # JAX refuses odd lengths when differentiating, and no one knows beforehand who will
    if call.queries % 2 or call.keys % 2:
        return f"an odd length: {call.queries} queries, {call.keys} keys"
    if call.value_dim != call.key_dim:
        return f"value dim {call.value_dim} other than key dim {call.key_dim}"
    if call.key_dim % 8 or call.key_dim > 256:
        return f"head dim {call.key_dim}; it takes multiples of 8 up to 256"
    if call.key_dim > 128 and not _hopper():
        return f"head dim {call.key_dim}; above 128 it needs compute capability 9.0"
    return None


def _hopper() -> bool:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return False
    return tuple(map(int, device.compute_capability.split("."))) >= (9, 0)


def run(call: Call, *arrays: Array | None) -> Array:
    """The output `[B, S, H, D]`."""
    inputs: Inputs = _varying.align(Inputs(*arrays))  # type: ignore[arg-type]
    return _attend(call, inputs).astype(call.dtype)


def _direct(call: Call, inputs: Inputs) -> Array:
    """cuDNN's output, put right where cuDNN averages over keys that no query may attend to."""
    query, key, value, mask, bias = inputs[:5]
    if mask is not None and bias is not None:
        bias = jnp.where(mask, bias, -jnp.inf)
        mask = None
    pairs = mask if bias is None else bias > -jnp.inf
    alive = None
    if pairs is not None:
        allowed = allowed_pairs(call, pairs)
        assert allowed is not None
        alive, seen = live(allowed)
        alive = jnp.broadcast_to(alive, (call.batch, call.kv_heads, call.groups, call.queries, 1))
        alive, seen = heads_last(call, alive), seen.swapaxes(1, 2)
        query, key, value = jnp.where(alive, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)
        if bias is not None:
            bias = _near_zero(bias, allowed.reshape(bias.shape))
    if bias is not None:
        # -inf less -inf is NaN there; this, which JAX puts for masked pairs, leaves a weight of 0 just as well
        bias = jnp.maximum(bias, -(2.0**15) if bias.dtype == jnp.float16 else -(2.0**41))
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=call.scale,
        is_causal=call.right == 0,
        local_window_size=None if call.left is None else (call.left, 0),
        implementation=BACKEND,
    )
    return output if alive is None else jnp.where(alive, output, 0)


def _near_zero(bias: Array, allowed: Array) -> Array:
    """`bias` with the largest value of a row taken off it where that is huge, which changes no weight.

    cuDNN finds its gradients from a log-sum-exp in float32, which would forget the sum beside a bias of -1e9.
    """
    top = jnp.where(allowed, jax.lax.stop_gradient(bias), -jnp.inf).max(-1, keepdims=True)
    # from there on the difference of two values is exact, in half precision too, unless its weight is 0 anyway
    return bias - jnp.where(jnp.isfinite(top) & (jnp.abs(top) >= 256), top, 0)


# cuDNN's primitives have no second derivative, and batch only arrays that all have the batch. So what touches them is
# opaque to both: `vmap` loops, and second derivatives are those of the XLA implementation.


def _primal(call: Call, inputs: Inputs) -> Array:
    return jax.custom_batching.sequential_vmap(functools.partial(_direct, call))(inputs)


def _forward(call: Call, inputs: Inputs) -> Any:
    output, kept = _keep(call, inputs)
    return output, (inputs, kept)


def _backward(call: Call, residuals: Any, d_output: Array) -> tuple[Inputs]:
    return (_pull(call, *residuals, d_output),)


_attend = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _with_pull(call: Call, inputs: Inputs) -> Any:
    """The output, and the function that takes its cotangent to those of the inputs."""
    return jax.vjp(lambda moving: _direct(call, inputs._replace(**moving)), differentiable(inputs))


def _keep_primal(call: Call, inputs: Inputs) -> tuple[Array, list[Array]]:
    """The output, and the arrays that the backward pass will need."""

    def run(inputs: Inputs) -> tuple[Array, list[Array]]:
        output, pull = _with_pull(call, inputs)
        return output, jax.tree.leaves(pull)

    return jax.custom_batching.sequential_vmap(run)(inputs)


def _keep_forward(call: Call, inputs: Inputs) -> Any:
    return _keep(call, inputs), inputs


def _keep_backward(call: Call, inputs: Inputs, d_results: Any) -> tuple[Inputs]:
    # what was kept has no cotangent: `_pull` counts its part in with the inputs'
    return (_by_xla(call, inputs, d_results[0]),)


_keep = jax.custom_vjp(_keep_primal, nondiff_argnums=(0,))
_keep.defvjp(_keep_forward, _keep_backward)


def _pull_primal(call: Call, inputs: Inputs, kept: list[Array], d_output: Array) -> Inputs:
    """The cotangents of the inputs."""

    def run(inputs: Inputs, kept: list[Array], d_output: Array) -> dict[str, Array]:
        # the function itself cannot be kept, as `vmap` would trace it anew; traced here it costs nothing
        tree = jax.tree.structure(jax.eval_shape(functools.partial(_with_pull, call), inputs)[1])
        return jax.tree.unflatten(tree, kept)(d_output)[0]

    return cotangents(inputs, jax.custom_batching.sequential_vmap(run)(inputs, kept, d_output))


def _pull_forward(call: Call, inputs: Inputs, kept: list[Array], d_output: Array) -> Any:
    return _pull(call, inputs, kept, d_output), (inputs, d_output)


def _pull_backward(call: Call, residuals: Any, dd_inputs: Inputs) -> Any:
    inputs, d_output = residuals
    moving = differentiable(inputs)

    def gradients(moving: dict[str, Array], d_output: Array) -> dict[str, Array]:
        return differentiable(_by_xla(call, inputs._replace(**moving), d_output))

    _, pull = jax.vjp(gradients, moving, d_output)
    d_moving, dd_output = pull({name: getattr(dd_inputs, name) for name in moving})
    return cotangents(inputs, d_moving), None, dd_output


_pull = jax.custom_vjp(_pull_primal, nondiff_argnums=(0,))
_pull.defvjp(_pull_forward, _pull_backward)


def _by_xla(call: Call, inputs: Inputs, d_output: Array) -> Inputs:
    """The cotangents of the inputs, by the XLA implementation."""

    def output(moving: dict[str, Array]) -> Array:
        return xla.run(call, *inputs._replace(**moving)).astype(d_output.dtype)

    return cotangents(inputs, jax.vjp(output, differentiable(inputs))[1](d_output)[0])
