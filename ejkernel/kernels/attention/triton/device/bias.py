"""Device code of the bias gradient: a program sums, in a fixed order, all tiles that its block was added to.

Kept as a promise of the contract: a bias has a gradient of its own shape, whichever of its axes are broadcast.
"""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.device.backward import load_lse, weights
from ejkernel.kernels.attention.triton.device.tiles import (
    KEYS,
    QUERIES,
    ROWS,
    draw_rows,
    keep_mask,
    load_bias,
    load_ids,
    load_mask,
    load_rows,
    padded,
    pair_rows,
    zeros,
)


@triton.jit
def sight(p, i_b, o_i, BY_ROW: tl.constexpr):
    """The first and one past the last key that position lets each of the queries `o_i` see; both 0 for none."""
    if BY_ROW:
        o_bound = i_b.to(tl.int64) * p.S + o_i
    else:
        o_bound = o_i
    m_i = o_i < p.S
    return tl.load(p.start + o_bound, mask=m_i, other=0), tl.load(p.stop + o_bound, mask=m_i, other=0)


@triton.jit
def span(p, i_b, i_q, BM: tl.constexpr, BY_ROW: tl.constexpr):
    """The first and one past the last key that some query of a block sees."""
    b_start, b_stop = sight(p, i_b, i_q * BM + tl.arange(0, BM), BY_ROW)
    return tl.min(tl.where(b_start < b_stop, b_start, p.L), 0), tl.max(b_stop, 0)


@triton.jit
def scores_gradient(p, i_b, i_h, i_q, i_k, CALL: tl.constexpr):
    """The gradient of a tile's scores after the soft cap, which is the bias' gradient."""
    H: tl.constexpr = CALL.heads
    HKV: tl.constexpr = CALL.kv_heads
    D: tl.constexpr = CALL.key_dim
    DV: tl.constexpr = CALL.value_dim
    o_m = tl.arange(0, CALL.rows)
    o_n = tl.arange(0, CALL.columns)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    o_i = i_q * CALL.rows + o_m
    o_j = i_k * CALL.columns + o_n
    m_i = o_i < p.S
    m_j = o_j < p.L
    b_start, b_stop = sight(p, i_b, o_i, CALL.bounds_by_row)
    m_pair = (o_j[None, :] >= b_start[:, None]) & (o_j[None, :] < b_stop[:, None])
    q_row = i_b.to(tl.int64) * p.S + i_q * CALL.rows
    k_row = i_b.to(tl.int64) * p.L + i_k * CALL.columns
    i_kv = i_h // (H // HKV)
    b_q = load_rows(p.query + i_h * D, q_row, o_m, m_i, o_d, H, D, False)
    b_k = load_rows(p.key + i_kv * D, k_row, o_n, m_j, o_d, HKV, D, False)
    b_v = load_rows(p.value + i_kv * DV, k_row, o_n, m_j, o_dv, HKV, DV, False)
    b_do = load_rows(p.d_output + i_h * DV, q_row, o_m, m_i, o_dv, H, DV, False)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
    b_dp = tl.dot(b_do.to(b_v.dtype), tl.trans(b_v), input_precision=CALL.precision)
    o_row = (i_b * H + i_h).to(tl.int64) * p.S + o_i
    b_lse, b_rest = load_lse(p, o_row, m_i, True)
    b_delta = tl.load(p.delta + o_row, mask=m_i, other=0.0)
    if CALL.ids:
        b_ids = load_ids(p.segment_ids, i_b.to(tl.int64) * p.S, o_i, m_i)
        b_ids_kv = load_ids(p.segment_ids_kv, i_b.to(tl.int64) * p.L, o_j, m_j)
        m_pair &= (b_ids[:, None] == b_ids_kv[None, :]) & (b_ids[:, None] >= 0)
    if CALL.mask:
        o_mask = pair_rows(i_b, i_h, o_i, p, CALL.mask_heads, CALL.mask, CALL)
        m_pair &= load_mask(p, o_mask[:, None], o_j[None, :], CALL)
    if CALL.drop_below:
        m_kept = keep_mask(p, draw_rows(i_b, i_h, o_i, p, CALL)[:, None], o_j.to(tl.uint32)[None, :], CALL)
        b_dp = tl.where(m_kept, b_dp * CALL.keep_factor, 0.0)
    o_bias = pair_rows(i_b, i_h, o_i, p, CALL.bias_heads, CALL.bias, CALL)
    b_bias = load_bias(p, o_bias[:, None], o_j[None, :], CALL)
    b_p, _ = weights(b_s, b_bias, b_lse[:, None], b_rest[:, None], CALL)
    return tl.where(m_pair, b_p * (b_dp - b_delta[:, None]), 0.0)


