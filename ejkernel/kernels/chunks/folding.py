"""What JAX's transformations do to the passes of a recurrence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp


def foldable(function: Callable[..., Any], call: Any, plan: Any) -> Callable[..., Any]:
    """`function(call, plan, *arrays)` that `vmap` maps: rows join the batch, packed streams run one by one."""

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Any) -> Any:
        return function(call, plan, *arrays)

    @mapped.def_vmap
    def rule(axis_size: int, is_batched: Any, *arrays: Any) -> tuple[Any, Any]:
        def spread(x: jax.Array, batched: bool) -> jax.Array:
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        arrays = jax.tree.map(spread, arrays, tuple(is_batched))
        if call.packed:
            results = jax.lax.map(lambda each: mapped(*each), arrays)
        else:
            folded = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
            larger = replace(call, batch=call.batch * axis_size, sequences=call.sequences * axis_size)
            results = foldable(function, larger, plan)(*folded)
            results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped
