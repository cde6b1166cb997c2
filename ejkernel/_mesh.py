"""A call on arrays that are sharded over a mesh: each device runs it on its own rows and heads.

Along `Explicit` axes shardings are part of types and known when a call is traced: `shard_map` then runs the call on
each device. Along `Auto` axes they are known when XLA partitions a program: `kernels._partitioned` then splits the
call. An array that an axis does not shard is replicated over it, and its gradient is summed over the axis's devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Named
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel import _sharding
from ejkernel._checks.wording import warn

Axes = tuple[str, ...]
Shape = tuple[int, ...]
TOKENS = "TS"  # letters of a query's tokens


class GatheredWarning(UserWarning):
    """A sharded array is gathered before a call; the message says which array, along which axis, and what helps."""


class Call(Protocol):
    """What a call says of itself so that it can be split."""

    def dims(self) -> dict[str, str]:
        """The dimensions of its arrays by name, a letter each: `B` for rows and `H` for heads, whatever their number.

        The first array is the query, whose tokens are `T` or `S`. In ops without heads `H` stands for channels, of
        which an attribute `together` may say how many must stay on one device. `*` stands for the two words of a
        random key, to which `Split.own` adds which part of the call a device has. Attributes may name arrays that the
        call writes to, `written`, and what helps where arrays are gathered, `instead`.
        """
        ...

    def part(self, rows: int, heads: int, shapes: dict[str, Shape | None]) -> Any:
        """The call of one device, if `rows` devices share the rows and `heads` devices the heads.

        `shapes` are those of the device's arrays.
        """
        ...

    def result_specs(self, tokens: PartitionSpec) -> Any:
        """The specs of the results, if `tokens` is that of an array with the query's dimensions."""
        ...


@dataclass(frozen=True)
class Part:
    """What a device has of an array.

    Attributes:
        shape: The shape of the device's part.
        rows: The dimension of rows, if devices have different rows; `None` if each device has all rows.
        heads: The dimension of heads, if devices have different heads; `None` if each device has all heads.
        chosen: The dimension of heads, if there are fewer heads than devices: a device has them all, and takes the one
            that its part of the call reads.
        is_key: Whether the array is a random key.
    """

    shape: Shape
    rows: int | None = None
    heads: int | None = None
    chosen: int | None = None
    is_key: bool = False

    def spec(self, rows: Axes, heads: Axes) -> PartitionSpec:
        """The array's spec, if rows and heads are sharded over these mesh axes."""
        axes = {self.rows: rows, self.heads: heads}
        return PartitionSpec(*(axes.get(i) or None for i in range(len(self.shape))))


def part_of(shape: Shape, letters: str, rows: int, heads: int) -> Part:
    """What a device has of an array, if `rows` devices share the rows and `heads` devices the heads."""
    if letters == "*":
        return Part(shape, is_key=True)
    local, devices = list(shape), {"B": rows, "H": heads}
    sharded: dict[str, int] = {}
    chosen = None
    for dim, letter in enumerate(letters):
        if letter not in devices:
            continue
        if local[dim] % devices[letter] == 0:
            sharded[letter], local[dim] = dim, local[dim] // devices[letter]
        elif letter == "H" and local[dim] > 1:
            chosen, local[dim] = dim, 1
    return Part(tuple(local), sharded.get("B"), sharded.get("H"), chosen)


def parts(call: Call, shapes: Named[str, Shape | None], rows: int, heads: int) -> tuple[Any, dict[str, Part | None]]:
    """The call of one device, and what the device has of the arrays of these shapes."""
    dims = call.dims()
    local = {name: None if shape is None else part_of(shape, dims[name], rows, heads) for name, shape in shapes.items()}
    return call.part(rows, heads, {name: None if each is None else each.shape for name, each in local.items()}), local


