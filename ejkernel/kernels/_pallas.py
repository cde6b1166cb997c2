"""TPU kernels as the rest of JAX sees them: traced only where a TPU is lowered for, and where they can run there."""

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


def launch(run: Run, instead: Run, results: Sequence[jax.ShapeDtypeStruct], *arrays: Any) -> Sequence[jax.Array]:
    """`run(*arrays)`, which has kernels in it; `instead`, which has none, where XLA would have to split them.

    The first array decides over which axes of a mesh the results vary. Some may be absent.
    """
    if INTERPRET is not None:
        # an interpreter has effects, which no operation may hide
        return _by_default(run, *arrays)
    leaves, tree = jax.tree.flatten(arrays)

    def filled(function: Run, *leaves: jax.Array) -> Sequence[jax.Array]:
        return function(*jax.tree.unflatten(tree, leaves))

    run, instead = (functools.partial(filled, each) for each in (run, instead))
    shapes = tuple((each.shape, each.dtype) for each in results)
    return _kernel().bind(*leaves, run=run, instead=instead, results=shapes)


@functools.cache
def _kernel() -> Any:
    """What a kernel computes, as one operation, which is traced when it is lowered.

    `jit` traces what it may choose from for every device, and a kernel takes long to trace; nor can JAX lower one where
    it lowers for several platforms at once.
    """
    # not at the top: `import ejkernel` must not import Pallas, which this does
    from jax.extend.core import Primitive

    kernel = Primitive("ejkernel_tpu_kernel")
    kernel.multiple_results = True

    @kernel.def_impl
    def _(*arrays: Any, run: Run, instead: Run, results: Any) -> Any:
        return _by_default(run, *arrays)

    @kernel.def_abstract_eval
    def _(*avals: Any, run: Run, instead: Run, results: Any) -> Any:
        like = avals[0]
        whole = [NamedSharding(like.sharding.mesh, PartitionSpec(*(None for _ in shape))) for shape, _ in results]
        return [
            jax.core.ShapedArray(*each, sharding=sharding, manual_axis_type=like.manual_axis_type)
            for each, sharding in zip(results, whole, strict=True)
        ]

    def lower(ctx: Any, *arrays: Any, run: Run, instead: Run, results: Any) -> Any:
        chosen = run
        if not _alone(ctx.module_context.axis_context):
            chosen = instead
            _warn_once(f"XLA serves a call on TPUs, which is slower than a kernel: {NOT_SPLIT}")
        return mlir.lower_fun(functools.partial(_by_default, chosen), multiple_results=True)(ctx, *arrays)

    def lower_elsewhere(ctx: Any, *arrays: Any, run: Run, instead: Run, results: Any) -> Any:
        platforms = ctx.module_context.platforms
        if len(platforms) == 1:
            raise PlatformError(f"platform: got a kernel for TPUs; this program is for {platforms[0]!r}")
        # of several, this one will not run it
        return mlir.lower_fun(lambda *_: [jnp.zeros(*each) for each in results], multiple_results=True)(ctx, *arrays)

    mlir.register_lowering(kernel, lower, platform="tpu")
    mlir.register_lowering(kernel, lower_elsewhere)
    return kernel


def _by_default(run: Run, *arrays: jax.Array) -> Sequence[jax.Array]:
    """`run(*arrays)`, in which dtypes and ranks are promoted as JAX does by default, whatever it was told since."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run(*arrays)


def _alone(context: Any) -> bool:
    """Whether a program, or what `shard_map` maps, runs on one device, so that nothing is left to split."""
    if hasattr(context, "num_devices"):
        return context.num_devices == 1
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return True
    manual = {*context.manual_axes, *mesh.manual_axes}
    return all(name in manual or size == 1 for name, size in mesh.shape.items())
