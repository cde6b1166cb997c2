"""Device code for chunks whose key gates are flagged and bounded: their scores, and the gradients of these.

Decays are taken from the middle of each 16 tokens. Pairs within these are one product, those across the middle of 32
tokens, or of 64, one more each, relative to there.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.bounded_gates import (
    BOUNDED,
    STRONG,
    count_unbounded,
    place_middles,
    sum_from_middle,
)
from ejkernel.kernels.chunks.triton.device.gates import MOST
from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    GROUPS,
    blocks_before,
    listed_from,
    load_flag,
    load_rows,
    locate,
    rows_kept,
    store_tile,
    token_of,
    visit,
)
from ejkernel.kernels.chunks.triton.device.rows import held_as_loaded, is_late, join_rows, sibling, split_rows
from ejkernel.kernels.linear_recurrence.triton.device.key_gates import (
    first_gate,
    is_bounded_group,
    load_met,
    store_factors,
)
from ejkernel.kernels.linear_recurrence.triton.device.strong_key_gates import load_parts
from ejkernel.kernels.linear_recurrence.triton.device.strong_rows import (
    load_tokens,
    mask_rows,
    place_rows,
    spread_rows,
)


@triton.jit
def classify(p, chunk, i_chunk, o_k, b_gate, b_eight, CALL: tl.constexpr):
    """Stores what a flagged chunk's gates leave of these dims of a state, and returns how many are beyond the bound."""
    b_all = tl.exp2(tl.minimum(tl.sum(tl.sum(b_eight, 1), 0), MOST))
    b_one = tl.full(o_k.shape, 1.0, tl.float32)
    # the chunk's k̂ and q̂ carry the decay to its ends
    store_factors(p, chunk, i_chunk, o_k, b_all, b_one, b_all, b_one, CALL)
    return count_unbounded(b_gate, b_eight)


