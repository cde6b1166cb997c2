# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code of the forward pass: one block of queries walks the keys in its sight, with the online softmax."""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.tiles import (
    ALL,
    LOG2E,
    at_edge,
    bend,
    block_of,
    in_sight,
    kept,
    load_bias,
    load_pairs,
    load_rows,
    locate,
    pair_rows,
    sees,
    stretch,
    walked,
)


@triton.jit
def absorb(
    b_top,
    b_total,
    b_sum,
    b_q,
    p_k,
    p_v,
    p_mask,
    p_bias,
    p_words,
    i_from,
    i_to,
    o_i,
    o_mask,
    o_bias,
    o_draw,
    k_row,
    k_at,
    L,
    low,
    high,
    lowest,
    highest,
    all_start,
    all_stop,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LINEAR: tl.constexpr,
    FAST: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
    JOINED: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """The running maximum, sum of weights and sum of weighted values, with keys `i_from … i_to` added.

    With WHOLE every row sees every one of these keys, with JOINED those from `all_start` to `all_stop`, as far as
    position goes. `o_i` are the positions of the rows' queries. GUARDED, values that a mask hides may be NaN.
    """
    FACTOR: tl.constexpr = SCALE * LOG2E if LINEAR else 1.0
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_dv = tl.arange(0, BDV)
    for i_k in range(i_from, i_to, BN):
        o_j = i_k + o_n
        m_j = (o_j >= low) & (o_j < high)
        b_k = load_rows(p_k, k_row + i_k, o_n, m_j, o_d, HKV * D, D, BD != D, WHOLE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s, _ = bend(b_s, SCALE, CAP, LINEAR, FAST)
        if BIAS:
            b_s += load_bias(p_bias, o_bias[:, None], k_at + o_j[None, :], L, BIAS)
        if MASK:
            m_pair = load_pairs(p_mask, o_mask[:, None], k_at + o_j[None, :], L, MASK) != 0
            b_s = tl.where(m_pair, b_s, float("-inf"))
        if not WHOLE:
            if not JOINED or at_edge(i_k, all_start, all_stop):
                m_seen = m_j[None, :] & sees(o_i[:, None], o_j[None, :], lowest, highest, LEFT, RIGHT)
                b_s = tl.where(m_seen, b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1) * FACTOR)
        b_base = b_new
        if MASK or BIAS or not WHOLE:
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * FACTOR - b_base[:, None])
        b_shrink = tl.exp2(b_top - b_base)
        b_top = b_new
        b_total = b_total * b_shrink + tl.sum(b_p, 1)
        if LEAST:
            b_p = tl.where(kept(p_words, o_draw[:, None], (k_at + o_j).to(tl.uint32)[None, :], LEAST), b_p, 0.0)
        b_v = load_rows(p_v, k_row + i_k, o_n, m_j, o_dv, HKV * DV, DV, BDV != DV, WHOLE)
        if MASK and GUARDED:
            # a value that none of the rows may attend to must not matter even if it is NaN, and 0 · NaN would let it
            b_v = tl.where(tl.max(m_pair.to(tl.int32), 0)[:, None] > 0, b_v, 0.0)
        b_sum = tl.dot(b_p.to(b_v.dtype), b_v, b_sum * b_shrink[:, None], input_precision=PRECISION)
    return b_top, b_total, b_sum


