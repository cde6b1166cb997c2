# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: every gradient of a chunk with one gate a key dim, from the states and cotangents at its ends."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.gates import LEAST, LOG2E, MOST
from ejkernel.kernels.chunks.triton.places import CHUNKS, load_rows, locate, token_of
from ejkernel.kernels.delta_rule.triton.device.gradients import of_values
from ejkernel.kernels.delta_rule.triton.device.inverse import corner
from ejkernel.kernels.delta_rule.triton.device.key_gates import (
    bits_from_middle,
    bits_to_border,
    decays_to_ends,
    scaled,
)


@triton.jit
def of_pairs(b_dscore, b_dbelow, b_late_q, b_late_k, b_early_k, PRECISION: tl.constexpr):
    """Gradients of queries and keys that come late, and of keys that come early, all decayed to where they meet."""
    b_dlate_q = tl.dot(b_dscore, b_early_k, input_precision=PRECISION)
    b_dlate_k = tl.dot(b_dbelow, b_early_k, input_precision=PRECISION)
    b_dearly = tl.dot(tl.trans(b_dscore), b_late_q, input_precision=PRECISION)
    b_dearly = tl.dot(tl.trans(b_dbelow), b_late_k, acc=b_dearly, input_precision=PRECISION)
    return b_dlate_q, b_dlate_k, b_dearly


@triton.jit
def gradients_keyed(
    p_q,
    p_k,
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
    LEVELS: tl.constexpr,
    FINE: tl.constexpr,
    LIMIT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dv of some value dims of a chunk, and their parts of dq, dk, dβ and the gates' gradient.

    The latter takes queries and keys as they were rounded: what passes between two tokens on the same side of a gate
    cancels, and so do the rounding errors.
    """
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    SCALE: tl.constexpr = CALL.scale
    FLIP: tl.constexpr = CALL.flip
    PRECISION: tl.constexpr = CALL.precision
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0)
    i_v = i_program % NV
    i_h = (i_program // NV) % H
    i_block = i_program // (NV * H)
    _, i_c, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
    i_chunk = i_block.to(tl.int64) * H + i_h
    i_row = i_c * C
    i_token = token_of(i_first, n_rows, i_row, FLIP)
    o_r = tl.arange(0, C)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    o_v = i_v * BV + tl.arange(0, BV)
    m_read = i_row + o_r < n_read
    m_write = i_row + o_r < n_rows
    m_gate = m_read & (i_row + o_r > 0)
    b_do, b_u, b_dr, b_beta, b_dscore, b_dbelow = of_values(
        p_dout, p_u, p_dr, p_beta, p_dv, p_dbeta, i_token, i_h, i_v, o_r, o_t, m_read, m_write, CALL, BV
    )
    # a token's own key crosses no gate
    b_own = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_dscore, 0.0), 1)[:, None]
    m_earlier = o_r[:, None] > o_r[None, :]
    b_dscore = tl.where(m_earlier, b_dscore, 0.0).to(b_u.dtype)
    b_dbelow = b_dbelow.to(b_u.dtype)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_k = load_rows(p_k, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, K % BK != 0, False)
        b_q = load_rows(p_q, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, K % BK != 0, False)
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_gate, o_k, H, K, K % BK != 0, True)
        o_state = i_chunk * (K * V) + o_v[:, None] * K + o_k[None, :]
        m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
        b_state = tl.load(p_states + o_state, mask=m_state, other=0.0)
        b_dstate = tl.load(p_dstates + o_state, mask=m_state, other=0.0)
        b_since, b_until = decays_to_ends(b_gate, o_r, FINE)
        b_total = tl.sum(tl.where((o_r == C - 1)[:, None], b_since, 0.0), 0)
        b_through = tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0) * b_total
        b_dq = tl.dot(b_do, b_state, input_precision=PRECISION) * b_since * SCALE
        b_dstart = tl.dot(b_dr, b_state, input_precision=PRECISION) * b_since * -b_beta[:, None]
        b_dk = tl.dot(b_u, b_dstate, input_precision=PRECISION) * b_until
        b_arriving = b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * b_dstart
        b_leaving = b_k.to(tl.float32) * b_dk
        b_dk += b_dstart + b_own * b_q.to(tl.float32)
        b_dq += b_own * b_k.to(tl.float32)
        b_bits = bits_from_middle(b_gate, o_r, LEVELS, FINE)
        if tl.max(tl.max(tl.abs(b_bits), 1), 0) <= LIMIT:
            b_up = tl.exp2(b_bits)
            b_down = tl.exp2(-b_bits)
            b_late_q = scaled(b_q, b_up)
            b_late_k = scaled(b_k, b_up)
            b_early_k = scaled(b_k, b_down)
            b_dlate_q, b_dlate_k, b_dearly = of_pairs(b_dscore, b_dbelow, b_late_q, b_late_k, b_early_k, PRECISION)
            b_arriving += b_late_q.to(tl.float32) * b_dlate_q + b_late_k.to(tl.float32) * b_dlate_k
            b_arriving -= b_early_k.to(tl.float32) * b_dearly
            b_dq += b_dlate_q * b_up
            b_dk += b_dlate_k * b_up + b_dearly * b_down
        else:
            for i_level in range(0, LEVELS):
                b_fade = tl.exp2(tl.minimum(bits_to_border(b_gate, o_r, i_level, FINE)[0], MOST))
                b_late_q = scaled(b_q, b_fade)
                b_late_k = scaled(b_k, b_fade)
                m_meet = corner(o_r, i_level)
                b_dlate_q, b_dlate_k, b_dearly = of_pairs(
                    tl.where(m_meet, b_dscore, 0.0).to(b_u.dtype),
                    tl.where(m_meet, b_dbelow, 0.0).to(b_u.dtype),
                    b_late_q,
                    b_late_k,
                    b_late_k,
                    PRECISION,
                )
                b_arriving += b_late_q.to(tl.float32) * b_dlate_q + b_late_k.to(tl.float32) * (b_dlate_k - b_dearly)
                b_dq += b_dlate_q * b_fade
                b_dk += (b_dlate_k + b_dearly) * b_fade
        # what arrives from this row on, and what has left before it
        b_dgate = tl.dot(tl.where(m_earlier, 0.0, 1.0), b_arriving, input_precision=PRECISION)
        b_dgate = tl.dot(tl.where(m_earlier, 1.0, 0.0), b_leaving, acc=b_dgate, input_precision=PRECISION)
        b_dgate += b_through[None, :]
        b_dgate = tl.where(m_gate[:, None] & (b_gate * LOG2E > LEAST), b_dgate, 0.0)
        o_rows = ((i_token * H + i_h) * NV + i_v) * K + o_t[:, None] * (H * NV * K) + o_k[None, :]
        m_rows = m_write[:, None] & (o_k[None, :] < K)
        tl.store(p_dgate + o_rows, b_dgate.to(p_dgate.dtype.element_ty), mask=m_rows)
        tl.store(p_dq + o_rows, b_dq.to(p_dq.dtype.element_ty), mask=m_rows)
        tl.store(p_dk + o_rows, b_dk.to(p_dk.dtype.element_ty), mask=m_rows)
