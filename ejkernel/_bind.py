"""From the checked arrays of a recurrence's front to the call that its core gets."""

from typing import Any, TypeVar

import jax
import numpy as np

from ejkernel import _checks, _sharding
from ejkernel.kernels.chunks.call import Call

AnyCall = TypeVar("AnyCall", bound=Call)


def recurrence(
    kind: type[AnyCall],
    arrays: _checks.LinearAttention | _checks.DeltaRule,
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
        query, scale = query.astype(arrays.state_dtype) * scale.astype(arrays.state_dtype), 1.0
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
        scale=scale,
        reverse=_checks.flag("reverse", reverse),
        dtype=np.dtype(arrays.query.dtype),
        **facts,
    )
    return call, query, state
