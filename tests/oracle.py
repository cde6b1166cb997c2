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
    query,
    key,
    value,
    attention_mask=None,
    bias=None,
    cu_seqlens=None,
    cu_seqlens_kv=None,
    query_offset=0,
    segment_ids=None,
    segment_ids_kv=None,
    **options,
):
    """Output and log-sum-exp of `attention`, each packed sequence or row of a batch by itself."""
    if segment_ids is not None:
        ids, ids_kv = np.asarray(segment_ids), np.asarray(segment_ids if segment_ids_kv is None else segment_ids_kv)
        mask = ((ids[:, :, None] == ids_kv[:, None]) & (ids >= 0)[:, :, None])[:, None]
        mask = mask if attention_mask is None else mask & attention_mask
        output, lse = flash_attention(query, key, value, mask, bias, query_offset=query_offset, **options)
        return output, np.where((ids >= 0)[..., None], lse, -np.inf)
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


def causal_conv1d(
    x,
    weight,
    bias=None,
    activation=None,
    initial_state=None,
    cu_seqlens=None,
    segment_ids=None,
    d_output=None,
    d_final_state=None,
    unit_dim=0,
):
    """The short convolution, one sequence and token at a time: output, final states, and with cotangents gradients.

    With a `unit_dim`, each head of so many channels is divided by `sqrt(sum of squares + 1e-6)` at the end.
    """
    arrays = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    arrays = {name: np.asarray(each, np.float64) for name, each in arrays.items() if each is not None}
    tokens, weight = arrays["x"].reshape(-1, *arrays["x"].shape[-2:]), arrays["weight"]
    batch, length, channels = tokens.shape
    history = len(weight) - 1
    # row, tokens, the initial state that they follow and the final state that they make, if they do
    runs = [(row, range(length), row, row) for row in range(batch)]
    count = batch
    if cu_seqlens is not None:
        runs = [(0, range(*each), n, n) for n, each in enumerate(itertools.pairwise(np.asarray(cu_seqlens)))]
        count = len(runs)
    if segment_ids is not None:
        runs = []
        for row, ids in enumerate(np.asarray(segment_ids)):
            groups = [list(group) for _, group in itertools.groupby(range(length), lambda t, ids=ids: max(ids[t], -1))]
            groups = [group for group in groups if ids[group[0]] >= 0] or [[]]
            last = len(groups) - 1
            for i, group in enumerate(groups):
                runs.append((row, group, row if i == 0 else None, row if i == last else None))
    output, final = np.zeros(tokens.shape), np.zeros((count, history, channels))
    grads = {name: np.zeros(each.shape) for name, each in arrays.items()}
    d_tokens = np.zeros(tokens.shape)
    for row, places, start, end in runs:
        before = np.zeros((history, channels))
        if start is not None and initial_state is not None:
            before = arrays["initial_state"][start]
        inputs = np.concatenate([before, tokens[row, list(places)].reshape(-1, channels)])
        d_inputs = np.zeros(inputs.shape)
        for i, t in enumerate(places):
            window = inputs[i : i + history + 1]
            z = (window * weight).sum(0) + arrays.get("bias", 0)
            share = 1 / (1 + np.exp(-z))
            y = z * share if activation == "silu" else z
            heads = y.reshape(-1, unit_dim or 1)
            norm = np.sqrt((heads**2).sum(1, keepdims=True) + 1e-6) if unit_dim else np.ones(heads.shape)
            output[row, t] = (heads / norm).ravel()
            if d_output is not None:
                d_z = np.asarray(d_output, np.float64).reshape(tokens.shape)[row, t]
                if unit_dim:
                    d_unit, unit = d_z.reshape(heads.shape), heads / norm
                    d_z = ((d_unit - unit * (unit * d_unit).sum(1, keepdims=True)) / norm).ravel()
                d_z = d_z * (share + z * share * (1 - share)) if activation == "silu" else d_z
                grads["weight"] += window * d_z
                d_inputs[i : i + history + 1] += weight * d_z
                if bias is not None:
                    grads["bias"] += d_z
        if end is not None:
            final[end] = inputs[len(places) :]
            if d_final_state is not None:
                d_inputs[len(places) :] += np.asarray(d_final_state, np.float64)[end]
        for i, t in enumerate(places):
            d_tokens[row, t] += d_inputs[history + i]
        if start is not None and initial_state is not None:
            grads["initial_state"][start] += d_inputs[:history]
    grads["x"] = d_tokens.reshape(arrays["x"].shape)
    return output.reshape(arrays["x"].shape), final, (grads if d_output is not None else {})


