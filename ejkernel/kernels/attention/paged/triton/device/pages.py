"""Device code of attention over pages: a tile of queries of one sequence walks the sequence's keys, page by page.

The online softmax runs over ranges of a fixed number of keys, counted from the sequence's start, whose sums are merged
one after the other: in the same program, or by `join` where each range has a program of its own (split keys). So both
give the same bits.
"""

import triton
import triton.language as tl

from ejkernel.kernels.attention.triton.device.tiles import LOG2E, tanh


@triton.jit
def initial_sums(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Running maximum, sum of weights, sum of values, and whether a key was bad, before the first key."""
    b_top, b_total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    return b_top, b_total, tl.zeros([ROWS, DIMS], tl.float32), tl.zeros([ROWS], tl.int32)


@triton.jit
def merged(sums, b_top, b_total, b_sum, b_bad):
    """`sums`, see `initial_sums`, with those of one more range of keys merged in."""
    a_top, a_total, a_sum, a_bad = sums
    b_new = tl.maximum(a_top, b_top)
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    a_shrink = tl.exp2(a_top - b_base)
    b_shrink = tl.exp2(b_top - b_base)
    total = a_total * a_shrink + b_total * b_shrink
    return b_new, total, a_sum * a_shrink[:, None] + b_sum * b_shrink[:, None], tl.maximum(a_bad, b_bad)


@triton.jit
def finished(sums, p, o_h, CALL: tl.constexpr):
    """The output of rows that belong to the heads `o_h`, after the last keys: the sinks join in."""
    b_top, b_total, b_sum, b_bad = sums
    if CALL.sinks:
        o_s = tl.arange(0, CALL.sink_block)
        o_row = o_h * CALL.sink_heads // CALL.heads * CALL.sinks
        m_s = (o_s < CALL.sinks)[None, :] & (o_h < CALL.heads)[:, None]
        b_sinks = tl.load(p.sinks + o_row[:, None] + o_s[None, :], mask=m_s, other=float("-inf")).to(tl.float32) * LOG2E
        b_new = tl.maximum(b_top, tl.max(b_sinks, 1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = tl.exp2(b_top - b_base)
        b_total = b_total * b_shrink + tl.sum(tl.exp2(b_sinks - b_base[:, None]), 1)
        b_sum = b_sum * b_shrink[:, None]
    b_out = tl.where((b_total == 0)[:, None], 0.0, b_sum / tl.where(b_total == 0, 1.0, b_total)[:, None])
    return tl.where(b_bad[:, None] > 0, float("nan"), b_out)


@triton.jit
def load_page_rows(pages, o_row, m_row, i_kv, FIRST: tl.constexpr, DIMS: tl.constexpr, DIM: tl.constexpr,
                   HKV: tl.constexpr, dtype):  # fmt: skip
    """`DIMS` dims, from `FIRST` on, of the rows `o_row` of all pages in the key head `i_kv`."""
    o_d = FIRST + tl.arange(0, DIMS)
    p_tile = pages + (o_row[:, None] * HKV + i_kv) * DIM + o_d[None, :]
    m_tile = m_row[:, None]
    if FIRST + DIMS > DIM:
        m_tile = m_tile & (o_d[None, :] < DIM)
    return tl.load(p_tile, mask=m_tile, other=0.0).to(dtype)


@triton.jit
def rows_of_keys(p, n, o_j, i_k, CALL: tl.constexpr):
    """The rows of keys `o_j`, from `i_k` on, of sequence `n` among those of all pages; and whether they have a page."""
    if CALL.page % CALL.columns == 0:
        # a block of keys lies in one page
        i_place = i_k // CALL.page
        i_page = tl.load(p.table + n * p.M + i_place, mask=i_place < p.M, other=-1)
        m_page = (o_j >= 0) & (i_page >= 0) & (i_page < p.P)
        o_row = i_page.to(tl.int64) * CALL.page + i_k % CALL.page + tl.arange(0, CALL.columns)
    else:
        i_place = o_j // CALL.page
        i_page = tl.load(p.table + n * p.M + i_place, mask=i_place < p.M, other=-1)
        m_page = (i_page >= 0) & (i_page < p.P)
        o_row = i_page.to(tl.int64) * CALL.page + o_j % CALL.page
    return o_row, m_page


@triton.jit
def block_sums(sums, b_q, b_q_rest, p, n, i_kv, i_k, end, o_at, EDGE: tl.constexpr, CALL: tl.constexpr):
    """`sums` with the block of keys from `i_k` on added, for rows at `o_at` of sequence `n`, which has `end` tokens.

    At an EDGE, some rows do not see some of the keys. Elsewhere values go from their pages to the product as they are.
    """
    b_top, b_total, b_sum, b_bad = sums
    HKV: tl.constexpr = CALL.kv_heads
    o_j = i_k + tl.arange(0, CALL.columns)
    o_row, m_page = rows_of_keys(p, n, o_j, i_k, CALL)
    m_j = m_page
    if EDGE:
        m_j = m_j & (o_j < end)
    b_k = load_page_rows(p.key_pages, o_row, m_j, i_kv, 0, CALL.key_block, CALL.key_dim, HKV, b_q.dtype)
    if CALL.latent and CALL.value_block == CALL.key_block and CALL.value_block == CALL.value_dim:
        b_v = b_k
    elif CALL.latent:
        b_v = load_page_rows(p.key_pages, o_row, m_j, i_kv, 0, CALL.value_block, CALL.key_dim, HKV, b_q.dtype)
        if CALL.value_block != CALL.value_dim:
            b_v = tl.where((tl.arange(0, CALL.value_block) < CALL.value_dim)[None, :], b_v, 0.0)
    else:
        b_v = load_page_rows(p.value_pages, o_row, m_j, i_kv, 0, CALL.value_block, CALL.value_dim, HKV, b_q.dtype)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
    if CALL.rest_block:
        b_k_rest = load_page_rows(
            p.key_pages, o_row, m_j, i_kv, CALL.key_block, CALL.rest_block, CALL.key_dim, HKV, b_q.dtype
        )
        b_s = tl.dot(b_q_rest, tl.trans(b_k_rest), b_s, input_precision=CALL.precision)
    if CALL.cap > 0:
        b_s = tanh(b_s * (CALL.scale / CALL.cap), False) * (CALL.cap * LOG2E)
    else:
        b_s = b_s * (CALL.scale * LOG2E)
    m_known = m_page
    if EDGE:
        m_seen = (o_j[None, :] <= o_at[:, None]) & (o_j < end)[None, :]
        if CALL.windowed:
            m_seen = m_seen & (o_j[None, :] >= o_at[:, None] - p.left)
        b_s = tl.where(m_seen, b_s, float("-inf"))
        # values that a row does not see must not matter even if they are NaN: 0 · NaN is NaN
        m_finite = tl.abs(b_v.to(tl.float32)) < float("inf")
        m_known = m_known & (tl.min(m_finite.to(tl.int32), 1) > 0)
        b_v = tl.where(m_finite, b_v, 0.0)
        b_bad = tl.maximum(b_bad, tl.max((m_seen & ~m_known[None, :]).to(tl.int32), 1))
    else:
        b_bad = tl.maximum(b_bad, tl.max((~m_known).to(tl.int32), 0))
    b_new = tl.maximum(b_top, tl.max(b_s, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_shrink = tl.exp2(b_top - b_base)
    b_total = b_total * b_shrink + tl.sum(b_p, 1)
    b_sum = tl.dot(b_p.to(b_v.dtype), b_v, b_sum * b_shrink[:, None], input_precision=CALL.precision)
    return b_new, b_total, b_sum, b_bad


@triton.jit
def sums_of_range(b_q, b_q_rest, p, n, i_kv, i_range, low, high, end, begin, o_at, CALL: tl.constexpr):
    """The sums over one range of the keys of sequence `n`, which has `end` tokens, for rows at `o_at`.

    Rows see keys from `low` to `high`. Blocks of keys begin at multiples of their size, whatever the window.
    """
    BN: tl.constexpr = CALL.columns
    i_from = tl.maximum(i_range * CALL.range, low // BN * BN)
    i_to = tl.minimum(i_range * CALL.range + CALL.range, high)
    sums = initial_sums(CALL.rows, CALL.value_block)
    # all rows see the blocks from `i_inner` to `i_edge`
    i_inner = i_from
    if CALL.windowed:
        i_inner = tl.minimum(tl.maximum(i_from, tl.cdiv(begin + CALL.size - p.left, BN) * BN), i_to)
        for i_k in tl.range(i_from, i_inner, BN, num_stages=1):
            sums = block_sums(sums, b_q, b_q_rest, p, n, i_kv, i_k, end, o_at, True, CALL)
    i_edge = tl.maximum(tl.minimum(begin // BN * BN, i_to), i_inner)
    for i_k in range(i_inner, i_edge, BN):
        sums = block_sums(sums, b_q, b_q_rest, p, n, i_kv, i_k, end, o_at, False, CALL)
    for i_k in tl.range(i_edge, i_to, BN, num_stages=1):
        sums = block_sums(sums, b_q, b_q_rest, p, n, i_kv, i_k, end, o_at, True, CALL)
    return sums


@triton.jit
def attend(p, CALL: tl.constexpr):
    """The output of a tile of queries of the heads that share a key head, or the sums over one range of its keys."""
    HKV: tl.constexpr = CALL.kv_heads
    G: tl.constexpr = CALL.heads // HKV
    i_program = tl.program_id(0)
    i_part = i_program % CALL.parts
    i_rows = i_program // CALL.parts % CALL.row_blocks
    i_kv = i_program // (CALL.parts * CALL.row_blocks) % HKV
    i_tile = i_program // (CALL.parts * CALL.row_blocks * HKV)
    n = tl.load(p.tile_sequence + i_tile)
    if n < 0:
        return
    begin = tl.load(p.tile_begin + i_tile)
    first = tl.load(p.first + n)
    end = tl.load(p.ends + n)
    # keys past the table have no page, and queries that see them get NaN anyway
    high = tl.minimum(begin + CALL.size, p.M * CALL.page)
    low = high * 0
    if CALL.windowed:
        low = tl.maximum(begin - p.left, 0)
    i_first = low // CALL.range
    o_m = tl.arange(0, CALL.rows)
    o_q = o_m // CALL.group_block
    o_g = i_rows * CALL.rows + o_m % CALL.group_block
    o_h = i_kv * G + o_g
    o_at = begin + o_q
    o_token = tl.load(p.cu_seqlens + n) + o_at - first
    m_row = (o_g < G) & (o_at >= first) & (o_at < end)
    o_out = o_token.to(tl.int64) * CALL.heads + o_h
    o_d = tl.arange(0, CALL.key_block)
    m_q = m_row[:, None] & (o_d[None, :] < CALL.key_dim)
    b_q = tl.load(p.query + o_out[:, None] * CALL.key_dim + o_d[None, :], mask=m_q, other=0.0)
    b_q_rest = b_q
    if CALL.rest_block:
        o_rest = CALL.key_block + tl.arange(0, CALL.rest_block)
        m_q = m_row[:, None] & (o_rest[None, :] < CALL.key_dim)
        b_q_rest = tl.load(p.query + o_out[:, None] * CALL.key_dim + o_rest[None, :], mask=m_q, other=0.0)
    if CALL.parts > 1:
        sums = sums_of_range(b_q, b_q_rest, p, n, i_kv, i_first + i_part, low, high, end, begin, o_at, CALL)
    else:
        sums = initial_sums(CALL.rows, CALL.value_block)
        for i_range in range(i_first, tl.cdiv(high, CALL.range)):
            sums = merged(sums, *sums_of_range(b_q, b_q_rest, p, n, i_kv, i_range, low, high, end, begin, o_at, CALL))
    o_dv = tl.arange(0, CALL.value_block)
    m_out = m_row[:, None] & (o_dv[None, :] < CALL.value_dim)
    if CALL.parts > 1:
        o_part = o_out * CALL.parts + i_part
        tl.store(p.top + o_part, sums[0], mask=m_row)
        tl.store(p.total + o_part, sums[1], mask=m_row)
        tl.store(p.bad + o_part, sums[3], mask=m_row)
        tl.store(p.sum + o_part[:, None] * CALL.value_dim + o_dv[None, :], sums[2], mask=m_out)
    else:
        b_out = finished(sums, p, o_h, CALL)
        p_tile = p.output + o_out[:, None] * CALL.value_dim + o_dv[None, :]
        tl.store(p_tile, b_out.to(p.output.dtype.element_ty), mask=m_out)


@triton.jit
def join(p, CALL: tl.constexpr):
    """The output of one query of one head, from the sums over ranges of its keys."""
    i_row = tl.program_id(0).to(tl.int64)
    i_token = i_row // CALL.heads
    i_h = (i_row % CALL.heads).to(tl.int32)
    if tl.load(p.real + i_token) == 0:
        return
    o_one = tl.arange(0, 1)
    o_dv = tl.arange(0, CALL.value_block)
    m_dv = (o_dv < CALL.value_dim)[None, :]
    sums = initial_sums(1, CALL.value_block)
    for i_part in range(0, tl.load(p.ranges + i_token)):
        o_part = i_row * CALL.parts + i_part + o_one
        b_sum = tl.load(p.sum + o_part[:, None] * CALL.value_dim + o_dv[None, :], mask=m_dv, other=0.0)
        part = tl.load(p.part_top + o_part), tl.load(p.part_total + o_part), b_sum, tl.load(p.part_bad + o_part)
        sums = merged(sums, *part)
    b_out = finished(sums, p, i_h + o_one, CALL)
    tl.store(p.output + i_row * CALL.value_dim + o_dv[None, :], b_out.to(p.output.dtype.element_ty), mask=m_dv)
