"""Device code of the backward pass: blocks of queries walk the keys for their gradient, blocks of keys the queries.

Each gradient is summed by the one program that owns it, in a fixed order: no atomics, and equal bits every time.
"""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.device.tiles import (
    INNER,
    LOG2E,
    at_edge,
    block_of,
    capped,
    draw_rows,
    has_stage,
    in_sight,
    in_window,
    keep_mask,
    load_bias,
    load_ids,
    load_mask,
    load_rows,
    locate,
    narrowed_to_id,
    next_id,
    pair_rows,
    rows_of_pairs,
    stage_span,
    tokens_in_sight,
    visit_queries,
    zeros,
)

# Columns of a row of `p.terms`: log-sum-exp and delta, each as three numbers that add up to it.
TERMS = tl.constexpr(16)


@triton.jit
def load_lse(p, o_row, m_row, APART: tl.constexpr):
    """The log-sum-exp; APART, as two numbers to subtract one after the other, lest a large maximum hide the second."""
    b_lse = tl.load(p.lse + o_row, mask=m_row, other=0.0)
    b_rest = b_lse
    if APART:
        b_rest = tl.load(p.lse_rest + o_row, mask=m_row, other=0.0)
        b_rest = tl.where(b_rest == float("-inf"), 0.0, b_rest)
    return b_lse, b_rest


@triton.jit
def weights(b_s, b_bias, b_lse, b_rest, CALL: tl.constexpr):
    """The weights of a tile either way around, before dropout and masks, and the soft cap's slope."""
    b_s, b_slope = capped(b_s, CALL)
    if CALL.bias:
        b_s = b_s + b_bias - b_lse - b_rest
    elif CALL.scaled_late:
        b_s = b_s * (CALL.scale * LOG2E) - b_lse
    else:
        b_s = b_s - b_lse
    # no weight is above 1, however large a score was rounded another way than in the forward pass
    return tl.exp2(tl.minimum(b_s, 0.0, propagate_nan=tl.PropagateNan.ALL)), b_slope


@triton.jit
def load_d_lse(p, o_row, o_token, m_row, CALL: tl.constexpr):
    """The log-sum-exp's cotangent, 0 for padding."""
    if CALL.packed:
        m_row = m_row & (o_token < tl.load(p.cu_seqlens + p.N))
    return tl.load(p.d_lse + o_row, mask=m_row, other=0.0)


@triton.jit
def add_product(b_sum, b_ds, b_rows, CALL: tl.constexpr):
    """`b_sum` and the product of the scores' gradients with keys or queries."""
    if b_rows.dtype == tl.float16:
        # these gradients may be beyond float16's range where their products are not
        b_scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(b_ds)), 1e-30))))
        return b_sum + b_scale * tl.dot((b_ds / b_scale).to(tl.float16), b_rows)
    else:
        return tl.dot(b_ds.to(b_rows.dtype), b_rows, b_sum, input_precision=CALL.precision)


@triton.jit
def terms(b_lse, b_delta, dtype: tl.constexpr):
    """Rows of `p.terms`: products of queries and keys that begin at their products with -1 have both subtracted."""
    o_c = tl.arange(0, TERMS)[None, :]
    b = tl.where(o_c < 3, b_lse[:, None], b_delta[:, None])
    b_first = b.to(dtype)
    b_rest = b - b_first.to(tl.float32)
    b_second = b_rest.to(dtype)
    b_third = (b_rest - b_second.to(tl.float32)).to(dtype)
    b_term = tl.where(o_c % 3 == 0, b_first, tl.where(o_c % 3 == 1, b_second, b_third))
    return tl.where(o_c < 6, b_term, 0.0)


@triton.jit
def minus_ones(m_c, dtype: tl.constexpr, CALL: tl.constexpr):
    """A tile of -1 in the columns `m_c`, else 0, whose product with `p.terms` is the sum of these columns, negated."""
    BN: tl.constexpr = CALL.columns
    return (tl.where(m_c, -1.0, 0.0)[None, :] + tl.zeros([BN, 1], tl.float32)).to(dtype)


