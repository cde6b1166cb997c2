"""Device code: a program loops over tokens of one row, and holds the last few tokens of its channels in registers."""

# Triton knows no unpacking into tuples
# ruff: noqa: RUF005

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.heads import SMALL, inverse_norm

EPSILON = tl.constexpr(1e-6)


@triton.jit
def forward(p, CALL: tl.constexpr):
    """The output of a span of tokens. Each is loaded once, and so are the `W - 1` tokens before the span."""
    GROUP: tl.constexpr = CALL.group
    i_row, i_first, o_d, m_d = _locate(CALL)
    b_weights = _load_weights(p, o_d, m_d, CALL)
    b_bias = _load_bias(p, o_d, m_d, CALL)
    b_past = _load_past(p, i_row, i_first, o_d, m_d, CALL)
    for i_group in range(0, CALL.span, GROUP):
        i_t = i_first + i_group
        # all loads of a group come before its first store, as none is moved across a store
        b_rows = ()
        n_befores = ()
        for i in tl.static_range(GROUP):
            b_rows = b_rows + (_load_token(p.x, i_row, i_t + i, o_d, m_d, CALL),)
            n_befores = n_befores + (_load_position(p, i_row, i_t + i, CALL),)
        for i in tl.static_range(GROUP):
            n_before = n_befores[i]
            b_taps = _taps(p, i_row, i_t + i, n_before, b_rows[i], b_past, o_d, m_d, CALL)
            b_sum = _sum(b_taps, b_weights, b_bias, CALL)
            if CALL.silu:
                b_sum = b_sum * tl.sigmoid(b_sum)
            if CALL.unit_dim:
                b_inverse, b_factor = _inverse_norms(_heads(b_sum, CALL), CALL)
                b_sum = tl.reshape((_heads(b_sum, CALL) * b_factor) * b_inverse, [CALL.columns])
            if CALL.placed:
                b_sum = tl.where(n_before >= 0, b_sum, 0.0)
            _store_token(p.output, i_row, i_t + i, i_first, CALL.tokens, b_sum, o_d, m_d, CALL)
            b_past = _shifted(b_rows[i], b_past, CALL)


