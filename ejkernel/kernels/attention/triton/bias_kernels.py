# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code of the bias gradient: each block of it sums up, in a fixed order, all tiles that it was added to."""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.backward_kernels import load_stats, weights
from ejkernel.kernels.attention.triton.tiles import (
    KEYS,
    QUERIES,
    ROWS,
    kept,
    load_bias,
    load_pairs,
    load_rows,
    pair_rows,
)


@triton.jit
def bias_gradient(
    p_q,
    p_k,
    p_v,
    p_mask,
    p_bias,
    p_words,
    p_start,
    p_stop,
    p_top,
    p_total,
    p_mean,
    p_dout,
    B,
    S,
    L,
    p_dbias,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    BOUNDS_BY_ROW: tl.constexpr,
    MASK: tl.constexpr,
    MASK_HEADS: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LINEAR: tl.constexpr,
    FAST: tl.constexpr,
    LEAST: tl.constexpr,
    SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of the gradient, from one of PARTS parts of the tiles. Query `i` sees keys `start[i] … stop[i]`."""
    n_q = tl.cdiv(S, BM)
    n_k = tl.cdiv(L, BN)
    i_program = tl.program_id(0)
    i_part = i_program % PARTS
    i_rest = i_program // PARTS
    i_k0 = 0
    i_q0 = 0
    i_b0 = 0
    n_tiles = H // BIAS_HEADS
    if KEYS & BIAS:
        i_k0 = i_rest % n_k
        i_rest = i_rest // n_k
    else:
        n_tiles = n_tiles * n_k
    if QUERIES & BIAS:
        i_q0 = i_rest % n_q
        i_rest = i_rest // n_q
    else:
        n_tiles = n_tiles * n_q
    i_h0 = i_rest % BIAS_HEADS
    if ROWS & BIAS:
        i_b0 = i_rest // BIAS_HEADS
    else:
        n_tiles = n_tiles * B
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_dv = tl.arange(0, BDV)
    n_each = tl.cdiv(n_tiles, PARTS)
    b_sum = tl.zeros([BM, BN], tl.float32)
    for i_tile in range(i_part * n_each, tl.minimum((i_part + 1) * n_each, n_tiles)):
        i_rest = i_tile + i_program * 0
        i_k = i_k0
        i_q = i_q0
        i_b = i_b0
        if not (KEYS & BIAS):
            i_k = i_rest % n_k
            i_rest = i_rest // n_k
        if not (QUERIES & BIAS):
            i_q = i_rest % n_q
            i_rest = i_rest // n_q
        i_h = i_h0 * (H // BIAS_HEADS) + i_rest % (H // BIAS_HEADS)
        if not (ROWS & BIAS):
            i_b = i_rest // (H // BIAS_HEADS)
        i_b = i_b + i_program * 0
        o_i = i_q * BM + o_m
        o_j = i_k * BN + o_n
        m_i = o_i < S
        o_bound = o_i
        if BOUNDS_BY_ROW:
            o_bound = i_b.to(tl.int64) * S + o_i
        b_start = tl.load(p_start + o_bound, mask=m_i, other=0)
        b_stop = tl.load(p_stop + o_bound, mask=m_i, other=0)
        low = tl.min(tl.where(b_start < b_stop, b_start, L), 0)
        high = tl.max(b_stop, 0)
        if (low < i_k * BN + BN) & (high > i_k * BN):
            m_i = m_i & (b_start < b_stop)
            m_j = (o_j >= low) & (o_j < high)
            m_pair = (o_j[None, :] >= b_start[:, None]) & (o_j[None, :] < b_stop[:, None])
            q_row = i_b.to(tl.int64) * S + i_q * BM
            k_row = i_b.to(tl.int64) * L + i_k * BN
            i_kv = i_h // (H // HKV)
            b_q = load_rows(p_q + i_h * D, q_row, o_m, m_i, o_d, H * D, D, BD != D, False)
            b_k = load_rows(p_k + i_kv * D, k_row, o_n, m_j, o_d, HKV * D, D, BD != D, False)
            b_v = load_rows(p_v + i_kv * DV, k_row, o_n, m_j, o_dv, HKV * DV, DV, BDV != DV, False)
            b_do = load_rows(p_dout + i_h * DV, q_row, o_m, m_i, o_dv, H * DV, DV, BDV != DV, False)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_dp = tl.dot(b_do.to(b_v.dtype), tl.trans(b_v), input_precision=PRECISION)
            o_row = (i_b * H + i_h).to(tl.int64) * S + o_i
            b_top, b_total = load_stats(p_top, p_total, o_row, m_i, True)
            b_mean = tl.load(p_mean + o_row, mask=m_i, other=0.0)
            if MASK:
                o_mask = pair_rows(i_b, i_h, o_i, S, L, H, MASK_HEADS, MASK)
                m_pair &= load_pairs(p_mask, o_mask[:, None], o_j[None, :], m_pair, MASK) != 0
            if LEAST:
                m_kept = kept(p_words, o_row.to(tl.uint32)[:, None], o_j.to(tl.uint32)[None, :], LEAST)
                b_dp = tl.where(m_kept, b_dp * SHARE, 0.0)
            o_bias = pair_rows(i_b, i_h, o_i, S, L, H, BIAS_HEADS, BIAS)
            b_bias = load_bias(p_bias, o_bias[:, None], o_j[None, :], m_pair, BIAS)
            b_p, _ = weights(b_s, b_bias, b_top[:, None], b_total[:, None], BIAS, SCALE, CAP, LINEAR, FAST)
            b_sum += tl.where(m_pair, b_p * (b_dp - b_mean[:, None]), 0.0)
    o_i = i_q0 * BM + o_m
    o_j = i_k0 * BN + o_n
    m_i = o_i < S
    m_j = o_j < L
    n_rows = i_program * 0 + 1
    if ROWS & BIAS:
        n_rows = n_rows * B
    # a part begins where the whole gradient's rows, heads, queries and keys before it end
    o_block = (i_part * n_rows + i_b0) * BIAS_HEADS + i_h0
    o_block = o_block.to(tl.int64)
    if QUERIES & BIAS:
        o_block = o_block * S
    else:
        b_sum = tl.sum(b_sum, 0)[None, :]
        o_i = tl.zeros([1], tl.int32)
        m_i = o_i == 0
    if KEYS & BIAS:
        o_block = o_block * L
    else:
        b_sum = tl.sum(b_sum, 1)[:, None]
        o_j = tl.zeros([1], tl.int32)
        m_j = o_j == 0
    o_row = o_i.to(tl.int64)
    if KEYS & BIAS:
        o_row = o_row * L
    tl.store(p_dbias + o_block + o_row[:, None] + o_j[None, :], b_sum, mask=m_i[:, None] & m_j[None, :])