@triton.jit
def bias_gradient(p, CALL: tl.constexpr):
    """One block of the gradient, from one part of its tiles. Query `i` sees keys from `start[i]` to `stop[i] - 1`."""
    H: tl.constexpr = CALL.heads
    BIAS: tl.constexpr = CALL.bias
    BIAS_HEADS: tl.constexpr = CALL.bias_heads
    ONE_PLACE: tl.constexpr = (KEYS & BIAS) > 0 and (QUERIES & BIAS) > 0 and not CALL.bounds_by_row
    BOUNDED: tl.constexpr = CALL.left or CALL.right or CALL.packed
    n_q = tl.cdiv(p.S, CALL.rows)
    n_k = tl.cdiv(p.L, CALL.columns)
    i_program = tl.program_id(0)
    i_part = i_program % CALL.parts
    i_rest = i_program // CALL.parts
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
        n_tiles = n_tiles * p.B
    o_m = tl.arange(0, CALL.rows)
    o_n = tl.arange(0, CALL.columns)
    if ONE_PLACE:
        # whether the block is in sight is known before the walk, which then never stops loading
        low, high = span(p, i_program * 0, i_q0, CALL.rows, False)
        n_tiles = tl.where((low < i_k0 * CALL.columns + CALL.columns) & (high > i_k0 * CALL.columns), n_tiles, 0)
    n_each = tl.cdiv(n_tiles, CALL.parts)
    b_sum = zeros(CALL.rows, CALL.columns)
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
        is_seen = True
        if BOUNDED and not ONE_PLACE:
            low, high = span(p, i_b, i_q, CALL.rows, CALL.bounds_by_row)
            is_seen = (low < i_k * CALL.columns + CALL.columns) & (high > i_k * CALL.columns)
        if is_seen:
            b_sum += scores_gradient(p, i_b, i_h, i_q, i_k, CALL)
    o_i = i_q0 * CALL.rows + o_m
    o_j = i_k0 * CALL.columns + o_n
    m_i = o_i < p.S
    m_j = o_j < padded(p.L)
    n_rows = i_program * 0 + 1
    if ROWS & BIAS:
        n_rows = n_rows * p.B
    # parts are whole gradients, one after the other
    o_row = ((i_part * n_rows + i_b0) * BIAS_HEADS + i_h0).to(tl.int64)
    if QUERIES & BIAS:
        o_row = o_row * p.S + o_i
    else:
        b_sum = tl.sum(b_sum, 0)[None, :]
        m_i = tl.full([1], True, tl.int1)
    if KEYS & BIAS:
        o_row = o_row * padded(p.L)
    else:
        b_sum = tl.sum(b_sum, 1)[:, None]
        o_j = tl.zeros([1], tl.int32)
        m_j = o_j == 0
    o_row += tl.zeros([1], tl.int64)
    p_tile = p.d_bias + o_row[:, None] + o_j[None, :]
    tl.store(p_tile, b_sum.to(p.d_bias.dtype.element_ty), mask=m_i[:, None] & m_j[None, :])
