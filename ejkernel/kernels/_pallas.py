"""TPU kernels as one JAX primitive: they are traced when a program is lowered for TPUs, and XLA serves other calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel._dispatch import NOT_SPLIT, PlatformError, _warn_once

Run = Callable[..., Sequence[jax.Array]]

# How to interpret kernels (`pltpu.InterpretParams`) instead of compiling them; for tests.
INTERPRET: Any = None


def launch(run: Run, fallback: Run, results: Sequence[jax.ShapeDtypeStruct], *arrays: Any) -> Sequence[jax.Array]:
    """`run(*arrays)`, which calls Pallas kernels; where XLA would have to partition these, `fallback(*arrays)`.

    Arrays may be trees of arrays. Results vary over those mesh axes over which the first array varies.
    """
    if INTERPRET is not None:
        # a primitive must not hide the effects of the interpreter
        return _by_default(run, *arrays)
    leaves, tree = jax.tree.flatten(arrays)

    def unflattened(function: Run, *leaves: jax.Array) -> Sequence[jax.Array]:
        return function(*jax.tree.unflatten(tree, leaves))

    run, fallback = (functools.partial(unflattened, each) for each in (run, fallback))
    shapes = tuple((each.shape, each.dtype) for each in results)
    return _kernel().bind(*leaves, run=run, fallback=fallback, results=shapes)


@functools.cache
def _kernel() -> Any:
    """A primitive that traces its kernels only when it is lowered, for two reasons.

    `jit` traces the implementations for all platforms, and kernels take long to trace. And JAX cannot lower a Pallas
    kernel in a program for several platforms.
    """
    # not at the top: `import ejkernel` must not import Pallas, which this does
    from jax.extend.core import Primitive

    kernel = Primitive("ejkernel_tpu_kernel")
    kernel.multiple_results = True

    @kernel.def_impl
    def _(*arrays: Any, run: Run, fallback: Run, results: Any) -> Any:
        return _by_default(run, *arrays)

    @kernel.def_abstract_eval
    def _(*avals: Any, run: Run, fallback: Run, results: Any) -> Any:
        like = avals[0]
        whole = [NamedSharding(like.sharding.mesh, PartitionSpec(*(None for _ in shape))) for shape, _ in results]
        return [
            jax.core.ShapedArray(*each, sharding=sharding, manual_axis_type=like.manual_axis_type)
            for each, sharding in zip(results, whole, strict=True)
        ]

    def lower(ctx: Any, *arrays: Any, run: Run, fallback: Run, results: Any) -> Any:
        chosen = run
        if not one_device(ctx.module_context.axis_context):
            chosen = fallback
            _warn_once(f"XLA serves a call on TPUs, which is slower than a kernel: {NOT_SPLIT}")
        return mlir.lower_fun(functools.partial(_by_default, chosen), multiple_results=True)(ctx, *arrays)

    def lower_elsewhere(ctx: Any, *arrays: Any, run: Run, fallback: Run, results: Any) -> Any:
        platforms = ctx.module_context.platforms
        if len(platforms) == 1:
            raise PlatformError(f"platform: got a kernel for TPUs; this program is for {platforms[0]!r}")
        # a program for several platforms: on this one the results are not used
        return mlir.lower_fun(lambda *_: [jnp.zeros(*each) for each in results], multiple_results=True)(ctx, *arrays)

    mlir.register_lowering(kernel, lower, platform="tpu")
    mlir.register_lowering(kernel, lower_elsewhere)
    return kernel


def _by_default(run: Run, *arrays: jax.Array) -> Sequence[jax.Array]:
    """`run(*arrays)` with JAX's default promotion of dtypes and ranks, whatever is set when it is traced."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run(*arrays)


def one_device(context: Any) -> bool:
    """Whether a program, or the function inside a `shard_map`, runs on one device, so that XLA partitions nothing."""
    if hasattr(context, "num_devices"):
        return context.num_devices == 1
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return True
    manual = {*context.manual_axes, *mesh.manual_axes}
    return all(name in manual or size == 1 for name, size in mesh.shape.items())
