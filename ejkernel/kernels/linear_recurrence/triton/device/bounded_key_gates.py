"""Device code for chunks whose key gates are flagged and bounded: their scores, and the gradients of these.

Decays are relative to the middle of each 16 tokens. Pairs within these are one product; pairs across the middle of a
block of 32 tokens, or of 64, are one more product each, relative to that middle.
Kept by what it spares at Kimi-K3's gates, `-5 · sigmoid(…)`, with which every chunk took the exact path: GLA 0.68 ms
instead of 0.89, and 2.41 instead of 2.66 with gradients.
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
    chunk_at,
    listed_from,
    load_flag,
    locate,
    rows_kept,
    store_tile,
)
from ejkernel.kernels.chunks.triton.device.rows import held_as_loaded, is_late, join_rows, sibling, split_rows
from ejkernel.kernels.linear_recurrence.triton.device.key_gates import is_bounded_group, load_product, store_factors
from ejkernel.kernels.linear_recurrence.triton.device.token_tiles import (
    load_sum,
    load_tokens,
    pointers,
    readable,
    score_gradients,
    tokens_of,
)


@triton.jit
def store_decays(p, chunk, i_chunk, o_k, b_gate, b_eight, CALL: tl.constexpr):
    """Stores a state's decays through a flagged chunk; returns how many of these gates are not bounded."""
    b_all = tl.exp2(tl.minimum(tl.sum(tl.sum(b_eight, 1), 0), MOST))
    b_one = tl.full(o_k.shape, 1.0, tl.float32)
    # the chunk's k̂ and q̂ carry the decay to its ends
    store_factors(p, chunk, i_chunk, o_k, b_all, b_one, b_all, b_one, CALL)
    return count_unbounded(b_gate, b_eight)


@triton.jit
def score_pairs(p, tokens, o_k, b_q, b_k, b_decay, b_eight, n_turns, CALL: tl.constexpr):
    """Scores of a bounded chunk by some key dims, whose q̂ and k̂ it stores.

    `n_turns` is 1, for loops of one turn around dots, as `for_each_exact_chunk` explains.
    """
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.key_block
    LR: tl.constexpr = CALL.log_rows
    LEVELS: tl.constexpr = CALL.levels
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    o_r = tl.arange(0, 1 << LR)
    o_b = tl.arange(0, C >> LR)
    # a pair that is not within 16 tokens belongs to the level of its highest bit
    b_apart = tl.where(o_row < o_column, -1, o_row ^ o_column)
    b_fraction, b_since, b_until, to_border = place_middles(b_eight, o_r, o_b, LEVELS)
    b_decay += b_fraction
    b_q32 = b_q.to(tl.float32) * tl.exp2(b_decay)
    b_k32 = b_k.to(tl.float32) * tl.exp2(-b_decay)
    b_fold = tl.reshape(b_q32.to(b_q.dtype), [C, BK])
    b_other = tl.reshape(b_k32.to(b_k.dtype), [C, BK])
    b_part = tl.zeros([C, C], tl.float32)
    for _ in tl.range(0, n_turns):
        b_pair = tl.dot(b_fold, tl.trans(b_other), input_precision=CALL.precision)
        b_part = tl.where((b_apart >= 0) & (b_apart < 16), b_pair, 0.0)
        b_fold = tl.zeros_like(b_fold)
        b_other = tl.zeros_like(b_other)
    for i_level in tl.static_range(4, LEVELS):
        b_half = tl.where(is_late(o_r, o_b, i_level, LR), b_q32, b_k32) * to_border[i_level - 4]
        b_fold = tl.reshape(b_half.to(b_q.dtype), [C, BK])
        for _ in tl.range(0, n_turns):
            b_pair = tl.dot(b_fold, tl.trans(b_fold), input_precision=CALL.precision)
            b_part = tl.where(b_apart >= 2**i_level, b_pair, b_part)
            b_fold = tl.zeros_like(b_fold)
    m_tile = readable(tokens, o_k, CALL.whole, CALL)
    p_tile = pointers(p.q_hat, tokens, o_k, CALL.dims, CALL)
    tl.store(p_tile, (b_q32 * b_since).to(p.q_hat.dtype.element_ty), mask=m_tile)
    p_tile = pointers(p.k_hat, tokens, o_k, CALL.dims, CALL)
    tl.store(p_tile, (b_k32 * b_until).to(p.k_hat.dtype.element_ty), mask=m_tile)
    return b_part


