"""Meshes with `Explicit` axes, where shardings are part of types, for code that leaves shardings to XLA."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AnyMesh = Mesh | jax.sharding.AbstractMesh


def explicit_mesh(*arrays: Any) -> AnyMesh | None:
    """The mesh with `Explicit` axes that some of the arrays are on, or that the caller has entered."""
    for x in jax.tree.leaves(arrays):
        # JAX takes longer to say that an array on one device is on no mesh
        if isinstance(x, jax.core.Tracer) or isinstance(getattr(x, "sharding", None), NamedSharding):
            mesh = jax.typeof(x).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    # arrays that are made inside an entered mesh lie on it, wherever the call's arrays lie
    entered = jax.sharding.get_abstract_mesh()
    return entered if entered.explicit_axes else None


def left_to_xla(mesh: AnyMesh | None = None, mapped: bool = False) -> bool:
    """Whether XLA's partitioner splits a computation here, along an axis of several devices.

    `mesh` is what `explicit_mesh` gives, or by default the mesh that the caller has entered. `mapped` says that a
    `shard_map` runs over its `Explicit` axes, so that only `Auto` axes are left to XLA.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return any(mesh.shape[name] > 1 for name in (*mesh.auto_axes, *(() if mapped else mesh.explicit_axes)))


def vmap_shards(mesh: AnyMesh) -> bool:
    """Whether `vmap` maps arrays here along an axis that is sharded over an `Explicit` axis of the mesh.

    Types inside the mapped function do not say so, but `jax.shard_map` refuses that axis of the mesh.
    """
    try:
        _over_explicit_axes(mesh).eval_shape()
    except ValueError:
        return True
    return False


@functools.cache
def _over_explicit_axes(mesh: AnyMesh) -> Any:
    """A `shard_map` that does nothing."""
    axes = frozenset(mesh.explicit_axes)
    return jax.jit(jax.shard_map(lambda: (), mesh=mesh, in_specs=(), out_specs=(), axis_names=axes))


def partitioned(run: Callable[..., Any], results: Any, *arrays: Any, mesh: AnyMesh | None = None) -> Any:
    """`run(*arrays)` with all `Explicit` axes made `Auto`; its results are sharded by the specs `results`.

    `mesh` is by default the mesh that the arrays are on. Axes of the specs that are `Auto` already stay with XLA.
    """
    mesh = explicit_mesh(*arrays) if mesh is None else mesh
    if mesh is None or not mesh.explicit_axes:
        return run(*arrays)

    def explicit(spec: PartitionSpec) -> NamedSharding:
        parts = [tuple(axis for axis in axes_of(part) if axis in mesh.explicit_axes) or None for part in spec]
        # a sharding rather than a spec, as the caller need not have entered the mesh by `jax.set_mesh`
        return NamedSharding(mesh, PartitionSpec(*parts))

    shardings = jax.tree.map(explicit, results, is_leaf=is_spec)
    return jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=shardings)(*arrays)


def spec_of(x: jax.Array) -> PartitionSpec:
    """The spec of `x`: over which `Explicit` axes each dimension is sharded."""
    return jax.typeof(x).sharding.spec


def reshape(x: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    """`x` in another shape, whose dimensions are sharded over `Explicit` axes by `spec`."""
    mesh = explicit_mesh(x)
    return jnp.reshape(x, shape, out_sharding=None if mesh is None else NamedSharding(mesh, spec))


def broadcast_rows(x: jax.Array, shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    """`x` broadcast to `shape`, whose first dimension is rows, sharded over `Explicit` axes as the rows of `like`.

    So each device sums the gradient over its own rows, and only these sums are reduced over devices.
    """
    mesh, rows = explicit_mesh(x, like), spec_of(like)[0]
    if mesh is None or rows is None or x.shape == shape:
        return jnp.broadcast_to(x, shape)
    others = spec_of(x)[-(len(shape) - 1) :]
    taken = {axis for part in others for axis in axes_of(part)}
    free = tuple(axis for axis in axes_of(rows) if axis not in taken)
    return jnp.broadcast_to(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(free, *others)))


def broadcast_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x [..., dim]` repeated for every head of `like [..., heads, any]`, and sharded as `like` is."""
    shape, mesh = (*like.shape[:-1], x.shape[-1]), explicit_mesh(x, like)
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec_of(like)[:-1], None))
    return jnp.broadcast_to(x[..., None, :], shape, out_sharding=sharding)


def widest(*arrays: jax.Array) -> jax.Array:
    """The array `[…, heads, dim]` with the most heads, or the first of them if several have as many."""
    return max(arrays, key=lambda x: x.shape[-2:-1])


def over(axis: str, spec: PartitionSpec, dim: int) -> PartitionSpec:
    """`spec` with dimension `dim` sharded over the mesh axis, and no other dimension over that axis."""
    parts = [axes_of(part) for part in spec]
    if axis in parts[dim]:
        return spec
    parts = [tuple(each for each in part if each != axis) for part in parts]
    parts[dim] = (axis,)
    return PartitionSpec(*parts)


def as_auto(mesh: AnyMesh) -> AnyMesh:
    """`mesh` with its `Explicit` axes made `Auto`, as code inside `partitioned` sees it."""
    if not mesh.explicit_axes:
        return mesh
    types = tuple(AxisType.Auto if each == AxisType.Explicit else each for each in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)


def axes_of(part: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension of a spec."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
