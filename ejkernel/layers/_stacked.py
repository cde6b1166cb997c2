"""Many layers of one kind as one, their parameters stacked: a model of any depth compiles as fast as one layer."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel import _checks

Made = TypeVar("Made", bound=nnx.Module)


def stacked(
    make: Callable[[nnx.Rngs, jax.Array], Made] | Sequence[Made],
    count: int | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    axis: str | None = None,
) -> Made:
    """`count` modules in one, each parameter with an axis of that size first, to go through with `jax.lax.scan`.

    The partitioning moves with it: a kernel that is `P(None, "model")` alone is `P(axis, None, "model")` here.

    Args:
        make: `make(rngs, number)` makes one, a layer or a block of several; the number is traced. Or a list of modules
            that are made already, as with published weights, and differ in nothing but their numbers.
        count: How many to make; not for a list.
        rngs: Random keys, of which each has its own; not for a list.
        axis: The mesh axis that layers lie along, as for pipelines; `None` has all of them everywhere.

    Returns:
        A module like those that `make` makes. With `graph, parameters = nnx.split(…)` of it, `nnx.merge(graph, one)` of
        one layer's parameters, as `jax.lax.scan` hands them out, is that layer again.

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
        return _together(make, count, rngs, metadata)
    count = _checks.positive_int("count", count)
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs: got {type(rngs).__name__}; expected nnx.Rngs")
    made = nnx.vmap(make, in_axes=(0, 0), out_axes=0, transform_metadata=metadata)
    return nnx.split_rngs(splits=count)(made)(rngs, jnp.arange(count, dtype=jnp.int32))


def _together(modules: Sequence[Made], count: Any, rngs: Any, metadata: dict[Any, Any]) -> Made:
    """Modules that are there already, as one."""
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
