"""Device code of the forward pass: a program walks the keys that its block of queries sees, with the online softmax."""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.device.tiles import (
    INNER,
    LOG2E,
    at_edge,
    capped,
    has_stage,
    in_window,
    keep_mask,
    load_bias,
    load_mask,
    load_rows,
    rows_of_pairs,
    stage_span,
    tokens_in_sight,
    visit_queries,
    zeros,
)


@triton.jit
def initial_sums(CALL: tl.constexpr):
    """The running maximum, sum of weights and sum of weighted values before the first key."""
    BM: tl.constexpr = CALL.rows
    return tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32), zeros(CALL.rows, CALL.value_block)


@triton.jit
def attend(
    sums, b_q, p_k, p_v, span, o_i, pairs, k_row, k_at, edges, i_id, p,
    UNMASKED: tl.constexpr, JOINED: tl.constexpr, GUARDED: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """`sums` (running maximum, sum of weights, sum of weighted values) with the keys from `span[0]` to `span[1]` added.

    `o_i` are the queries' positions and `pairs` their `rows_of_pairs`; `k_row` and `k_at` are where the sequence's keys
    begin, among those of all rows and in their row. `edges` are the keys that some query sees, the `bounds`, and the
    steps that all queries see. UNMASKED, all queries see the whole span; JOINED, the steps that `edges` says all see.
    GUARDED, values that a mask hides may be NaN. If there are ids, only keys that have `i_id` are added.
    """
    b_top, b_total, b_sum = sums
    i_from, i_to = span
    o_mask, o_bias, o_draw = pairs
    low, high, lowest, highest, all_start, all_stop = edges
    FACTOR: tl.constexpr = CALL.scale * LOG2E if CALL.scaled_late else 1.0
    o_n = tl.arange(0, CALL.columns)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    for i_k in range(i_from, i_to, CALL.columns):
        o_j = i_k + o_n
        m_j = tokens_in_sight(p.segment_ids_kv, k_row, o_j, low, high, i_id, UNMASKED, CALL)
        b_k = load_rows(p_k, k_row + i_k, o_n, m_j, o_d, CALL.kv_heads, CALL.key_dim, UNMASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
        b_s, _ = capped(b_s, CALL)
        if CALL.bias:
            b_s += load_bias(p, o_bias[:, None], k_at + o_j[None, :], CALL)
        if CALL.mask:
            m_pair = load_mask(p, o_mask[:, None], k_at + o_j[None, :], CALL)
            b_s = tl.where(m_pair, b_s, float("-inf"))
        if not UNMASKED:
            if not JOINED or at_edge(i_k, all_start, all_stop):
                m_seen = m_j[None, :] & in_window(o_i[:, None], o_j[None, :], lowest, highest, CALL)
                b_s = tl.where(m_seen, b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1) * FACTOR)
        b_base = b_new
        if CALL.mask or CALL.bias or not UNMASKED:
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * FACTOR - b_base[:, None])
        b_shrink = tl.exp2(b_top - b_base)
        b_top = b_new
        b_total = b_total * b_shrink + tl.sum(b_p, 1)
        if CALL.drop_below:
            b_p = tl.where(keep_mask(p, o_draw[:, None], (k_at + o_j).to(tl.uint32)[None, :], CALL), b_p, 0.0)
        b_v = load_rows(p_v, k_row + i_k, o_n, m_j, o_dv, CALL.kv_heads, CALL.value_dim, UNMASKED)
        if CALL.mask and GUARDED:
            # a value that none of the rows may attend to must not matter even if it is NaN, and 0 · NaN would let it
            b_v = tl.where(tl.max(m_pair.to(tl.int32), 0)[:, None] > 0, b_v, 0.0)
        b_sum = tl.dot(b_p.to(b_v.dtype), b_v, b_sum * b_shrink[:, None], input_precision=CALL.precision)
    return b_top, b_total, b_sum


