"""Softmax attention with its tokens sharded over a mesh axis.

Keys and values travel around the ring of devices. Each device attends to the block that it holds at the moment and
merges the result into its own, weighted by the softmax's denominators. The backward pass sends keys and values around
again, and their gradients along with them.
"""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ejkernel import _checks, _sharding
from ejkernel._checks import AnyArray, Borders
from ejkernel._dispatch import Implementation, Later, resolve, warn_of_tangents
from ejkernel._front import public
from ejkernel.attention import QKV, _bind
from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group
from ejkernel.kernels.attention.xla import blocks as xla_blocks
from ejkernel.kernels.attention.xla import supports as xla_supports
from ejkernel.parallel._ring import Ring, plan


def _passes(module: str) -> Callable[..., Any]:
    """`run(call, name, *arrays)`: the pass `name`, `"forward"` or `"backward"`, of this module's blocks."""
    return lambda call, name, *arrays: Later(module, name)(call, *arrays)


# implementations of attention to one block of keys, whose results the ring merges
BLOCKS = (
    Implementation(
        "triton",
        ("cuda",),
        Later("attention.triton", "supports"),
        _passes("attention.triton.blocks"),
        slower_than_fallback=Later("attention.triton", "slowest"),
    ),
    Implementation("xla", None, xla_supports, _passes("attention.xla.blocks")),
)


@public
def flash_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    *,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    layout: Literal["contiguous", "balanced"] = "contiguous",
    softmax_aux: AnyArray | None = None,
    softmax_scale: float | AnyArray | None = None,
    logits_soft_cap: float | None = None,
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    cu_seqlens: Borders | None = None,
    cu_seqlens_kv: Borders | None = None,
    segment_ids: AnyArray | None = None,
    segment_ids_kv: AnyArray | None = None,
    platform: str | None = None,
) -> Array:
    """`ejkernel.flash_attention` with queries, keys and values sharded over a mesh axis by their tokens.

    Without `mesh` it is called inside the caller's own `shard_map`: query, key, value and segment ids are this device's
    slice of the tokens, everything else (`softmax_aux`, `cu_seqlens`) is the same on all devices. With `mesh` it takes
    and returns global arrays and does the `shard_map` itself; other axes of the mesh stay as JAX has them.

    Keys and values go around the ring one device at a time, `P - 1` times for `P` devices, or as often as the window
    reaches; of a window shorter than a slice, only the tokens within its reach go to the neighbours. A device holds its
    own slice and one visiting, however many devices there are, forward and backward.

    Gradients are exact. Tangents and second derivatives are computed by XLA.

    Args:
        query: `[B, S, H, D]`. Packed, `[1, S, H, D]` or `[S, H, D]`.
        key: `[B, L, Hkv, D]`, `H` a multiple of `Hkv`: key/value head `j` serves query heads `j·H/Hkv …`. Packed like
            the query.
        value: `[B, L, Hkv, Dv]`. Packed like the query.
        axis_name: The mesh axis that the tokens are sharded over; the number of tokens is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        layout: `"contiguous"`: device `i` holds the `i`-th slice of the tokens. `"balanced"`: the tokens were brought
            by `to_balanced` into the order in which device `i` holds slices `i` and `2P-1-i` of `2P`, which gives all
            devices the same work under causality. What comes back is in the same order.
        softmax_aux: `[H | Hkv | 1, sinks]` or `[sinks]`, logits that only take part in the denominator. `[H]` is `H`
            sinks that all heads share; one sink a head, which models store so, is `sinks[:, None]`.
        softmax_scale: What scores are multiplied by; `None` is `D**-0.5`. An array (a learned scale, say) has a
            gradient.
        logits_soft_cap: Bends scores towards `±logits_soft_cap`; above 0, or `None` for no cap.
        dtype: Of the output; `None` is the query's.
        softmax_dtype: What the softmax is computed in; `None` is float32, or float64 where an input is float64.
        causal: A query sees keys up to its own position, both counted from 0. Packed, positions count from 0 in every
            sequence.
        sliding_window: `w` or `(left, right)`: query `q` sees keys `q - left … q + right`. Packed, positions count from
            0 in every sequence.
        cu_seqlens: `[N + 1]`, where each of `N` packed sequences of queries begins and the last ends. Sequences may be
            empty. Queries past the end are padding: output 0, no gradient, no effect. It counts the tokens of the whole
            stream in their original order: packed sequences may straddle devices.
        cu_seqlens_kv: `[N + 1]`, the same for keys and values; `None` means as `cu_seqlens`.
        segment_ids: Integers `[B, S]`, which sequence of its row each token belongs to: a query attends to keys that
            have its id, wherever in the row, and `causal`, windows, masks and biases count positions in the row as
            ever. A negative id is padding: output 0, no gradient, no effect. Sliced and ordered as the tokens are; not
            beside `cu_seqlens`.
        segment_ids_kv: `[B, L]`, the same for keys and values; `None` means as `segment_ids`, which then needs `S = L`.
        platform: Forces an implementation of the blocks: `"xla"`, `"triton"`.

    Returns:
        The output, `[B, S, H, Dv]` or packed `[S, H, Dv]` as the query came.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import parallel
        >>> mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> query = key = value = jnp.ones((2, 64, 4, 16))
        >>> parallel.flash_attention(query, key, value, causal=True, axis_name="time", mesh=mesh).shape
        (2, 64, 4, 16)
    """
    devices = _checks.bound_axis(axis_name) if mesh is None else _checks.mesh_axis(mesh, axis_name)
    # arrays hold one device's part of the tokens, or all of them
    parts = devices if mesh is None else 1
    slices = _checks.ring_slices(layout)
    if cu_seqlens is not None:
        _checks.no_segments(segment_ids, segment_ids_kv)
    cu, cu_kv = _checks.packed_borders(query, key, cu_seqlens, cu_seqlens_kv, parts)
    unbatched = cu is not None and query.ndim == 3
    if unbatched:
        query, key, value = (_checks.unbatched(name, x) for name, x in zip(QKV, (query, key, value), strict=True))
    bound: Any
    call, bound = _bind(
        (query, key, value),
        (None, None, None),
        (softmax_aux, softmax_scale, logits_soft_cap),
        (dtype, softmax_dtype),
        (True, 0.0, None),
        (causal, sliding_window),
    )
    dims = _checks.Dims(B=call.batch, S=call.queries, L=call.keys)
    ids, ids_kv = _checks.attention_segments(dims, segment_ids, segment_ids_kv)
    over = None if mesh is None else devices
    call = replace(
        call,
        queries=_checks.even_slices("query", call.queries, slices, over),
        keys=_checks.even_slices("key", call.keys, slices, over),
        sequences=None if cu is None else cu.shape[0] - 1,
        separate=cu_seqlens_kv is not None,
        segment_ids=ids is not None,
        segment_ids_kv=segment_ids_kv is not None,
    )
    ring = plan(call, axis_name, devices, slices, shifted=cu_seqlens_kv is not None)
    inputs = Arrays(bound[0], bound[1], bound[2], ids, ids_kv, bound[5], cu, cu_kv)
    static = Static(call, ring, resolve(BLOCKS, _block_call(call), _sharding.explicit_mesh(inputs), platform=platform))
    spec = _sharding.spec_of(inputs.query)
    if mesh is None:
        output = _sharding.partitioned(partial(_on_slice, static), jax.P(*spec[:3], None), inputs)
    else:
        spec = _sharding.over(axis_name, spec, 1)
        run = partial(_on_mesh, static, _sharding.as_auto(mesh))
        output = _sharding.partitioned(run, jax.P(*spec[:3], None), inputs, mesh=mesh)
    return output[0] if unbatched else output