@triton.jit
def bounded_scores_of(p, chunk, span, i_h, i_chunk, n_turns, CALL: tl.constexpr):
    """The results of `bounded_scores` for one chunk; returns its flag."""
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.key_block
    NK: tl.constexpr = (CALL.key_dim + BK - 1) // BK
    R: tl.constexpr = 1 << CALL.log_rows
    tokens = tokens_of(chunk, span, i_h, CALL)
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    o_k = tl.arange(0, BK)
    b_q, b_k, b_gate = load_tokens(p, tokens, o_k, CALL.dims, CALL.whole, CALL)
    b_decay, b_eight = sum_from_middle(b_gate, o_r, o_b)
    n_bad = store_decays(p, chunk, i_chunk, o_k, b_gate, b_eight, CALL)
    for i_k in range(1, NK):
        # gates of more dims than a program holds are read twice: all of them say whether the chunk is bounded
        o_part = i_k * BK + o_k
        _, _, b_other = load_tokens(p, tokens, o_part, CALL.dims, CALL.whole, CALL)
        _, b_sum = sum_from_middle(b_other, o_r, o_b)
        n_bad += store_decays(p, chunk, i_chunk, o_part, b_other, b_sum, CALL)
    if n_bad == 0:
        b_score = score_pairs(p, tokens, o_k, b_q, b_k, b_decay, b_eight, n_turns, CALL)
        for i_k in range(1, NK):
            o_part = i_k * BK + o_k
            b_q, b_k, b_gate = load_tokens(p, tokens, o_part, CALL.dims, CALL.whole, CALL)
            b_decay, b_eight = sum_from_middle(b_gate, o_r, o_b)
            b_score += score_pairs(p, tokens, o_part, b_q, b_k, b_decay, b_eight, n_turns, CALL)
        o_row = tl.arange(0, C)[:, None]
        p_score = p.score + rows_kept(chunk, i_chunk, i_h, p, C, CALL) + (o_row * C + tl.arange(0, C)[None, :])
        store_tile(p_score, b_score.to(p.score.dtype.element_ty), chunk.i_row + o_row < chunk.n_end, not CALL.listed)
    return tl.where(n_bad == 0, BOUNDED, STRONG)


