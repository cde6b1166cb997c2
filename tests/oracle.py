"""Slow, obvious float64 NumPy versions of everything, written from the contract and never from the implementation."""

import itertools

import numpy as np


def attention(
    query,
    key,
    value,
    attention_mask=None,
    bias=None,
    softmax_aux=None,
    softmax_scale=None,
    logits_soft_cap=None,
    causal=False,
    sliding_window=None,
    kept=None,
    dropout_prob=0.0,
    query_offset=0,
    with_lse=False,
    mask_beside_bias=False,
):
    """Softmax attention, one query and head at a time; `kept` says which weights dropout leaves, `[B, H, S, L]`.

    Query `q` stands at key position `q + query_offset`. `with_lse` adds the log of the denominator, `[B, S, H]`. A bias
    overrides the mask, unless `mask_beside_bias`.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (batch, queries, heads, dim), (_, keys, kv_heads, _) = query.shape, key.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale

    def for_head(x, head):  # x has one entry for all heads, one for each key/value head, or one for each head
        return x[{1: 0, kv_heads: head * kv_heads // heads, heads: head}[len(x)]]

    output = np.zeros((batch, queries, heads, value.shape[-1]))
    weights = np.zeros((batch, heads, queries, keys))
    lse = np.full((batch, queries, heads), -np.inf)
    for b, h, q in np.ndindex(batch, heads, queries):
        kv, place = h * kv_heads // heads, q + query_offset
        scores = key[b, :, kv] @ query[b, q, h] * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        allowed = np.ones(keys, bool)
        if bias is not None:
            full = np.broadcast_to(bias, (batch, bias.shape[1], queries, keys))
            scores = scores + for_head(full[b], h)[q]
        if attention_mask is not None and (bias is None or mask_beside_bias):
            full = np.broadcast_to(attention_mask, (batch, attention_mask.shape[1], queries, keys))
            allowed &= for_head(full[b], h)[q]
        if causal:
            allowed &= np.arange(keys) <= place
        if sliding_window is not None:
            left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)
            allowed &= (np.arange(keys) >= place - left) & (np.arange(keys) <= place + right)
        allowed &= scores > -np.inf
        sinks = np.zeros(0)
        if softmax_aux is not None:
            sinks = np.asarray(softmax_aux, np.float64)
            sinks = sinks if sinks.ndim == 1 else for_head(sinks, h)
        if not allowed.any() and not sinks.size:
            continue
        top = max([*scores[allowed], *sinks])
        each = np.where(allowed, np.exp(np.where(allowed, scores, top) - top), 0)
        total = each.sum() + np.exp(sinks - top).sum()
        lse[b, q, h] = top + np.log(total)
        weights[b, h, q] = each / total
        if kept is not None:
            weights[b, h, q] *= kept[b, h, q] / (1 - dropout_prob)
        output[b, q, h] = weights[b, h, q] @ value[b, :, kv]
    return (output, weights, lse) if with_lse else (output, weights)


def flash_attention(
    query, key, value, attention_mask=None, bias=None, cu_seqlens=None, cu_seqlens_kv=None, query_offset=0, **options
):
    """Output and log-sum-exp of `attention`, each packed sequence or row of a batch by itself."""
    if cu_seqlens is None:
        rows = [(slice(b, b + 1), slice(None), slice(None)) for b in range(len(query))]
    else:
        cu_seqlens_kv = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
        rows = [
            (slice(0, 1), slice(cu_seqlens[n], cu_seqlens[n + 1]), slice(cu_seqlens_kv[n], cu_seqlens_kv[n + 1]))
            for n in range(len(cu_seqlens) - 1)
        ]
    offsets = np.broadcast_to(query_offset, len(rows))
    output, lse = np.zeros((*query.shape[:3], value.shape[3])), np.full(query.shape[:3], -np.inf)
    for (row, queries, keys), offset in zip(rows, offsets, strict=True):
        pairs = {}
        for name, x in (("attention_mask", attention_mask), ("bias", bias)):
            if x is not None:
                full = np.broadcast_to(x, (query.shape[0], x.shape[1], query.shape[1], key.shape[1]))
                pairs[name] = full[row, :, queries, keys]
        output[row, queries], _, lse[row, queries] = attention(
            query[row, queries],
            key[row, keys],
            value[row, keys],
            **pairs,
            **options,
            query_offset=offset,
            with_lse=True,
            mask_beside_bias=True,
        )
    return output, lse


def attention_gradients(
    d_output, query, key, value, bias=None, softmax_aux=None, cu_seqlens=None, softmax_scale=1.0, **options
):
    """The output, and gradients by argument, each packed sequence by itself, from the weights as they are defined.

    For logits so large that differences would be lost in their rounding. Sinks are `[H, sinks]`, a bias `[1, 1, S, L]`.
    """
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "softmax_aux": softmax_aux}
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items() if x is not None}
    output = np.zeros((*query.shape[:3], value.shape[3]))
    grads = {name: np.zeros(x.shape) for name, x in arrays.items()}
    borders = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens
    for b, (start, end), h in itertools.product(range(len(query)), itertools.pairwise(borders), range(query.shape[2])):
        kv = h * key.shape[2] // query.shape[2]
        q, k, v = (b, slice(start, end), h), (b, slice(start, end), kv), (b, slice(start, end), kv)
        pairs = (b, 0, slice(start, end), slice(start, end))
        given = {name: arrays[name][at][None, :, None] for name, at in (("query", q), ("key", k), ("value", v))} | (
            {"bias": arrays["bias"][pairs][None, None]} if bias is not None else {}
        )
        sinks = np.zeros(0) if softmax_aux is None else arrays["softmax_aux"][h]
        found, weights = attention(**given, softmax_aux=sinks, softmax_scale=softmax_scale, **options)
        output[q], weights, d_out = found[0, :, 0], weights[0, 0], np.asarray(d_output, np.float64)[q]
        d_weights = d_out @ arrays["value"][v].T
        mean = (weights * d_weights).sum(-1, keepdims=True)
        d_scores = weights * (d_weights - mean)
        grads["query"][q] += softmax_scale * d_scores @ arrays["key"][k]
        grads["key"][k] += softmax_scale * d_scores.T @ arrays["query"][q]
        grads["value"][v] += weights.T @ d_out
        if bias is not None:
            grads["bias"][pairs] += d_scores
        if sinks.size:
            among = np.exp(sinks - sinks.max())
            share = np.where(weights.any(-1), 1 - weights.sum(-1), 0).clip(0)  # of all sinks
            grads["softmax_aux"][h] -= (share * mean[:, 0]).sum() * among / among.sum()
    return output, grads


def token_indices(cu_seqlens, total_tokens=None):
    """Rows (sequence, position); past the last sequence the next number, counted from 0."""
    return _indices([end - start for start, end in itertools.pairwise(cu_seqlens)], total_tokens)


def chunk_indices(cu_seqlens, chunk_size, total_chunks=None):
    """Rows (sequence, chunk in it), as `token_indices` for chunks."""
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    return _indices([len(range(0, length, chunk_size)) for length in lengths], total_chunks)


def _indices(counts, total):
    rows = [(owner, index) for owner, count in enumerate(counts) for index in range(count)]
    extra = 0 if total is None else total - len(rows)
    return np.array(rows + [(len(counts), index) for index in range(extra)], np.int64).reshape(-1, 2)


def cumsum_matrix(tokens, chunk_size=None, reverse=False, cu_seqlens=None):
    """`[T, T]`: 1 where token `s` (column) is part of the sum at token `t` (row)."""
    matrix = np.zeros((tokens, tokens))
    borders = [0, tokens] if cu_seqlens is None else list(cu_seqlens)
    for start, end in itertools.pairwise(borders):
        for t in range(start, end):
            for s in range(start, end):
                same_chunk = chunk_size is None or (t - start) // chunk_size == (s - start) // chunk_size
                if same_chunk and (s >= t if reverse else s <= t):
                    matrix[t, s] = 1
    return matrix


def cumsum(x, chunk_size=None, reverse=False, cu_seqlens=None, softmax_scale=1.0, head_first=False):
    """Chunked cumulative sum along time; over the whole of each sequence if there is no `chunk_size`."""
    x = np.moveaxis(np.asarray(x, np.float64), 2 if head_first else 1, 0)
    out = softmax_scale * np.tensordot(cumsum_matrix(len(x), chunk_size, reverse, cu_seqlens), x, axes=1)
    return np.moveaxis(out, 0, 2 if head_first else 1)


def cumsum_gradient(weights, chunk_size=None, reverse=False, cu_seqlens=None, softmax_scale=1.0, head_first=False):
    """The gradient of `Σ weights · cumsum(x)` in `x`."""
    weights = np.moveaxis(np.asarray(weights, np.float64), 2 if head_first else 1, 0)
    matrix = cumsum_matrix(len(weights), chunk_size, reverse, cu_seqlens)
    return np.moveaxis(softmax_scale * np.tensordot(matrix.T, weights, axes=1), 0, 2 if head_first else 1)


def recurrent(query, key, value, d_output=None, d_final_state=None, **options):
    """The gated linear recurrence, one token and head at a time: output, final states, and with cotangents gradients.

    Takes `recurrent`'s arguments by name. The gradients follow the recurrence backwards from its definition; they are
    a dict by argument, empty without cotangents.
    """
    arrays = {"query": query, "key": key, "value": value}
    names = ("g", "g_gamma", "gk", "gv", "initial_state")
    arrays |= {name: options[name] for name in names if options.get(name) is not None}
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    cu_seqlens, reverse = options.get("cu_seqlens"), options.get("reverse", False)
    unbatched = arrays["query"].ndim == 3
    per_token = [name for name in ("query", "key", "value", "g", "gk", "gv") if name in arrays]
    full = {name: x[None] if unbatched and name in per_token else x for name, x in arrays.items()}
    (batch, tokens, _, K), V = full["query"].shape, full["value"].shape[-1]
    heads = max(full[name].shape[2] for name in ("query", "key", "value"))
    group = {name: heads // full[name].shape[2] for name in ("query", "key", "value")}
    scale = K**-0.5 if options.get("softmax_scale") is None else float(options["softmax_scale"])
    spans = [(row, 0, tokens) for row in range(batch)]
    if cu_seqlens is not None:
        cu_seqlens = np.asarray(cu_seqlens)
        spans = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens)]
    for name, rank in (("g_gamma", 1), ("initial_state", 3)):
        if name in full:
            shape = (len(spans), *full[name].shape[-rank:])
            full[name] = np.broadcast_to(full[name], shape)
    output, final = np.zeros((batch, tokens, heads, V)), np.zeros((len(spans), heads, K, V))
    grads = {name: np.zeros(x.shape) for name, x in full.items()} if d_output is not None else {}
    do = None if d_output is None else np.asarray(d_output, np.float64).reshape(output.shape)

    for n, h in np.ndindex(len(spans), heads):
        row, start, end = spans[n]
        order = range(start, end)[::-1] if reverse else range(start, end)
        state = full["initial_state"][n, h] if "initial_state" in full else np.zeros((K, V))
        at = {name: h // group[name] for name in group}
        steps = []
        for t in order:
            a, b = np.zeros(K), np.zeros(V)
            q, k, v = (full[name][row, t, at[name]] for name in ("query", "key", "value"))
            for name in ("g", "gk"):
                a = a + (full[name][row, t, h] if name in full else 0)
            a = a + (full["g_gamma"][n, h] if "g_gamma" in full else 0)
            b = b + (full["gv"][row, t, h] if "gv" in full else 0)
            kept = np.exp(a)[:, None] * np.exp(b)[None, :] * state
            state = kept + np.outer(k, v)
            output[row, t, h] = scale * state.T @ q
            steps.append((t, q, k, v, a, b, kept, state))
        final[n, h] = state
        if do is None:
            continue
        d_state = np.asarray(d_final_state, np.float64)[n, h]
        for t, q, k, v, a, b, kept, after in reversed(steps):
            grads["query"][row, t, at["query"]] += scale * after @ do[row, t, h]
            d_state = d_state + scale * np.outer(q, do[row, t, h])
            grads["key"][row, t, at["key"]] += d_state @ v
            grads["value"][row, t, at["value"]] += d_state.T @ k
            for name, axis in (("g", 1), ("gk", 1), ("gv", 0)):
                if name in grads:
                    flow = (kept * d_state).sum(axis)
                    grads[name][row, t, h] += flow if grads[name].shape[-1] > 1 else flow.sum()
            if "g_gamma" in grads:
                grads["g_gamma"][n, h] += (kept * d_state).sum()
            d_state = np.exp(a)[:, None] * np.exp(b)[None, :] * d_state
        if "initial_state" in grads:
            grads["initial_state"][n, h] += d_state

    def as_given(name, grad):  # sums over whatever the argument was broadcast along
        shape = arrays[name].shape
        if name in per_token:
            return grad.reshape(shape)
        grad = grad.sum(0) if len(shape) < grad.ndim else grad
        return grad.sum(0, keepdims=True) if grad.shape != shape else grad

    grads = {name: as_given(name, grad) for name, grad in grads.items()}
    return (output[0] if unbatched else output), final, grads


def delta_rule(query, key, value, beta, g=None, d_output=None, d_final_state=None, **options):
    """The delta rule, one token and head at a time: output, final states and gradients, as `recurrent`.

    `g` is `[B, T, H]`, `[B, T, H, K]` or `None`. The gradients follow the recurrence backwards from its definition.
    """
    arrays = {"query": query, "key": key, "value": value, "beta": beta, "g": g}
    arrays["initial_state"] = options.get("initial_state")
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items() if x is not None}
    cu_seqlens, reverse = options.get("cu_seqlens"), options.get("reverse", False)
    unbatched = arrays["query"].ndim == 3
    full = {name: x[None] if unbatched and name != "initial_state" else x for name, x in arrays.items()}
    (batch, tokens, heads), K, V = full["beta"].shape, full["query"].shape[-1], full["value"].shape[-1]
    group = {name: heads // full[name].shape[2] for name in ("query", "key", "value")}
    scale = K**-0.5 if options.get("softmax_scale") is None else float(options["softmax_scale"])
    spans = [(row, 0, tokens) for row in range(batch)]
    if cu_seqlens is not None:
        spans = [(0, start, end) for start, end in itertools.pairwise(np.asarray(cu_seqlens))]
    if "initial_state" in full:
        full["initial_state"] = np.broadcast_to(full["initial_state"], (len(spans), heads, K, V))
    output, final = np.zeros((batch, tokens, heads, V)), np.zeros((len(spans), heads, K, V))
    grads = {name: np.zeros(x.shape) for name, x in full.items()} if d_output is not None else {}
    do = None if d_output is None else np.asarray(d_output, np.float64).reshape(output.shape)

    for n, h in np.ndindex(len(spans), heads):
        row, start, end = spans[n]
        order = range(start, end)[::-1] if reverse else range(start, end)
        state = full["initial_state"][n, h] if "initial_state" in full else np.zeros((K, V))
        at = {name: h // group[name] for name in group}
        steps = []
        for t in order:
            q, k, v = (full[name][row, t, at[name]] for name in ("query", "key", "value"))
            b, a = full["beta"][row, t, h], full["g"][row, t, h] if "g" in full else 0.0
            kept = np.exp(a * np.ones(K))[:, None] * state
            error = v - kept.T @ k
            state = kept + b * np.outer(k, error)
            output[row, t, h] = scale * state.T @ q
            steps.append((t, q, k, b, a, kept, error, state))
        final[n, h] = state
        if do is None:
            continue
        d_state = np.asarray(d_final_state, np.float64)[n, h]
        for t, q, k, b, a, kept, error, after in reversed(steps):
            grads["query"][row, t, at["query"]] += scale * after @ do[row, t, h]
            d_state = d_state + scale * np.outer(q, do[row, t, h])
            d_error = b * d_state.T @ k
            grads["beta"][row, t, h] += k @ d_state @ error
            grads["key"][row, t, at["key"]] += b * d_state @ error - kept @ d_error
            grads["value"][row, t, at["value"]] += d_error
            d_kept = d_state - np.outer(k, d_error)
            if "g" in grads:
                flow = (kept * d_kept).sum(1)
                grads["g"][row, t, h] += flow if grads["g"].ndim == 4 else flow.sum()
            d_state = np.exp(a * np.ones(K))[:, None] * d_kept
        if "initial_state" in grads:
            grads["initial_state"][n, h] += d_state

    def as_given(name, grad):  # sums over whatever the argument was broadcast along
        shape = arrays[name].shape
        return grad.sum(0) if name == "initial_state" and len(shape) < grad.ndim else grad.reshape(shape)

    grads = {name: as_given(name, grad) for name, grad in grads.items()}
    return (output[0] if unbatched else output), final, grads
