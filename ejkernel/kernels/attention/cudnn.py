"""Softmax attention by cuDNN, through `jax.nn.dot_product_attention`, for the calls that it gets right.

The limits in `supports` are those of JAX 0.10 to 0.12, read from their sources. An option is supported only if a test
on a GPU compares its output and gradients with the oracle's.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel import _devices
from ejkernel.kernels import _differentiable, _launch, _varying
from ejkernel.kernels.attention import triton
from ejkernel.kernels.attention.borrowed import borrowed
from ejkernel.kernels.attention.call import Call, lacking
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import allowed_pairs, live_tokens

BACKEND: Any = "cudnn"  # what `jax.nn.dot_product_attention` calls it
HALF = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
# Not: dropout, which its backward pass cannot repeat; return_lse, which comes rounded and without a gradient.
SUPPORTED = ("left", "right", "mask_shape", "bias_shape", "bias_dtype", "block_sizes")


def supports(call: Call) -> str | None:
    """Why cuDNN cannot serve `call`, or `None` if it can."""
    return _missing() or _options(call) or _bounds(call) or _pairs(call) or _arrays(call)


def slower(call: Call) -> str | None:
    """The option of `call` with which the Triton kernels were measured to be faster, or `None`.

    They are faster with biases too. But where a row's bias is huge throughout, float32 scores forget what it was added
    to, which `_near_zero` prevents here.
    """
    return "attention_mask" if call.mask_shape is not None and call.bias_shape is None else None


def _missing() -> str | None:
    device = _devices.assumed.get()
    return None if device is not None and device.platform == "cuda" else _installed()


@functools.cache
def _installed() -> str | None:
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(each) for each in plugins):
        return "JAX's CUDA plugin is not installed"
    return None


def _options(call: Call) -> str | None:
    if call.softmax_dtype != np.float32:
        return "it has no softmax_dtype other than float32"
    return lacking(call, SUPPORTED)


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
    return (_launch.capability() or 0) >= 90


def run(call: Call, *arrays: Array | None) -> Array:
    """The output `[B, S, H, D]`."""
    inputs: Inputs = _varying.align(Inputs(*arrays))  # type: ignore[arg-type]
    return _differentiable.call(OP, call, inputs).astype(call.dtype)


def _direct(call: Call, inputs: Inputs) -> Array:
    """cuDNN's output, with 0 for queries without keys, for which cuDNN averages over all values."""
    query, key, value, mask, bias = inputs[:5]
    if mask is not None and bias is not None:
        bias = jnp.where(mask, bias, -jnp.inf)
        mask = None
    pairs = mask if bias is None else bias > -jnp.inf
    live_queries = None
    if pairs is not None:
        allowed = allowed_pairs(call, pairs)
        assert allowed is not None
        live_queries, live_keys = live_tokens(call, allowed)
        query, key, value = (
            jnp.where(live, x, 0) for live, x in ((live_queries, query), (live_keys, key), (live_keys, value))
        )
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
    return output if live_queries is None else jnp.where(live_queries, output, 0)


def _near_zero(bias: Array, allowed: Array) -> Array:
    """`bias` with the largest value of a row taken off it where that is huge, which changes no weight.

    cuDNN finds its gradients from a log-sum-exp in float32, which would forget the sum beside a bias of -1e9.
    """
    top = jnp.where(allowed, jax.lax.stop_gradient(bias), -jnp.inf).max(-1, keepdims=True)
    # from there on the difference of two values is exact, in half precision too, unless its weight is 0 anyway
    return bias - jnp.where(jnp.isfinite(top) & (jnp.abs(top) >= 256), top, 0)


OP = borrowed(_direct, with_tangents=lambda call: triton.run if triton.supports(call) is None else None)
