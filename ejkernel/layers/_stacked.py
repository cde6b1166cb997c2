"""Stacks the parameters of equal layers, to scan over: a model of any depth compiles as fast as one layer."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel import _checks

Module = TypeVar("Module", bound=nnx.Module)


def stacked(
    make: Callable[[nnx.Rngs, jax.Array], Module] | Sequence[Module],
    count: int | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    axis: str | None = None,
) -> Module:
    """`count` modules as one, whose parameters have a first axis of that size, for `jax.lax.scan`.

    Partitionings get an axis more too: a kernel with `P(None, "model")` has `P(axis, None, "model")` here.

    Args:
        make: `make(rngs, number)` creates one module, a layer or a block of several; the number is traced. Or a list
            of existing modules, as with published weights, that differ only in the values of their parameters.
        count: How many modules to create; not for a list.
        rngs: Random keys, which are split for the modules; not for a list.
        axis: The mesh axis along which layers are sharded, as for pipelines; `None` replicates them.

    Returns:
        A module like those that `make` creates. After `graph, parameters = nnx.split(…)` of it, `nnx.merge(graph, one)`
        with one layer's parameters, as `jax.lax.scan` slices them, is that layer.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from ejkernel import layers
        >>> def make(rngs, number):
        ...     return layers.GatedLinearAttention(16, heads=2, rngs=rngs)
        >>> graph, parameters = nnx.split(layers.stacked(make, 3, nnx.Rngs(0)))
        >>> parameters["out"]["kernel"].get_value().shape
        (3, 16, 16)
        >>> nnx.get_partition_spec(parameters)["out"]["kernel"].get_value()
        P(None, 'model', None)
        >>> def through(x, parameters):
        ...     return x + nnx.merge(graph, parameters)(x)[0], None
        >>> output, _ = jax.lax.scan(through, jnp.ones((1, 5, 16)), parameters)
        >>> output.shape
        (1, 5, 16)
    """
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"axis: got {type(axis).__name__}; expected a name or None")
    metadata: dict[Any, Any] = {nnx.PARTITION_NAME: axis}
    if not callable(make):
        return _stack(make, count, rngs, metadata)
    count = _checks.positive_int("count", count)
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs: got {type(rngs).__name__}; expected nnx.Rngs")
    create = nnx.vmap(make, in_axes=(0, 0), out_axes=0, transform_metadata=metadata)
    return nnx.split_rngs(splits=count)(create)(rngs, jnp.arange(count, dtype=jnp.int32))


def _stack(modules: Sequence[Module], count: Any, rngs: Any, metadata: dict[Any, Any]) -> Module:
    """Existing modules as one."""
    if not isinstance(modules, list | tuple) or not modules:
        got = "an empty one" if isinstance(modules, list | tuple) else type(modules).__name__
        raise TypeError(f"make: got {got}; expected a function or a list of modules")
    for name, each in (("count", count), ("rngs", rngs)):
        if each is not None:
            raise TypeError(f"{name}: got {type(each).__name__}; expected None, as the modules are made already")
    graph, *others = (nnx.graphdef(module) for module in modules)
    for number, other in enumerate(others, 1):
        if other != graph:
            _checks.fail("make", f"a module {number} that is not as module 0", "modules of the same options")
    parameters = jax.tree.map(lambda *each: jnp.stack(each), *map(nnx.state, modules))
    return nnx.merge(graph, nnx.spmd.add_axis(parameters, 0, metadata))
