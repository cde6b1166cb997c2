"""How `vmap` maps an op: as one call where the op can fold calls into one, else by JAX or one call after the other."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.kernels._op import LinearMap, Op


@functools.cache
def mapped_op(op: Op, tree: Any, axes: tuple[bool, ...], name: str | None = None) -> Op:
    """`op` mapped over these leaves of its inputs, and over all outputs, residuals and cotangents.

    `tree` is the structure of the inputs. `name` is that of the mapped axis, if the op has collectives over it.
    """
    mapped = jax.tree.unflatten(tree, [0 if each else None for each in axes])
    vmap = functools.partial(jax.vmap, axis_name=name)

    def vmapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda static, inputs: vmap(functools.partial(function, static), (mapped,))(inputs)

    def backward(static: Any, inputs: Any, residuals: Any, cotangents: Any, wanted: Any) -> Any:
        def run(inputs: Any, residuals: Any, cotangents: Any) -> Any:
            assert op.backward is not None
            results = tree.flatten_up_to(op.backward(static, inputs, residuals, cotangents, wanted))
            return [x if is_wanted else None for x, is_wanted in zip(results, jax.tree.leaves(wanted), strict=True)]

        return jax.tree.unflatten(tree, vmap(run, (mapped, 0, 0))(inputs, residuals, cotangents))

    def tangent(static: Any, inputs: Any, residuals: Any, tangents: Any) -> tuple[Any, Any]:
        assert op.tangent is not None
        return vmap(functools.partial(op.tangent, static), (mapped, 0, 0))(inputs, residuals, tangents)

    forward, reference, with_residuals = map(vmapped, (op.forward, op.reference, op.with_residuals))
    own = None if op.backward is None else backward, None if op.tangent is None else tangent
    return Op(forward, reference, with_residuals, *own, op.keeps, splits=False)


def first_axis(x: Any, axis: int | None) -> Any:
    """`x` with the mapped axis first, if it has one."""
    return x if axis is None else jnp.moveaxis(x, axis, 0)


def batched(
    primitive: Any, axis: Any, operands: Any, dims: Any, *, linear_map: LinearMap, outputs: Any, **params: Any
) -> Any:
    """The batching rule of a primitive that computes a linear map, or its transpose, over `axis`."""
    op, mapped, size = linear_map.op, tuple(each is not None for each in dims), axis.size
    name = axis.name if isinstance(axis.name, str) else None
    if not any(mapped) and (name is None or op.fold is not None):  # and no collective over the axis, either
        results = primitive.bind(*operands, linear_map=linear_map, outputs=outputs, **params)
        return results, [None] * len(results)
    rows = list(map(first_axis, operands, dims))
    repeated = [_repeated(x, size, each) for x, each in zip(rows, mapped, strict=True)]

    def bind(linear_map: LinearMap, operands: Sequence[Any], shape: Callable[..., tuple[int, ...]]) -> Any:
        avals = tuple(_of_shape(shape(*each.shape), each) for each in outputs)
        return primitive.bind(*operands, linear_map=linear_map, outputs=avals, **params)

    if op.fold is None:
        # an input with a cotangent has one in each call
        axes = tuple(a or b for a, b in zip(linear_map.split(mapped)[0], linear_map.wanted, strict=True))
        inputs = (whole if each else x for x, whole, each in zip(rows, repeated, axes, strict=False))
        larger = replace(linear_map, op=mapped_op(op, linear_map.inputs, axes, name))
        results = bind(larger, (*inputs, *repeated[len(axes) :]), lambda *shape: (size, *shape))
    elif folded := op.fold(linear_map.static, size, *linear_map.input_trees(rows, mapped, linear_map.wanted)):
        static, inputs = folded
        larger = replace(linear_map, static=static)
        others = [_joined(x) for x in repeated[linear_map.inputs.num_leaves :]]
        results = bind(larger, (*jax.tree.leaves(inputs), *others), lambda first, *shape: (size * first, *shape))
        results = [_parted(x, size) for x in results]
    else:
        results = jax.lax.map(lambda each: bind(linear_map, each, lambda *shape: shape), repeated)
    return results, [0] * len(results)


def foldable(run: Callable[..., Any], fold: Callable[..., Any], static: Any) -> Callable[[Any], Any]:
    """`run(static, inputs)` as a function of the inputs that `vmap` maps by `fold`, which is an `Op.fold`."""

    @jax.custom_batching.custom_vmap
    def mapped(inputs: Any) -> Any:
        return run(static, inputs)

    @mapped.def_vmap
    def rule(size: int, batched: list[Any], inputs: Any) -> tuple[Any, Any]:
        nothing = jax.tree.map(lambda _: False, inputs)
        if folded := fold(static, size, inputs, batched[0], nothing):
            results = foldable(run, fold, folded[0])(folded[1])
            results = jax.tree.map(lambda x: _parted(x, size), results)
        else:
            results = jax.lax.map(mapped, jax.tree.map(lambda x, each: _repeated(x, size, each), inputs, batched[0]))
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def fold_rows(inputs: Any, size: int, mapped: Any, shared: Iterable[str] = ()) -> Any:
    """The inputs of one call that has the rows of all `size` calls, for `Op.fold`.

    Fields whose names are in `shared` are not mapped, and stay as they are.
    """
    same = {name: getattr(inputs, name) for name in shared}
    if same:
        nothing = dict.fromkeys(same)
        inputs, mapped = inputs._replace(**nothing), mapped._replace(**nothing)
    folded = jax.tree.map(lambda x, each: _joined(_repeated(x, size, each)), inputs, mapped)
    return folded._replace(**same) if same else folded


def _repeated(x: Any, size: int, is_mapped: bool) -> Any:
    """`x` with a mapped axis of this size in front, if it has none."""
    return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))


def _joined(x: jax.Array) -> jax.Array:
    """`[calls, rows, …]` as `[calls · rows, …]`."""
    return x.reshape(-1, *x.shape[2:])


def _parted(x: jax.Array, size: int) -> jax.Array:
    """`[calls · rows, …]` as `[calls, rows, …]`."""
    return x.reshape(size, -1, *x.shape[1:])


def _of_shape(shape: tuple[int, ...], like: Any) -> Any:
    """The type of an array of this shape that varies over the mesh axes that `like` varies over."""
    whole = NamedSharding(like.sharding.mesh, PartitionSpec(*(None for _ in shape)))
    return jax.core.ShapedArray(shape, like.dtype, sharding=whole, manual_axis_type=like.manual_axis_type)
