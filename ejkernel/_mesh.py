"""A call on arrays that are sharded over a mesh: each device runs it on its own rows and heads.

Along `Explicit` axes shardings are part of types, so they are known when a call is traced, and `shard_map` maps it.
Along `Auto` axes they are known when XLA partitions a program: `kernels._partitioned` asks then how a call is split.
What an axis does not shard is shared by its devices, and its gradient is summed over them.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Named
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel import _sharding

Axes = tuple[str, ...]
Shape = tuple[int, ...]
TOKENS = "TS"  # letters of a query's tokens


class GatheredWarning(UserWarning):
    """Sharded arrays are brought together before a call; the message says which, along which axis, and what helps."""


class Call(Protocol):
    """What is asked of a call here."""

    def dims(self) -> dict[str, str]:
        """The dimensions of its arrays by name, a letter each: `B` for rows and `H` for heads, whatever their number.

        The first array is the query; its tokens are `T` or `S`.

        Ops without heads have `H` for channels, each computed by itself, or so many of them `together`. `*` alone is
        the two words of a random key, to which a device's part has its place added, see `Split.own`.
        """
        ...

    def part(self, rows: int, heads: int, shapes: dict[str, Shape | None]) -> Any:
        """The call that a device has where so many share the rows and heads, its arrays having these shapes."""
        ...

    def result_specs(self, tokens: PartitionSpec) -> Any: ...


@dataclass(frozen=True)
class Part:
    """What a device has of an array.

    Attributes:
        shape: its shape
        rows: the dimension whose rows the devices share out; `None` if each has all there are
        heads: the same of heads
        chosen: the dimension of which a device takes the one head that its own heads read, out of fewer than devices
        is_key: whether it is a random key
    """

    shape: Shape
    rows: int | None = None
    heads: int | None = None
    chosen: int | None = None
    is_key: bool = False

    def spec(self, rows: Axes, heads: Axes) -> PartitionSpec:
        """How the array is sharded where rows and heads are over these axes."""
        axes = {self.rows: rows, self.heads: heads}
        return PartitionSpec(*(axes.get(i) or None for i in range(len(self.shape))))


def part_of(shape: Shape, letters: str, rows: int, heads: int) -> Part:
    """What a device has of an array where so many share rows and heads."""
    if letters == "*":
        return Part(shape, is_key=True)
    local, dims = list(shape), {"B": rows, "H": heads}
    at: dict[str, int] = {}
    for dim, letter in enumerate(letters):
        devices = dims.get(letter)
        if devices is None:
            continue
        if local[dim] % devices == 0:
            at[letter], local[dim] = dim, local[dim] // devices
        elif letter == "H" and local[dim] > 1:
            at["chosen"], local[dim] = dim, 1
    return Part(tuple(local), at.get("B"), at.get("H"), at.get("chosen"))


def parts(call: Call, shapes: Named[str, Shape | None], rows: int, heads: int) -> tuple[Any, dict[str, Part | None]]:
    """The call that each of so many devices has, and what it has of the arrays of these shapes."""
    dims = call.dims()
    found = {name: None if shape is None else part_of(shape, dims[name], rows, heads) for name, shape in shapes.items()}
    local = {name: None if each is None else each.shape for name, each in found.items()}
    return call.part(rows, heads, local), found


@dataclass(frozen=True)
class Split:
    """A call, split over the axes of a mesh.

    Attributes:
        whole: the call
        call: the call that each device runs
        rows: the axes that rows are sharded over
        heads: the axes that heads are sharded over
        arrays: what a device has of the call's arrays, in their order, `None` for absent ones
    """

    whole: Any
    call: Any
    rows: Axes
    heads: Axes
    arrays: tuple[Part | None, ...]

    def specs(self) -> tuple[PartitionSpec | None, ...]:
        """How the call's arrays are sharded."""
        return tuple(None if each is None else each.spec(self.rows, self.heads) for each in self.arrays)

    def own(self, x: Any, part: Part | None) -> Any:
        """An array as the device's call reads it, from what it has by the array's spec.

        That is one head, if `part` says so. The words of a random key are followed by the numbers of the device's first
        head and of a row's heads, both counted in the whole call, so that weights are drawn as on one device.
        """
        if part is not None and part.is_key:
            first = _index(self.rows) * (self.call.batch * self.whole.heads) + _index(self.heads) * self.call.heads
            return jnp.concatenate([x, jnp.stack([first, jnp.full_like(first, self.whole.heads)])])
        if part is None or part.chosen is None:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self._chosen(x.shape[part.chosen]), 1, part.chosen)

    def of_all(self, x: jax.Array, part: Part, shape: Shape) -> jax.Array:
        """The cotangent of an array of this shape from that of what `own` gives, summed over devices that share it."""
        if part.chosen is not None:
            heads = shape[part.chosen]
            zeros = jnp.zeros((*x.shape[: part.chosen], heads, *x.shape[part.chosen + 1 :]), x.dtype)
            x = jax.lax.dynamic_update_slice_in_dim(zeros, x, self._chosen(heads), part.chosen)
        axes = (*(self.rows if part.rows is None else ()), *(self.heads if part.heads is None else ()))
        return jax.lax.psum(x, axes) if axes else x

    def _chosen(self, heads: int) -> jax.Array:
        """Which of so many heads, which are fewer than devices, this device's heads read."""
        devices = self.whole.heads // self.call.heads
        return (_index(self.heads) // np.uint32(devices // heads)).astype(np.int32)


def split(
    call: Call,
    mesh: Any,
    shapes: Named[str, Shape | None],
    specs: Named[str, PartitionSpec],
    results: Sequence[tuple[Shape, str]] = (),
) -> Split:
    """How a call is split whose arrays, by name, have these shapes, and these shardings over a mesh.

    `results` are shapes and dimensions of what the call is to give. It warns of arrays that have to be gathered.
    """
    dims = {name: each for name, each in call.dims().items() if shapes.get(name) is not None}
    letters = next(iter(dims.values()))  # those of the query, and of whatever else has all heads
    alike = [name for name, each in list(dims.items())[:3] if len(each) == len(letters)]
    lead = max(alike, key=lambda name: _heads(shapes[name], dims[name]))  # type: ignore[arg-type]
    of_letters = dict(zip(dims[lead], map(_sharding.axes_of, specs[lead]), strict=False))
    rows, heads = of_letters.get("B", ()), of_letters.get("H", ())
    by_rows, by_heads = _size(mesh, rows), _size(mesh, heads)
    batch = shapes[lead][dims[lead].index("B")] if rows else 1  # type: ignore[index]
    if batch % by_rows:
        _warn(f"{lead}: {batch} rows, which axis {_text(rows)} of {by_rows} devices does not divide")
        rows, by_rows = (), 1
    together = getattr(call, "together", 1)  # channels that no two devices share
    counts = {name: _heads(shapes[name], each) for name, each in dims.items()}  # type: ignore[arg-type]
    counts = {name: [own // together for own in each] for name, each in counts.items()}
    refused = [
        (name, own)
        for name, each in counts.items()
        for own in each
        if own % by_heads and (together > 1 or by_heads % own)
    ]
    # of what is given a device cannot have one head that others have too
    refused += [("results", own) for each in results for own in _heads(*each) if own // together % by_heads]
    if refused:
        name, own = refused[0]
        _warn(f"{name}: {own} heads, which axis {_text(heads)} of {by_heads} devices does not divide")
        heads, by_heads = (), 1
    part, found = parts(call, shapes, by_rows, by_heads)
    for name, letters in dims.items():
        for dim, axes in enumerate(specs[name]):
            moved = tuple(each for each in _sharding.axes_of(axes) if mesh.shape[each] > 1)
            if moved and letters[dim : dim + 1] not in ("B", "H"):
                _warn(f"{name}: dimension {dim} is sharded over axis {_text(moved)}")
    return Split(call, part, rows, heads, tuple(found.values()))


def _heads(shape: Shape, letters: str) -> list[int]:
    return [size for size, letter in zip(shape, letters, strict=False) if letter == "H"]


@dataclass(frozen=True)
class Mapping:
    """How a call is mapped over the `Explicit` axes of a mesh.

    Attributes:
        results: how each device's results lie together
        wanted: the same, but for tokens: these are sharded again as the query's were
    """

    mesh: _sharding.AnyMesh
    split: Split
    results: Any
    wanted: Any

    @property
    def call(self) -> Any:
        """The call that each device runs."""
        return self.split.call

    def run(self, function: Callable[..., Any], *arrays: Any, check_vma: bool = True) -> Any:
        """`function(call, *arrays)` on every device's part."""
        axes, specs = frozenset(self.mesh.explicit_axes), self.split.specs()
        placed = [
            x if spec is None else jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]

        def on_part(*arrays: Any) -> Any:
            return function(self.call, *map(self.split.own, arrays, self.split.arrays))

        # with the mesh, as the caller need not have entered it by `jax.set_mesh`
        mapped = jax.shard_map(
            on_part, mesh=self.mesh, in_specs=specs, out_specs=self.results, axis_names=axes, check_vma=check_vma
        )
        found = mapped(*placed)
        if self.wanted == self.results:
            return found
        return jax.tree.map(
            lambda spec, x: jax.sharding.reshard(x, NamedSharding(self.mesh, spec)),
            self.wanted,
            found,
            is_leaf=_is_spec,
        )


def mapping(call: Call, mesh: _sharding.AnyMesh, arrays: tuple[Any, ...]) -> Mapping:
    """How `call` is mapped over the `Explicit` axes of a mesh that its arrays are sharded over."""
    dims = call.dims()
    named = dict(zip(dims, arrays, strict=False))
    shapes = {name: None if x is None else x.shape for name, x in named.items()}
    specs = {name: _sharding.spec_of(x) for name, x in named.items() if x is not None}
    found = split(call, mesh, shapes, specs)
    letters = next(iter(dims.values()))  # those of the query, and of whatever else has all heads
    axes: dict[str, Axes] = {"B": found.rows, "H": found.heads}
    taken = {*found.rows, *found.heads}
    of_tokens = {
        letter: tuple(each for each in _sharding.axes_of(part) if each not in taken)
        for letter, part in zip(letters, specs[next(iter(dims))], strict=True)
        if letter in TOKENS
    }

    def results(axes: dict[str, Axes]) -> Any:
        return call.result_specs(PartitionSpec(*(axes.get(each) or None for each in letters)))

    return Mapping(mesh, found, results(axes), results(axes | of_tokens))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _index(axes: Axes) -> jax.Array:
    """The number of this device along these axes."""
    return jax.lax.axis_index(axes).astype(np.uint32) if axes else jnp.uint32(0)


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
