"""Device code of the tangent pass: a program walks once over the keys that its block of queries sees.

With weights `w`, scores' tangents `ds`, and `delta` a row's sum of `w · ds`, which is also the log-sum-exp's tangent,
the output's tangent is `Σ w · ds · value + Σ w · d_value - delta · output`. Arrays without tangents are `None` in `p`,
and what only they would need is neither loaded nor multiplied.
"""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.device.backward import add_product, load_lse, weights
from ejkernel.kernels.attention.triton.device.tiles import (
    INNER,
    LOG2E,
    at_edge,
    has_stage,
    in_window,
    keep_mask,
    load_bias,
    load_mask,
    load_pairs,
    load_rows,
    rows_of_pairs,
    stage_span,
    tokens_in_sight,
    visit_queries,
    zeros,
)


@triton.jit
def tangent(p, CALL: tl.constexpr):
    """The tangents of output and log-sum-exp of one block of queries of one head."""
    visit_queries(p, tangent_rows, CALL)


@triton.jit
def tangent_rows(p, i_h, place, m_i, sight, i_id, CALL: tl.constexpr):
    """`tangent` of the rows `m_i` of a block, which have the id `i_id` if there are ids."""
    H: tl.constexpr = CALL.heads
    HKV: tl.constexpr = CALL.kv_heads
    D: tl.constexpr = CALL.key_dim
    DV: tl.constexpr = CALL.value_dim
    BM: tl.constexpr = CALL.rows
    OF_PRODUCTS: tl.constexpr = p.d_query is not None or p.d_key is not None
    OF_SCORES: tl.constexpr = OF_PRODUCTS or p.d_bias is not None
    i_b, i_first, q_at, k_at, lowest, highest = place
    low, high, start, all_start, all_stop = sight
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, CALL.columns)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    o_i = i_first + o_m
    o_token = q_at + o_i
    q_row = i_b.to(tl.int64) * p.S + q_at + i_first
    k_row = i_b.to(tl.int64) * p.L + k_at
    o_kd = i_h // (H // HKV) * D
    o_kdv = i_h // (H // HKV) * DV
    b_q = load_rows(p.query + i_h * D, q_row, o_m, m_i, o_d, H, D, False)
    if p.d_query is not None:
        b_dq = load_rows(p.d_query + i_h * D, q_row, o_m, m_i, o_d, H, D, False)
    o_row = (i_b * H + i_h).to(tl.int64) * p.S + o_token
    b_lse, b_rest = load_lse(p, o_row, m_i, CALL.bias > 0)
    o_mask, o_bias, o_draw = rows_of_pairs(i_b, i_h, o_token, p, CALL)

    b_sum = zeros(CALL.rows, CALL.value_block)
    b_delta = tl.zeros([BM], tl.float32)
    for STAGE in tl.static_range(3):
        if has_stage(STAGE, CALL.left or CALL.ids, CALL.joined):
            i_from, i_to = stage_span(STAGE, start, all_start, all_stop, high, CALL.joined)
            for i_k in range(i_from, i_to, CALL.columns):
                UNMASKED: tl.constexpr = STAGE == INNER
                o_j = i_k + o_n
                m_j = tokens_in_sight(p.segment_ids_kv, k_row, o_j, low, high, i_id, UNMASKED, CALL)
                b_k = load_rows(p.key + o_kd, k_row + i_k, o_n, m_j, o_d, HKV, D, UNMASKED)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
                b_bias = 0.0
                if CALL.bias:
                    b_bias = load_bias(p, o_bias[:, None], k_at + o_j[None, :], CALL)
                b_p, b_slope = weights(b_s, b_bias, b_lse[:, None], b_rest[:, None], CALL)
                if OF_SCORES:
                    b_ds = zeros(CALL.rows, CALL.columns)
                    if p.d_query is not None:
                        b_ds = tl.dot(b_dq, tl.trans(b_k), input_precision=CALL.precision)
                    if p.d_key is not None:
                        b_dk = load_rows(p.d_key + o_kd, k_row + i_k, o_n, m_j, o_d, HKV, D, UNMASKED)
                        b_ds = tl.dot(b_q, tl.trans(b_dk), b_ds, input_precision=CALL.precision)
                    b_ds = b_ds * CALL.scale * b_slope
                    if p.d_bias is not None:
                        b_ds += load_pairs(p.d_bias, o_bias[:, None], k_at + o_j[None, :], p.L, CALL.bias).to(
                            tl.float32
                        )
                # selecting, not the weights' 0, keeps a NaN from pairs that may not attend
                if CALL.mask:
                    m_pair = load_mask(p, o_mask[:, None], k_at + o_j[None, :], CALL)
                    b_p = tl.where(m_pair, b_p, 0.0)
                    if OF_SCORES:
                        b_ds = tl.where(m_pair, b_ds, 0.0)
                if not UNMASKED:
                    if not CALL.joined or at_edge(i_k, all_start, all_stop):
                        m_seen = m_j[None, :] & in_window(o_i[:, None], o_j[None, :], lowest, highest, CALL)
                        b_p = tl.where(m_seen, b_p, 0.0)
                        if OF_SCORES:
                            b_ds = tl.where(m_seen, b_ds, 0.0)
                if OF_SCORES:
                    b_ds = b_p * b_ds
                    b_delta += tl.sum(b_ds, 1)
                if CALL.drop_below:
                    m_kept = keep_mask(p, o_draw[:, None], (k_at + o_j).to(tl.uint32)[None, :], CALL)
                    b_p = tl.where(m_kept, b_p * CALL.keep_factor, 0.0)
                    if OF_SCORES:
                        b_ds = tl.where(m_kept, b_ds * CALL.keep_factor, 0.0)
                if OF_SCORES:
                    b_v = load_rows(p.value + o_kdv, k_row + i_k, o_n, m_j, o_dv, HKV, DV, UNMASKED)
                    b_sum = add_product(b_sum, b_ds, b_v, CALL)
                if p.d_value is not None:
                    b_dv = load_rows(p.d_value + o_kdv, k_row + i_k, o_n, m_j, o_dv, HKV, DV, UNMASKED)
                    b_sum = tl.dot(b_p.to(b_dv.dtype), b_dv, b_sum, input_precision=CALL.precision)
    if p.d_sinks is not None:
        o_s = tl.arange(0, CALL.sink_block)
        o_sink = (i_h * CALL.sink_heads // CALL.heads) * CALL.sinks + o_s
        b_sinks = tl.load(p.sinks + o_sink, mask=o_s < CALL.sinks, other=float("-inf")).to(tl.float32) * LOG2E
        if CALL.bias:
            b_lse += b_rest
        b_shares = tl.exp2(b_sinks[None, :] - b_lse[:, None])
        b_dsinks = tl.load(p.d_sinks + o_sink, mask=o_s < CALL.sinks, other=0.0).to(tl.float32)
        b_delta += tl.sum(b_shares * b_dsinks[None, :], 1)
    if OF_SCORES or p.d_sinks is not None:
        b_out = load_rows(p.output + i_h * DV, q_row, o_m, m_i, o_dv, H, DV, False).to(tl.float32)
        # a row without keys has output 0, and tangent 0
        b_sum -= tl.where(b_out == 0, 0.0, b_delta[:, None] * b_out)
    m_out = m_i[:, None] & (o_dv[None, :] < DV)
    p_tile = p.d_output + (q_row * H + i_h) * DV + o_m[:, None] * (H * DV) + o_dv[None, :]
    tl.store(p_tile, b_sum.to(p.d_output.dtype.element_ty), mask=m_out)
    tl.store(p.d_lse + o_row, b_delta, mask=m_i)
