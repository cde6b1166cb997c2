# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: the walks, which carry a state, or its cotangent, through the chunks of a sequence.

The state is kept as [value dims, key dims], the left operand of every large dot.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.places import CHUNKS, SEGMENTS, blocks_before, load_rows, locate, token_of


@triton.jit
def load_pairs(p_pair, i_chunk, o_r, C: tl.constexpr):
    return tl.load(p_pair + i_chunk * (C * C) + o_r[:, None] * C + o_r[None, :])


@triton.jit
def forward(
    p_q,
    p_k,
    p_recalled,
    p_added,
    p_score,
    p_weight,
    p_start,
    p_cu,
    p_owner,
    T,
    N,
    L,
    p_out,
    p_u,
    p_states,
    p_last,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    SCALE: tl.constexpr,
    START: tl.constexpr,
    KEEP: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`u = added - recalled S`, `out = scale (e^A q S + P u)`, `S ← e^{A_C} S + (k e^{A_C - A})ᵀ u`; the last state.

    KEEP stores `u`, in place of what was added, and the state at each chunk's start.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    PAD_K: tl.constexpr = BK != K
    PAD_V: tl.constexpr = NV * BV != V
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_block = i_program // (NV * H)
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, SEGMENTS, N, T, L, PACKED)
    i_chunk0 = blocks_before(i_n, p_cu, CHUNKS, N, T, C, PACKED)
    n_chunks = tl.cdiv(n_rows, C)
    i_from = i_j * (L // C)
    n_steps = tl.minimum(n_chunks - i_from, tl.cdiv(L, C))
    o_r = tl.arange(0, C)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    b_state = tl.zeros([BV, BK], tl.float32)
    if START:
        p_tile = p_start + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state
        b_state = tl.load(p_tile, mask=m_state & (i_n < N), other=0.0)
    for i_step in range(0, n_steps):
        i_c = i_from + i_step
        i_row = i_c * C
        i_token = token_of(i_first, n_rows, i_row, FLIP)
        i_chunk = (i_chunk0 + i_c) * H + i_h
        m_read = i_row + o_r < n_read
        b_w = load_rows(p_recalled, i_token, i_h, o_t, m_read, o_k, H, K, PAD_K, False, WHOLE)
        b_q = load_rows(p_q, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, PAD_K, False, WHOLE)
        b_k = load_rows(p_k, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, PAD_K, False, WHOLE)
        b_u = load_rows(p_added, i_token, i_h, o_t, m_read, o_v, H, V, PAD_V, False, WHOLE)
        b_score = load_pairs(p_score, i_chunk, o_r, C)
        b_seen = b_state.to(b_k.dtype)
        b_new = tl.trans(b_u).to(tl.float32) - tl.dot(b_seen, tl.trans(b_w), input_precision=PRECISION)
        b_out = tl.dot(b_seen, tl.trans(b_q), input_precision=PRECISION)
        b_put = b_new
        if DECAY == "head":
            p_row = p_weight + i_chunk * (2 * C)
            b_out = b_out * tl.load(p_row + o_r)[None, :]
            b_put = b_new * tl.load(p_row + C + o_r)[None, :]
            b_state = b_state * tl.load(p_row + C - 1)
        b_new = b_new.to(b_k.dtype)
        b_state = tl.dot(b_put.to(b_k.dtype), b_k, acc=b_state, input_precision=PRECISION)
        b_out = tl.dot(b_new, tl.trans(b_score), acc=b_out, input_precision=PRECISION) * SCALE
        o_rows = (i_token * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
        m_rows = (i_row + o_r < n_rows)[:, None] & (o_v[None, :] < V)
        b_rows = tl.trans(b_out.to(p_out.dtype.element_ty))
        if WHOLE and not PAD_V:
            tl.store(p_out + o_rows, b_rows)
        else:
            tl.store(p_out + o_rows, b_rows, mask=m_rows)
        if KEEP:
            if WHOLE and not PAD_V:
                tl.store(p_u + o_rows, tl.trans(b_new))
            else:
                tl.store(p_u + o_rows, tl.trans(b_new), mask=m_rows)
            p_tile = p_states + i_chunk * (K * V) + o_v[:, None] * K + o_k[None, :]
            tl.store(p_tile, b_seen, mask=m_state)
    if (i_from + n_steps >= n_chunks) & (i_n < N):
        tl.store(p_last + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state, b_state, mask=m_state)


@triton.jit
def backward(
    p_q,
    p_k,
    p_recalled,
    p_dout,
    p_score,
    p_weight,
    p_dlast,
    p_cu,
    p_owner,
    T,
    N,
    L,
    p_du,
    p_dstates,
    p_dstart,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    SCALE: tl.constexpr,
    START: tl.constexpr,
    LAST: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`du = scale Pᵀ do + k e^{A_C - A} dS`, `dS ← e^{A_C} dS + scale (q e^A)ᵀ do - recalledᵀ du`, last chunk first.

    Stores `du`, the cotangent of the state at each chunk's end, and if LAST that of the first state.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    PAD_K: tl.constexpr = BK != K
    PAD_V: tl.constexpr = NV * BV != V
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_block = i_program // (NV * H)
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, SEGMENTS, N, T, L, PACKED)
    i_chunk0 = blocks_before(i_n, p_cu, CHUNKS, N, T, C, PACKED)
    n_chunks = tl.cdiv(n_rows, C)
    i_from = i_j * (L // C)
    n_steps = tl.minimum(n_chunks - i_from, tl.cdiv(L, C))
    o_r = tl.arange(0, C)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    b_dstate = tl.zeros([BV, BK], tl.float32)
    if START:
        p_tile = p_dlast + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state
        b_dstate = tl.load(p_tile, mask=m_state & (i_n < N), other=0.0)
    for i_step in range(0, n_steps):
        i_c = i_from + n_steps - 1 - i_step
        i_row = i_c * C
        i_token = token_of(i_first, n_rows, i_row, FLIP)
        i_chunk = (i_chunk0 + i_c) * H + i_h
        m_read = i_row + o_r < n_read
        b_k = load_rows(p_k, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, PAD_K, False, WHOLE)
        b_do = tl.trans(load_rows(p_dout, i_token, i_h, o_t, m_read, o_v, H, V, PAD_V, False, WHOLE))
        b_score = load_pairs(p_score, i_chunk, o_r, C)
        b_w = load_rows(p_recalled, i_token, i_h, o_t, m_read, o_k, H, K, PAD_K, False, WHOLE)
        b_q = load_rows(p_q, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, PAD_K, False, WHOLE)
        b_seen = b_dstate.to(b_k.dtype)
        b_du = tl.dot(b_seen, tl.trans(b_k), input_precision=PRECISION)
        b_read = b_do.to(tl.float32) * SCALE
        if DECAY == "head":
            p_row = p_weight + i_chunk * (2 * C)
            b_du = b_du * tl.load(p_row + C + o_r)[None, :]
            b_read = b_read * tl.load(p_row + o_r)[None, :]
            b_dstate = b_dstate * tl.load(p_row + C - 1)
        p_tile = p_dstates + i_chunk * (K * V) + o_v[:, None] * K + o_k[None, :]
        tl.store(p_tile, b_seen, mask=m_state)
        b_du += tl.dot(b_do, b_score, input_precision=PRECISION) * SCALE
        b_du = b_du.to(b_k.dtype)
        b_dstate = tl.dot(b_read.to(b_k.dtype), b_q, acc=b_dstate, input_precision=PRECISION)
        b_dstate -= tl.dot(b_du, b_w, input_precision=PRECISION)
        o_rows = (i_token * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
        if WHOLE and not PAD_V:
            tl.store(p_du + o_rows, tl.trans(b_du))
        else:
            tl.store(p_du + o_rows, tl.trans(b_du), mask=(i_row + o_r < n_rows)[:, None] & (o_v[None, :] < V))
    if LAST:
        if (i_j == 0) & (i_n < N):
            tl.store(p_dstart + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state, b_dstate, mask=m_state)