@triton.jit
def normalize(b_top, b_total, b_sum, p, i_h, CALL: tl.constexpr):
    """The output and the log-sum-exp as the sum of two numbers, after the last keys: the sinks join in.

    With a bias the two are the maximum and the logarithm of the sum relative to it, as one number would lose the
    latter beside a large maximum; else the log-sum-exp and 0. In a row with nothing to sum they are 0 and -inf.
    """
    b_dead = b_total == 0
    if CALL.sinks:
        o_s = tl.arange(0, CALL.sink_block)
        p_row = p.sinks + (i_h * CALL.sink_heads // CALL.heads) * CALL.sinks + o_s
        b_sinks = tl.load(p_row, mask=o_s < CALL.sinks, other=float("-inf")).to(tl.float32) * LOG2E
        b_new = tl.maximum(b_top, tl.max(b_sinks, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = tl.exp2(b_top - b_base)
        b_total = b_total * b_shrink + tl.sum(tl.exp2(b_sinks[None, :] - b_base[:, None]), 1)
        b_sum = b_sum * b_shrink[:, None]
        b_top = b_new
    b_out = tl.where(b_dead[:, None], 0.0, b_sum * (CALL.keep_factor / tl.where(b_dead, 1.0, b_total))[:, None])
    b_empty = b_total == 0
    b_log = tl.log2(tl.where(b_empty, 1.0, b_total))
    if not CALL.bias:
        b_top += b_log
        b_log = tl.zeros_like(b_log)
    return b_out, tl.where(b_empty, 0.0, b_top), tl.where(b_empty, float("-inf"), b_log)


@triton.jit
def forward(p, CALL: tl.constexpr):
    """Output and log-sum-exp of one block of queries of one head."""
    visit_queries(p, forward_rows, CALL)


@triton.jit
def forward_rows(p, i_h, place, m_i, sight, i_id, CALL: tl.constexpr):
    """`forward` of the rows `m_i` of a block, which have the id `i_id` if there are ids."""
    H: tl.constexpr = CALL.heads
    D: tl.constexpr = CALL.key_dim
    DV: tl.constexpr = CALL.value_dim
    i_b, i_first, q_at, k_at, lowest, highest = place
    low, high, start, all_start, all_stop = sight
    o_m = tl.arange(0, CALL.rows)
    o_d = tl.arange(0, CALL.key_block)
    o_dv = tl.arange(0, CALL.value_block)
    o_token = q_at + i_first + o_m

    q_row = i_b.to(tl.int64) * p.S + q_at + i_first
    k_row = i_b.to(tl.int64) * p.L + k_at
    p_k = p.key + i_h // (H // CALL.kv_heads) * D
    p_v = p.value + i_h // (H // CALL.kv_heads) * DV
    b_q = load_rows(p.query + i_h * D, q_row, o_m, m_i, o_d, H, D, False)
    o_i = i_first + o_m
    pairs = rows_of_pairs(i_b, i_h, o_token, p, CALL)
    edges = (low, high, lowest, highest, all_start, all_stop)
    sums = initial_sums(CALL)
    for STAGE in tl.static_range(3):
        if has_stage(STAGE, CALL.left or CALL.ids, CALL.joined):
            span = stage_span(STAGE, start, all_start, all_stop, high, CALL.joined)
            sums = attend(
                sums, b_q, p_k, p_v, span, o_i, pairs, k_row, k_at, edges, i_id, p,
                STAGE == INNER, CALL.joined, False, CALL,
            )  # fmt: skip
    b_out, b_lse, b_rest = normalize(*sums, p, i_h, CALL)
    m_out = m_i[:, None] & (o_dv[None, :] < DV)
    p_tile = p.output + (q_row * H + i_h) * DV + o_m[:, None] * (H * DV) + o_dv[None, :]
    tl.store(p_tile, b_out.to(p.output.dtype.element_ty), mask=m_out)
    o_row = (i_b * H + i_h).to(tl.int64) * p.S + o_token
    tl.store(p.lse + o_row, b_lse, mask=m_i)
    tl.store(p.lse_rest + o_row, b_rest, mask=m_i)
