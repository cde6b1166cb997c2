# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: every gradient of a chunk, from the states and cotangents at its ends."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.gates import LEAST
from ejkernel.kernels.chunks.triton.places import CHUNKS, load_rows, locate, token_of
from ejkernel.kernels.delta_rule.triton.device.decays import decays, pair_decays, sum_gates


@triton.jit
def gradients(
    p_q,
    p_k,
    p_v,
    p_beta,
    p_gate,
    p_dout,
    p_u,
    p_dr,
    p_states,
    p_dstates,
    p_cu,
    p_owner,
    T,
    N,
    p_dq,
    p_dk,
    p_dv,
    p_dbeta,
    p_dgate,
    CALL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dq, dk and dv of a chunk, and for some key dims their parts of dβ and of the gates' gradient."""
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    HV: tl.constexpr = CALL.value_heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    SCALE: tl.constexpr = CALL.scale
    FLIP: tl.constexpr = CALL.flip
    PRECISION: tl.constexpr = CALL.precision
    NK: tl.constexpr = (K + BK - 1) // BK
    i_program = tl.program_id(0)
    i_k = i_program % NK
    i_h = (i_program // NK) % H
    i_block = i_program // (NK * H)
    _, i_c, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
    i_chunk = i_block.to(tl.int64) * H + i_h
    i_row = i_c * C
    i_token = token_of(i_first, n_rows, i_row, FLIP)
    i_qh = i_h // (H // HQ)
    i_kh = i_h // (H // HK)
    i_vh = i_h // (H // HV)
    o_r = tl.arange(0, C)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    o_k = i_k * BK + tl.arange(0, BK)
    m_read = i_row + o_r < n_read
    m_write = i_row + o_r < n_rows
    m_earlier = o_r[:, None] > o_r[None, :]
    o_head = (i_token + o_t) * H + i_h
    b_beta = tl.load(p_beta + o_head, mask=m_read, other=0.0).to(tl.float32)
    b_dscore = tl.zeros([C, C], tl.float32)
    b_dbelow = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dstart = tl.zeros([C, BK], tl.float32)
    b_dend = tl.zeros([C, BK], tl.float32)
    b_dbeta = tl.zeros([C], tl.float32)
    b_through = 0.0
    for i_v in range(0, (V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_dr = load_rows(p_dr, i_token, i_h, o_t, m_read, o_v, H, V, V % BV != 0, False)
        b_u = load_rows(p_u, i_token, i_h, o_t, m_read, o_v, H, V, V % BV != 0, False)
        b_do = load_rows(p_dout, i_token, i_h, o_t, m_read, o_v, H, V, V % BV != 0, False)
        o_state = i_chunk * (K * V) + o_v[:, None] * K + o_k[None, :]
        m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
        b_state = tl.load(p_states + o_state, mask=m_state, other=0.0)
        b_dstate = tl.load(p_dstates + o_state, mask=m_state, other=0.0)
        b_dscore = tl.dot(b_do, tl.trans(b_u), acc=b_dscore, input_precision=PRECISION)
        b_dbelow = tl.dot(b_dr, tl.trans(b_u), acc=b_dbelow, input_precision=PRECISION)
        b_dq = tl.dot(b_do, b_state, acc=b_dq, input_precision=PRECISION)
        b_dstart = tl.dot(b_dr, b_state, acc=b_dstart, input_precision=PRECISION)
        b_dend = tl.dot(b_u, b_dstate, acc=b_dend, input_precision=PRECISION)
        if DECAY != "none":
            b_through += tl.sum(tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1), 0)
        if i_k == 0:
            b_v = load_rows(p_v, i_token, i_vh, o_t, m_read, o_v, HV, V, V % BV != 0, False)
            b_dbeta += tl.sum(b_dr.to(tl.float32) * b_v.to(tl.float32), 1)
            b_dv = b_dr.to(tl.float32) * b_beta[:, None]
            o_rows = (i_token * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
            m_rows = m_write[:, None] & (o_v[None, :] < V)
            tl.store(p_dv + o_rows, b_dv.to(p_dv.dtype.element_ty), mask=m_rows)

    b_k = load_rows(p_k, i_token, i_kh, o_t, m_read, o_k, HK, K, K % BK != 0, False)
    b_q = load_rows(p_q, i_token, i_qh, o_t, m_read, o_k, HQ, K, K % BK != 0, False)
    b_below = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_below = tl.where(m_earlier, b_below, 0.0)
    b_score = tl.where(m_earlier, b_score, 0.0)
    b_dq = b_dq * SCALE
    b_dscore = b_dscore * SCALE
    # a token's own key crosses no gate
    b_own = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_dscore, 0.0), 1)
    # strictly below: a token meets itself in the system's diagonal, which is 1
    b_dscore = tl.where(m_earlier, b_dscore, 0.0)
    b_dbelow = tl.where(m_earlier, -b_dbelow, 0.0)
    if DECAY == "head":
        m_gate = m_read & (i_row + o_r > 0)
        b_whole, b_part, b_gate = sum_gates(p_gate, i_token, i_h, o_t, m_gate, H)
        b_since, b_until = decays(b_whole, b_part, o_r, C)
        b_pair = pair_decays(b_whole, b_part, o_r)
        b_dscore = b_dscore * b_pair
        b_dbelow = b_dbelow * b_pair
        b_dq = b_dq * b_since[:, None]
        b_dstart = b_dstart * b_since[:, None]
        b_dend = b_dend * b_until[:, None]
    # of some key dims only: what is summed over these is a part of the whole
    b_dbeta += tl.sum(b_dbelow * b_below, 1) - tl.sum(b_dstart * b_k.to(tl.float32), 1)
    b_dbelow = b_dbelow * b_beta[:, None]
    b_dstart = b_dstart * -b_beta[:, None]
    p_part = (i_token + o_t) * (H * NK) + i_h * NK + i_k
    tl.store(p_dbeta + p_part, b_dbeta, mask=m_write)
    if DECAY == "head":
        b_flow = b_dscore * b_score + b_dbelow * b_below
        b_arriving = tl.sum(b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * b_dstart, 1) + tl.sum(b_flow, 1)
        # a row less a column
        b_arriving = tl.where(o_r[:, None] >= o_r[None, :], b_arriving[:, None], 0.0)
        b_crossing = tl.sum(b_arriving, 0)
        b_leaving = tl.sum(b_k.to(tl.float32) * b_dend, 1)
        b_gone = tl.sum(tl.where(o_r[:, None] < o_r[None, :], b_leaving[:, None], 0.0), 0)
        b_column = tl.sum(b_flow, 0)
        b_within = tl.sum(tl.where(o_r[None, :] >= o_r[:, None], b_column[None, :], 0.0), 1)
        b_total = tl.sum(tl.where(o_r == C - 1, b_since, 0.0), 0)
        b_dgate = b_crossing - b_within + b_gone + b_total * b_through
        b_dgate = tl.where(m_gate & (b_gate > LEAST), b_dgate, 0.0)
        tl.store(p_dgate + p_part, b_dgate, mask=m_write)
    b_dscore = b_dscore.to(b_k.dtype)
    b_dbelow = b_dbelow.to(b_k.dtype)
    b_dq = tl.dot(b_dscore, b_k, acc=b_dq, input_precision=PRECISION) + b_own[:, None] * b_k.to(tl.float32)
    b_dk = tl.dot(tl.trans(b_dscore), b_q, acc=b_dstart + b_dend, input_precision=PRECISION)
    b_dk = tl.dot(b_dbelow, b_k, acc=b_dk, input_precision=PRECISION)
    b_dk = tl.dot(tl.trans(b_dbelow), b_k, acc=b_dk, input_precision=PRECISION)
    b_dk += b_own[:, None] * b_q.to(tl.float32)
    o_rows = (i_token * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    m_rows = m_write[:, None] & (o_k[None, :] < K)
    tl.store(p_dq + o_rows, b_dq.to(p_dq.dtype.element_ty), mask=m_rows)
    tl.store(p_dk + o_rows, b_dk.to(p_dk.dtype.element_ty), mask=m_rows)