@triton.jit
def backward(p, CALL: tl.constexpr):
    """`d_x` of a span of tokens, and their part of the cotangents of weight and bias, as rows of `d_sums`.

    A token's `d_x` is a sum over itself and the `W - 1` tokens behind it, and pending until the loop has passed those.
    """
    W: tl.constexpr = CALL.taps
    GROUP: tl.constexpr = CALL.group
    COLUMNS: tl.constexpr = CALL.columns
    i_row, i_first, o_d, m_d = _locate(CALL)
    n_end = tl.minimum(i_first + CALL.span, CALL.tokens)
    b_weights = _load_weights(p, o_d, m_d, CALL)
    b_bias = _load_bias(p, o_d, m_d, CALL)
    b_past = _load_past(p, i_row, i_first, o_d, m_d, CALL)
    b_pending = ()
    b_d_weights = ()
    for _ in tl.static_range(W - 1):
        b_pending = b_pending + (tl.zeros([COLUMNS], tl.float32),)
    for _ in tl.static_range(W):
        b_d_weights = b_d_weights + (tl.zeros([COLUMNS], tl.float32),)
    b_d_bias = tl.zeros([COLUMNS], tl.float32)
    for i_group in range(0, CALL.span + W - 1, GROUP):
        i_t = i_first + i_group
        b_rows = ()
        b_d_rows = ()
        n_befores = ()
        for i in tl.static_range(GROUP):
            b_rows = b_rows + (_load_token(p.x, i_row, i_t + i, o_d, m_d, CALL),)
            n_befores = n_befores + (_load_position(p, i_row, i_t + i, CALL),)
            b_d_rows = b_d_rows + (_load_token(p.d_output, i_row, i_t + i, o_d, m_d, CALL),)
        for i in tl.static_range(GROUP):
            n_before = n_befores[i]
            b_taps = _taps(p, i_row, i_t + i, n_before, b_rows[i], b_past, o_d, m_d, CALL)
            b_d_sum = b_d_rows[i]
            if CALL.silu or CALL.unit_dim:
                b_sum = _sum(b_taps, b_weights, b_bias, CALL)
            if CALL.silu:
                b_share = tl.sigmoid(b_sum)
            if CALL.unit_dim:
                b_d_sum = _d_unit(b_sum * b_share if CALL.silu else b_sum, b_d_sum, CALL)
            if CALL.silu:
                b_d_sum = b_d_sum * (b_share * (1.0 + b_sum * (1.0 - b_share)))
            b_d_sum = tl.where(n_before >= 0, b_d_sum, 0.0)
            b_counted = tl.where(i_t + i < n_end, b_d_sum, 0.0)
            b_d_bias += b_counted
            b_more = ()
            b_through = ()
            for lag in tl.static_range(W):
                b_more = b_more + (tl.fma(b_counted, b_taps[lag], b_d_weights[lag]),)
                b_own = b_d_sum
                if CALL.placed:
                    b_own = tl.where(n_before >= lag, b_d_sum, 0.0)
                if lag == 0:
                    b_through = b_through + (b_own * b_weights[lag],)
                else:
                    b_through = b_through + (tl.fma(b_own, b_weights[lag], b_pending[lag - 1]),)
            b_d_weights = b_more
            _store_token(p.d_x, i_row, i_t + i - (W - 1), i_first, n_end, b_through[W - 1], o_d, m_d, CALL)
            b_pending = b_through[: W - 1]
            b_past = _shifted(b_rows[i], b_past, CALL)
    ROWS: tl.constexpr = W + CALL.has_bias
    p_sums = p.d_sums + (tl.program_id(0) // CALL.columns_blocks).to(tl.int64) * (ROWS * CALL.channels) + o_d
    for lag in tl.static_range(W):
        tl.store(p_sums + (W - 1 - lag) * CALL.channels, b_d_weights[lag], mask=m_d)
    if CALL.has_bias:
        tl.store(p_sums + W * CALL.channels, b_d_bias, mask=m_d)


@triton.jit
def _locate(CALL: tl.constexpr):
    """The program's row and first token, and the offsets and mask of its channels."""
    COLUMNS: tl.constexpr = CALL.columns
    i_program = tl.program_id(0)
    i_block = i_program // CALL.columns_blocks
    o_d = (i_program % CALL.columns_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    return i_block // CALL.spans, (i_block % CALL.spans) * CALL.span, o_d, o_d < CALL.channels


@triton.jit
def _load_weights(p, o_d, m_d, CALL: tl.constexpr):
    """The weight's rows, in order of their lags."""
    W: tl.constexpr = CALL.taps
    b_weights = ()
    for lag in tl.static_range(W):
        p_row = p.weight + (W - 1 - lag) * CALL.channels + o_d
        b_weights = b_weights + (tl.load(p_row, mask=m_d, other=0.0).to(tl.float32),)
    return b_weights


@triton.jit
def _load_bias(p, o_d, m_d, CALL: tl.constexpr):
    COLUMNS: tl.constexpr = CALL.columns
    b_bias = tl.zeros([COLUMNS], tl.float32)
    if CALL.has_bias:
        b_bias = tl.load(p.bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def _load_token(p_x, i_row, i_t, o_d, m_d, CALL: tl.constexpr):
    """A token in float32, or 0 outside of the row."""
    p_token = p_x + (i_row.to(tl.int64) * CALL.tokens + i_t) * CALL.channels + o_d
    return tl.load(p_token, mask=m_d & (i_t >= 0) & (i_t < CALL.tokens), other=0.0).to(tl.float32)


@triton.jit
def _store_token(p_x, i_row, i_t, n_start, n_end, b_token, o_d, m_d, CALL: tl.constexpr):
    """Stores a token if its index is in `[n_start, n_end)`."""
    p_token = p_x + (i_row.to(tl.int64) * CALL.tokens + i_t) * CALL.channels + o_d
    tl.store(p_token, b_token.to(p_x.dtype.element_ty), mask=m_d & (i_t >= n_start) & (i_t < n_end))


@triton.jit
def _load_past(p, i_row, i_t, o_d, m_d, CALL: tl.constexpr):
    """The `W - 1` tokens before token `i_t`, the latest first; before the row's first token, the initial state."""
    W: tl.constexpr = CALL.taps
    b_past = ()
    for lag in tl.static_range(1, W):
        b_token = _load_token(p.x, i_row, i_t - lag, o_d, m_d, CALL)
        if CALL.has_states and not CALL.placed:
            p_state = p.states + (i_row.to(tl.int64) * (W - 1) + W - 1 + i_t - lag) * CALL.channels
            b_token += tl.load(p_state + o_d, mask=m_d & (i_t < lag), other=0.0).to(tl.float32)
        b_past = b_past + (b_token,)
    return b_past


@triton.jit
def _load_position(p, i_row, i_t, CALL: tl.constexpr):
    """How many tokens of its sequence precede a token, at most `W - 1`; -1 for padding and outside of the row."""
    W: tl.constexpr = CALL.taps
    if CALL.placed:
        return tl.load(p.position + i_row.to(tl.int64) * CALL.tokens + i_t, mask=i_t < CALL.tokens, other=-1)
    else:
        # the row is one sequence, so that no lag is masked
        return tl.where(i_t < CALL.tokens, W - 1, -1)


@triton.jit
def _taps(p, i_row, i_t, n_before, b_token, b_past, o_d, m_d, CALL: tl.constexpr):
    """The tokens in the sum of a token, in order of their lags."""
    W: tl.constexpr = CALL.taps
    if CALL.placed:
        b_taps = (tl.where(n_before >= 0, b_token, 0.0),)
        if CALL.has_states:
            p_owner = p.owner + i_row.to(tl.int64) * CALL.tokens + i_t
            i_state = tl.load(p_owner, mask=i_t < CALL.tokens, other=-1)
        for lag in tl.static_range(1, W):
            b_tap = tl.where(n_before >= lag, b_past[lag - 1], 0.0)
            if CALL.has_states:
                i_rows = i_state.to(tl.int64) * (W - 1) + W - 1 + n_before - lag
                m_state = m_d & (i_state >= 0) & (n_before < lag)
                b_tap += tl.load(p.states + i_rows * CALL.channels + o_d, mask=m_state, other=0.0).to(tl.float32)
            b_taps = b_taps + (b_tap,)
        return b_taps
    else:
        return (b_token,) + b_past


@triton.jit
def _shifted(b_token, b_past, CALL: tl.constexpr):
    """`b_past` for the next token."""
    W: tl.constexpr = CALL.taps
    if W == 1:
        return b_past
    else:
        return (b_token,) + b_past[: W - 2]


@triton.jit
def _heads(b_x, CALL: tl.constexpr):
    """The channels of a token by heads, `[heads, unit_dim]`."""
    return tl.reshape(b_x, [CALL.columns // CALL.unit_dim, CALL.unit_dim])


@triton.jit
def _inverse_norms(b_heads, CALL: tl.constexpr):
    """The two results of `inverse_norm` for each head, `[heads, 1]`."""
    b_small = b_heads * SMALL
    b_inverse, b_factor = inverse_norm(tl.sum(b_heads * b_heads, 1), tl.sum(b_small * b_small, 1), EPSILON)
    return b_inverse[:, None], b_factor[:, None]


@triton.jit
def _d_unit(b_x, b_d_unit, CALL: tl.constexpr):
    """The cotangent of a token, given that of its heads divided by their norms."""
    b_heads, b_d_heads = _heads(b_x, CALL), _heads(b_d_unit, CALL)
    b_inverse, b_factor = _inverse_norms(b_heads, CALL)
    b_unit = (b_heads * b_factor) * b_inverse
    b_along = tl.sum(b_unit * b_d_heads, 1)[:, None]
    return tl.reshape((b_d_heads - b_unit * b_along) * (b_inverse * b_factor), [CALL.columns])


@triton.jit
def _sum(b_taps, b_weights, b_bias, CALL: tl.constexpr):
    """The sum before the activation, added up in the same order and with the same roundings for every token."""
    W: tl.constexpr = CALL.taps
    b_sum = b_taps[0] * b_weights[0]
    for lag in tl.static_range(1, W):
        b_sum = tl.fma(b_taps[lag], b_weights[lag], b_sum)
    return b_sum + b_bias