@triton.jit
def bounded_scores(p, CALL: tl.constexpr):
    """Of each flagged chunk whether it is bounded, and a state's decays through it; of bounded ones scores, q̂ and k̂."""
    H: tl.constexpr = CALL.heads
    HEADS: tl.constexpr = CALL.heads_at_once
    p_flag = p.any_flag if CALL.listed else p.flag
    b_flag = tl.load(p_flag + tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS))
    # without `disable_licm` values that all heads share would take registers
    for i_part in tl.range(0, tl.max(b_flag, 0) * HEADS, disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        i_chunk = i_program.to(tl.int64)
        span = locate(i_program // H, p, CHUNKS, CALL.chunk, CALL)
        i_from = span.i_j
        n_listed = 1
        if CALL.listed:
            i_from, n_listed = listed_from(span.i_n, span.i_j, 1, p, CALL)
        for i in range(i_from, i_from + n_listed):
            chunk = chunk_at(i, span, p, CALL)
            # 1 or 0 until this kernel says more
            flag = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL)
            if flag != 0:
                kind = bounded_scores_of(p, chunk, span, i_h, i_chunk, flag, CALL)
                i_flag = i_chunk
                if CALL.listed:
                    i_flag = (span.i_n.to(tl.int64) * H + i_h) * p.T + chunk.i_row
                tl.store(p.flag + i_flag, kind)


@triton.jit
def as_rounded(b, b_like):
    """A float32 tile rounded as the operand of a product would be that has the dtype of `b_like`."""
    if b_like.dtype == tl.bfloat16:
        # half of the last remaining digit is added, faster than to convert and back; a NaN stays one
        b_power = (b.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        b = ((b + b_power * 2.0**-8).to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return b


@triton.jit
def sum_to_end(b, b_sum, o_r, o_b, LR: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of rows to the chunk's end plus `b_sum` [1, 1, dims], and `b_sum` plus the sum of all rows."""
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
    # by now every block has the total of the chunk
    return join_rows(sums, o_r) + (b_after + b_sum), b_sum + tl.max(b_total, 0, keep_dims=True)


@triton.jit
def bounded_gradients_of(p, chunk, span, i_h, o_k, b_sum, is_whole, CALL: tl.constexpr):
    """The results of `bounded_gradients` for one chunk.

    If `is_whole`, the chunk's group is bounded: `b_sum` is the gates' gradient behind the chunk, and at its first token
    when this returns it.
    """
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.key_block
    LEVELS: tl.constexpr = CALL.levels
    LR: tl.constexpr = CALL.log_rows
    R: tl.constexpr = 1 << LR
    tokens = tokens_of(chunk, span, i_h, CALL)
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    b_q, b_k, b_gate = load_tokens(p, tokens, o_k, CALL.dims, CALL.whole, CALL)
    m_tile = readable(tokens, o_k, CALL.whole, CALL)
    b_dqhat = load_sum(p.dq_hat, tokens, o_k, m_tile, CALL.dims, CALL)
    b_dkhat = load_sum(p.dk_hat, tokens, o_k, m_tile, CALL.dims, CALL)
    b_dscore, b_transposed = score_gradients(p, chunk, tokens, CALL.whole, True, CALL)
    b_diagonal = tl.sum(tl.where(o_row == o_column, b_dscore, 0.0), 1) * CALL.scale
    b_diagonal = tl.reshape(b_diagonal, [C // R, R])[:, :, None]
    # symmetric, so that one product has the gradients of later tokens' queries and of earlier tokens' keys
    m_later = o_row > o_column
    b_apart = o_row ^ o_column
    b_both = tl.where(m_later, b_dscore, b_transposed) * CALL.scale
    b_decay, b_eight = sum_from_middle(b_gate, o_r, o_b)
    b_fraction, b_since, b_until, to_border = place_middles(b_eight, o_r, o_b, LEVELS)
    b_decay += b_fraction
    # operands as the forward computed and rounded them; until the end gradients are, as operands are, relative to the
    # middle of 16 tokens: only powers of two are between two middles
    b_query = as_rounded(b_q.to(tl.float32) * tl.exp2(b_decay), b_q)
    b_key = b_k.to(tl.float32) * tl.exp2(-b_decay)
    b_khat = as_rounded(b_key * b_until, b_k)
    b_key = as_rounded(b_key, b_k)
    # through states
    b_dq = b_dqhat * b_since
    b_dk = b_dkhat * b_until
    b_summand = b_key * b_dk - b_khat * b_dkhat
    # by pairs within 16 tokens
    b_near = tl.where((b_apart > 0) & (b_apart < 16), b_both, 0.0)
    b_pairs = tl.where(m_later, b_near, 0.0).to(b_q.dtype)
    b_grad = tl.dot(b_pairs, tl.reshape(b_key.to(b_q.dtype), [C, BK]), input_precision=CALL.precision)
    b_dq += held_as_loaded(tl.reshape(b_grad, [C // R, R, BK]))
    b_pairs = tl.where(m_later, 0.0, b_near).to(b_q.dtype)
    b_grad = tl.dot(b_pairs, tl.reshape(b_query.to(b_q.dtype), [C, BK]), input_precision=CALL.precision)
    b_dk += held_as_loaded(tl.reshape(b_grad, [C // R, R, BK]))
    for i_level in tl.static_range(4, LEVELS):
        m_late = is_late(o_r, o_b, i_level, LR)
        b_fold = tl.where(m_late, b_query, b_key) * to_border[i_level - 4]
        # pairs of a block and its neighbour
        b_pairs = tl.where(b_apart >> i_level == 1, b_both, 0.0).to(b_q.dtype)
        b_grad = tl.dot(b_pairs, tl.reshape(b_fold.to(b_q.dtype), [C, BK]), input_precision=CALL.precision)
        b_grad = held_as_loaded(tl.reshape(b_grad, [C // R, R, BK]))
        # by factors of 0, since to select from a product's result would move whole tiles
        b_dq += b_grad * tl.where(m_late, to_border[i_level - 4], 0.0)
        b_dk += b_grad * tl.where(m_late, 0.0, to_border[i_level - 4])
    b_summand += b_query * b_dq - b_key * b_dk
    # adds 0, since `n_read` is never negative, but makes the compiler compute the powers again: they would take more
    # registers than they are worth
    b_decay += tl.where(chunk.n_read < 0, 1.0, 0.0)
    b_dq = b_dq * tl.exp2(b_decay) + b_diagonal * b_k.to(tl.float32)
    b_dk = b_dk * tl.exp2(-b_decay) + b_diagonal * b_q.to(tl.float32)
    p_tile = pointers(p.d_query, tokens, o_k, CALL.dims, CALL)
    tl.store(p_tile, b_dq.to(p.d_query.dtype.element_ty), mask=m_tile)
    p_tile = pointers(p.d_key, tokens, o_k, CALL.dims, CALL)
    tl.store(p_tile, b_dk.to(p.d_key.dtype.element_ty), mask=m_tile)
    if is_whole:
        b_summand, b_sum = sum_to_end(b_summand, b_sum, o_r, o_b, LR, LEVELS)
        if not CALL.start:
            # the first gate meets no state
            is_later = (o_r[None, :] > 0) | (tokens.i_row + o_b[:, None] > 0)
            b_summand = tl.where(is_later[:, :, None], b_summand, 0.0)
        p_gate = pointers(p.d_gate, tokens, o_k, CALL.dims, CALL)
        tl.store(p_gate, b_summand.to(p.d_gate.dtype.element_ty), mask=m_tile)
    else:
        tl.store(pointers(p.summand, tokens, o_k, CALL.dims, CALL, CALL.parts), b_summand, mask=m_tile)
    return b_sum


@triton.jit
def bounded_gradients(p, CALL: tl.constexpr):
    """dq and dk of bounded chunks, and the summands of the gates' gradient or, where a group is bounded, all of it.

    dq̂ and dk̂, and summands, are as in `exact_gradients`.
    """
    H: tl.constexpr = CALL.heads
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    G: tl.constexpr = CALL.group
    HEADS: tl.constexpr = CALL.heads_at_once
    NK: tl.constexpr = (CALL.key_dim + BK - 1) // BK
    i_first_program = tl.program_id(0) // NK * HEADS
    span = locate(i_first_program // H, p, GROUPS, C * G, CALL)
    i_chunk0 = blocks_before(span.i_n, p, CHUNKS, C, CALL)
    n_chunks = tl.minimum(tl.cdiv(span.n_rows, C) - span.i_j * G, G)
    # of each head and chunk; of listed chunks, whether any that begins there is flagged
    o_g = tl.arange(0, G)
    p_flags = (p.any_flag if CALL.listed else p.flag) + (i_chunk0 + span.i_j * G + o_g)[:, None] * H
    p_flags += i_first_program % H + tl.arange(0, HEADS)[None, :]
    b_flag = tl.load(p_flags, mask=(o_g < n_chunks)[:, None], other=0)
    n_heads = tl.where(tl.max(tl.max(b_flag, 1), 0) >= (STRONG if CALL.listed else BOUNDED), HEADS, 0)
    i_from = span.i_j * G
    if CALL.listed:
        i_from, n_chunks = listed_from(span.i_n, i_from, n_chunks, p, CALL)
    # without `disable_licm` values that all heads share would take registers
    for i_part in tl.range(0, n_heads, disable_licm=True):
        i_program = i_first_program + i_part
        i_h = i_program % H
        o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
        is_whole = is_bounded_group(p, i_chunk0 + span.i_j * G, n_chunks, i_h, CALL)
        b_sum = tl.zeros([1, 1, BK], tl.float32)
        if is_whole:
            b_sum += load_product(p, i_program, o_k, CALL)[None, None, :]
        for i_step in tl.range(0, n_chunks, disable_licm=True):
            chunk = chunk_at(i_from + n_chunks - 1 - i_step, span, p, CALL)
            i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
            if load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) == BOUNDED:
                b_sum = bounded_gradients_of(p, chunk, span, i_h, o_k, b_sum, is_whole, CALL)
