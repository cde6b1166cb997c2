"""What all fronts of a recurrence do once their arrays are checked: describe the call, and run it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks, _pools, _sharding
from ejkernel._dispatch import Implementation, dispatch
from ejkernel.kernels.chunks.call import Call

Arrays = _checks.RecurrenceArrays
AnyCall = TypeVar("AnyCall", bound=Call)


def run(
    arrays: Arrays,
    bind: Callable[[Arrays], tuple[Call, tuple[jax.Array | None, ...]]],
    implementations: Sequence[Implementation],
    pooled: Sequence[Implementation],
    platform: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the final state, or the pool of states where the call has one.

    `bind` gives the static facts of a call and the arrays that its implementations take. `pooled` are implementations
    for calls with a pool.
    """
    if _pools.is_pooled(arrays):
        return _pools.run(pooled, arrays, bind, platform)
    call, operands = bind(arrays)
    output, final_state = dispatch(implementations, call, *operands, platform=platform)
    return (output[0] if arrays.unbatched else output), final_state


def recurrence(
    kind: type[AnyCall],
    arrays: Arrays,
    query: jax.Array,
    softmax_scale: float | _checks.AnyArray | None,
    reverse: bool,
    **facts: Any,
) -> tuple[AnyCall, jax.Array, jax.Array | None]:
    """The static facts of a call as a `kind`, its query, and an initial state for each sequence.

    `query` is that of `arrays` or that query normalized; `facts` are fields of `kind` that only this recurrence has.
    """
    B, T, _, K = query.shape
    # without key dims the output is 0 whatever the scale
    scale = max(K, 1) ** -0.5 if softmax_scale is None else _checks.factor("softmax_scale", softmax_scale)
    if isinstance(scale, jax.Array):
        # the scale may be traced, so the query takes it: the output is linear in the query
        query = without_padding(arrays, query).astype(arrays.state_dtype)
        query, scale = query * scale.astype(arrays.state_dtype), 1.0
    state = arrays.initial_state
    if state is not None and state.ndim == 3:
        state = _sharding.broadcast_rows(state, (arrays.sequences, *state.shape), arrays.query)
    call = kind(
        batch=B,
        tokens=T,
        heads=arrays.heads,
        key_dim=K,
        value_dim=arrays.value.shape[-1],
        sequences=arrays.sequences,
        packed=arrays.cu_seqlens is not None,
        segmented=arrays.segment_ids is not None,
        scale=scale,
        reverse=_checks.flag("reverse", reverse),
        dtype=np.dtype(arrays.query.dtype),
        **facts,
    )
    return call, query, state


def sequences(arrays: Arrays) -> jax.Array | None:
    """`cu_seqlens` or `segment_ids`, of which a call has at most one."""
    return arrays.cu_seqlens if arrays.segment_ids is None else arrays.segment_ids


def without_padding(arrays: Arrays, x: jax.Array) -> jax.Array:
    """`x [B, T, heads, dim]` with 0 for tokens that are padding: by their ids, or behind the last of `cu_seqlens`.

    Fronts that multiply `x` need it before an implementation skips padding, which may be NaN and has no gradient.
    """
    if arrays.segment_ids is not None:
        is_token = arrays.segment_ids >= 0
    elif arrays.cu_seqlens is not None:
        is_token = jnp.arange(x.shape[1])[None] < arrays.cu_seqlens[-1]
    else:
        return x
    return jnp.where(is_token[:, :, None, None], x, 0)
