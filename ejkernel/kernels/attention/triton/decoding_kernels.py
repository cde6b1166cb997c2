# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code for few queries against many keys: each part of the keys by a program of its own, then merged.

The rows of a tile are all queries of all heads that share a key head, so that each key is read once.
"""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.forward_kernels import absorb, finish
from ejkernel.kernels.attention.triton.tiles import bounds, in_sight, pair_rows


@triton.jit
def attend_part(
    p_q,
    p_k,
    p_v,
    p_mask,
    p_bias,
    p_words,
    p_offset,
    S,
    L,
    left,
    right,
    p_sum,
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
    PARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    MASK_HEADS: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LINEAR: tl.constexpr,
    FAST: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Maximum, sum of weights and sum of weighted values over one part of the keys in sight, `[B, S, H, PARTS, …]`."""
    G: tl.constexpr = H // HKV
    i_program = tl.program_id(0)
    i_kv = i_program % HKV
    i_part = i_program // HKV % PARTS
    i_b = i_program // (HKV * PARTS)
    lowest, highest = bounds(p_offset, i_b, left, right, OFFSETS)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_dv = tl.arange(0, BDV)
    m_i = o_m < S * G
    o_token = o_m // G
    i_h = i_kv * G + o_m % G
    low, high, start, _, _ = in_sight(0, S - 1, i_program * 0 + L, lowest, highest, BN, LEFT, RIGHT)
    n_each = tl.cdiv(tl.cdiv(tl.maximum(high - start, 0), BN), PARTS) * BN
    i_from = start + i_part * n_each
    i_to = tl.minimum(i_from + n_each, high)

    o_row = (i_b.to(tl.int64) * S + o_token) * H + i_h
    p_tile = p_q + o_row[:, None] * D + o_d[None, :]
    b_q = tl.load(p_tile, mask=m_i[:, None] & (o_d[None, :] < D), other=0.0)
    o_mask = o_token
    o_bias = o_token
    o_draw = o_token
    if MASK:
        o_mask = pair_rows(i_b, i_h, o_token, S, L, H, MASK_HEADS, MASK)
    if BIAS:
        o_bias = pair_rows(i_b, i_h, o_token, S, L, H, BIAS_HEADS, BIAS)
    if LEAST:
        o_draw = ((i_b * H + i_h).to(tl.int64) * S + o_token).to(tl.uint32)
    b_top, b_total, b_sum = absorb(
        tl.full([BM], float("-inf"), tl.float32),
        tl.zeros([BM], tl.float32),
        tl.zeros([BM, BDV], tl.float32),
        b_q,
        p_k + i_kv * D,
        p_v + i_kv * DV,
        p_mask,
        p_bias,
        p_words,
        i_from,
        i_to,
        o_token,
        o_mask,
        o_bias,
        o_draw,
        i_b.to(tl.int64) * L,
        i_b * 0,
        L,
        low,
        high,
        lowest,
        highest,
        high,
        low,
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
        False,
        False,
        True,
    )
    o_out = o_row * PARTS + i_part
    tl.store(p_sum + o_out[:, None] * DV + o_dv[None, :], b_sum, mask=m_i[:, None] & (o_dv[None, :] < DV))
    tl.store(p_top + o_out, b_top, mask=m_i)
    tl.store(p_total + o_out, b_total, mask=m_i)


@triton.jit
def merge_parts(
    p_sum,
    p_part_top,
    p_part_total,
    p_sinks,
    S,
    p_out,
    p_top,
    p_total,
    H: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    PARTS: tl.constexpr,
    BPARTS: tl.constexpr,
    SINKS: tl.constexpr,
    SINK_HEADS: tl.constexpr,
    BSINKS: tl.constexpr,
    SHARE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Output, maximum and log-sum of one query of one head, from those over the parts of the keys."""
    i_row = tl.program_id(0).to(tl.int64)
    i_h = (i_row % H).to(tl.int32)
    i_token = i_row // H % S
    i_b = i_row // H // S
    o_p = tl.arange(0, BPARTS)
    o_dv = tl.arange(0, BDV)
    m_p = o_p < PARTS
    b_tops = tl.load(p_part_top + i_row * PARTS + o_p, mask=m_p, other=float("-inf"))
    b_totals = tl.load(p_part_total + i_row * PARTS + o_p, mask=m_p, other=0.0)
    p_tile = p_sum + (i_row * PARTS + o_p[:, None]) * DV + o_dv[None, :]
    b_sums = tl.load(p_tile, mask=m_p[:, None] & (o_dv[None, :] < DV), other=0.0)
    b_top = tl.max(b_tops, 0)
    b_shrink = tl.exp2(b_tops - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_total = tl.sum(b_totals * b_shrink, 0)
    b_sum = tl.sum(b_sums * b_shrink[:, None], 0)
    o_one = tl.zeros([1], tl.float32)
    b_out, b_top, b_total = finish(
        o_one + b_top, o_one + b_total, b_sum[None, :], p_sinks, i_h, H, SINK_HEADS, SINKS, BSINKS, SHARE, BIAS > 0
    )
    o_d = i_row * DV + o_dv[None, :]
    tl.store(p_out + o_d, b_out.to(p_out.dtype.element_ty), mask=o_dv[None, :] < DV)
    o_stat = (i_b * H + i_h) * S + i_token + tl.arange(0, 1)
    tl.store(p_top + o_stat, b_top)
    tl.store(p_total + o_stat, b_total)