def paged_attention(query, key, value, pages, table, lengths, cu, *, scale=None, cap=None, left=None, sinks=None):
    """`paged_attention` query by query; `value` `[T, Hkv, Dv]`, or an int for latent pages. The output alone."""
    query, table, lengths, cu = np.asarray(query, float), *(np.asarray(x) for x in (table, lengths, cu))
    T, H, D = query.shape
    latent = isinstance(value, int)
    stored = [np.array(x, float) for x in ((pages[0],) if latent else pages)]
    P, page, kv_heads = stored[0].shape[:3]
    new = None if key is None else [np.asarray(x, float) for x in ((key,) if latent else (key, value))]

    def place(n, position):
        """Page and row of a position; `None` if it has no page."""
        column, row = divmod(position, page)
        number = table[n, column] if 0 <= column < table.shape[1] else -1
        return (number, row) if 0 <= number < P else None

    before = lengths if new is not None else lengths - np.diff(cu)
    tokens = [(n, t, before[n] + t - cu[n]) for n in range(len(lengths)) for t in range(cu[n], cu[n + 1])]
    for n, t, position in tokens:
        if new is not None and place(n, position) is not None:
            for pages_of, x in zip(stored, new, strict=True):
                pages_of[place(n, position)] = x[t]
    value_dim = value if latent else stored[1].shape[-1]
    output = np.zeros((T, H, value_dim))
    for n, t, position in tokens:
        seen = range(max(0, position - left) if left is not None else 0, position + 1)
        places = [place(n, each) for each in seen]
        if before[n] < 0 or None in places:
            output[t] = np.nan
            continue
        for h in range(H):
            j = h // (H // kv_heads)
            keys = np.array([stored[0][each][j] for each in places])
            values = keys[:, :value_dim] if latent else np.array([stored[1][each][j] for each in places])
            scores = keys @ query[t, h] * (D**-0.5 if scale is None else scale)
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            extra = np.zeros(0) if sinks is None else np.asarray(sinks, float)[h * len(sinks) // H]
            top = max([*scores, *extra])
            weights = np.exp(scores - top)
            output[t, h] = weights @ values / (weights.sum() + np.exp(extra - top).sum())
    return output


def one_by_one(op, arrays, segment_ids, d_output=None, d_final_state=None, reverse=False, **options):
    """`op`, `recurrent` or `delta_rule` from here, of each sequence of each row by itself: runs of equal ids.

    A row's first sequence starts from its initial state, which also stays where there is none.
    """
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    of_rows = [name for name in ("g_gamma", "initial_state") if name in arrays]
    full = dict(arrays)
    for name in of_rows:
        rank = {"g_gamma": 1, "initial_state": 3}[name]
        full[name] = np.broadcast_to(arrays[name], (len(segment_ids), *arrays[name].shape[-rank:]))
    grads = {name: np.zeros(x.shape) for name, x in full.items()}
    output, final = [], []
    for row, ids in enumerate(segment_ids):
        borders = [0, *np.flatnonzero(np.diff(ids)) + 1, len(ids)]
        spans = [(a, b) for a, b in itertools.pairwise(borders) if ids[a] >= 0][:: -1 if reverse else 1]
        state = full["initial_state"][row : row + 1] if "initial_state" in full else None
        d_state = None if d_final_state is None else np.asarray(d_final_state, np.float64)[row : row + 1]
        outputs, end = {}, state
        for n, (a, b) in enumerate(spans):
            of_run = {name: x[row : row + 1, a:b] for name, x in full.items() if name not in of_rows}
            if "g_gamma" in full:
                of_run["g_gamma"] = full["g_gamma"][row : row + 1]
            if n == 0 and state is not None:
                of_run["initial_state"] = state
            cotangents = {}
            if d_output is not None:
                last = n == len(spans) - 1
                cotangents = {
                    "d_output": d_output[row : row + 1, a:b],
                    "d_final_state": d_state if last else 0 * d_state,
                }
            outputs[a, b], end, found = op(**of_run, **cotangents, reverse=reverse, **options)
            for name, grad in found.items():
                where = slice(row, row + 1)
                grads[name][(where,) if name in of_rows else (where, slice(a, b))] += grad
        if not spans and state is not None and d_state is not None:
            grads["initial_state"][row] += d_state[0]
        output.append(outputs)
        final.append(end)
    heads, shape = None, None
    for outputs, end in zip(output, final, strict=True):
        if outputs:
            shape, heads = end.shape[1:], end.shape[1]
    full_output = np.zeros((*np.shape(segment_ids), heads, shape[-1]))
    full_final = np.zeros((len(segment_ids), *shape))
    for row, (outputs, end) in enumerate(zip(output, final, strict=True)):
        for (a, b), x in outputs.items():
            full_output[row, a:b] = x[0]
        if end is not None:
            full_final[row] = end[0]
    for name in of_rows:
        if arrays[name].shape != grads[name].shape:
            grads[name] = grads[name].sum(0).reshape(arrays[name].shape)
    return full_output, full_final, grads if d_output is not None else {}
