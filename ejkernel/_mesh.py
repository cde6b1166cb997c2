"""A call on arrays that are sharded over `Explicit` axes of a mesh: each device runs it on its own rows and heads.

Shardings are part of types there, so they are known when a call is traced, and `shard_map` can map it. What an axis
does not shard is shared by its devices, and `shard_map` sums its gradient over them.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel import _sharding

Axes = tuple[str, ...]


class GatheredWarning(UserWarning):
    """Sharded arrays are brought together before a call; the message says which, along which axis, and what helps."""


class Call(Protocol):
    """What is asked of a call here."""

    @property
    def heads(self) -> int: ...

    def dims(self) -> dict[str, str]:
        """The dimensions of its arrays by name, a letter each: `B` for rows and `H` for heads, whatever their number.

        `*` alone is a random key, of which every device makes its own.
        """
        ...

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> Any:
        """The call that a device has where so many share the rows and heads, its arrays having these shapes."""
        ...

    def result_specs(self, tokens: PartitionSpec) -> Any: ...


@dataclass(frozen=True)
class Mapping:
    """How a call is mapped over a mesh.

    Attributes:
        mesh: the mesh
        call: the call that each device runs
        heads: the axes that heads are sharded over
        specs: how its arrays are sharded, `None` for absent ones
        chosen: of each array the dimension of which a device takes one head out of some, or `None`; -1 for random keys
        results: how the results are sharded
    """

    mesh: _sharding.AnyMesh
    call: Any
    heads: Axes
    specs: tuple[PartitionSpec | None, ...]
    chosen: tuple[int | None, ...]
    results: Any

    def run(self, function: Callable[..., Any], *arrays: Any, check_vma: bool = True) -> Any:
        """`function(call, *arrays)` on every device's part."""
        axes = frozenset(self.mesh.explicit_axes)
        placed = [
            x if spec is None else jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
            for x, spec in zip(arrays, self.specs, strict=True)
        ]

        def on_part(*arrays: Any) -> Any:
            return function(self.call, *map(self._own, arrays, self.chosen))

        # with the mesh, as the caller need not have entered it by `jax.set_mesh`
        mapped = jax.shard_map(
            on_part, mesh=self.mesh, in_specs=self.specs, out_specs=self.results, axis_names=axes, check_vma=check_vma
        )
        return mapped(*placed)

    def _own(self, x: Any, dim: int | None) -> Any:
        """`x`, or the one head of it that this device's heads read, or a random key of this device's own."""
        if x is None or dim is None:
            return x
        if dim < 0:
            number = jax.lax.axis_index(tuple(self.mesh.explicit_axes)).astype(jnp.uint32)
            typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return jax.random.fold_in(x, number) if typed else x.at[-1].add(number)
        devices = math.prod(self.mesh.shape[name] for name in self.heads)
        at = jax.lax.axis_index(self.heads) // (devices // x.shape[dim])
        return jax.lax.dynamic_slice_in_dim(x, at, 1, dim)


def mapping(call: Call, arrays: tuple[Any, ...]) -> Mapping | None:
    """How `call` is mapped over the `Explicit` axes that its arrays are sharded over; `None` where there are none."""
    mesh = _sharding.explicit_mesh(*arrays)
    if mesh is None:
        return None
    dims = dict(list(call.dims().items())[: len(arrays)])
    shapes = {name: None if x is None else x.shape for name, x in zip(dims, arrays, strict=True)}
    lead = _sharding.widest(*arrays[:3])
    rows, _, heads, _ = (_sharding.axes_of(part) for part in _sharding.spec_of(lead))
    rows, heads = _divided(mesh, rows, lead.shape[0]), _divided(mesh, heads, lead.shape[2])
    by_heads = _size(mesh, heads)
    for name, letters in dims.items():
        shape = shapes[name]
        if shape is not None and "H" in letters:
            own = shape[letters.index("H")]
            if own % by_heads and by_heads % own:
                _warn(f"{name}: {own} heads, which axis {_text(heads)} of {by_heads} devices does not divide")
                heads, by_heads = (), 1
    specs, chosen, local = [], [], {}
    for name, letters, x in zip(dims, dims.values(), arrays, strict=True):
        spec, which, shape = _array(mesh, name, letters, x, rows, heads)
        specs.append(spec)
        chosen.append(which)
        local[name] = shape
    part = call.part(_size(mesh, rows), by_heads, local)
    results = call.result_specs(PartitionSpec(rows or None, None, heads or None, None))
    return Mapping(mesh, part, heads, tuple(specs), tuple(chosen), results)


def _array(
    mesh: Any, name: str, letters: str, x: Any, rows: Axes, heads: Axes
) -> tuple[PartitionSpec | None, int | None, tuple[int, ...] | None]:
    """An array's spec, the dimension of which a device takes one head, if it does, and a device's shape."""
    if x is None:
        return None, None, None
    if letters == "*":
        return PartitionSpec(), -1, x.shape
    parts: list[Axes] = []
    shape, chosen = list(x.shape), None
    for dim, letter in enumerate(letters):
        axes = {"B": rows, "H": heads}.get(letter, ())
        devices = _size(mesh, axes)
        if shape[dim] % devices:
            # shared by all rows, or one of the heads that several devices share
            if letter == "H" and shape[dim] > 1:
                chosen, shape[dim] = dim, 1
            axes, devices = (), 1
        parts.append(axes)
        shape[dim] //= devices
    for dim, part in enumerate(_sharding.spec_of(x)):
        if moved := [each for each in _sharding.axes_of(part) if each not in parts[dim] and mesh.shape[each] > 1]:
            if dim < len(letters) and letters[dim] not in "BH":
                _warn(f"{name}: dimension {dim} is sharded over axis {_text(tuple(moved))}")
    return PartitionSpec(*(each or None for each in parts)), chosen, tuple(shape)


def _divided(mesh: Any, axes: Axes, size: int) -> Axes:
    return axes if size % _size(mesh, axes) == 0 else ()


def _size(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _text(axes: Axes) -> str:
    return ", ".join(map(repr, axes))


@functools.cache
def _warn(what: str) -> None:
    message = (
        f"{what}; the array is gathered, and each device computes more than its part. Shard batch or heads, or shard "
        "tokens by ejkernel.parallel"
    )
    warnings.warn(message, GatheredWarning, stacklevel=6)