@triton.jit
def row_deltas(p, CALL: tl.constexpr):
    """Delta, the row sums of output times its cotangent, less the log-sum-exp's cotangent, of one block of queries.

    A pass of its own: the walks have several loads to wait for one after the other, and would take longer.
    """
    H: tl.constexpr = CALL.heads
    DV: tl.constexpr = CALL.value_dim
    i_program = tl.program_id(0)
    i_h = i_program % H
    o_m = tl.arange(0, CALL.rows)
    o_dv = tl.arange(0, CALL.value_block)
    n_blocks = tl.cdiv(p.S, CALL.rows)
    i_b = i_program // H // n_blocks
    i_first = i_program // H % n_blocks * CALL.rows
    m_i = i_first + o_m < p.S
    q_row = i_b.to(tl.int64) * p.S + i_first
    b_out = load_rows(p.output + i_h * DV, q_row, o_m, m_i, o_dv, H, DV, False).to(tl.float32)
    b_do = load_rows(p.d_output + i_h * DV, q_row, o_m, m_i, o_dv, H, DV, False).to(tl.float32)
    # a row without keys has output 0 and takes no gradient, not even a NaN
    b_delta = tl.sum(tl.where(b_out == 0, 0.0, b_out * b_do), 1)
    o_row = (i_b * H + i_h).to(tl.int64) * p.S + i_first + o_m
    if CALL.has_d_lse:
        b_delta -= load_d_lse(p, o_row, i_first + o_m, m_i, CALL)
    tl.store(p.delta + o_row, b_delta, mask=m_i)
    if CALL.folded:
        b_lse = tl.load(p.lse + o_row, mask=m_i, other=0.0)
        b_terms = terms(b_lse / (CALL.scale * LOG2E) if CALL.scaled_late else b_lse, b_delta, p.terms.dtype.element_ty)
        tl.store(p.terms + o_row[:, None] * TERMS + tl.arange(0, TERMS)[None, :], b_terms, mask=m_i[:, None])


@triton.jit
def query_gradient(p, CALL: tl.constexpr):
    """The gradient of one block of queries of one head.

    With sinks also the delta of its rows once more, from weights: the output was rounded, and in a sink's gradient, a
    sum over all rows, the rounding would be much of what is left.
    """
    visit_queries(p, query_gradient_rows, CALL)


@triton.jit
def query_gradient_rows(p, i_h, place, m_i, sight, i_id, CALL: tl.constexpr):
    """`query_gradient` of the rows `m_i` of a block, which have the id `i_id` if there are ids."""
    H: tl.constexpr = CALL.heads
    HKV: tl.constexpr = CALL.kv_heads
    D: tl.constexpr = CALL.key_dim
    DV: tl.constexpr = CALL.value_dim
    BM: tl.constexpr = CALL.rows
    i_b, i_first, q_at, k_at, lowest, highest = place
    low, high, start, all_start, all_stop = sight
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, CALL.columns)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    o_token = q_at + i_first + o_m
    q_row = i_b.to(tl.int64) * p.S + q_at + i_first
    k_row = i_b.to(tl.int64) * p.L + k_at
    p_k = p.key + i_h // (H // HKV) * D
    p_v = p.value + i_h // (H // HKV) * DV
    b_q = load_rows(p.query + i_h * D, q_row, o_m, m_i, o_d, H, D, False)
    b_do = load_rows(p.d_output + i_h * DV, q_row, o_m, m_i, o_dv, H, DV, False).to(b_q.dtype)
    o_row = (i_b * H + i_h).to(tl.int64) * p.S + o_token
    b_lse, b_rest = load_lse(p, o_row, m_i, CALL.bias > 0)
    b_delta = tl.load(p.delta + o_row, mask=m_i, other=0.0)
    o_mask, o_bias, o_draw = rows_of_pairs(i_b, i_h, o_token, p, CALL)

    b_dq = zeros(CALL.rows, CALL.key_block)
    b_sink_delta = tl.zeros([BM], tl.float32)
    o_i = i_first + o_m
    for STAGE in tl.static_range(3):
        if has_stage(STAGE, CALL.left or CALL.ids, CALL.joined):
            i_from, i_to = stage_span(STAGE, start, all_start, all_stop, high, CALL.joined)
            for i_k in range(i_from, i_to, CALL.columns):
                UNMASKED: tl.constexpr = STAGE == INNER
                o_j = i_k + o_n
                m_j = tokens_in_sight(p.segment_ids_kv, k_row, o_j, low, high, i_id, UNMASKED, CALL)
                b_k = load_rows(p_k, k_row + i_k, o_n, m_j, o_d, HKV, D, UNMASKED)
                b_v = load_rows(p_v, k_row + i_k, o_n, m_j, o_dv, HKV, DV, UNMASKED)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=CALL.precision)
                m_there = m_i[:, None] & m_j[None, :]
                b_bias = 0.0
                if CALL.bias:
                    b_bias = load_bias(p, o_bias[:, None], k_at + o_j[None, :], CALL)
                if CALL.drop_below:
                    m_kept = keep_mask(p, o_draw[:, None], (k_at + o_j).to(tl.uint32)[None, :], CALL)
                    b_dp = tl.where(m_kept, b_dp * CALL.keep_factor, 0.0)
                b_p, b_slope = weights(b_s, b_bias, b_lse[:, None], b_rest[:, None], CALL)
                b_ds = (b_dp - b_delta[:, None]) * b_slope
                # selecting, not the weights' 0, keeps a NaN from pairs that may not attend
                if CALL.mask:
                    m_pair = load_mask(p, o_mask[:, None], k_at + o_j[None, :], CALL)
                    b_p = tl.where(m_pair, b_p, 0.0)
                    b_ds = tl.where(m_pair, b_ds, 0.0)
                if not UNMASKED:
                    if not CALL.joined or at_edge(i_k, all_start, all_stop):
                        m_seen = m_there & in_window(o_i[:, None], o_j[None, :], lowest, highest, CALL)
                        b_p = tl.where(m_seen, b_p, 0.0)
                        b_ds = tl.where(m_seen, b_ds, 0.0)
                if CALL.sinks:
                    b_sink_delta += tl.sum(tl.where(b_p == 0, 0.0, b_p * b_dp), 1)
                b_dq = add_product(b_dq, b_p * b_ds, b_k, CALL)
    if CALL.sinks:
        if CALL.has_d_lse:
            b_sink_delta -= load_d_lse(p, o_row, o_token, m_i, CALL)
        tl.store(p.sink_delta + o_row, b_sink_delta, mask=m_i)
    p_tile = p.d_query + (q_row * H + i_h) * D + o_m[:, None] * (H * D) + o_d[None, :]
    tl.store(p_tile, (b_dq * CALL.scale).to(p.d_query.dtype.element_ty), mask=m_i[:, None] & (o_d[None, :] < D))