@public
def to_balanced(x: AnyArray, devices: int, axis: int = 1) -> Array:
    """Tokens of `x` along `axis`, in the order that `layout="balanced"` wants: each device an early and a late slice.

    Args:
        x: An array with a dimension of tokens, a multiple of `2 * devices`.
        devices: How many devices the mesh axis has.
        axis: Which dimension of `x` that is.

    Examples:
        >>> import jax.numpy as jnp
        >>> print(to_balanced(jnp.arange(8), devices=2, axis=0))
        [0 1 6 7 2 3 4 5]
    """
    return _reordered(x, _balanced(devices), axis)


@public
def from_balanced(x: AnyArray, devices: int, axis: int = 1) -> Array:
    """The inverse of `to_balanced`.

    Args:
        x: An array with a dimension of tokens, a multiple of `2 * devices`.
        devices: How many devices the mesh axis has.
        axis: Which dimension of `x` that is.

    Examples:
        >>> import jax.numpy as jnp
        >>> print(from_balanced(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), devices=2, axis=0))
        [0 1 2 3 4 5 6 7]
    """
    return _reordered(x, np.argsort(_balanced(devices)), axis)


def _balanced(devices: int) -> np.ndarray:
    early = np.arange(_checks.positive_int("devices", devices))
    return np.stack([early, 2 * devices - 1 - early], 1).reshape(-1)