@triton.jit
def finish(
    b_top,
    b_total,
    b_sum,
    p_sinks,
    i_h,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    BSINKS: tl.constexpr,
    SHARE: tl.constexpr,
    APART: tl.constexpr,
):
    """The output, and the log of the denominator as a sum of two, once the keys are summed up: the sinks join in.

    APART these are the maximum and the log of what is left, of which a large maximum would leave nothing in one number;
    else all is in the first. Where there is nothing to sum they are 0 and -inf.
    """
    b_dead = b_total == 0
    if SINKS:
        o_s = tl.arange(0, BSINKS)
        p_row = p_sinks + (i_h * HEADS // H) * SINKS + o_s
        b_sinks = tl.load(p_row, mask=o_s < SINKS, other=float("-inf")).to(tl.float32) * LOG2E
        b_new = tl.maximum(b_top, tl.max(b_sinks, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = tl.exp2(b_top - b_base)
        b_total = b_total * b_shrink + tl.sum(tl.exp2(b_sinks[None, :] - b_base[:, None]), 1)
        b_sum = b_sum * b_shrink[:, None]
        b_top = b_new
    b_out = tl.where(b_dead[:, None], 0.0, b_sum * (SHARE / tl.where(b_dead, 1.0, b_total))[:, None])
    b_empty = b_total == 0
    b_log = tl.log2(tl.where(b_empty, 1.0, b_total))
    if not APART:
        b_top += b_log
        b_log = tl.zeros_like(b_log)
    return b_out, tl.where(b_empty, 0.0, b_top), tl.where(b_empty, float("-inf"), b_log)


@triton.jit
def forward(
    p_q,
    p_k,
    p_v,
    p_mask,
    p_bias,
    p_sinks,
    p_words,
    p_cu,
    p_cu_kv,
    p_offset,
    S,
    L,
    N,
    apart,
    left,
    right,
    p_out,
    p_top,
    p_total,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PACKED: tl.constexpr,
    OFFSETS: tl.constexpr,
    JOINED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    MASK_HEADS: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    SINK_HEADS: tl.constexpr,
    BSINKS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LINEAR: tl.constexpr,
    FAST: tl.constexpr,
    LEAST: tl.constexpr,
    SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output, maximum and log-sum of one block of queries of one head. The longest walks begin first."""
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = block_of(i_program, H, RIGHT)
    i_b, i_first, q_at, n_q, k_at, n_k, lowest, highest = locate(
        i_block, p_cu, p_cu_kv, p_offset, N, apart, S, L, left, right, BM, False, PACKED, OFFSETS
    )
    if i_first >= n_q:
        return
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_dv = tl.arange(0, BDV)
    m_i = i_first + o_m < n_q
    o_token = q_at + i_first + o_m
    i_last = tl.minimum(i_first + BM, n_q) - 1
    low, high, start, all_start, all_stop = in_sight(i_first, i_last, n_k, lowest, highest, BN, LEFT, RIGHT)

    q_row = i_b.to(tl.int64) * S + q_at + i_first
    k_row = i_b.to(tl.int64) * L + k_at
    p_k += i_h // (H // HKV) * D
    p_v += i_h // (H // HKV) * DV
    b_q = load_rows(p_q + i_h * D, q_row, o_m, m_i, o_d, H * D, D, BD != D, False)
    o_mask = o_token
    o_bias = o_token
    o_draw = o_token
    if MASK:
        o_mask = pair_rows(i_b, i_h, o_token, S, L, H, MASK_HEADS, MASK)
    if BIAS:
        o_bias = pair_rows(i_b, i_h, o_token, S, L, H, BIAS_HEADS, BIAS)
    if LEAST:
        o_draw = ((i_b * H + i_h).to(tl.int64) * S + o_token).to(tl.uint32)

    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    b_sum = tl.zeros([BM, BDV], tl.float32)
    o_i = i_first + o_m
    for STAGE in tl.static_range(3):
        if walked(STAGE, LEFT, JOINED):
            i_from, i_to = stretch(STAGE, start, all_start, all_stop, high, JOINED)
            b_top, b_total, b_sum = absorb(
                b_top,
                b_total,
                b_sum,
                b_q,
                p_k,
                p_v,
                p_mask,
                p_bias,
                p_words,
                i_from,
                i_to,
                o_i,
                o_mask,
                o_bias,
                o_draw,
                k_row,
                k_at,
                L,
                low,
                high,
                lowest,
                highest,
                all_start,
                all_stop,
                HKV,
                D,
                DV,
                BD,
                BDV,
                BN,
                LEFT,
                RIGHT,
                MASK,
                BIAS,
                SCALE,
                CAP,
                LINEAR,
                FAST,
                LEAST,
                PRECISION,
                STAGE == ALL,
                JOINED,
                False,
            )
    b_out, b_top, b_total = finish(b_top, b_total, b_sum, p_sinks, i_h, H, SINK_HEADS, SINKS, BSINKS, SHARE, BIAS > 0)
    m_out = m_i[:, None] & (o_dv[None, :] < DV)
    p_tile = p_out + (q_row * H + i_h) * DV + o_m[:, None] * (H * DV) + o_dv[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_out)
    o_row = (i_b * H + i_h).to(tl.int64) * S + o_token
    tl.store(p_top + o_row, b_top, mask=m_i)
    tl.store(p_total + o_row, b_total, mask=m_i)
