"""The delta rule: linear attention that corrects what its memory recalls, with no gate, one a head or one a key dim."""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejkernel import _bind, _checks, _pools
from ejkernel._checks import AnyArray, Borders
from ejkernel._front import public
from ejkernel._normalization import normalized
from ejkernel.kernels.delta_rule import IMPLEMENTATIONS, POOLED
from ejkernel.kernels.delta_rule.call import Call, Decay

Result = tuple[jax.Array, jax.Array]


@public
def delta_rule(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    beta: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    normalize: bool = False,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Linear attention whose memory is corrected rather than added to, as in DeltaNet.

    A token replaces what its key already recalls. With a state `S` of `K × V` per head, for each token in turn:

        S_t = S_{t-1} + beta_t * k_t (v_t - S_{t-1}ᵀ k_t)ᵀ
        o_t = softmax_scale * S_tᵀ q_t

    Args:
        query: `[B, T, ·, K]`, what each token reads the memory with. Query, key and value may each have fewer heads
            than `H`, any divisor of it: head `h` reads their head `h // (H / theirs)`.
        key: `[B, T, ·, K]`, where in the memory each token writes.
        value: `[B, T, ·, V]`, what it writes there.
        beta: `[B, T, H]`, how much of a recalled value is replaced: 0 nothing, 1 all, 2 reflects; any value is legal.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
        normalize: Divide each query and key by `sqrt(sum of its squares + 1e-6)` first, in float32.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.
        states: For serving, a pool of states `[slots, H, K, V]`, float32 or bfloat16, instead of `initial_state`. It is
            returned in place of the final state, written in place if it was donated. Such a call has no derivatives.
        reads: int `[B]` (packed `[N]`), the slot that each sequence starts from, or -1: zeros. All reads come before
            all writes.
        writes: int `[B]` (packed `[N]`), the slot that gets each sequence's final state, or -1: none. With `at`
            `[B, C]` (packed `[N, C]`).
        at: int `[B, C]` (packed `[N, C]`), after how many of a sequence's tokens in this call its state is written:
            from 0, what it started from, to all of them. Other numbers write nothing. `None`: after all tokens.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.

    Raises:
        ValueError: Ranks or sizes that do not fit together; a number of heads that does not divide `H`; a packed batch
            other than 1; a `cu_seqlens` that does not start at 0, decreases or ends past `T`, if its values are known
            when tracing.
        TypeError: An array that is not of a floating dtype, or a flag that is not known when tracing.
        PlatformError: The implementation that `platform` names cannot serve the call.

    Examples:
        >>> import jax.numpy as jnp
        >>> query = key = value = jnp.ones((2, 100, 4, 64))
        >>> output, state = delta_rule(query, key, value, beta=jnp.full((2, 100, 8), 0.5), normalize=True)
        >>> output.shape, state.shape
        ((2, 100, 8, 64), (2, 8, 64, 64))
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, normalize, platform
    return _run("none", query, key, value, beta, None, *options, (states, reads, writes, at))


@public
def gated_delta_rule(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray,
    beta: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    normalize: bool = False,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """The delta rule with a memory that each token may fade, head by head, as in Gated DeltaNet.

        S' = exp(g_t) * S_{t-1}
        S_t = S' + beta_t * k_t (v_t - S'ᵀ k_t)ᵀ,    o_t = softmax_scale * S_tᵀ q_t

    Errors are those of `delta_rule`.

    Args:
        query: `[B, T, ·, K]`, what each token reads the memory with. Query, key and value may each have fewer heads
            than `H`, any divisor of it: head `h` reads their head `h // (H / theirs)`.
        key: `[B, T, ·, K]`, where in the memory each token writes.
        value: `[B, T, ·, V]`, what it writes there.
        g: Log decay of each head, `[B, T, H]` (packed: `[T, H]` for unbatched arrays). Any value is legal: 0 keeps,
            `-inf` forgets everything.
        beta: `[B, T, H]`, how much of a recalled value is replaced: 0 nothing, 1 all, 2 reflects; any value is legal.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
        normalize: Divide each query and key by `sqrt(sum of its squares + 1e-6)` first, in float32.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.
        states: For serving, a pool of states `[slots, H, K, V]`, float32 or bfloat16, instead of `initial_state`. It is
            returned in place of the final state, written in place if it was donated. Such a call has no derivatives.
        reads: int `[B]` (packed `[N]`), the slot that each sequence starts from, or -1: zeros. All reads come before
            all writes.
        writes: int `[B]` (packed `[N]`), the slot that gets each sequence's final state, or -1: none. With `at`
            `[B, C]` (packed `[N, C]`).
        at: int `[B, C]` (packed `[N, C]`), after how many of a sequence's tokens in this call its state is written:
            from 0, what it started from, to all of them. Other numbers write nothing. `None`: after all tokens.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.

    Examples:
        >>> import jax.numpy as jnp
        >>> query = key = value = jnp.ones((2, 100, 4, 64))
        >>> beta, g = jnp.full((2, 100, 8), 0.5), jnp.full((2, 100, 8), -0.1)
        >>> output, state = gated_delta_rule(query, key, value, g, beta, normalize=True)
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, normalize, platform
    return _run("head", query, key, value, beta, g, *options, (states, reads, writes, at))


@public
def kda(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray,
    beta: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    normalize: bool = False,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """The delta rule with a memory that each token may fade, key dim by key dim, as in Kimi Delta Attention.

        S' = exp(g_t)[:, None] * S_{t-1}
        S_t = S' + beta_t * k_t (v_t - S'ᵀ k_t)ᵀ,    o_t = softmax_scale * S_tᵀ q_t

    Errors are those of `delta_rule`.

    Args:
        query: `[B, T, ·, K]`, what each token reads the memory with. Query, key and value may each have fewer heads
            than `H`, any divisor of it: head `h` reads their head `h // (H / theirs)`.
        key: `[B, T, ·, K]`, where in the memory each token writes.
        value: `[B, T, ·, V]`, what it writes there.
        g: Log decay of each key dim, `[B, T, H, K]`. Any value is legal: 0 keeps, `-inf` forgets everything.
        beta: `[B, T, H]`, how much of a recalled value is replaced: 0 nothing, 1 all, 2 reflects; any value is legal.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
        normalize: Divide each query and key by `sqrt(sum of its squares + 1e-6)` first, in float32.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.
        states: For serving, a pool of states `[slots, H, K, V]`, float32 or bfloat16, instead of `initial_state`. It is
            returned in place of the final state, written in place if it was donated. Such a call has no derivatives.
        reads: int `[B]` (packed `[N]`), the slot that each sequence starts from, or -1: zeros. All reads come before
            all writes.
        writes: int `[B]` (packed `[N]`), the slot that gets each sequence's final state, or -1: none. With `at`
            `[B, C]` (packed `[N, C]`).
        at: int `[B, C]` (packed `[N, C]`), after how many of a sequence's tokens in this call its state is written:
            from 0, what it started from, to all of them. Other numbers write nothing. `None`: after all tokens.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.

    Examples:
        >>> import jax.numpy as jnp
        >>> query = key = value = jnp.ones((2, 100, 4, 64))
        >>> beta, g = jnp.full((2, 100, 8), 0.5), jnp.full((2, 100, 8, 64), -0.1)
        >>> output, state = kda(query, key, value, g, beta, normalize=True)
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, normalize, platform
    return _run("key", query, key, value, beta, g, *options, (states, reads, writes, at))


# dimensions of `g` after the tokens
GATE_DIMS: dict[Decay, str] = {"none": "", "head": "H", "key": "H K"}


def _run(
    decay: Decay,
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    beta: AnyArray,
    g: AnyArray | None,
    softmax_scale: float | AnyArray | None,
    initial_state: AnyArray | None,
    reverse: bool,
    cu_seqlens: Borders | None,
    segment_ids: AnyArray | None,
    normalize: bool,
    platform: str | None,
    slots: Any,
) -> Result:
    """The op with this decay; `slots` are its `states`, `reads`, `writes` and `at`."""
    start = _checks.start(initial_state, slots, reverse, segment_ids)
    gates = beta, g, GATE_DIMS[decay]
    arrays = _checks.delta_rule(query, key, value, *gates, start, cu_seqlens, segment_ids)
    divide = _pools.normalized_apart if _pools.is_pooled(arrays) else normalized

    def bound(arrays: _checks.RecurrenceArrays) -> tuple[Call, tuple[jax.Array | None, ...]]:
        return bind(arrays, decay, softmax_scale, reverse, normalize, divide)

    return _bind.run(arrays, bound, IMPLEMENTATIONS, POOLED, platform)


def bind(
    arrays: _checks.RecurrenceArrays,
    decay: Decay,
    softmax_scale: float | AnyArray | None,
    reverse: bool,
    normalize: bool,
    divide: Callable[[jax.Array, float], jax.Array] = normalized,
) -> tuple[Call, tuple[jax.Array | None, ...]]:
    """The static facts of a call, and the arrays that its implementations take; `divide` is how it normalizes."""
    query, key = arrays.query, arrays.key
    if _checks.flag("normalize", normalize):
        query, key = (divide(_bind.without_padding(arrays, x).astype(arrays.state_dtype), 1e-6) for x in (query, key))
    call, query, state = _bind.recurrence(Call, arrays, query, softmax_scale, reverse, decay=decay)
    return call, (query, key, arrays.value, arrays.beta, arrays.g, state, _bind.sequences(arrays))