@triton.jit
def score_pairs(p, chunk, i_token, i_h, o_r, o_b, o_k, b_q, b_k, b_decay, b_eight, n_turns, CALL: tl.constexpr):
    """Scores of a bounded chunk by some key dims, whose q̂ and k̂ are stored; `n_turns` is 1."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.key_block
    LR: tl.constexpr = CALL.log_rows
    LEVELS: tl.constexpr = CALL.levels
    R: tl.constexpr = 1 << LR
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    # rows meet earlier columns within 16, or at the level of the highest bit in which they differ
    b_apart = tl.where(o_row < o_column, -1, o_row ^ o_column)
    b_rest, b_since, b_until, meeting = place_middles(b_eight, o_r, o_b, LEVELS)
    b_decay += b_rest
    b_q32 = b_q.to(tl.float32) * tl.exp2(b_decay)
    b_k32 = b_k.to(tl.float32) * tl.exp2(-b_decay)
    b_fold = tl.reshape(b_q32.to(b_q.dtype), [C, BK])
    b_other = tl.reshape(b_k32.to(b_k.dtype), [C, BK])
    b_part = tl.zeros([C, C], tl.float32)
    # an operand that was computed stays in shared memory from one turn to the next alone
    for _ in tl.range(0, n_turns):
        b_pair = tl.dot(b_fold, tl.trans(b_other), input_precision=CALL.precision)
        b_part = tl.where((b_apart >= 0) & (b_apart < 16), b_pair, 0.0)
        b_fold = tl.zeros_like(b_fold)
        b_other = tl.zeros_like(b_other)
    for i_level in tl.static_range(4, LEVELS):
        b_half = tl.where(is_late(o_r, o_b, i_level, LR), b_q32, b_k32) * meeting[i_level - 4]
        b_fold = tl.reshape(b_half.to(b_q.dtype), [C, BK])
        for _ in tl.range(0, n_turns):
            b_pair = tl.dot(b_fold, tl.trans(b_fold), input_precision=CALL.precision)
            b_part = tl.where(b_apart >= 2**i_level, b_pair, b_part)
            b_fold = tl.zeros_like(b_fold)
    m_tile = mask_rows(chunk.i_row + o_b[:, None] * R + o_r[None, :], chunk.n_read, o_k, K, K % BK != 0, CALL.whole)
    o_hat = place_rows(i_token, i_h, o_b * (R * SIGN), o_k, H, K)
    p_tile = spread_rows(p.q_hat + o_hat, o_r, SIGN * H * K, CALL.dims)
    tl.store(p_tile, (b_q32 * b_since).to(p.q_hat.dtype.element_ty), mask=m_tile)
    p_tile = spread_rows(p.k_hat + o_hat, o_r, SIGN * H * K, CALL.dims)
    tl.store(p_tile, (b_k32 * b_until).to(p.k_hat.dtype.element_ty), mask=m_tile)
    return b_part


@triton.jit
def bounded_scores_of(p, chunk, i_first, n_rows, i_h, i_chunk, n_turns, CALL: tl.constexpr):
    """What `bounded_scores` gives, of one chunk; returns its flag."""
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.key_block
    NK: tl.constexpr = (K + BK - 1) // BK
    R: tl.constexpr = 1 << CALL.log_rows
    PAD: tl.constexpr = K % BK != 0
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    i_row = chunk.i_row
    i_gate = 1
    if CALL.listed:
        i_gate = first_gate(chunk, CALL)
    i_token = token_of(i_first, n_rows, i_row, CALL.flip)
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    o_k = tl.arange(0, BK)
    b_q, b_k, b_gate = load_tokens(
        p, i_token, i_h, i_row, chunk.n_read, i_gate, o_r, o_b, o_k, PAD, CALL.dims, SIGN, CALL, CALL.whole
    )
    b_decay, b_eight = sum_from_middle(b_gate, o_r, o_b)
    n_bad = classify(p, chunk, i_chunk, o_k, b_gate, b_eight, CALL)
    for i_k in range(1, NK):
        # of more dims than a program holds, gates are read twice
        o_part = i_k * BK + o_k
        _, _, b_other = load_tokens(
            p, i_token, i_h, i_row, chunk.n_read, i_gate, o_r, o_b, o_part, PAD, CALL.dims, SIGN, CALL, CALL.whole
        )
        _, b_sum = sum_from_middle(b_other, o_r, o_b)
        n_bad += classify(p, chunk, i_chunk, o_part, b_other, b_sum, CALL)
    if n_bad == 0:
        b_score = score_pairs(p, chunk, i_token, i_h, o_r, o_b, o_k, b_q, b_k, b_decay, b_eight, n_turns, CALL)
        for i_k in range(1, NK):
            o_part = i_k * BK + o_k
            b_q, b_k, b_gate = load_tokens(
                p, i_token, i_h, i_row, chunk.n_read, i_gate, o_r, o_b, o_part, PAD, CALL.dims, SIGN, CALL, CALL.whole
            )
            b_decay, b_eight = sum_from_middle(b_gate, o_r, o_b)
            b_score += score_pairs(p, chunk, i_token, i_h, o_r, o_b, o_part, b_q, b_k, b_decay, b_eight, n_turns, CALL)
        o_row = tl.arange(0, C)[:, None]
        p_score = p.score + rows_kept(chunk, i_chunk, i_h, p, C, CALL) + (o_row * C + tl.arange(0, C)[None, :])
        store_tile(p_score, b_score.to(p.score.dtype.element_ty), i_row + o_row < chunk.n_end, not CALL.listed)
    return tl.where(n_bad == 0, BOUNDED, STRONG)


@triton.jit
def bounded_scores(p, CALL: tl.constexpr):
    """For a flagged chunk: its kind and what it leaves of a state; if it is bounded, its scores, q̂ and k̂ as well."""
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    HEADS: tl.constexpr = CALL.heads_at_once
    p_flag = p.any_flag if CALL.listed else p.flag
    b_flag = tl.load(p_flag + tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS))
    # what is the same for all heads would take registers
    for i_part in tl.range(0, tl.max(b_flag, 0) * HEADS, disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        i_chunk = i_program.to(tl.int64)
        i_n, i_c, i_first, n_rows, n_read = locate(i_program // H, p, CHUNKS, C, CALL)
        i_from = i_c
        n_listed = 1
        if CALL.listed:
            i_from, n_listed = listed_from(i_n, i_c, 1, p, CALL)
        for i in range(i_from, i_from + n_listed):
            chunk = visit(i, i_n, n_rows, n_read, p, CALL)
            # 1 or 0, and the turns of the loops around dots
            is_flagged = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL)
            if is_flagged != 0:
                kind = bounded_scores_of(p, chunk, i_first, n_rows, i_h, i_chunk, is_flagged, CALL)
                i_flag = i_chunk
                if CALL.listed:
                    i_flag = (i_n.to(tl.int64) * H + i_h) * p.T + chunk.i_row
                tl.store(p.flag + i_flag, kind)


@triton.jit
def as_rounded(b, b_like):
    """A tile as the operand of a product that has the type of `b_like` takes it, still in float32."""
    if b_like.dtype == tl.bfloat16:
        # half of the last digit that stays is added, which is faster than to convert and back; a NaN stays one
        b_power = (b.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        b = ((b + b_power * 2.0**-8).to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return b


@triton.jit
def sum_to_end(b, b_sum, o_r, o_b, LR: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of rows to the end of a chunk plus `b_sum` [1, 1, dims], and what those of all rows come to."""
    R: tl.constexpr = 1 << LR
    rows = split_rows(b, LR)
    b_last = rows[R - 1]
    backwards = (b_last,)
    for r in tl.static_range(1, R):
        b_last += rows[R - 1 - r]
        backwards += (b_last,)
    sums = ()
    for r in tl.static_range(R):
        sums += (backwards[R - 1 - r],)
    b_total = tl.reshape(b_last, [b.shape[0], 1, b.shape[2]])
    b_after = tl.zeros_like(b_total)
    for i_level in tl.static_range(LR, LEVELS):
        b_beside = sibling(b_total, 1 << (i_level - LR))
        b_after += tl.where(is_late(o_r, o_b, i_level, LR), 0.0, b_beside)
        b_total += b_beside
    # all blocks have the same total by now
    return join_rows(sums, o_r) + (b_after + b_sum), b_sum + tl.max(b_total, 0, keep_dims=True)


