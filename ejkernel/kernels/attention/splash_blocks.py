"""Splash attention's passes as `xla.blocks` has them, for a ring of devices that merges what each block of keys gives.

The kernel keeps its log-sum-exp where its own backward pass finds it. That pass, given the output and the log-sum-exp
over all keys instead, gives what the keys of one block have of the whole softmax's gradients.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels import _pallas
from ejkernel.kernels.attention import splash
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents
from ejkernel.kernels.attention.xla import blocks as xla_blocks

_NOTHING = -1e37  # log-sum-exps below are those of rows that see no key of the block


def supports(call: Call) -> str | None:
    """Why splash attention cannot serve a block of the ring's, or `None` if it can."""
    if call.left is not None or call.right not in (None, 0):
        return "a window, whose edge is elsewhere for each pair of slices"
    if call.queries != call.keys:
        return f"slices of {call.queries} queries and {call.keys} keys"
    return splash.supports(replace(call, offset=False, dtype=call.query_dtype))


def forward(call: Call, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and a reference and the sum of `exp(score - reference)`, `[B, S, H]`."""
    wide = jnp.float32
    rows = (call.batch, call.queries, call.heads)

    def block(right: int | None, inputs: Inputs) -> list[Array]:
        kernel = splash.kernel(replace(call, right=right), save_residuals=True)
        output, (lse,) = kernel(*splash.operands(call, inputs))
        lse = splash.used(inputs.cu_seqlens, lse.swapaxes(1, 2), -jnp.inf)
        empty = lse < _NOTHING
        output = jnp.where(empty[..., None], 0, output.swapaxes(1, 2).astype(wide))
        return [output, jnp.where(empty, 0, lse), jnp.where(empty, 0, jnp.ones(rows, wide))]

    def nothing(inputs: Inputs) -> list[Array]:
        return [jnp.zeros((*rows, call.value_dim), wide), jnp.zeros(rows, wide), jnp.zeros(rows, wide)]

    def instead(inputs: Inputs) -> list[Array]:
        return [each.astype(wide) for each in xla_blocks.forward(call, inputs)]

    output, top, total = _launch(call, block, nothing, instead, inputs)
    return output, top, total


def backward(
    call: Call, inputs: Inputs, output: Array, top: Array, total: Array, d_output: Array, d_total: Array
) -> Inputs:
    """Cotangents of query, key and value; `output`, `top` and `total` may be over more keys than these."""
    lse = jnp.where(total == 0, 0, top + jnp.log(jnp.where(total == 0, 1, total)))
    rows = output.astype(call.query_dtype), lse, d_output.astype(call.query_dtype)

    def block(right: int | None, inputs: Inputs, output: Array, lse: Array, d_output: Array) -> list[Array]:
        arguments = splash.operands(call, inputs)
        output, lse, d_output = (
            splash.used(inputs.cu_seqlens, each).swapaxes(1, 2) for each in (output, lse, d_output)
        )
        leaves, tree = jax.tree.flatten(_pull(replace(call, right=right), *arguments))
        for place, each in zip(_kept(replace(call, right=right), len(arguments) > 3), (output, lse), strict=True):
            leaves[place] = each
        d_query, d_key, d_value = (each.swapaxes(1, 2) for each in jax.tree.unflatten(tree, leaves)(d_output))
        return [(d_query.astype(jnp.float32) * call.scale).astype(d_query.dtype), d_key, d_value]

    def nothing(inputs: Inputs, *_: Array) -> list[Array]:
        return [jnp.zeros_like(each) for each in inputs[:3]]

    def instead(inputs: Inputs, output: Array, lse: Array, d_output: Array) -> list[Array]:
        found = xla_blocks.backward(call, inputs, output, lse, jnp.ones_like(lse), d_output, jnp.zeros_like(lse))
        return [found.query, found.key, found.value]

    found = _launch(call, block, nothing, instead, inputs, *rows)
    return cotangents(inputs, dict(zip(("query", "key", "value"), found, strict=True)))


def _launch(
    call: Call, block: Callable[..., Any], nothing: Callable[..., Any], instead: Callable[..., Any], *trees: Any
) -> Any:
    """`block` of what the slices see of each other: all, what is not later, or `nothing`; as one operation."""
    arrays, tree = jax.tree.flatten(trees)
    shapes = jax.eval_shape(nothing, *trees)

    def flat(function: Callable[..., Any], *arrays: Array) -> Any:
        found = function(*jax.tree.unflatten(tree, arrays))
        return [x.astype(each.dtype) for x, each in zip(found, shapes, strict=True)]

    def run(*arrays: Array) -> Any:
        if call.right is None:
            return flat(functools.partial(block, None), *arrays)
        # slices are equally long, so what is between them is a whole number of slices
        distance = jax.tree.unflatten(tree, arrays)[0].query_offset[0]
        branches: list[Callable[..., Any]] = [nothing, functools.partial(block, 0), functools.partial(block, None)]
        return jax.lax.switch(
            jnp.sign(distance).astype(np.int32) + 1, [functools.partial(flat, each) for each in branches], *arrays
        )

    def harmless(*arrays: Array) -> Any:
        # it weighs what is masked by 0, and 0 times NaN is NaN
        inputs, *rest = jax.tree.unflatten(tree, arrays)
        of_queries = [inputs.query, *(each for each in rest if each.ndim == 4)]
        tokens = [(inputs.cu_seqlens, of_queries), (inputs.cu_seqlens_kv, inputs[1:3])]
        small = [(jnp.abs(splash.used(cu, x)) <= splash.HARMLESS).all() for cu, each in tokens for x in each]
        return jax.lax.cond(jnp.stack(small).all(), run, functools.partial(flat, instead), *arrays)

    packed = trees[0].cu_seqlens is not None
    return _pallas.launch(harmless if packed else run, functools.partial(flat, instead), shapes, *arrays)


def _pull(call: Call, *arguments: Any) -> Any:
    """The function that takes the output's cotangent to those of the kernel's first three arguments."""
    kernel = splash.kernel(call)
    return jax.vjp(lambda *moving: kernel(*moving, *arguments[3:]), *arguments[:3])[1]


@functools.cache
def _kept(call: Call, packed: bool) -> tuple[int, int]:
    """Which of the arrays that the backward pass keeps are the output and the log-sum-exp.

    They are told from the others by sizes that no other array has.
    """
    dims = 64, 128
    sizes = replace(call, keys=2 * call.queries, key_dim=dims[0], value_dim=dims[1])
    shapes = [
        (call.batch, call.heads, sizes.queries, dims[0]),
        (call.batch, call.kv_heads, sizes.keys, dims[0]),
        (call.batch, call.kv_heads, sizes.keys, dims[1]),
    ]
    arguments: list[Any] = [jax.ShapeDtypeStruct(shape, call.query_dtype) for shape in shapes]
    if packed:
        arguments.append(
            splash.segments(*(jax.ShapeDtypeStruct((each,), np.int32) for each in (sizes.queries, sizes.keys)))
        )
    leaves = jax.tree.leaves(jax.eval_shape(functools.partial(_pull, sizes), *arguments))
    found = [(each.shape, np.dtype(each.dtype)) for each in leaves]
    output = ((call.batch, call.heads, sizes.queries, dims[1]), call.query_dtype)
    lse = ((call.batch, call.heads, sizes.queries), np.dtype(np.float32))
    if not found.count(output) == found.count(lse) == 1:
        raise NotImplementedError(f"splash attention of JAX {jax.__version__} keeps {found} for its backward pass")
    return found.index(output), found.index(lse)
