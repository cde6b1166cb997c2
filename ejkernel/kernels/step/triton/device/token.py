"""Device code of a step: a program computes one head, whose state it reads and writes once."""

# Triton knows no unpacking into tuples
# ruff: noqa: RUF005

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E, faded
from ejkernel.kernels.chunks.triton.device.heads import SMALL, inverse_norm, own_place


@triton.jit
def convolve(p, CALL: tl.constexpr):
    """Convolves each head of queries, keys and values once, where several heads of the state share one."""
    # a field of a record is a constant to Triton once it has a name
    QUERY: tl.constexpr = CALL.queries
    KEY: tl.constexpr = CALL.keys
    VALUE: tl.constexpr = CALL.values
    HEADS: tl.constexpr = QUERY.heads + KEY.heads + VALUE.heads
    i_program = tl.program_id(0)
    i_b = (i_program // HEADS).to(tl.int64)
    i_head = i_program % HEADS
    if i_head < QUERY.heads:
        _convolve_head(p, p.query, i_b, i_head, CALL.first_query, QUERY, CALL)
    elif i_head < QUERY.heads + KEY.heads:
        _convolve_head(p, p.key, i_b, i_head - QUERY.heads, CALL.first_key, KEY, CALL)
    else:
        _convolve_head(p, p.value, i_b, i_head - QUERY.heads - KEY.heads, CALL.first_value, VALUE, CALL)


@triton.jit
def _convolve_head(p, p_x, i_b, i_head, FIRST: tl.constexpr, VIEW: tl.constexpr, CALL: tl.constexpr):
    D: tl.constexpr = VIEW.dim
    BLOCK: tl.constexpr = VIEW.block
    o_d = tl.arange(0, BLOCK)
    b_tokens = _load_tokens(p, p_x, i_b, i_head, o_d, o_d < D, FIRST, VIEW, CALL)
    b_convolved = _convolve_token(p, b_tokens, i_b, i_head, o_d, o_d < D, FIRST, VIEW, CALL)
    p_convolved = p.mixed + i_b * CALL.channels + FIRST + i_head * D + o_d
    tl.store(p_convolved, b_convolved.to(p.mixed.dtype.element_ty), mask=o_d < D)


@triton.jit
def step(p, CALL: tl.constexpr):
    """The output of a head and its next state."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    NV: tl.constexpr = CALL.value_blocks
    COPIES: tl.constexpr = CALL.copies
    QUERY: tl.constexpr = CALL.queries
    KEY: tl.constexpr = CALL.keys
    VALUE: tl.constexpr = CALL.values
    BETA: tl.constexpr = CALL.beta
    OUTPUT_GATE: tl.constexpr = CALL.output_gate
    i_program = tl.program_id(0)
    i_b = (i_program // H).to(tl.int64)
    i_h = i_program % H
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    p_memory = p.memory + (i_b * H + i_h) * (K * V)
    p_next = p.next + (i_b * H + i_h) * (K * V)
    # queries and keys are loaded before either is used, so that the loads overlap
    b_tokens_q = _load_head(p, p.query, i_b, i_h, o_k, m_k, CALL.first_query, QUERY, CALL)
    b_tokens_k = _load_head(p, p.key, i_b, i_h, o_k, m_k, CALL.first_key, KEY, CALL)
    b_gate, b_step = _decay(p, i_b, i_h, o_k, m_k, CALL)
    b_beta = 1.0
    if CALL.beta is not None:
        p_beta = _place(p.beta, i_b, i_h, BETA, CALL)
        b_beta = CALL.beta_factor * tl.sigmoid(tl.load(p_beta).to(tl.float32))
    b_q = _convolved(p, b_tokens_q, i_b, i_h, o_k, m_k, CALL.first_query, QUERY, CALL)
    b_k = _convolved(p, b_tokens_k, i_b, i_h, o_k, m_k, CALL.first_key, KEY, CALL)
    if CALL.normalize:
        b_q = _unit(b_q, CALL.key_epsilon)
        b_k = _unit(b_k, CALL.key_epsilon)
    o_row = tl.arange(0, NV)
    b_out = tl.zeros([NV, BV], tl.float32)
    # a pipelined loop: the next block is loaded while this one is computed
    for i_v in tl.range(0, NV, num_stages=CALL.stages):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        o_state = o_k[:, None] * V + o_v[None, :]
        m_state = m_k[:, None] & m_v[None, :]
        b_state = tl.load(p_memory + o_state, mask=m_state, other=0.0).to(tl.float32)
        b_tokens = _load_head(p, p.value, i_b, i_h, o_v, m_v, CALL.first_value, VALUE, CALL)
        b_v = _convolved(p, b_tokens, i_b, i_h, o_v, m_v, CALL.first_value, VALUE, CALL)
        if CALL.per_key:
            b_state = faded(b_state, (b_gate * LOG2E)[:, None])
        else:
            b_state = faded(b_state, b_gate * LOG2E)
        b_new = b_v
        if CALL.values_by_step:
            b_new = b_v * b_step
        if CALL.beta is not None:
            b_new = b_beta * (b_new - tl.sum(b_k[:, None] * b_state, 0))
        b_state = b_state + b_k[:, None] * b_new[None, :]
        b_output = tl.sum(b_q[:, None] * b_state, 0) * CALL.scale
        tl.store(p_next + o_state, b_state, mask=m_state)
        if p.skip is not None:
            b_output += tl.load(p.skip + i_h).to(tl.float32) * b_v
        b_out = tl.where((o_row == i_v)[:, None], b_output[None, :], b_out)
    o_v = o_row[:, None] * BV + tl.arange(0, BV)[None, :]
    m_v = o_v < V
    if CALL.epsilon is not None:
        b_inverse, b_scale = inverse_norm(
            tl.sum(b_out * b_out), tl.sum((b_out * SMALL) * (b_out * SMALL)), CALL.epsilon * V
        )
        b_out = (b_out * b_scale) * b_inverse * CALL.root
        b_out = b_out * tl.load(p.norm + o_v, mask=m_v, other=0.0).to(tl.float32)
    if CALL.output_gate is not None:
        p_gate = _place(p.output_gate, i_b, i_h, OUTPUT_GATE, CALL)
        b_z = tl.load(p_gate + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_share = tl.sigmoid(b_z)
        if CALL.activation == "silu":
            b_share = b_z * b_share
        b_out = b_out * b_share
    for i_copy in tl.static_range(COPIES):
        p_output = p.output + ((i_copy * CALL.batch + i_b) * H + i_h) * V + o_v
        tl.store(p_output, b_out.to(p.output.dtype.element_ty), mask=m_v)


@triton.jit
def _place(p_x, i_b, i_h, VIEW: tl.constexpr, CALL: tl.constexpr):
    """The pointer to the head of a view that head `i_h` of the state uses."""
    return own_place(p_x, i_b, i_h // (CALL.heads // VIEW.heads), VIEW)


@triton.jit
def _load_head(p, p_x, i_b, i_h, o_d, m_d, FIRST: tl.constexpr, VIEW: tl.constexpr, CALL: tl.constexpr):
    """The tokens that `_convolved` needs for a head of queries, keys or values: the current one, then the last ones."""
    i_head = i_h // (CALL.heads // VIEW.heads)
    if CALL.convolved_before:
        p_convolved = p.mixed + i_b * CALL.channels + FIRST + i_head * VIEW.dim + o_d
        return (tl.load(p_convolved, mask=m_d, other=0.0),)
    else:
        return _load_tokens(p, p_x, i_b, i_head, o_d, m_d, FIRST, VIEW, CALL)


@triton.jit
def _load_tokens(p, p_x, i_b, i_head, o_d, m_d, FIRST: tl.constexpr, VIEW: tl.constexpr, CALL: tl.constexpr):
    """A head's current token and the last ones before it, the latest first."""
    W: tl.constexpr = CALL.taps
    b_tokens = (tl.load(own_place(p_x, i_b, i_head, VIEW) + o_d, mask=m_d, other=0.0),)
    for lag in tl.static_range(1, W):
        o_recent = (i_b * (W - 1) + W - 1 - lag) * CALL.channels + FIRST + i_head * VIEW.dim + o_d
        b_tokens = b_tokens + (tl.load(p.recent + o_recent, mask=m_d, other=0.0),)
    return b_tokens


@triton.jit
def _convolved(p, b_tokens, i_b, i_h, o_d, m_d, FIRST: tl.constexpr, VIEW: tl.constexpr, CALL: tl.constexpr):
    """A head of queries, keys or values in float32, convolved here unless the kernel `convolve` has done it."""
    if CALL.taps == 0 or CALL.convolved_before:
        return b_tokens[0].to(tl.float32)
    else:
        return _convolve_token(p, b_tokens, i_b, i_h // (CALL.heads // VIEW.heads), o_d, m_d, FIRST, VIEW, CALL)


@triton.jit
def _convolve_token(p, b_tokens, i_b, i_head, o_d, m_d, FIRST: tl.constexpr, VIEW: tl.constexpr, CALL: tl.constexpr):
    """A head's convolved token. Its last tokens are stored one place earlier. `FIRST` is its view's first channel."""
    W: tl.constexpr = CALL.taps
    C: tl.constexpr = CALL.channels
    o_c = FIRST + i_head * VIEW.dim + o_d
    b_sum = b_tokens[0].to(tl.float32) * tl.load(p.taps + (W - 1) * C + o_c, mask=m_d, other=0.0).to(tl.float32)
    for lag in tl.static_range(1, W):
        b_tap = tl.load(p.taps + (W - 1 - lag) * C + o_c, mask=m_d, other=0.0).to(tl.float32)
        b_sum = tl.fma(b_tokens[lag].to(tl.float32), b_tap, b_sum)
    for lag in tl.static_range(1, W):
        p_moved = p.moved + (i_b * (W - 1) + W - 1 - lag) * C + o_c
        tl.store(p_moved, b_tokens[lag - 1].to(p.moved.dtype.element_ty), mask=m_d)
    if p.taps_bias is not None:
        b_sum += tl.load(p.taps_bias + o_c, mask=m_d, other=0.0).to(tl.float32)
    return b_sum * tl.sigmoid(b_sum)


@triton.jit
def _unit(b_x, EPSILON: tl.constexpr):
    """`b_x` divided by its norm, which may be as large or small as float32 holds."""
    b_small = b_x * SMALL
    b_inverse, b_scale = inverse_norm(tl.sum(b_x * b_x), tl.sum(b_small * b_small), EPSILON)
    return (b_x * b_scale) * b_inverse


@triton.jit
def _softplus(b_x):
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    # log1p, which corrects for the rounding of the sum
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / (b_u - 1.0)))
    return tl.maximum(b_x, 0.0) + b_log


@triton.jit
def _decay(p, i_b, i_h, o_k, m_k, CALL: tl.constexpr):
    """The log decay, a number or one for each key dim, and the time step in it."""
    GATE: tl.constexpr = CALL.gate
    p_gate = _place(p.gate, i_b, i_h, GATE, CALL)
    if CALL.per_key:
        b_x = tl.load(p_gate + o_k, mask=m_k, other=0.0).to(tl.float32)
    else:
        b_x = tl.load(p_gate).to(tl.float32)
    if CALL.decay == "log_sigmoid":
        return -_softplus(-b_x) * CALL.factor, 1.0
    else:
        b_rate = tl.exp(tl.load(p.rate + i_h).to(tl.float32))
        if CALL.per_key:
            b_x += tl.load(p.bias + i_h * CALL.key_dim + o_k, mask=m_k, other=0.0).to(tl.float32)
        else:
            b_x += tl.load(p.bias + i_h).to(tl.float32)
        if CALL.decay == "bounded":
            return CALL.factor * tl.sigmoid(b_rate * b_x), 1.0
        else:
            b_step = tl.minimum(tl.maximum(_softplus(b_x), CALL.shortest), CALL.longest)
            return -b_rate * b_step, b_step
