"""TPU kernels as the rest of JAX sees them: traced only where a TPU is lowered for, split over batch and heads."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel._dispatch import PlatformError

Run = Callable[..., Sequence[jax.Array]]

# How to interpret kernels (`pltpu.InterpretParams`) instead of compiling them; for tests.
INTERPRET: Any = None


@functools.cache
def _kernel() -> Any:
    """What a kernel computes, as one operation, which is traced when it is lowered, and for TPUs only.

    `jit` traces what it may choose from for every device, and a kernel takes long to trace; nor can JAX lower one where
    it lowers for several platforms at once.
    """
    # not at the top: `import ejkernel` must not import Pallas, which this does
    from jax.extend.core import Primitive

    kernel = Primitive("ejkernel_tpu_kernel")
    kernel.multiple_results = True

    @kernel.def_impl
    def _(*arrays: Any, run: Run, results: Any) -> Any:
        return run(*arrays)

    @kernel.def_abstract_eval
    def _(*avals: Any, run: Run, results: Any) -> Any:
        return [jax.core.ShapedArray(*each, manual_axis_type=avals[0].manual_axis_type) for each in results]

    def lower(ctx: Any, *arrays: Any, run: Run, results: Any) -> Any:
        return mlir.lower_fun(run, multiple_results=True)(ctx, *arrays)

    def lower_elsewhere(ctx: Any, *arrays: Any, run: Run, results: Any) -> Any:
        platforms = ctx.module_context.platforms
        if len(platforms) == 1:
            raise PlatformError(f"platform: got a kernel for TPUs; this program is for {platforms[0]!r}")
        # of several, this one will not run it
        return lower(ctx, *arrays, run=functools.partial(_zeros, results), results=results)

    mlir.register_lowering(kernel, lower, platform="tpu")
    mlir.register_lowering(kernel, lower_elsewhere)
    return kernel


def _zeros(shapes: Any, *arrays: jax.Array) -> list[jax.Array]:
    return [jnp.zeros(*each) for each in shapes]


@dataclass(frozen=True)
class Dims:
    """Which dimension of an array is the batch, and which the heads; `None` where it has none."""

    batch: int | None = None
    heads: int | None = None


def launch(run: Run, operands: Sequence[Dims], results: Sequence[tuple[Any, Dims]], *arrays: jax.Array) -> Any:
    """`run(*arrays)`, which can tell from shapes which part of batch and heads it is given; `results` as shapes."""
    if INTERPRET is not None:
        # an interpreter has effects, which no operation may hide
        return run(*arrays)
    mesh = jax.sharding.get_abstract_mesh()
    shapes = tuple((x.shape, x.dtype) for x, _ in results)
    whole = functools.partial(_kernel().bind, run=run, results=shapes)
    if mesh.axis_names and not mesh.auto_axes:
        return whole(*arrays)
    split = Split(run, tuple(operands), tuple(dims for _, dims in results), shapes)
    partitioned = custom_partitioning(lambda *arrays: tuple(whole(*arrays)))
    rule, local = split.rule(arrays)
    partitioned.def_partition(split.partition, sharding_rule=rule, need_replication_factors=tuple(local))
    return partitioned(*arrays)


@dataclass(frozen=True)
class Split:
    """How a kernel is split over the devices of a mesh."""

    run: Run
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    def rule(self, arrays: Sequence[jax.Array]) -> tuple[str, list[str]]:
        """What may be sharded alike, in Shardy's notation, and the factors that may not be."""
        local: list[str] = []
        counts = self._counts(arrays)

        def factors(shape: Sequence[int], dims: Dims) -> str:
            found = []
            for i, size in enumerate(shape):
                if i == dims.batch:
                    found.append("b")
                elif i == dims.heads and size == counts[-1] and len(counts) < 3:
                    found.append("h" if counts[0] in (1, counts[-1]) else "(h r)")
                elif i == dims.heads and size == counts[0] > 1 and len(counts) < 3:
                    found.append("h")
                else:
                    local.append(f"i{len(local)}")
                    found.append(local[-1])
            return " ".join(found)

        given = ", ".join(factors(x.shape, dims) for x, dims in zip(arrays, self.operands, strict=True))
        made = ", ".join(factors(shape, dims) for (shape, _), dims in zip(self.shapes, self.results, strict=True))
        return f"{given} -> {made}", local

    def _counts(self, arrays: Sequence[Any]) -> list[int]:
        """The numbers of heads that there are, ascending."""
        found = zip((x.shape for x in arrays), self.operands, strict=True)
        return sorted({shape[dims.heads] for shape, dims in found if dims.heads is not None})

    def partition(self, mesh: Any, given: Any, made: Any) -> Any:
        """The mesh, what each device runs, and the shardings of results and operands."""
        counts = self._counts(given)
        # heads that others share are the ones that decide
        decisive = counts[0] if counts[0] > 1 and len(counts) < 3 else counts[-1]

        def axes_of(kind: str, size: int | None) -> Any:
            for x, dims in zip(given, self.operands, strict=True):
                at = getattr(dims, kind)
                if at is not None and size in (None, x.shape[at]):
                    part = x.sharding.spec[at]
                    names = () if part is None else (part,) if isinstance(part, str) else tuple(part)
                    parts = math.prod(mesh.shape[name] for name in names)
                    return part if x.shape[at] % parts == 0 else None
            return None

        rows, heads = axes_of("batch", None), axes_of("heads", decisive)

        def sharding(shape: Sequence[int], dims: Dims) -> NamedSharding:
            spec: list[Any] = [None] * len(shape)
            if dims.batch is not None:
                spec[dims.batch] = rows
            if dims.heads is not None and shape[dims.heads] >= decisive:
                spec[dims.heads] = heads
            return NamedSharding(mesh, PartitionSpec(*spec))

        operands = tuple(sharding(x.shape, dims) for x, dims in zip(given, self.operands, strict=True))
        results = tuple(sharding(x.shape, dims) for x, dims in zip(made, self.results, strict=True))
        shapes = tuple((each.shard_shape(x.shape), x.dtype) for each, x in zip(results, made, strict=True))

        def part(*arrays: jax.Array) -> Any:
            return tuple(_kernel().bind(*arrays, run=self.run, results=shapes))

        return mesh, part, results, operands