@dataclass(frozen=True)
class Split:
    """A call, split over the axes of a mesh.

    Attributes:
        whole: The call.
        call: The call that each device runs.
        rows: The mesh axes that rows are sharded over.
        heads: The mesh axes that heads are sharded over.
        arrays: What a device has of the call's arrays, in their order; `None` for absent arrays.
    """

    whole: Any
    call: Any
    rows: Axes
    heads: Axes
    arrays: tuple[Part | None, ...]

    def specs(self) -> tuple[PartitionSpec | None, ...]:
        """The specs of the call's arrays."""
        return tuple(None if each is None else each.spec(self.rows, self.heads) for each in self.arrays)

    def own(self, x: Any, part: Part | None) -> Any:
        """An array of the device's call, from the device's shard `x`: the one head that is read, if `part` says so.

        Behind the words of a random key come two numbers, both counted in the whole call: that of the device's first
        head, and how many heads a row has. With them dropout draws the same weights as on one device.
        """
        if part is not None and part.is_key:
            first = _index(self.rows) * (self.call.batch * self.whole.heads) + _index(self.heads) * self.call.heads
            return jnp.concatenate([x, jnp.stack([first, jnp.full_like(first, self.whole.heads)])])
        if part is None or part.chosen is None:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self._chosen(x.shape[part.chosen]), 1, part.chosen)

    def of_all(self, x: jax.Array, part: Part, shape: Shape) -> jax.Array:
        """The cotangent of a shard of this shape, from that of `own`'s result: summed over devices that share it."""
        if part.chosen is not None:
            heads = shape[part.chosen]
            zeros = jnp.zeros((*x.shape[: part.chosen], heads, *x.shape[part.chosen + 1 :]), x.dtype)
            x = jax.lax.dynamic_update_slice_in_dim(zeros, x, self._chosen(heads), part.chosen)
        axes = (*(self.rows if part.rows is None else ()), *(self.heads if part.heads is None else ()))
        return jax.lax.psum(x, axes) if axes else x

    def _chosen(self, heads: int) -> jax.Array:
        """Which of `heads`, which are fewer than devices, this device's part of the call reads."""
        devices = self.whole.heads // self.call.heads
        return (_index(self.heads) // np.uint32(devices // heads)).astype(np.int32)


def split(
    call: Call,
    mesh: Any,
    shapes: Named[str, Shape | None],
    specs: Named[str, PartitionSpec],
    results: Sequence[tuple[Shape, str]] = (),
) -> Split:
    """How a call is split, from the shapes of its arrays by name, and their specs on a mesh.

    `results` are the shapes and dimensions of results, whose heads are split too. Warns of arrays that are gathered.
    """
    warn_of = functools.partial(
        _warn, instead=getattr(call, "instead", "Shard batch or heads, or shard tokens by ejkernel.parallel")
    )
    dims = {name: each for name, each in call.dims().items() if shapes.get(name) is not None}
    letters = next(iter(dims.values()))  # of the query
    # of query, key and value the one with the most heads says over which axes rows and heads are sharded
    candidates = [name for name, each in list(dims.items())[:3] if len(each) == len(letters)]
    lead = max(candidates, key=lambda name: _heads(shapes[name], dims[name]))  # type: ignore[arg-type]
    axes_by_letter = dict(zip(dims[lead], map(_sharding.axes_of, specs[lead]), strict=False))
    rows, heads = axes_by_letter.get("B", ()), axes_by_letter.get("H", ())
    by_rows, by_heads = _size(mesh, rows), _size(mesh, heads)
    batch = shapes[lead][dims[lead].index("B")] if rows else 1  # type: ignore[index]
    if batch % by_rows:
        warn_of(f"{lead}: {batch} rows, which axis {_text(rows)} of {by_rows} devices does not divide")
        rows, by_rows = (), 1
    together = getattr(call, "together", 1)  # channels that must stay on one device
    indivisible = []
    for name, each in dims.items():
        for count in _heads(shapes[name], each):  # type: ignore[arg-type]
            groups = count // together
            shared = together == 1 and name not in getattr(call, "written", ())
            if groups % by_heads and not (shared and by_heads % groups == 0):
                indivisible.append((name, groups))
    # several devices can read one head, but not write it
    indivisible += [("results", count) for each in results for count in _heads(*each) if count // together % by_heads]
    if indivisible:
        name, count = indivisible[0]
        warn_of(f"{name}: {count} heads, which axis {_text(heads)} of {by_heads} devices does not divide")
        heads, by_heads = (), 1
    part, local = parts(call, shapes, by_rows, by_heads)
    for name, letters in dims.items():
        for dim, axes in enumerate(specs[name]):
            moved = tuple(each for each in _sharding.axes_of(axes) if mesh.shape[each] > 1)
            if moved and letters[dim : dim + 1] not in ("B", "H"):
                warn_of(f"{name}: dimension {dim} is sharded over axis {_text(moved)}")
    return Split(call, part, rows, heads, tuple(local.values()))


def _heads(shape: Shape, letters: str) -> list[int]:
    return [size for size, letter in zip(shape, letters, strict=False) if letter == "H"]


@dataclass(frozen=True)
class Mapping:
    """How a call is mapped over the `Explicit` axes of a mesh.

    Attributes:
        mesh: The mesh.
        split: What each device runs.
        results: The specs of the results, sharded over rows and heads alone.
        wanted: The same specs with tokens sharded as the query's tokens are.
        by_xla: Whether XLA splits the call instead, as along `Auto` axes: `shard_map` takes no axis that `vmap` maps.
    """

    mesh: _sharding.AnyMesh
    split: Split
    results: Any
    wanted: Any
    by_xla: bool

    @property
    def call(self) -> Any:
        """The call that each device runs, as far as it is known before XLA splits the call."""
        return self.split.whole if self.by_xla else self.split.call

    def run(self, function: Callable[..., Any], *arrays: Any, check_vma: bool = True) -> Any:
        """`function(call, *arrays)` on every device, with the device's call and its shards of the arrays."""
        if self.by_xla:
            return _sharding.partitioned(functools.partial(function, self.call), self.wanted, *arrays, mesh=self.mesh)
        axes, specs = frozenset(self.mesh.explicit_axes), self.split.specs()
        placed = [
            x if spec is None else jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]

        def on_part(*arrays: Any) -> Any:
            return function(self.call, *map(self.split.own, arrays, self.split.arrays))

        # the mesh is named, as the caller need not have entered it by `jax.set_mesh`
        mapped = jax.shard_map(
            on_part, mesh=self.mesh, in_specs=specs, out_specs=self.results, axis_names=axes, check_vma=check_vma
        )
        results = mapped(*placed)
        if self.wanted == self.results:
            return results
        return jax.tree.map(
            lambda spec, x: jax.sharding.reshard(x, NamedSharding(self.mesh, spec)),
            self.wanted,
            results,
            is_leaf=_sharding.is_spec,
        )


def mapping(call: Call, mesh: _sharding.AnyMesh, arrays: tuple[Any, ...]) -> Mapping:
    """How `call` is mapped over the `Explicit` axes of the mesh that its arrays are on."""
    dims = call.dims()
    named = dict(zip(dims, arrays, strict=False))
    shapes = {name: None if x is None else x.shape for name, x in named.items()}
    specs = {name: _sharding.spec_of(x) for name, x in named.items() if x is not None}
    parted = split(call, mesh, shapes, specs)
    query, letters = next(iter(dims.items()))
    axes: dict[str, Axes] = {"B": parted.rows, "H": parted.heads}
    token_axes = {
        letter: tuple(each for each in _sharding.axes_of(part) if each not in parted.rows + parted.heads)
        for letter, part in zip(letters, specs[query], strict=True)
        if letter in TOKENS
    }

    def results(axes: dict[str, Axes]) -> Any:
        return call.result_specs(PartitionSpec(*(axes.get(each) or None for each in letters)))

    return Mapping(mesh, parted, results(axes), results(axes | token_axes), _sharding.vmap_shards(mesh))


def _index(axes: Axes) -> jax.Array:
    """The index of this device along these mesh axes."""
    return jax.lax.axis_index(axes).astype(np.uint32) if axes else jnp.uint32(0)


def _size(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _text(axes: Axes) -> str:
    return ", ".join(map(repr, axes))


@functools.cache
def _warn(problem: str, instead: str) -> None:
    consequence = "the array is gathered, and each device computes more than its part"
    warn(f"{problem}; {consequence}. {instead}", GatheredWarning)
