"""Softmax attention on TPUs by the splash attention kernel that JAX ships, for the calls that it gets right."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels import _differentiable, _pallas, _varying
from ejkernel.kernels.attention.borrowed import borrowed
from ejkernel.kernels.attention.call import Call, lacking
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import in_sequences, int32_ids
from ejkernel.xla_utils.utils import prepare_sequence_ids

LANES = 128
LARGEST_BLOCK = 512
# Not return_lse, which has no gradient.
SUPPORTED = ("soft_cap", "left", "right", "sinks", "sequences", "segment_ids", "block_sizes")
# Products and sums of numbers up to here stay within float32, whatever they are multiplied by.
HARMLESS = 2.0**30


def supports(call: Call) -> str | None:
    """Why splash attention cannot serve `call`, or `None` if it can."""
    return _options(call) or _bounds(call) or _arrays(call) or _place()


def _options(call: Call) -> str | None:
    if call.sinks not in (None, 1):
        return "it has no softmax_aux with more than one sink"
    if call.softmax_dtype != np.float32:
        return "it has no softmax_dtype other than float32"
    return lacking(call, SUPPORTED)


def _bounds(call: Call) -> str | None:
    windowed = call.left is not None or call.right not in (None, 0)
    if windowed and call.queries != call.keys:
        return f"a window with {call.queries} queries and {call.keys} keys, where a query may see none"
    return None


def _arrays(call: Call) -> str | None:
    dtypes = {call.query_dtype, call.key_dtype, call.value_dtype, call.dtype}
    if dtypes != {np.dtype(jnp.bfloat16)}:
        return f"{'/'.join(sorted(map(str, dtypes)))} arrays; it is exact enough for bfloat16 alone"
    sizes = (call.batch, call.queries, call.keys, call.heads)
    if any(jax.export.is_symbolic_dim(size) for size in sizes):
        return "sizes that are known only when the program runs"
    if 0 in sizes:
        return "an empty array"
    if call.queries % LANES or call.keys % LANES:
        return f"{call.queries} queries and {call.keys} keys; it takes multiples of {LANES}"
    if any(dim % 64 or not 0 < dim <= 256 for dim in (call.key_dim, call.value_dim)):
        return f"head dims {call.key_dim} and {call.value_dim}; it takes multiples of 64 up to 256"
    return None


def _place() -> str | None:
    if _varying.tracked():
        return "shard_map with check_vma: it does not say over which axes its results vary"
    return None


def run(call: Call, *arrays: Array | None) -> Array:
    """The output `[B, S, H, D]`."""
    inputs: Inputs = _varying.align(Inputs(*arrays))  # type: ignore[arg-type]
    return _differentiable.call(OP, call, inputs)


def _direct(call: Call, inputs: Inputs) -> Array:
    # not at the top: `import ejkernel` must not import Pallas
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    # the kernel has no scale
    query = (inputs.query.astype(jnp.float32) * call.scale).astype(inputs.query.dtype)
    query, key, value = (_without_padding(inputs, x).swapaxes(1, 2) for x in (query, inputs.key, inputs.value))
    ids = None
    if inputs.segment_ids is not None:
        # padding attends to padding, which is 0
        ids = jnp.maximum(int32_ids(inputs.segment_ids, inputs.segment_ids)[0], -1)
    elif inputs.cu_seqlens is not None:
        ids = prepare_sequence_ids(inputs.cu_seqlens, total_tokens=call.queries).astype(np.int32)[None]
    one_row, sinks = _kernel(call), () if inputs.sinks is None else (_by_head(call, inputs.sinks),)
    output = jax.vmap(lambda *row: one_row(*row, *sinks))(
        query, key, value, None if ids is None else SegmentIds(ids, ids)
    )
    return _without_padding(inputs, output.swapaxes(1, 2))


def _kernel(call: Call) -> Callable[..., Any]:
    """Splash attention over one row `[H, T, …]`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    queries, keys = _block(call.queries), _block(call.keys)
    sizes = kernels.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
    return kernels.make_splash_mha(
        mask=_mask(call),
        block_sizes=sizes,
        attn_logits_soft_cap=call.soft_cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=_pallas.INTERPRET is not None,
    )


def _without_padding(inputs: Inputs, x: Array) -> Array:
    """`x [B, T, …]` with 0 for padding; queries and keys have the same padding."""
    inside = in_sequences(inputs)
    return x if inside is None else jnp.where(inside[..., None, None], x, jnp.zeros((), x.dtype))


def _by_head(call: Call, sinks: Array) -> Array:
    """`[1 or Hkv or H, 1]` as one number for each head."""
    return jnp.repeat(sinks[:, 0], call.heads // sinks.shape[0])


def _block(tokens: int) -> int:
    """The largest power of two that divides the tokens, within limits."""
    return min(LARGEST_BLOCK, tokens & -tokens)


def _mask(call: Call) -> Any:
    """Which pairs attend, the same for all heads."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (call.queries, call.keys)
    mask: Any
    if call.left is None and call.right is None:
        mask = masks.FullMask(shape)
    elif call.left is None and call.right == 0:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, (call.left, call.right), 0)
    return masks.MultiHeadMask([mask] * call.heads)


def _enter(run: Callable[..., Any], fallback: Callable[..., Any], *trees: Any) -> Any:
    """`run(*trees)` as one operation, which XLA need not be able to split."""
    arrays, tree = jax.tree.flatten(trees)
    shapes, results_tree = jax.tree.flatten(jax.eval_shape(fallback, *trees))

    def flat(function: Callable[..., Any], *arrays: Array) -> list[Array]:
        # some of the kernel's gradients come in the query's dtype
        results = jax.tree.leaves(function(*jax.tree.unflatten(tree, arrays)))
        return [x.astype(each.dtype) for x, each in zip(results, shapes, strict=True)]

    kernel, other = functools.partial(flat, run), functools.partial(flat, fallback)
    if trees[0].cu_seqlens is not None or trees[0].segment_ids is not None:
        kernel = functools.partial(_unless_it_leaks, kernel, other, tree)
    return jax.tree.unflatten(results_tree, _pallas.launch(kernel, other, shapes, *arrays))


def _unless_it_leaks(run: Callable[..., Any], fallback: Callable[..., Any], tree: Any, *arrays: Array) -> Any:
    """`run(*arrays)`, or `fallback(*arrays)` if numbers of one sequence would reach another.

    The kernel multiplies what is masked by 0, and 0 times NaN is NaN.
    """
    inputs, *others = jax.tree.unflatten(tree, arrays)
    # after the residuals comes the cotangent
    tokens = [*inputs[:3], *others[1:]]
    harmless = [(jnp.abs(_without_padding(inputs, x)) <= HARMLESS).all() for x in tokens]
    return jax.lax.cond(jnp.stack(harmless).all(), run, fallback, *arrays)


OP = borrowed(_direct, _enter)