@triton.jit
def key_gradients(p, CALL: tl.constexpr):
    """The gradients of one block of keys, of values, or of both, from one part of the heads that share them.

    Tiles of pairs are [keys, queries] here.
    """
    HKV: tl.constexpr = CALL.kv_heads
    i_program = tl.program_id(0)
    i_part = i_program % CALL.parts
    i_kv = i_program // CALL.parts % HKV
    i_block = block_of(i_program, CALL.parts * HKV, False)
    i_b, i_first, q_at, n_q, k_at, n_k, lowest, highest = locate(i_block, p, CALL.columns, True, CALL)
    place = (i_b, i_first, q_at, k_at, lowest, highest)
    if i_first >= n_k:
        return
    o_n = tl.arange(0, CALL.columns)
    m_j = i_first + o_n < n_k
    i_last = tl.minimum(i_first + CALL.columns, n_k) - 1
    # the queries that see a key are found as the keys that a query sees, the other way around
    sight = in_sight(i_first, i_last, n_q, -highest, -lowest, CALL.rows, CALL.right, CALL.left)
    if CALL.ids:
        b_ids = load_ids(p.segment_ids_kv, i_b.to(tl.int64) * p.L + i_first, o_n, m_j)
        i_id, n_left = next_id(b_ids, m_j, -2)
        while n_left > 0:
            own = narrowed_to_id(sight, i_b, i_id, n_q, p, CALL.rows)
            key_gradient_rows(p, i_part, i_kv, place, m_j & (b_ids == i_id), own, i_id, CALL)
            i_id, n_left = next_id(b_ids, m_j, i_id)
    else:
        key_gradient_rows(p, i_part, i_kv, place, m_j, sight, 0, CALL)


