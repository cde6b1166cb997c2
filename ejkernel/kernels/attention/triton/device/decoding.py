"""Device code for few queries against many keys: programs attend to parts of the keys (split keys), then a merge.

The rows of a tile are all queries of all heads that share a key head, so that each key is read once.
"""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.device.forward import attend, initial_sums, normalize
from ejkernel.kernels.attention.triton.device.tiles import bounds, in_sight, load_ids, next_id, rows_of_pairs


@triton.jit
def attend_part(p, CALL: tl.constexpr):
    """Maximum, sum of weights and sum of weighted values over one part of the keys in sight, `[B, S, H, parts, …]`."""
    HKV: tl.constexpr = CALL.kv_heads
    D: tl.constexpr = CALL.key_dim
    DV: tl.constexpr = CALL.value_dim
    G: tl.constexpr = CALL.heads // HKV
    i_program = tl.program_id(0)
    i_kv = i_program % HKV
    i_part = i_program // HKV % CALL.parts
    i_b = i_program // (HKV * CALL.parts)
    lowest, highest = bounds(p, i_b, CALL)
    o_m = tl.arange(0, CALL.rows)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    m_i = o_m < p.S * G
    o_token = o_m // G
    i_h = i_kv * G + o_m % G
    n_k = i_program * 0 + p.L
    low, high, start, _, _ = in_sight(0, p.S - 1, n_k, lowest, highest, CALL.columns, CALL.left, CALL.right)
    n_each = tl.cdiv(tl.cdiv(tl.maximum(high - start, 0), CALL.columns), CALL.parts) * CALL.columns
    i_from = start + i_part * n_each
    i_to = tl.minimum(i_from + n_each, high)

    o_row = (i_b.to(tl.int64) * p.S + o_token) * CALL.heads + i_h
    p_tile = p.query + o_row[:, None] * D + o_d[None, :]
    b_q = tl.load(p_tile, mask=m_i[:, None] & (o_d[None, :] < D), other=0.0)
    pairs = rows_of_pairs(i_b, i_h, o_token, p, CALL)
    edges = (low, high, lowest, highest, high, low)
    sums = initial_sums(CALL)
    p_k = p.key + i_kv * D
    p_v = p.value + i_kv * DV
    k_row = i_b.to(tl.int64) * p.L
    if CALL.ids:
        b_top, b_total, b_sum = sums
        b_ids = load_ids(p.segment_ids, i_b.to(tl.int64) * p.S, o_token, m_i)
        i_id, n_left = next_id(b_ids, m_i, -1)
        while n_left > 0:
            m_own = b_ids == i_id
            b_own = tl.where(m_own[:, None], b_q, 0.0)
            own = attend(
                sums, b_own, p_k, p_v, (i_from, i_to), o_token, pairs, k_row, i_b * 0, edges, i_id, p,
                False, False, True, CALL,
            )  # fmt: skip
            b_top = tl.where(m_own, own[0], b_top)
            b_total = tl.where(m_own, own[1], b_total)
            b_sum = tl.where(m_own[:, None], own[2], b_sum)
            i_id, n_left = next_id(b_ids, m_i, i_id)
    else:
        b_top, b_total, b_sum = attend(
            sums, b_q, p_k, p_v, (i_from, i_to), o_token, pairs, k_row, i_b * 0, edges, 0, p, False, False, True, CALL
        )
    o_out = o_row * CALL.parts + i_part
    tl.store(p.part_sum + o_out[:, None] * DV + o_dv[None, :], b_sum, mask=m_i[:, None] & (o_dv[None, :] < DV))
    tl.store(p.part_top + o_out, b_top, mask=m_i)
    tl.store(p.part_total + o_out, b_total, mask=m_i)


@triton.jit
def merge_parts(p, CALL: tl.constexpr):
    """Output and log-sum-exp of one query of one head, from the sums over the parts of the keys."""
    H: tl.constexpr = CALL.heads
    DV: tl.constexpr = CALL.value_dim
    i_row = tl.program_id(0).to(tl.int64)
    i_h = (i_row % H).to(tl.int32)
    i_token = i_row // H % p.S
    i_b = i_row // H // p.S
    o_p = tl.arange(0, CALL.part_block)
    o_dv = tl.arange(0, CALL.value_block)
    m_p = o_p < CALL.parts
    b_tops = tl.load(p.part_top + i_row * CALL.parts + o_p, mask=m_p, other=float("-inf"))
    b_totals = tl.load(p.part_total + i_row * CALL.parts + o_p, mask=m_p, other=0.0)
    p_tile = p.part_sum + (i_row * CALL.parts + o_p[:, None]) * DV + o_dv[None, :]
    b_sums = tl.load(p_tile, mask=m_p[:, None] & (o_dv[None, :] < DV), other=0.0)
    b_top = tl.max(b_tops, 0)
    b_shrink = tl.exp2(b_tops - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_total = tl.sum(b_totals * b_shrink, 0)
    b_sum = tl.sum(b_sums * b_shrink[:, None], 0)
    o_one = tl.zeros([1], tl.float32)
    b_out, b_lse, b_rest = normalize(o_one + b_top, o_one + b_total, b_sum[None, :], p, i_h, CALL)
    o_d = i_row * DV + o_dv[None, :]
    tl.store(p.output + o_d, b_out.to(p.output.dtype.element_ty), mask=o_dv[None, :] < DV)
    o_stat = (i_b * H + i_h) * p.S + i_token + tl.arange(0, 1)
    tl.store(p.lse + o_stat, b_lse)
    tl.store(p.lse_rest + o_stat, b_rest)
