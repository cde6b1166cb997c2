"""Softmax attention: `attention`, which returns its weights, and `flash_attention`, which never holds them all."""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Key, UInt32

from ejkernel import _checks
from ejkernel._checks import AnyArray, Borders
from ejkernel._dispatch import dispatch
from ejkernel._front import public
from ejkernel.kernels.attention import ATTENTION, FLASH_ATTENTION
from ejkernel.kernels.attention.call import Call, common_dtype
from ejkernel.kernels.attention.dropout import words as dropout_words

__all__ = ["attention", "flash_attention"]

QKV = ("query", "key", "value")
DropoutKey = Key[Array, ""] | UInt32[AnyArray, "2"]


@public
def attention(
    query: Float[AnyArray, "B S H D"],
    key: Float[AnyArray, "B L Hkv D"],
    value: Float[AnyArray, "B L Hkv Dv"],
    attention_mask: Bool[AnyArray, "B heads S L"] | None = None,
    bias: Float[AnyArray, "B heads S L"] | None = None,
    init_bias: Callable[[], Float[AnyArray, "B heads S L"]] | None = None,
    deterministic: bool = True,
    dropout_rng: DropoutKey | None = None,
    softmax_aux: Float[AnyArray, "heads sinks"] | Float[AnyArray, " sinks"] | None = None,
    softmax_scale: float | AnyArray | None = None,
    logits_soft_cap: float | None = None,
    dtype: DTypeLike | None = jnp.bfloat16,
    softmax_dtype: DTypeLike | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    *,
    platform: str | None = None,
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B H S L"]]:
    """Softmax attention that returns its weights beside its output, **both in bfloat16 unless `dtype` says otherwise**.

    `dtype=None` returns what the query has, float32 for float32. In this order, per head:

        scores  = softmax_scale · query keyᵀ
        scores  = logits_soft_cap · tanh(scores / logits_soft_cap)            if there is a cap
        scores  = scores + bias                                               if there is a bias
        scores  = -inf where attention_mask, causal or sliding_window rules the pair out
        weights = exp(scores) / (Σ_keys exp(scores) + Σ_sinks exp(softmax_aux))
        weights = dropout(weights)
        output  = weights value

    A query that may attend nowhere gets weights 0, output 0 and gradient 0. A key that no query of its row may attend
    to, and a query that may attend nowhere, have no effect on anything even where they are NaN; the NaN of a key
    that some query of its row attends to reaches all of that row, and never another row.

    Args:
        query: `[B, S, H, D]`.
        key: `[B, L, Hkv, D]`, `H` a multiple of `Hkv`: key/value head `j` serves query heads `j·H/Hkv …`.
        value: `[B, L, Hkv, Dv]`.
        attention_mask: bool `[B, H | Hkv | 1, S, L]`, True where the query may attend; any axis may be 1 and is
            broadcast. Ignored if there is a bias, with a warning; `flash_attention` applies both.
        bias: `[B, H | Hkv | 1, S, L]`, added to the scores and broadcast likewise; may hold `-inf`.
        init_bias: Called for a bias if neither `attention_mask` nor `bias` is given.
        deterministic: Leaves dropout out.
        dropout_rng: The key that dropout draws with, from `jax.random.key` or `jax.random.PRNGKey`.
        softmax_aux: `[H | Hkv | 1, sinks]` or `[sinks]`, logits that only take part in the denominator. `[H]` is `H`
            sinks that all heads share; one sink a head, which models store so, is `sinks[:, None]`.
        softmax_scale: What scores are multiplied by; `None` is `D**-0.5`. An array (a learned scale, say) has a
            gradient.
        logits_soft_cap: Bends scores towards `±logits_soft_cap`; above 0, or `None` for no cap.
        dtype: Of both results, bfloat16 unless another is given; `None` is the query's.
        softmax_dtype: What the softmax is computed in; `None` is float32, or float64 where an input is float64.
        dropout_prob: In `[0, 1)`. Every weight is dropped by a draw of its own; kept ones are divided by
            `1 - dropout_prob`.
        causal: A query sees keys up to its own position, both counted from 0.
        sliding_window: `w` or `(left, right)`: query `q` sees keys `q - left … q + right`.
        platform: Forces an implementation: `"xla"`.

    Returns:
        The output `[B, S, H, Dv]` and the weights `[B, H, S, L]` after dropout. Matmuls are summed in float32, or
        float64 for float64 input.

    Raises:
        ValueError: Shapes that do not fit together, `dropout_prob` outside `[0, 1)`, a window bound below 0, or dropout
            without `dropout_rng`.
        TypeError: A dtype that does not fit, or a traced value where a number or flag known when tracing is needed.
        NotImplementedError: A bias with a number of heads other than 1, `Hkv` or `H`.
        PlatformError: `platform` names no implementation of this op.

    Warns:
        UserWarning: Both `attention_mask` and `bias` are given, and the mask is ignored.

    Examples:
        >>> import jax
        >>> from ejkernel import attention
        >>> query = jax.random.normal(jax.random.key(0), (1, 3, 4, 8))
        >>> key, value = jax.random.normal(jax.random.key(1), (2, 1, 3, 2, 8))
        >>> output, weights = attention(query, key, value, causal=True, dtype=None)
        >>> output.shape, weights.shape
        ((1, 3, 4, 8), (1, 4, 3, 3))
        >>> print(weights.sum(-1)[0, 0], weights[0, 0, 0])
        [1. 1. 1.] [1. 0. 0.]
    """
    if attention_mask is not None and bias is not None:
        _checks.warn("attention_mask: ignored, as attention takes a bias instead of it; flash_attention applies both")
        attention_mask = None
    call, arrays = _bind(
        (query, key, value),
        (attention_mask, bias, init_bias),
        (softmax_aux, softmax_scale, logits_soft_cap),
        (dtype, softmax_dtype),
        (deterministic, dropout_prob, dropout_rng),
        (causal, sliding_window),
    )
    return dispatch(ATTENTION, replace(call, return_weights=True), *arrays, platform=platform)


@overload
def flash_attention(
    query: Float[AnyArray, "B S H D"],
    key: Float[AnyArray, "B L Hkv D"],
    value: Float[AnyArray, "B L Hkv Dv"],
    attention_mask: Bool[AnyArray, "B heads S L"] | None = None,
    bias: Float[AnyArray, "B heads S L"] | None = None,
    init_bias: Callable[[], Float[AnyArray, "B heads S L"]] | None = None,
    deterministic: bool = True,
    dropout_rng: DropoutKey | None = None,
    softmax_aux: Float[AnyArray, "heads sinks"] | Float[AnyArray, " sinks"] | None = None,
    softmax_scale: float | AnyArray | None = None,
    logits_soft_cap: float | None = None,
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    *,
    cu_seqlens: Borders | None = None,
    cu_seqlens_kv: Borders | None = None,
    query_offset: int | Int[AnyArray, "*rows"] = 0,
    segment_ids: Int[AnyArray, "B S"] | None = None,
    segment_ids_kv: Int[AnyArray, "B L"] | None = None,
    return_lse: Literal[False] = False,
    block_sizes: tuple[int, int] | None = None,
    platform: str | None = None,
) -> Array: ...
@overload
def flash_attention(
    query: Float[AnyArray, "B S H D"],
    key: Float[AnyArray, "B L Hkv D"],
    value: Float[AnyArray, "B L Hkv Dv"],
    attention_mask: Bool[AnyArray, "B heads S L"] | None = None,
    bias: Float[AnyArray, "B heads S L"] | None = None,
    init_bias: Callable[[], Float[AnyArray, "B heads S L"]] | None = None,
    deterministic: bool = True,
    dropout_rng: DropoutKey | None = None,
    softmax_aux: Float[AnyArray, "heads sinks"] | Float[AnyArray, " sinks"] | None = None,
    softmax_scale: float | AnyArray | None = None,
    logits_soft_cap: float | None = None,
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    *,
    cu_seqlens: Borders | None = None,
    cu_seqlens_kv: Borders | None = None,
    query_offset: int | Int[AnyArray, "*rows"] = 0,
    segment_ids: Int[AnyArray, "B S"] | None = None,
    segment_ids_kv: Int[AnyArray, "B L"] | None = None,
    return_lse: Literal[True],
    block_sizes: tuple[int, int] | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]: ...
@overload
def flash_attention(*args: Any, return_lse: bool, **options: Any) -> Array | tuple[Array, Array]: ...
@public  # type: ignore[misc]  # the overload for a flag that is not known when typing takes anything else
def flash_attention(
    query: Float[AnyArray, "B S H D"],
    key: Float[AnyArray, "B L Hkv D"],
    value: Float[AnyArray, "B L Hkv Dv"],
    attention_mask: Bool[AnyArray, "B heads S L"] | None = None,
    bias: Float[AnyArray, "B heads S L"] | None = None,
    init_bias: Callable[[], Float[AnyArray, "B heads S L"]] | None = None,
    deterministic: bool = True,
    dropout_rng: DropoutKey | None = None,
    softmax_aux: Float[AnyArray, "heads sinks"] | Float[AnyArray, " sinks"] | None = None,
    softmax_scale: float | AnyArray | None = None,
    logits_soft_cap: float | None = None,
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    *,
    cu_seqlens: Borders | None = None,
    cu_seqlens_kv: Borders | None = None,
    query_offset: int | Int[AnyArray, "*rows"] = 0,
    segment_ids: Int[AnyArray, "B S"] | None = None,
    segment_ids_kv: Int[AnyArray, "B L"] | None = None,
    return_lse: bool = False,
    block_sizes: tuple[int, int] | None = None,
    platform: str | None = None,
) -> Array | tuple[Array, Array]:
    """Softmax attention that never holds all its weights: memory grows with the tokens, not with their square.

    It returns the query's dtype, float32 for float32, unless `dtype` says otherwise; `attention` returns bfloat16.
    Otherwise its output is that of `attention` for the same arguments, dropout included, computed a block of queries
    and keys at a time with the online softmax; `attention_mask` and `bias` given together both apply. Keys that
    causality, the window or packing put out of sight cost nothing, or little with few queries on a CPU. Gradients
    recompute the scores; nothing of size `S × L` exists forward or backward but a mask or a bias given as one.

    Rows of several sequences come with `segment_ids`, or flattened with `cu_seqlens`. A NaN or inf in one row or
    sequence, or in padding, never reaches another.

    Args:
        query: `[B, S, H, D]`. Packed, `[1, S, H, D]` or `[S, H, D]`.
        key: `[B, L, Hkv, D]`, `H` a multiple of `Hkv`: key/value head `j` serves query heads `j·H/Hkv …`. Packed like
            the query.
        value: `[B, L, Hkv, Dv]`. Packed like the query.
        attention_mask: bool `[B, H | Hkv | 1, S, L]`, True where the query may attend; any axis may be 1 and is
            broadcast. Packed, `[1, heads, S, L]` of the whole stream, also where the query has rank 3.
        bias: `[B, H | Hkv | 1, S, L]`, added to the scores and broadcast likewise; may hold `-inf`. Packed like the
            mask. Its gradient has its shape.
        init_bias: Called for a bias if neither `attention_mask` nor `bias` is given.
        deterministic: Leaves dropout out.
        dropout_rng: The key that dropout draws with, from `jax.random.key` or `jax.random.PRNGKey`. What is dropped
            depends on the key and the weight's place alone.
        softmax_aux: `[H | Hkv | 1, sinks]` or `[sinks]`, logits that only take part in the denominator. `[H]` is `H`
            sinks that all heads share; one sink a head, which models store so, is `sinks[:, None]`.
        softmax_scale: What scores are multiplied by; `None` is `D**-0.5`. An array (a learned scale, say) has a
            gradient. It makes the query float32, which cuDNN does not take.
        logits_soft_cap: Bends scores towards `±logits_soft_cap`; above 0, or `None` for no cap.
        dtype: Of the output; `None` is the query's.
        softmax_dtype: What the softmax is computed in; `None` is float32, or float64 where an input is float64.
        dropout_prob: In `[0, 1)`. Every weight is dropped by a draw of its own; kept ones are divided by
            `1 - dropout_prob`.
        causal: A query sees keys up to its own position, both counted from 0. Packed, positions count from 0 in every
            sequence.
        sliding_window: `w` or `(left, right)`: query `q` sees keys `q - left … q + right`. Packed, positions count from
            0 in every sequence.
        cu_seqlens: `[N + 1]`, where each of `N` packed sequences of queries begins and the last ends. Sequences may be
            empty. Queries past the end are padding: output 0, no gradient, no effect.
        cu_seqlens_kv: `[N + 1]`, the same for keys and values; `None` means as `cu_seqlens`.
        query_offset: Where the first query stands among the keys, counted from 0, for `causal` and `sliding_window`:
            what came before in decoding or chunked prefill. One int, or one for each row or packed sequence.
        segment_ids: Integers `[B, S]`, which sequence of its row each token belongs to: a query attends to keys that
            have its id, wherever in the row, and `causal`, windows, masks and biases count positions in the row as
            ever. A negative id is padding: output 0, no gradient, no effect. Not beside `cu_seqlens`.
        segment_ids_kv: `[B, L]`, the same for keys and values; `None` means as `segment_ids`, which then needs `S = L`.
        return_lse: Return the log of the softmax's denominator too.
        block_sizes: How many queries and how many keys XLA takes at a time; `None` leaves it to the library.
        platform: Forces an implementation: `"xla"`, `"triton"`, `"cudnn"`, `"splash"`.

    Returns:
        The output, `[B, S, H, Dv]` or packed `[S, H, Dv]` as the query came. With `return_lse` also
        `log(Σ_keys exp(scores) + Σ_sinks exp(softmax_aux))`, `[B, S, H]` in float32 (float64 for float64 input), which
        is differentiable and `-inf` where there is nothing to sum.

    Raises:
        ValueError: As in `attention`, or a `cu_seqlens` or `cu_seqlens_kv` that does not start at 0, decreases or ends
            past its tokens, if its values are known when tracing; `segment_ids` beside `cu_seqlens`, of another shape
            than the tokens', or none for keys where `S` is not `L`.
        TypeError: As in `attention`.
        NotImplementedError: As in `attention`.
        PlatformError: The implementation that `platform` names cannot serve the call.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import flash_attention
        >>> query = jax.random.normal(jax.random.key(0), (9, 4, 8))
        >>> key, value = jax.random.normal(jax.random.key(1), (2, 9, 2, 8))
        >>> packed = flash_attention(query, key, value, causal=True, cu_seqlens=jnp.array([0, 3, 9]))
        >>> alone = flash_attention(query[None, 3:], key[None, 3:], value[None, 3:], causal=True)
        >>> packed.shape, bool(jnp.allclose(packed[3:], alone[0], atol=1e-6))
        ((9, 4, 8), True)
    """
    if cu_seqlens is not None:
        _checks.no_segments(segment_ids, segment_ids_kv)
    borders, borders_kv = _checks.packed_borders(query, key, cu_seqlens, cu_seqlens_kv)
    unbatched = borders is not None and query.ndim == 3
    if unbatched:
        query, key, value = (_checks.unbatched(name, x) for name, x in zip(QKV, (query, key, value), strict=True))
    call, arrays = _bind(
        (query, key, value),
        (attention_mask, bias, init_bias),
        (softmax_aux, softmax_scale, logits_soft_cap),
        (dtype, softmax_dtype),
        (deterministic, dropout_prob, dropout_rng),
        (causal, sliding_window),
    )
    _checks.known_size("query", call.queries, "tokens")
    _checks.known_size("key", call.keys, "tokens")
    sequences = None if borders is None else _checks.known_size("cu_seqlens", borders.shape[0] - 1, "sequences")
    offset = _checks.query_offset(query_offset, call.batch if sequences is None else sequences)
    dims = _checks.Dims(B=call.batch, S=call.queries, L=call.keys)
    ids, ids_kv = _checks.attention_segments(dims, segment_ids, segment_ids_kv)
    call = replace(
        call,
        sequences=sequences,
        separate=cu_seqlens_kv is not None,
        offset=offset is not None,
        segment_ids=ids is not None,
        segment_ids_kv=segment_ids_kv is not None,
        return_lse=_checks.flag("return_lse", return_lse),
        block_sizes=None if block_sizes is None else _checks.block_sizes(block_sizes),
    )
    results = dispatch(FLASH_ATTENTION, call, *arrays, borders, borders_kv, offset, ids, ids_kv, platform=platform)
    return jax.tree.map(lambda x: x[0], results) if unbatched else results


def _bind(
    inputs: tuple[Any, Any, Any],
    pairs: tuple[Any, Any, Any],
    scores: tuple[Any, Any, Any],
    dtypes: tuple[Any, Any],
    dropout: tuple[Any, Any, Any],
    positions: tuple[Any, Any],
) -> tuple[Call, tuple[Array | None, ...]]:
    """The arguments, checked, as the static facts and the arrays of a call."""
    dims = _checks.Dims()
    query, key, value = _checks.attention_inputs(dims, *inputs)
    mask, bias = _mask_and_bias(dims, *pairs)
    softmax_aux, scale, soft_cap = scores
    sinks = None if softmax_aux is None else _checks.sinks(dims, softmax_aux)
    dtype, softmax_dtype = dtypes
    probability, dropout_key = _checks.dropout(*dropout)
    causal, sliding_window = positions
    left, right = _checks.sliding_window(sliding_window) or (None, None)
    wide = common_dtype(query.dtype, key.dtype, value.dtype, np.float32)
    results_dtype = np.dtype(query.dtype) if dtype is None else _checks.floating_dtype("dtype", dtype)
    if isinstance(scale, Array | np.ndarray):
        # a learned scale has a gradient, which only arrays carry
        factor = _checks.scalar("softmax_scale", scale).astype(wide)
        # kept wide: scaled, a half-precision query would be rounded once more, or overflow
        query, scale = _scaled(query.astype(wide), factor), 1.0
    call = Call(
        batch=dims["B"],
        queries=dims["S"],
        keys=dims["L"],
        heads=dims["H"],
        kv_heads=dims["Hkv"],
        key_dim=dims["D"],
        value_dim=dims["Dv"],
        query_dtype=np.dtype(query.dtype),
        key_dtype=np.dtype(key.dtype),
        value_dtype=np.dtype(value.dtype),
        scale=max(dims["D"], 1) ** -0.5 if scale is None else _checks.real("softmax_scale", scale),
        soft_cap=_checks.soft_cap(soft_cap),
        left=left,
        right=0 if _checks.flag("causal", causal) else right,
        mask_shape=None if mask is None else mask.shape,
        bias_shape=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else np.dtype(bias.dtype),
        sinks=None if sinks is None else sinks.shape[-1],
        dropout=probability,
        dtype=results_dtype,
        softmax_dtype=wide if softmax_dtype is None else _checks.floating_dtype("softmax_dtype", softmax_dtype),
    )
    words = None if dropout_key is None else dropout_words(dropout_key)
    return call, (query, key, value, mask, bias, sinks, words)


@jax.custom_jvp
def _scaled(query: Array, factor: Array) -> Array:
    """`query · factor`, whose derivative by `factor` leaves out queries that are NaN or inf.

    Such a query makes its own gradients NaN where it attends to anything. Padding may hold it too, and has no effect.
    """
    return query * factor


@_scaled.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (query, factor), (d_query, d_factor) = primals, tangents
    return _scaled(query, factor), d_query * factor + jnp.where(jnp.isfinite(query), query, 0) * d_factor


def _mask_and_bias(dims: _checks.Dims, mask: Any, bias: Any, init_bias: Any) -> tuple[Array | None, Array | None]:
    """Mask and bias, checked; `init_bias` is called for a bias if neither is given."""
    if mask is not None or bias is not None or init_bias is None:
        mask = None if mask is None else _checks.attention_mask(dims, mask)
        return mask, None if bias is None else _checks.attention_bias(dims, bias)
    if not callable(init_bias):
        raise TypeError(f"init_bias: got {type(init_bias).__name__}; expected a function without arguments")
    return None, _checks.attention_bias(dims, init_bias(), "init_bias()")