@triton.jit
def key_gradient_rows(p, i_part, i_kv, place, m_j, sight, i_id, CALL: tl.constexpr):
    """`key_gradients` of the keys `m_j` of a block, which have the id `i_id` if there are ids."""
    H: tl.constexpr = CALL.heads
    HKV: tl.constexpr = CALL.kv_heads
    D: tl.constexpr = CALL.key_dim
    DV: tl.constexpr = CALL.value_dim
    G: tl.constexpr = H // HKV // CALL.parts
    i_b, i_first, q_at, k_at, lowest, highest = place
    low, high, start, all_start, all_stop = sight
    o_m = tl.arange(0, CALL.rows)
    o_n = tl.arange(0, CALL.columns)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    o_j = i_first + o_n
    q_row = i_b.to(tl.int64) * p.S + q_at
    k_row = i_b.to(tl.int64) * p.L + k_at + i_first
    b_k = load_rows(p.key + i_kv * D, k_row, o_n, m_j, o_d, HKV, D, False)
    b_v = load_rows(p.value + i_kv * DV, k_row, o_n, m_j, o_dv, HKV, DV, False)
    o_c = tl.arange(0, TERMS)
    subtract_lse = minus_ones(o_c < 3, b_k.dtype, CALL)
    subtract_delta = minus_ones((o_c >= 3) & (o_c < 6), b_k.dtype, CALL)
    b_dk = zeros(CALL.columns, CALL.key_block)
    b_dv = zeros(CALL.columns, CALL.value_block)
    for i_g in range(G):
        i_h = (i_kv * CALL.parts + i_part) * G + i_g
        stats = (i_b * H + i_h).to(tl.int64) * p.S + q_at
        for STAGE in tl.static_range(3):
            if has_stage(STAGE, CALL.right or CALL.ids, CALL.joined):
                i_from, i_to = stage_span(STAGE, start, all_start, all_stop, high, CALL.joined)
                for i_q in range(i_from, i_to, CALL.rows):
                    UNMASKED: tl.constexpr = STAGE == INNER
                    o_i = i_q + o_m
                    m_i = tokens_in_sight(p.segment_ids, q_row, o_i, low, high, i_id, UNMASKED, CALL)
                    b_q = load_rows(p.query + i_h * D, q_row + i_q, o_m, m_i, o_d, H, D, UNMASKED)
                    b_do = load_rows(p.d_output + i_h * DV, q_row + i_q, o_m, m_i, o_dv, H, DV, UNMASKED)
                    b_do = b_do.to(b_v.dtype)
                    if CALL.folded:
                        b_terms = load_rows(p.terms, stats + i_q, o_m, m_i, o_c, 1, TERMS, UNMASKED)
                        b_terms = tl.trans(b_terms)
                        b_delta = 0.0
                    else:
                        b_delta = tl.load(p.delta + stats + o_i, mask=m_i, other=0.0)[None, :]
                    if CALL.folded and CALL.scaled_late:
                        b_s = tl.dot(b_k, tl.trans(b_q), tl.dot(subtract_lse, b_terms))
                        b_lse = 0.0
                        b_rest = 0.0
                    else:
                        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=CALL.precision)
                        if CALL.folded and not CALL.bias:
                            b_lse = -tl.dot(subtract_lse, b_terms)
                            b_rest = 0.0
                        else:
                            b_lse, b_rest = load_lse(p, stats + o_i, m_i, CALL.bias > 0)
                            b_lse = b_lse[None, :]
                            b_rest = b_rest[None, :]
                    if CALL.folded:
                        b_dp = tl.dot(b_v, tl.trans(b_do), tl.dot(subtract_delta, b_terms))
                    else:
                        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=CALL.precision)
                    m_there = m_j[:, None] & m_i[None, :]
                    b_bias = 0.0
                    if CALL.bias:
                        o_bias = pair_rows(i_b, i_h, q_at + o_i, p, CALL.bias_heads, CALL.bias, CALL)
                        b_bias = load_bias(p, o_bias[None, :], k_at + o_j[:, None], CALL)
                    if CALL.drop_below:
                        o_draw = draw_rows(i_b, i_h, q_at + o_i, p, CALL)[None, :]
                        m_kept = keep_mask(p, o_draw, (k_at + o_j).to(tl.uint32)[:, None], CALL)
                        b_dp = tl.where(m_kept, b_dp * CALL.keep_factor, 0.0)
                    b_p, b_slope = weights(b_s, b_bias, b_lse, b_rest, CALL)
                    b_ds = (b_dp - b_delta) * b_slope
                    # selecting, not the weights' 0, keeps a NaN from pairs that may not attend
                    if CALL.mask:
                        o_mask = pair_rows(i_b, i_h, q_at + o_i, p, CALL.mask_heads, CALL.mask, CALL)
                        m_pair = load_mask(p, o_mask[None, :], k_at + o_j[:, None], CALL)
                        b_p = tl.where(m_pair, b_p, 0.0)
                        b_ds = tl.where(m_pair, b_ds, 0.0)
                    if not UNMASKED:
                        if not CALL.joined or at_edge(i_q, all_start, all_stop):
                            m_seen = m_there & in_window(o_i[None, :], o_j[:, None], lowest, highest, CALL)
                            b_p = tl.where(m_seen, b_p, 0.0)
                            b_ds = tl.where(m_seen, b_ds, 0.0)
                    b_kept = b_p
                    if CALL.drop_below:
                        b_kept = tl.where(m_kept, b_p * CALL.keep_factor, 0.0)
                    if CALL.of_value:
                        b_dv = tl.dot(b_kept.to(b_do.dtype), b_do, b_dv, input_precision=CALL.precision)
                    if CALL.of_key:
                        b_dk = add_product(b_dk, b_p * b_ds, b_q, CALL)
    k_row = (i_part.to(tl.int64) * p.B * p.L + k_row) * HKV + i_kv
    if CALL.of_key:
        p_tile = p.d_key + k_row * D + o_n[:, None] * (HKV * D) + o_d[None, :]
        tl.store(p_tile, (b_dk * CALL.scale).to(p.d_key.dtype.element_ty), mask=m_j[:, None] & (o_d[None, :] < D))
    if CALL.of_value:
        p_tile = p.d_value + k_row * DV + o_n[:, None] * (HKV * DV) + o_dv[None, :]
        tl.store(p_tile, b_dv.to(p.d_value.dtype.element_ty), mask=m_j[:, None] & (o_dv[None, :] < DV))
