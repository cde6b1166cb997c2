"""What layers with a memory carry from call to call, and how a call of them begins."""

from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._padding import without_padding


class RecurrentState(NamedTuple):
    """What a layer with a memory carries from token to token; its size does not depend on how many there were.

    Attributes:
        memory: `[B, H, K, V]`; packed, here and below, `[N, …]`.
        recent: `[B, size - 1, channels]`, the last tokens that a short convolution still needs; `None` without one.
        position: `[B]` int32, how many tokens there were; `None` where the layer does not need it.
    """

    memory: jax.Array
    recent: jax.Array | None = None
    position: jax.Array | None = None


def begin(
    x: Any,
    state: Any,
    cu_seqlens: Any,
    dtype: DTypeLike | None,
    dims: _checks.Dims,
    convolution: ShortConvolution | None = None,
    counted: bool = False,
) -> tuple[jax.Array, RecurrentState | None, jax.Array | None]:
    """Checks what a layer is called with; `x` comes back in the dtype to compute in, with 0 for padding.

    `dims` knows the layer's `width`, `H`, `K` and `V`; `counted` layers have a state with a position.
    """
    x, cu_seqlens = _checks.layer_input(dims, x, cu_seqlens)
    x = without_padding(x if dtype is None else x.astype(dtype), cu_seqlens)
    if state is None:
        return x, None, cu_seqlens
    if not isinstance(state, RecurrentState):
        raise TypeError(f"state: got {type(state).__name__}; expected the RecurrentState of an earlier call")
    memory, recent, position = state
    memory = _checks.carried(dims, "state.memory", memory, "H K V")
    if convolution is not None:
        dims.sizes |= {"recent": convolution.size - 1, "channels": convolution.channels}
        recent = _checks.carried(dims, "state.recent", recent, "recent channels")
    if counted:
        position = _checks.position(dims, "state.position", position)
    return x, RecurrentState(memory, recent, position), cu_seqlens
