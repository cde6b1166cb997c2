"""Mesh axes, and tokens dealt out over them."""

from typing import Any

import jax

from ejkernel._checks.wording import fail


def bound_axis(axis_name: str) -> int:
    """The size of a mesh axis that the caller's `shard_map` runs over."""
    _axis_name(axis_name)
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        fail("axis_name", repr(axis_name), "an axis of the shard_map around this call; outside of one, give mesh=")


def mesh_axis(mesh: jax.sharding.Mesh, axis_name: str) -> int:
    """The size of an axis of `mesh`."""
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}; expected a jax.sharding.Mesh")
    _axis_name(axis_name)
    if axis_name not in mesh.shape:
        fail("axis_name", repr(axis_name), f"one of the mesh's axes {tuple(mesh.shape)}")
    return mesh.shape[axis_name]


def _axis_name(axis_name: Any) -> None:
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: got {type(axis_name).__name__}; expected the name of a mesh axis")


def divisible_time(tokens: int, axis_name: str, devices: int) -> None:
    """The tokens can be dealt out evenly."""
    if tokens % devices:
        fail("query", f"{tokens} tokens", f"a multiple of the {devices} devices of axis {axis_name!r}: pad the tokens")


def ring_slices(layout: str) -> int:
    """How many slices of the tokens a device holds."""
    if layout not in ("contiguous", "balanced"):
        fail("layout", repr(layout), "'contiguous' or 'balanced'")
    return 2 if layout == "balanced" else 1


def even_slices(argument: str, tokens: int, slices: int, devices: int | None = None) -> int:
    """How many tokens a slice has if they are dealt out evenly, over `devices` or on one."""
    whole = slices * (devices or 1)
    if tokens % whole:
        if devices is None:
            expected = "an even number on each device"
        else:
            expected = f"a multiple of {whole}, {'twice ' if slices == 2 else ''}the {devices} devices"
        why = ", as layout='balanced' gives each device two slices" if slices == 2 else ""
        fail(argument, f"{tokens} tokens", f"{expected}{why}: pad the tokens")
    return tokens // whole
