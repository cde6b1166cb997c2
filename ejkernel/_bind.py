"""From the checked arrays of a recurrence's front to the call that its core gets."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks, _sharding
from ejkernel.kernels.chunks.call import Call

Arrays = _checks.RecurrenceArrays
AnyCall = TypeVar("AnyCall", bound=Call)


def recurrence(
    kind: type[AnyCall],
    arrays: Arrays,
    query: jax.Array,
    softmax_scale: float | _checks.AnyArray | None,
    reverse: bool,
    **facts: Any,
) -> tuple[AnyCall, jax.Array, jax.Array | None]:
    """The call of this `kind`, its query, and the initial state of every sequence.

    `query` is that of `arrays`, perhaps normalized; `facts` are those of the call that only its recurrence has.
    """
    B, T, _, K = query.shape
    # without key dims the output is 0 whatever the scale
    scale = max(K, 1) ** -0.5 if softmax_scale is None else _checks.factor("softmax_scale", softmax_scale)
    if isinstance(scale, jax.Array):
        # perhaps traced: the output is linear in the query too
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
    """Where sequences lie: `cu_seqlens` or `segment_ids`, of which there is at most one."""
    return arrays.cu_seqlens if arrays.segment_ids is None else arrays.segment_ids


def without_padding(arrays: Arrays, x: jax.Array) -> jax.Array:
    """`x [B, T, heads, dim]` with 0 for tokens whose ids say that they are padding.

    For what is multiplied before a core selects its tokens: padding may be NaN, and must have no gradient.
    """
    if arrays.segment_ids is None:
        return x
    return jnp.where(arrays.segment_ids[:, :, None, None] >= 0, x, 0)
