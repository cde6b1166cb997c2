"""Inside `shard_map` JAX tracks the mesh axes over which a value varies; loops and custom gradients want them equal."""

from typing import Any

import jax


def align(tree: Any) -> Any:
    """`tree` with every array marked as varying over all axes that any of them varies over."""
    union = frozenset().union(*(axes(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: over(x, union), tree)


def like(tree: Any, reference: jax.Array) -> Any:
    """`tree` with every array marked as varying over the axes that `reference` varies over."""
    return jax.tree.map(lambda x: over(x, axes(reference)), tree)


def over(x: jax.Array, wanted: frozenset[str]) -> jax.Array:
    """`x` marked as varying over these mesh axes too."""
    missing = tuple(wanted - axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def shape_like(shape: tuple[int, ...], dtype: Any, reference: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape of an array that varies over the axes that `reference` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(reference).manual_axis_type)


def axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which `x` varies; none inside a `shard_map` with `check_vma=False`."""
    return jax.typeof(x).manual_axis_type.varying


def tracked() -> bool:
    """Whether JAX tracks which mesh axes values vary over: only inside a `shard_map` with `check_vma=True`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) and bool(axes(jax.lax.axis_index(manual[0])))
