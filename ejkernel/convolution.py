"""The short convolution over tokens that linear attention layers apply before their recurrence."""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from typing import Any, Literal

import jax

from ejkernel import _checks, _pools
from ejkernel._checks import AnyArray, Borders
from ejkernel._dispatch import dispatch
from ejkernel._front import public
from ejkernel.kernels.convolution import IMPLEMENTATIONS
from ejkernel.kernels.convolution.call import Call, Inputs


@public
def causal_conv1d(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    activation: Literal["silu"] | None = None,
    initial_state: AnyArray | None = None,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A short causal convolution over tokens, channel by channel: a sum over the last `W` tokens, itself included.

        y_t = activation(bias + Σ_{l = 0 … W-1} weight[W-1-l] * x_{t-l})

    Sums and activation are in float32 (float64 for float64 input), and always added up in the same order: a token's
    output has the same bits however its sequence is split into calls or packed with others.

    Args:
        x: `[B, T, D]`, tokens of `D` channels.
        weight: `[W, D]`, of which the last row weighs the token itself, and the first the token `W - 1` before it.
        bias: `[D]`; `None` means zeros.
        activation: The activation of the sums: `None` or `"silu"`.
        initial_state: `[B, W - 1, D]`, the inputs before the first token, oldest first; `None` means zeros. It is cast
            to the dtype of `x`.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]` of `N` packed sequences, `[N + 1]`. `x` is then `[1, T, D]` or
            `[T, D]`, the states are `[N, W - 1, D]`, and sequences never see each other. Tokens past the last border
            are padding: output 0, no gradient, no effect.
        segment_ids: `[B, T]` integers, which sequence of its row each token belongs to: a token whose id differs from
            the one before it starts from nothing. The row's first sequence starts from `initial_state`, and the final
            state is that of its last one. A negative id is padding: output 0, no gradient, no effect; it ends a
            sequence and leaves the state as it is.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.
        states: A pool of states `[slots, W - 1, D]`, in any floating dtype, instead of `initial_state`, for serving. It
            comes back in place of the final state with the slots in `writes` changed, in place if it was donated. Such
            a call is not differentiable.
        reads: int `[B]` (packed: `[N]`), the slot of `states` from which each sequence starts; -1 starts from nothing.
            All reads come before all writes.
        writes: int `[B]` (packed: `[N]`), the slot that gets each sequence's state after its last token; -1 writes
            nowhere. With `at` `[B, C]` (packed: `[N, C]`).
        at: int `[B, C]` (packed: `[N, C]`), after how many of a sequence's tokens in this call its state goes to
            `writes`: from 0, what it started from, to all of them. Others write nowhere. `None` is after all of them.

    Returns:
        The output, shaped as `x` and in its dtype, and the final state `[B, W - 1, D]`, also in the dtype of `x`: the
        last `W - 1` inputs of each sequence, which as `initial_state` continue it. Of a shorter sequence, the older
        ones come from `initial_state`, or are 0.

    Raises:
        ValueError: Ranks or sizes that do not fit together; a packed batch other than 1; a `cu_seqlens` that does not
            start at 0, decreases or ends past `T`, if its values are known when tracing; both `cu_seqlens` and
            `segment_ids`; another `activation`.
        TypeError: An array that is not of a floating dtype, or ids that are no integers.
        PlatformError: The implementation that `platform` names cannot serve the call.

    Examples:
        >>> import jax.numpy as jnp
        >>> x, weight = jnp.ones((2, 10, 64)), jnp.full((4, 64), 0.25)
        >>> output, state = causal_conv1d(x, weight, activation="silu")
        >>> output, state = causal_conv1d(x[:, :1], weight, activation="silu", initial_state=state)
        >>> output.shape, state.shape
        ((2, 1, 64), (2, 3, 64))
    """
    start = _checks.start(initial_state, (states, reads, writes, at), segment_ids=segment_ids)
    return _convolved(x, weight, bias, activation, start, cu_seqlens, segment_ids, platform, 0)


@public
def unit_conv1d(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    activation: Literal["silu"] | None = None,
    initial_state: AnyArray | None = None,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    unit_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d` for queries and keys: afterwards each head of `unit_dim` channels is divided by its norm.

    The norm is `sqrt(sum of squares + 1e-6)`, as with `normalize=True` in the delta rule, in the dtype of sums. If a
    kernel computes it, the output is rounded once. For this library's layers only: not part of the public interface.
    """
    return _convolved(x, weight, bias, activation, initial_state, cu_seqlens, segment_ids, platform, unit_dim)


def _convolved(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None,
    activation: Literal["silu"] | None,
    start: Any,
    cu_seqlens: Borders | None,
    segment_ids: AnyArray | None,
    platform: str | None,
    unit_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """The output, and the final state, or the pool if `start` is a pool."""
    arrays = _checks.convolution(x, weight, bias, start, cu_seqlens, segment_ids)
    B, T, D = arrays.x.shape
    call = Call(
        batch=B,
        tokens=T,
        channels=D,
        taps=arrays.weight.shape[0],
        sequences=arrays.sequences,
        layout="packed" if cu_seqlens is not None else "rows" if segment_ids is None else "segments",
        activation=_checks.activation(activation),
        dtype=arrays.x.dtype,
        unit_dim=unit_dim,
    )
    inputs = Inputs(*(getattr(arrays, name) for name in Inputs._fields))
    if _pools.is_pooled(arrays):
        output, final_state = _pools.run_convolution(
            lambda inputs: dispatch(IMPLEMENTATIONS, call, *inputs, platform=platform)[0], inputs
        )
    else:
        output, final_state = dispatch(IMPLEMENTATIONS, call, *inputs, platform=platform)
    return (output[0] if arrays.unbatched else output), final_state
