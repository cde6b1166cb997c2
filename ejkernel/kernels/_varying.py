"""Inside `shard_map` JAX tracks the mesh axes over which a value varies; loops and custom gradients want them equal."""

from typing import Any

import jax


def align(tree: Any) -> Any:
    """`tree` with every array marked as varying over all axes that any of them varies over."""
    axes = frozenset().union(*(_axes(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: _mark(x, axes), tree)


def like(tree: Any, reference: jax.Array) -> Any:
    """`tree` with every array marked as varying over the axes that `reference` varies over."""
    return jax.tree.map(lambda x: _mark(x, _axes(reference)), tree)


def _axes(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _mark(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(axes - _axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
