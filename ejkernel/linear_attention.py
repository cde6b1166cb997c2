"""Linear attention: one gated recurrence and the ops that differ from it only in how their memory fades."""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ejkernel import _bind, _checks, _sharding
from ejkernel._checks import AnyArray, Borders
from ejkernel._front import public
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS, POOLED
from ejkernel.kernels.linear_recurrence.call import Call, Decay
from ejkernel.xla_utils.utils import prepare_sequence_ids

Result = tuple[jax.Array, jax.Array]


@public
def recurrent(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray | None = None,
    g_gamma: AnyArray | None = None,
    gk: AnyArray | None = None,
    gv: AnyArray | None = None,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Linear attention with a memory that every token may fade, head by head and dim by dim.

    With a state `S` of `K × V` per head, for each token in turn:

        S_t = exp(g_t + gk_t + g_gamma)[:, None] * exp(gv_t)[None, :] * S_{t-1} + k_t v_tᵀ
        o_t = softmax_scale * S_tᵀ q_t

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        g: Log decay of each key dim, `[B, T, H, K]`, or `[B, T, H, 1]` for one a head. Any value is legal: 0 keeps,
            `-inf` forgets everything.
        g_gamma: Log decay of each head at every token, `[H]`, `[1, H]` or `[B, H]` (packed: `[N, H]`).
        gk: Like `g`, and added to it.
        gv: Log decay of each value dim, `[B, T, H, V]`, or `[B, T, H, 1]`.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
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
        ValueError: Ranks or sizes that do not fit together; a packed batch other than 1; a `cu_seqlens` that does not
            start at 0, decreases or ends past `T`, if its values are known when tracing; `segment_ids` beside it.
        TypeError: An array that is not of a floating dtype, or a `reverse` that is not known when tracing.
        PlatformError: The implementation that `platform` names cannot serve the call.

    Examples:
        >>> import jax.numpy as jnp
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = recurrent(query, key, value, g_gamma=-jnp.arange(8) * 0.1)
        >>> output.shape, state.shape
        ((2, 100, 8, 64), (2, 8, 64, 64))

        Three sequences in one stream:

        >>> query = key = value = jnp.ones((150, 8, 64))
        >>> output, states = recurrent(query, key, value, cu_seqlens=[0, 50, 100, 150])
        >>> output.shape, states.shape
        ((150, 8, 64), (3, 8, 64, 64))
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, platform, (states, reads, writes, at)
    return _run(query, key, value, *options, g=g, g_gamma=g_gamma, gk=gk, gv=gv)


def _run(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    softmax_scale: float | AnyArray | None,
    initial_state: AnyArray | None,
    reverse: bool,
    cu_seqlens: Borders | None,
    segment_ids: AnyArray | None,
    platform: str | None,
    slots: Any,
    **gates: AnyArray | None,
) -> Result:
    """`recurrent` with these of its gates; `slots` are its `states`, `reads`, `writes` and `at`."""
    start = _checks.start(initial_state, slots, reverse, segment_ids)
    sequences = {"borders": cu_seqlens, "segment_ids": segment_ids}
    arrays = _checks.linear_attention(query, key, value, initial_state=start, **sequences, **gates)
    bound = partial(bind, softmax_scale=softmax_scale, reverse=reverse)
    return _bind.run(arrays, bound, IMPLEMENTATIONS, POOLED, platform)


def bind(
    arrays: _checks.RecurrenceArrays, softmax_scale: float | AnyArray | None, reverse: bool
) -> tuple[Call, tuple[jax.Array | None, ...]]:
    """The static facts of a call, and the arrays that its implementations take."""
    value, gv = arrays.value, arrays.gv
    decay, log_decay = _log_decay(arrays)
    if gv is not None:
        gv = jnp.broadcast_to(gv, (*gv.shape[:-1], value.shape[-1]))
    facts = {"decay": decay, "value_decay": gv is not None}
    call, query, state = _bind.recurrence(Call, arrays, arrays.query, softmax_scale, reverse, **facts)
    return call, (query, arrays.key, value, log_decay, gv, state, _bind.sequences(arrays))


def _log_decay(arrays: _checks.RecurrenceArrays) -> tuple[Decay, jax.Array | None]:
    """`g`, `gk` and `g_gamma` as one log decay, in the smallest of the shapes that the cores know."""
    gamma, gates = arrays.g_gamma, [gate for gate in (arrays.g, arrays.gk) if gate is not None]
    if gamma is not None:
        gamma = _sharding.broadcast_rows(gamma, (arrays.sequences, gamma.shape[-1]), arrays.query)
        if not gates:
            return "constant", gamma
        if arrays.cu_seqlens is None:
            gamma = gamma[:, None]
        else:
            sequence = prepare_sequence_ids(arrays.cu_seqlens, total_tokens=arrays.query.shape[1])
            gamma = _sharding.partitioned(
                lambda gamma, sequence: gamma[jnp.minimum(sequence, arrays.sequences - 1)][None],
                jax.P(None, None, _sharding.spec_of(gamma)[-1]),
                gamma,
                sequence,
            )
        gates.append(gamma[..., None])
    if not gates:
        return "none", None
    log_decay = gates[0]
    for gate in gates[1:]:
        log_decay = log_decay.astype(arrays.state_dtype) + gate.astype(arrays.state_dtype)
    return ("head", log_decay[..., 0]) if log_decay.shape[-1] == 1 else ("key", log_decay)


@public
def recurrent_gla(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray | None = None,
    g_gamma: AnyArray | None = None,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Gated linear attention: each token says how much every key dim forgets.

        S_t = exp(g_t + g_gamma)[:, None] * S_{t-1} + k_t v_tᵀ,    o_t = softmax_scale * S_tᵀ q_t

    Errors are those of `recurrent`.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        g: Log decay of each key dim, `[B, T, H, K]`, or `[B, T, H, 1]` for one a head. Any value is legal: 0 keeps,
            `-inf` forgets everything.
        g_gamma: Log decay of each head at every token, `[H]`, `[1, H]` or `[B, H]` (packed: `[N, H]`).
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
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
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = recurrent_gla(query, key, value, g=jnp.full((2, 100, 8, 64), -0.1))
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, platform, (states, reads, writes, at)
    return _run(query, key, value, *options, g=g, g_gamma=g_gamma)


@public
def simple_gla(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Linear attention in which each token says how much every head forgets, as in Mamba-2.

        S_t = exp(g_t) * S_{t-1} + k_t v_tᵀ,    o_t = softmax_scale * S_tᵀ q_t

    Errors are those of `recurrent`.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        g: Log decay of each head, `[B, T, H]` (packed: `[T, H]` for unbatched arrays). Any value is legal: 0 keeps,
            `-inf` forgets everything.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
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
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = simple_gla(query, key, value, g=jnp.full((2, 100, 8), -0.1))
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, platform, (states, reads, writes, at)
    g = _checks.gate_per_head(g, query, key, value)
    return _run(query, key, value, *options, g=g)


@public
def retention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Linear attention whose memory fades at a fixed rate per head, from 1/32 a token down.

        S_t = (1 - 2**(-5 - h)) * S_{t-1} + k_t v_tᵀ,    o_t = softmax_scale * S_tᵀ q_t        for head h = 0 … H-1

    Errors are those of `recurrent`.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
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
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = retention(query, key, value)
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, platform, (states, reads, writes, at)
    g_gamma = retention_decay(query, key, value)
    return _run(query, key, value, *options, g_gamma=g_gamma)


def retention_decay(query: AnyArray, key: AnyArray, value: AnyArray) -> jax.Array:
    """`g_gamma` of `retention`, `[H]`."""
    heads = _checks.heads(query, key, value)
    return jnp.asarray(np.log1p(-(2.0 ** (-5 - np.arange(heads)))), _checks.state_dtype(query))


@public
def lightning_attn(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    layer_idx: ArrayLike,
    num_layers: int,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Linear attention whose memory fades faster in later heads and in earlier layers.

        S_t = exp(-(8 / H) * (1 - layer_idx / num_layers) * h) * S_{t-1} + k_t v_tᵀ        for head h = 0 … H-1
        o_t = softmax_scale * S_tᵀ q_t

    Errors are those of `recurrent`; `num_layers` below 1, and a `layer_idx` that is known when tracing and not one of 0
    to `num_layers - 1`, is a `ValueError`.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        layer_idx: The layer's number, from 0: an int, or an array of one number, which may be traced, as in a scan over
            layers.
        num_layers: How many layers there are, an int of at least 1.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
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
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = lightning_attn(query, key, value, layer_idx=3, num_layers=12)
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, platform, (states, reads, writes, at)
    g_gamma = lightning_decay(query, key, value, layer_idx, num_layers)
    return _run(query, key, value, *options, g_gamma=g_gamma)


def lightning_decay(
    query: AnyArray, key: AnyArray, value: AnyArray, layer_idx: ArrayLike, num_layers: int
) -> jax.Array:
    """`g_gamma` of `lightning_attn`, `[H]`."""
    heads, dtype = _checks.heads(query, key, value), _checks.state_dtype(query)
    number = _checks.layer_number(layer_idx, _checks.positive_int("num_layers", num_layers))
    depth = 1 - number.astype(dtype) / num_layers
    return -(8 / max(heads, 1)) * depth * jnp.arange(heads, dtype=dtype)


@public
def linear_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    platform: str | None = None,
    states: AnyArray | None = None,
    reads: AnyArray | None = None,
    writes: AnyArray | None = None,
    at: AnyArray | None = None,
) -> Result:
    """Linear attention that forgets nothing.

        S_t = S_{t-1} + k_t v_tᵀ,    o_t = softmax_scale * S_tᵀ q_t

    Errors are those of `recurrent`.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
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
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = linear_attention(query, key, value)
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, platform, (states, reads, writes, at)
    return _run(query, key, value, *options)