def _reordered(x: AnyArray, order: np.ndarray, axis: int) -> Array:
    x = _checks.array("x", x)
    axis = _checks.axis(axis, x.ndim)
    tokens = _checks.even_slices("x", x.shape[axis], 2, len(order) // 2)

    def run(x: Array) -> Array:
        slices = x.reshape(*x.shape[:axis], len(order), tokens, *x.shape[axis + 1 :])
        return jnp.take(slices, order, axis).reshape(x.shape)

    return _sharding.partitioned(run, _sharding.spec_of(x), x)


class Arrays(NamedTuple):
    """The arrays of a call; those before `sinks` are `[B, tokens, …]`, and a device has a slice of their tokens."""

    query: Array
    key: Array
    value: Array
    segment_ids: Array | None
    segment_ids_kv: Array | None
    sinks: Array | None
    cu_seqlens: Array | None
    cu_seqlens_kv: Array | None


@dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced.

    Attributes:
        call: The static facts of a call on one slice.
        ring: Which keys visit which devices.
        chosen: Implementations of `BLOCKS` by the platform that is lowered for.
    """

    call: Call
    ring: Ring
    chosen: tuple[tuple[str, Implementation], ...]


@partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(static: Static, mesh: jax.sharding.Mesh, arrays: Arrays) -> Array:
    axis = static.ring.axis
    sliced = jax.P(None, axis)
    specs = (*[sliced] * 5, *[jax.P()] * 3)
    run = jax.shard_map(
        lambda *arrays: _on_slice(static, Arrays(*arrays)),
        mesh=mesh,
        in_specs=tuple(None if x is None else spec for x, spec in zip(arrays, specs, strict=True)),
        out_specs=sliced,
        axis_names={axis},
    )
    return run(*arrays)


@partial(jax.jit, static_argnums=0)
def _on_slice(static: Static, arrays: Arrays) -> Array:
    """The call on this device's tokens."""
    call = static.call
    arrays, _ = _varying.align((arrays, lax.axis_index(static.ring.axis)))
    if 0 in (call.batch, call.queries, call.keys):
        shape = (*arrays.query.shape[:-1], call.value_dim)
        return _varying.like(jnp.zeros(shape, call.dtype), arrays.query)
    return _differentiable.call(OP, static, arrays).astype(call.dtype)


def _forward(static: Static, arrays: Arrays) -> Array:
    return _with_residuals(static, arrays)[0]


def _with_residuals(
    static: Static, arrays: Arrays, attend: Callable[..., Any] | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """The output; and of each query the softmax's largest score and sum of exponentials, `top` and `total`.

    `attend(call, inputs)` attends to one block of keys; by default the chosen implementation does.
    """
    call, ring = static.call, static.ring
    attend = attend or partial(_run_block, static, "forward")
    device = lax.axis_index(ring.axis)
    queries, ids = ring.split(arrays.query), _split(ring, arrays.segment_ids)
    starts = ring.starts(device, call.queries)

    def visit(results: Any, blocks: Any, shift: Any, begin: int = 0) -> Any:
        """`results`, the output, top and total of each slice of queries, with those over visiting `blocks` merged in.

        `blocks` come from the device `shift` places before, and hold its tokens from `begin` on.
        """
        key_starts = ring.starts((device - shift) % ring.devices, call.keys) + begin

        def one_slice(xs: Any) -> Any:
            results, *of_query = xs

            def one_block(results: Any, block: Any) -> Any:
                return _merge(results, attend(*_pair(call, arrays, *of_query, *block))), None

            return lax.scan(one_block, results, (*blocks, key_starts))[0]

        return lax.map(one_slice, (results, queries, ids, starts))

    def step(carry: Any, shift: Array) -> Any:
        results, blocks = carry
        return (visit(results, blocks, shift), ring.hop(blocks)), None

    zeros = jnp.zeros(queries.shape[:-1], call.wide)
    results = _varying.like((jnp.zeros((*zeros.shape, call.value_dim), call.wide), zeros, zeros), queries)
    local_blocks = _blocks(ring, arrays)
    last = ring.first + ring.visits - 1
    carry = results, ring.hop(local_blocks, ring.first)
    (results, blocks), _ = lax.scan(step, carry, jnp.arange(ring.first, last))
    results = visit(results, blocks, last)
    for shift, begin, end in ring.edges:
        results = visit(results, ring.hop(_tokens_between(local_blocks, begin, end), shift), shift, begin)
    output, top, total = map(ring.join, results)
    if arrays.sinks is not None:
        output, _, _ = _merge((output, top, total), (jnp.zeros_like(output), *_sinks_top_and_total(call, arrays.sinks)))
    return output.astype(call.residual_dtype), (top, total)


def _backward(static: Static, arrays: Arrays, residuals: Any, d_output: Array, wanted: Arrays) -> Arrays:
    call, ring = static.call, static.ring
    output, (top, total) = residuals
    device = lax.axis_index(ring.axis)
    d_sinks = None
    if arrays.sinks is not None:
        alive = total > 0
        top, totals = _common_top((top, total), _sinks_top_and_total(call, arrays.sinks))
        total = totals[0] + totals[1]
        d_sinks = _sinks_gradient(call, arrays.sinks, output, top, total, d_output, alive)
    of_queries = tuple(_split(ring, x) for x in (arrays.query, arrays.segment_ids, output, top, total, d_output))
    starts = ring.starts(device, call.queries)

    def visit(blocks: Any, shift: Any, begin: int = 0) -> Any:
        """The gradients of the visiting blocks, and what these blocks add to the gradient of the queries."""
        key_starts = ring.starts((device - shift) % ring.devices, call.keys) + begin

        def one_slice(sums: Any, xs: Any) -> Any:
            start, query, ids, output, top, total, d_output = xs

            def one_block(d_query: Array, block: Any) -> Any:
                inner, inputs = _pair(call, arrays, query, ids, start, *block)
                rows = output, top, total, d_output, jnp.zeros_like(total)
                gradients: Inputs = _run_block(static, "backward", inner, inputs, *rows)
                added, d_key, d_value = (x.astype(call.wide) for x in gradients[:3])
                return d_query + added, (d_key, d_value)

            zeros = _varying.like(jnp.zeros(query.shape, call.wide), query)
            d_query, d_blocks = lax.scan(one_block, zeros, (*blocks, key_starts))
            return _add(sums, d_blocks), d_query

        zeros = _varying.like(tuple(jnp.zeros(x.shape, call.wide) for x in blocks[:2]), arrays.query)
        return lax.scan(one_slice, zeros, (starts, *of_queries))

    def step(carry: Any, shift: Array) -> Any:
        blocks, d_blocks, d_query = carry
        # sent before the visit, which does not depend on it: blocks travel while the device computes
        following, arrived = ring.hop(blocks), ring.hop(d_blocks)
        added, d_more = visit(blocks, shift)
        return (following, _add(arrived, added), d_query + d_more), None

    local_blocks = _blocks(ring, arrays)
    blocks = ring.hop(local_blocks, ring.first)
    d_blocks, d_query = visit(blocks, ring.first)
    if ring.visits > 1:
        last = ring.first + ring.visits - 1
        carry = ring.hop(blocks), d_blocks, d_query
        (blocks, d_blocks, d_query), _ = lax.scan(step, carry, jnp.arange(ring.first + 1, last))
        added, d_more = visit(blocks, last)
        d_blocks, d_query = _add(ring.hop(d_blocks), added), d_query + d_more
    d_blocks = ring.hop(d_blocks, 1 - ring.first - ring.visits)
    for shift, begin, end in ring.edges:
        added, d_more = visit(ring.hop(_tokens_between(local_blocks, begin, end), shift), shift, begin)
        sums = _add(_tokens_between(d_blocks, begin, end), ring.hop(added, -shift))
        d_blocks = jax.tree.map(lambda d, new, at=begin: lax.dynamic_update_slice_in_dim(d, new, at, 2), d_blocks, sums)
        d_query = d_query + d_more
    d_query, d_key, d_value = (
        ring.join(d).astype(x.dtype) for d, x in zip((d_query, *d_blocks), arrays[:3], strict=True)
    )
    return Arrays(d_query, d_key, d_value, None, None, d_sinks, None, None)


def _reference(static: Static, arrays: Arrays) -> Array:
    """The output by XLA, in loops of fixed length, which JAX can differentiate any number of times."""
    return _with_residuals(static, arrays, partial(xla_blocks.forward, every_block=True))[0]


def _tangent(static: Static, arrays: Arrays, residuals: Any, tangents: Arrays) -> tuple[Array, Array]:
    if any(each.name != "xla" for _, each in static.chosen):
        warn_of_tangents("tangents of parallel.flash_attention")

    def output(static: Static, arrays: Arrays) -> Array:
        return _with_residuals(static, arrays, partial(xla_blocks.forward, apart=True))[0]

    return by_jvp(output)(static, arrays, residuals, tangents)


OP = Op(_forward, _reference, _with_residuals, _backward, _tangent, keeps=lambda output: output, splits=False)


def _run_block(static: Static, name: Literal["forward", "backward"], call: Call, *arrays: Any) -> Any:
    """A pass over one block of keys, by the implementation that was chosen for the device lowered for."""
    branches = {device: partial(each.run, call, name) for device, each in static.chosen}
    if len(branches) == 1:
        return next(iter(branches.values()))(*arrays)
    return lax.platform_dependent(*arrays, **branches)


def _block_call(call: Call, keys: int | None = None) -> Call:
    """The call on one slice of queries and one block of `keys` keys, by default as many as a slice has."""
    # blocks' results are merged before they are rounded, and sinks are merged last
    return replace(call, keys=call.keys if keys is None else keys, dtype=call.wide, sinks=None, offset=True)


def _pair(
    call: Call,
    arrays: Arrays,
    query: Array,
    ids: Array | None,
    start: Array,
    key: Array,
    value: Array,
    ids_kv: Array | None,
    key_start: Array,
) -> tuple[Call, Inputs]:
    """A slice of queries from token `start` on and a block of keys from `key_start` on, as a call of their own."""
    call = _block_call(call, key.shape[1])
    cu, cu_kv = arrays.cu_seqlens, arrays.cu_seqlens_kv
    offset = (start - key_start)[None]
    if cu is not None and cu_kv is not None:
        local, local_kv = jnp.clip(cu - start, 0, call.queries), jnp.clip(cu_kv - key_start, 0, call.keys)
        # a block counts positions from where a sequence's part in it begins
        offset = offset + (cu_kv - cu + local - local_kv)[:-1]
        cu, cu_kv = local, local_kv
    return call, Inputs(query, key, value, None, None, None, None, cu, cu_kv, offset, ids, ids_kv)


def _split(ring: Ring, x: Array | None) -> Array | None:
    return None if x is None else ring.split(x)


def _blocks(ring: Ring, arrays: Arrays) -> tuple[Array | None, ...]:
    """The arrays that travel around the ring: slices of keys, values and, if there are any, segment ids of keys."""
    return tuple(_split(ring, x) for x in (arrays.key, arrays.value, arrays.segment_ids_kv))


def _merge(one: tuple[Array, Array, Array], other: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The output, top and total over two sets of keys, from the outputs, tops and totals over each set."""
    top, totals = _common_top(one[1:], other[1:])
    total = totals[0] + totals[1]
    # also where a part is not selected it must not divide by 0, or its derivatives would be NaN
    share, other_share = (jnp.where(part == 0, 0, part / jnp.where(part == 0, 1, total))[..., None] for part in totals)
    return share * one[0] + other_share * other[0], top, total


def _common_top(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
    """The top over two sets of keys, and the total of each relative to it, from the tops and totals of each."""
    tops = [jnp.where(total == 0, -jnp.inf, top) for top, total in (one, other)]
    top = jnp.maximum(*tops)
    top = jnp.where(top == -jnp.inf, 0, top)
    return top, (jnp.exp(tops[0] - top) * one[1], jnp.exp(tops[1] - top) * other[1])


def _add(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def _tokens_between(blocks: Any, begin: int, end: int) -> Any:
    """The tokens from `begin` to `end` of blocks `[slices, B, T, …]`."""
    return jax.tree.map(lambda x: x[:, :, begin:end], blocks)


def _sinks_by_head(call: Call, sinks: Array) -> Array:
    split = by_group(call, sinks, 0).astype(call.wide)
    return jnp.broadcast_to(split, (call.kv_heads, call.groups, split.shape[-1])).reshape(call.heads, -1)


def _sinks_top_and_total(call: Call, sinks: Array) -> tuple[Array, Array]:
    """The top and total `[1, 1, H]` of the sinks, both 0 if all sinks are `-inf`."""
    by_head = _sinks_by_head(call, sinks)[None, None]
    top = lax.stop_gradient(by_head).max(-1)
    top = jnp.where(top == -jnp.inf, 0, top)
    return top, jnp.exp(by_head - top[..., None]).sum(-1)


def _sinks_gradient(
    call: Call, sinks: Array, output: Array, top: Array, total: Array, d_output: Array, alive: Array
) -> Array:
    """The gradient of the sinks, from the top and total over keys and sinks.

    `alive` says which queries see a key: for other queries the output is 0 whatever the sinks are.
    """
    mean = jnp.where(alive, (output.astype(call.wide) * d_output.astype(call.wide)).sum(-1), 0)
    by_head, pull = jax.vjp(partial(_sinks_by_head, call), sinks)
    weights = jnp.exp(by_head[None, None] - top[..., None]) / jnp.where(alive, total, 1)[..., None]  # [B, T, H, sinks]
    return pull(-jnp.where(alive[..., None], weights * mean[..., None], 0).sum((0, 1)))[0]