@triton.jit
def score_gradients(p, chunk, i_token, i_h, CALL: tl.constexpr):
    """Gradients of a chunk's scores but for their scale, [query, key] and [key, query]."""
    H: tl.constexpr = CALL.heads
    HV: tl.constexpr = CALL.value_heads
    HO: tl.constexpr = CALL.output_heads
    V: tl.constexpr = CALL.value_dim
    BV: tl.constexpr = CALL.value_block
    C: tl.constexpr = CALL.chunk
    WIDE: tl.constexpr = CALL.wide
    PAD: tl.constexpr = V % BV != 0
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    o_t = tl.arange(0, C)
    m_read = chunk.i_row + o_t < chunk.n_read
    b_dscore = tl.zeros([C, C], tl.float32)
    b_turned = tl.zeros([C, C], tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_dout = load_rows(p.d_output, i_token, i_h // (H // HO), o_t * SIGN, m_read, o_v, HO, V, PAD, WIDE, CALL.whole)
        b_v = load_rows(p.value, i_token, i_h // (H // HV), o_t * SIGN, m_read, o_v, HV, V, PAD, WIDE, CALL.whole)
        b_dscore = tl.dot(b_dout, tl.trans(b_v), acc=b_dscore, input_precision=CALL.precision)
        # once more, as it is cheaper than to turn them
        b_turned = tl.dot(b_v, tl.trans(b_dout), acc=b_turned, input_precision=CALL.precision)
    return b_dscore, b_turned


@triton.jit
def bounded_gradients_of(p, chunk, i_first, n_rows, i_h, o_k, b_sum, is_whole, CALL: tl.constexpr):
    """What `bounded_gradients` gives, of one chunk; returns the gates' gradient at its first token."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    LR: tl.constexpr = CALL.log_rows
    PARTS: tl.constexpr = CALL.parts
    PAD: tl.constexpr = K % BK != 0
    R: tl.constexpr = 1 << LR
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    i_row = chunk.i_row
    i_gate = 1
    if CALL.listed:
        i_gate = first_gate(chunk, CALL)
    i_token = token_of(i_first, n_rows, i_row, CALL.flip)
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    b_q, b_k, b_gate = load_tokens(
        p, i_token, i_h, i_row, chunk.n_read, i_gate, o_r, o_b, o_k, PAD, CALL.dims, SIGN, CALL, CALL.whole
    )
    m_tile = mask_rows(i_row + o_b[:, None] * R + o_r[None, :], chunk.n_read, o_k, K, PAD, CALL.whole)
    o_part = place_rows(i_token * PARTS, i_h * PARTS, o_b * (R * SIGN * PARTS), o_k, H, K)
    b_dqhat = load_parts(spread_rows(p.dq_hat + o_part, o_r, SIGN * H * PARTS * K, CALL.dims), m_tile, K, PARTS)
    b_dkhat = load_parts(spread_rows(p.dk_hat + o_part, o_r, SIGN * H * PARTS * K, CALL.dims), m_tile, K, PARTS)
    b_dscore, b_turned = score_gradients(p, chunk, i_token, i_h, CALL)
    b_own = tl.sum(tl.where(o_row == o_column, b_dscore, 0.0), 1) * CALL.scale
    b_own = tl.reshape(b_own, [C // R, R])[:, :, None]
    # pairs meet both ways: row of q with row of k, and back
    m_later = o_row > o_column
    b_apart = o_row ^ o_column
    b_both = tl.where(m_later, b_dscore, b_turned) * CALL.scale
    b_decay, b_eight = sum_from_middle(b_gate, o_r, o_b)
    b_rest, b_since, b_until, meeting = place_middles(b_eight, o_r, o_b, LEVELS)
    b_decay += b_rest
    # as the forward has it, from the first product to the rounding of each operand; gradients are relative to the
    # middle of 16 tokens until the end, and so are operands: powers of two are all that is between two of these
    b_query = as_rounded(b_q.to(tl.float32) * tl.exp2(b_decay), b_q)
    b_key = b_k.to(tl.float32) * tl.exp2(-b_decay)
    b_left = as_rounded(b_key * b_until, b_k)
    b_key = as_rounded(b_key, b_k)
    # what states do
    b_dq = b_dqhat * b_since
    b_dk = b_dkhat * b_until
    b_summand = b_key * b_dk - b_left * b_dkhat
    # what tokens do to others of their 16
    b_near = tl.where((b_apart > 0) & (b_apart < 16), b_both, 0.0)
    b_pairs = tl.where(m_later, b_near, 0.0).to(b_q.dtype)
    b_grad = tl.dot(b_pairs, tl.reshape(b_key.to(b_q.dtype), [C, BK]), input_precision=CALL.precision)
    b_dq += held_as_loaded(tl.reshape(b_grad, [C // R, R, BK]))
    b_pairs = tl.where(m_later, 0.0, b_near).to(b_q.dtype)
    b_grad = tl.dot(b_pairs, tl.reshape(b_query.to(b_q.dtype), [C, BK]), input_precision=CALL.precision)
    b_dk += held_as_loaded(tl.reshape(b_grad, [C // R, R, BK]))
    for i_level in tl.static_range(4, LEVELS):
        m_late = is_late(o_r, o_b, i_level, LR)
        b_fold = tl.where(m_late, b_query, b_key) * meeting[i_level - 4]
        # each block meets its neighbour
        b_pairs = tl.where(b_apart >> i_level == 1, b_both, 0.0).to(b_q.dtype)
        b_grad = tl.dot(b_pairs, tl.reshape(b_fold.to(b_q.dtype), [C, BK]), input_precision=CALL.precision)
        b_grad = held_as_loaded(tl.reshape(b_grad, [C // R, R, BK]))
        # factors and not choices, which would move the tiles
        b_dq += b_grad * tl.where(m_late, meeting[i_level - 4], 0.0)
        b_dk += b_grad * tl.where(m_late, 0.0, meeting[i_level - 4])
    b_summand += b_query * b_dq - b_key * b_dk
    # computed anew, as the powers would take more registers than they are worth; there is no row before the first
    b_decay += tl.where(chunk.n_read < 0, 1.0, 0.0)
    # and what they do to themselves
    b_dq = b_dq * tl.exp2(b_decay) + b_own * b_k.to(tl.float32)
    b_dk = b_dk * tl.exp2(-b_decay) + b_own * b_q.to(tl.float32)
    o_hat = place_rows(i_token, i_h, o_b * (R * SIGN), o_k, H, K)
    p_tile = spread_rows(p.d_query + o_hat, o_r, SIGN * H * K, CALL.dims)
    tl.store(p_tile, b_dq.to(p.d_query.dtype.element_ty), mask=m_tile)
    p_tile = spread_rows(p.d_key + o_hat, o_r, SIGN * H * K, CALL.dims)
    tl.store(p_tile, b_dk.to(p.d_key.dtype.element_ty), mask=m_tile)
    if is_whole:
        b_summand, b_sum = sum_to_end(b_summand, b_sum, o_r, o_b, LR, LEVELS)
        if not CALL.start:
            # the first gate meets no state
            b_summand = tl.where(((o_r[None, :] > 0) | (i_row + o_b[:, None] > 0))[:, :, None], b_summand, 0.0)
        p_gate = spread_rows(p.d_gate + o_hat, o_r, SIGN * H * K, CALL.dims)
        tl.store(p_gate, b_summand.to(p.d_gate.dtype.element_ty), mask=m_tile)
    else:
        p_summand = spread_rows(p.summand + o_part, o_r, SIGN * H * PARTS * K, CALL.dims)
        tl.store(p_summand, b_summand, mask=m_tile)
    return b_sum


@triton.jit
def bounded_gradients(p, CALL: tl.constexpr):
    """For a bounded chunk: dq and dk, of which dq̂ and dk̂ hold the state's part, and what a gate's gradient sums up.

    Of a group whose chunks are all bounded, the gates' gradient itself. The summand takes operands as they were
    rounded, and leaves out what a token does to itself; it comes in place of dq̂, in its first part.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    G: tl.constexpr = CALL.group
    HEADS: tl.constexpr = CALL.heads_at_once
    NK: tl.constexpr = (K + BK - 1) // BK
    i_first_program = tl.program_id(0) // NK * HEADS
    i_n, i_j, i_first, n_rows, n_read = locate(i_first_program // H, p, GROUPS, C * G, CALL)
    i_chunk0 = blocks_before(i_n, p, CHUNKS, C, CALL)
    n_chunks = tl.minimum(tl.cdiv(n_rows, C) - i_j * G, G)
    # bounded chunks by head, or listed ones of which some may be
    o_g = tl.arange(0, G)
    p_flags = (p.any_flag if CALL.listed else p.flag) + (i_chunk0 + i_j * G + o_g)[:, None] * H
    p_flags += i_first_program % H + tl.arange(0, HEADS)[None, :]
    b_flag = tl.load(p_flags, mask=(o_g < n_chunks)[:, None], other=0)
    n_heads = tl.where(tl.max(tl.max(b_flag, 1), 0) >= (STRONG if CALL.listed else BOUNDED), HEADS, 0)
    i_from = i_j * G
    if CALL.listed:
        i_from, n_chunks = listed_from(i_n, i_from, n_chunks, p, CALL)
    # what is the same for all heads would take registers
    for i_part in tl.range(0, n_heads, disable_licm=True):
        i_program = i_first_program + i_part
        i_h = i_program % H
        o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
        is_whole = is_bounded_group(p, i_chunk0 + i_j * G, n_chunks, i_h, CALL)
        b_sum = tl.zeros([1, 1, BK], tl.float32)
        if is_whole:
            b_sum += load_met(p, i_program, o_k, CALL)[None, None, :]
        for i_step in tl.range(0, n_chunks, disable_licm=True):
            chunk = visit(i_from + n_chunks - 1 - i_step, i_n, n_rows, n_read, p, CALL)
            i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
            if load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) == BOUNDED:
                b_sum = bounded_gradients_of(p, chunk, i_first, n_rows, i_h, o_k, b_sum, is_whole, CALL)
