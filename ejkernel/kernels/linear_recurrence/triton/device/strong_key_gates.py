"""Device code for the exact path of key gates: scores of chunks whose gates are strong, and their gradients.

The contract promises any gate. Scores are computed over dyadic blocks: a pair of tokens belongs to the level of the
highest bit in which their numbers differ, and its decay is split at the border between the two halves of that level's
block. So no exponent of a decay is ever positive. A decay is the product of its tokens' own decays, the only powers
that are computed.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.bounded_gates import STRONG
from ejkernel.kernels.chunks.triton.device.gates import scaled
from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    chunk_at,
    listed_from,
    load_flag,
    locate,
    rows_kept,
    store_tile,
)
from ejkernel.kernels.chunks.triton.device.rows import climb, held_as_loaded, is_late, join_rows, sibling, split_rows
from ejkernel.kernels.linear_recurrence.triton.device.token_tiles import (
    load_sum,
    load_with_decays,
    pointers,
    readable,
    score_gradients,
    tokens_of,
)


@triton.jit
def takes_exact_path(b_flag, CALL: tl.constexpr):
    """Whether flags are of chunks on the exact path; with `CALL.bounded`, bounded ones have kernels of their own."""
    if CALL.bounded:
        return (b_flag & STRONG) != 0
    else:
        return b_flag != 0


@triton.jit
def for_each_exact_chunk(p, p_score, compute: tl.constexpr, CALL: tl.constexpr):
    """Calls `compute` with each chunk on the exact path, of as many heads as a program visits.

    `compute` gets `n_turns`, which is 1, for loops of one turn around its dots. The compiler must not know that: an
    operand that was computed stays in shared memory only from one turn of a loop to the next.
    """
    H: tl.constexpr = CALL.heads
    HEADS: tl.constexpr = CALL.heads_at_once
    p_flags = p.any_flag if CALL.listed else p.flag
    b_flag = tl.load(p_flags + tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS))
    if not CALL.listed:
        b_flag = takes_exact_path(b_flag, CALL).to(tl.int32)
    # most programs end here; without `disable_licm` values that all heads share would take registers
    for i_part in tl.range(0, tl.max(b_flag, 0) * HEADS, disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        i_chunk = i_program.to(tl.int64)
        if CALL.listed:
            span = locate(i_program // H, p, CHUNKS, CALL.chunk, CALL)
            i_from, n_listed = listed_from(span.i_n, span.i_j, 1, p, CALL)
            for i in range(i_from, i_from + n_listed):
                chunk = chunk_at(i, span, p, CALL)
                flag = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL)
                if takes_exact_path(flag, CALL):
                    n_turns = tl.minimum(flag, 1)
                    compute(p, p_score, chunk, span, i_h, i_chunk, n_turns, CALL)
        else:
            flag = tl.load(p.flag + i_chunk)
            if takes_exact_path(flag, CALL):
                n_turns = tl.minimum(flag, 1)
                span = locate(i_program // H, p, CHUNKS, CALL.chunk, CALL)
                compute(p, p_score, chunk_at(span.i_j, span, p, CALL), span, i_h, i_chunk, n_turns, CALL)


@triton.jit
def exact_scores_of(p, p_score, chunk, span, i_h, i_chunk, n_turns, CALL: tl.constexpr):
    """The results of `exact_scores` for one chunk."""
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    R: tl.constexpr = 1 << CALL.log_rows
    tokens = tokens_of(chunk, span, i_h, CALL)
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    # the highest bit is the level of a pair
    b_apart = tl.where(o_row < o_column, -1, o_row ^ o_column)
    b_score = tl.zeros([C, C], tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q, b_k, b_total = load_with_decays(p, tokens, o_k, 4, CALL)
        b_fold = tl.reshape(b_q, [C, BK])
        b_other = tl.reshape(b_k, [C, BK])
        b_q = b_q.to(tl.float32) * b_total
        b_k = b_k.to(tl.float32)
        b_part = tl.zeros([C, C], tl.float32)
        for _ in tl.range(0, n_turns):
            b_pair = tl.dot(b_fold, tl.trans(b_other), input_precision=CALL.precision)
            b_part = tl.where(b_apart == 0, b_pair, 0.0)
            b_fold = tl.zeros_like(b_fold)
        for i_level in tl.static_range(0, LEVELS):
            b_fold, b_q, b_k, b_total = climb(b_q, b_k, b_total, o_r, o_b, i_level, CALL.log_rows)
            b_fold = tl.reshape(b_fold, [C, BK]).to(b_other.dtype)
            for _ in tl.range(0, n_turns):
                b_pair = tl.dot(b_fold, tl.trans(b_fold), input_precision=CALL.precision)
                # higher levels overwrite their own pairs
                b_part = tl.where(b_apart >= 2**i_level, b_pair, b_part)
                b_fold = tl.zeros_like(b_fold)
        b_score += b_part
        m_tile = readable(tokens, o_k, False, CALL)
        p_tile = pointers(p.q_hat, tokens, o_k, 4, CALL)
        tl.store(p_tile, b_q.to(p.q_hat.dtype.element_ty), mask=m_tile)
        p_tile = pointers(p.k_hat, tokens, o_k, 4, CALL)
        tl.store(p_tile, b_k.to(p.k_hat.dtype.element_ty), mask=m_tile)
    p_tile = p_score + rows_kept(chunk, i_chunk, i_h, p, C, CALL) + (o_row * C + o_column)
    store_tile(p_tile, b_score.to(p_score.dtype.element_ty), chunk.i_row + o_row < chunk.n_end, not CALL.listed)


@triton.jit
def exact_scores(p, CALL: tl.constexpr):
    """Scores of the chunks on the exact path, and their q̂ and k̂, which are decayed from and to the chunk's ends."""
    for_each_exact_chunk(p, p.score, exact_scores_of, CALL)


@triton.jit
def pair_gradients(queries, b_k, decays, p_block, o_r, C: tl.constexpr):
    """Gradients of queries and keys by the pairs within each block, one by one, and decays from each token to its end.

    `queries` and `decays` are tuples of rows, as of `split_rows`; gradients of the blocks' scores lie at `p_block`.
    """
    R: tl.constexpr = b_k.shape[1]
    b_keys = b_k.to(tl.float32)
    b_until = tl.full(b_k.shape, 1.0, tl.float32)
    b_dq = tl.zeros(b_k.shape, tl.float32)
    b_dk = tl.zeros(b_k.shape, tl.float32)
    for t in tl.static_range(1, R):
        m_before = (o_r < t)[None, :, None]
        b_until = tl.where(m_before, b_until * decays[t][:, None, :], b_until)
        b_pair = tl.load(p_block + (t * C + o_r)[None, :, None]) * b_until
        # -0.0 and not 0.0: the compiler knows that adding it changes nothing
        b_sum = tl.sum(tl.where(m_before, b_pair * b_keys, -0.0), 1)
        b_dq = tl.where((o_r == t)[None, :, None], b_sum[:, None, :], b_dq)
        b_dk = tl.where(m_before, b_dk + b_pair * queries[t].to(tl.float32)[:, None, :], b_dk)
    return b_dq, b_dk, b_until


@triton.jit
def exact_gradients_of(p, p_dscore, chunk, span, i_h, i_chunk, n_turns, CALL: tl.constexpr):
    """The results of `exact_gradients` for one chunk; at `p_dscore` the program keeps the gradients of its scores."""
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    LR: tl.constexpr = CALL.log_rows
    R: tl.constexpr = 1 << LR
    tokens = tokens_of(chunk, span, i_h, CALL)
    o_t = tl.arange(0, C)
    o_row = o_t[:, None]
    o_column = o_t[None, :]
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    b_dscore = score_gradients(p, chunk, tokens, False, False, CALL)[0] * CALL.scale
    # until here threads may read the last chunk's; from the second barrier on they read what others have written
    tl.debug_barrier()
    tl.store(p_dscore + (o_row * C + o_column), b_dscore)
    tl.debug_barrier()
    # symmetric, so that one product has the gradients of later tokens' queries and of earlier tokens' keys
    b_both = tl.where(o_row > o_column, b_dscore, tl.where(o_row < o_column, tl.trans(b_dscore), 0.0))
    if not CALL.wide:
        b_both = b_both.to(p.query.dtype.element_ty)
    levels = ()
    for i_level in tl.static_range(LR, LEVELS):
        # pairs of a block and its neighbour
        levels += (tl.where(((o_row ^ o_column) >> i_level) == 1, b_both, 0.0),)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q, b_k, b_decay = load_with_decays(p, tokens, o_k, 2, CALL)
        # loaded here, to be on their way together with the others
        m_tile = readable(tokens, o_k, False, CALL)
        b_dqhat = load_sum(p.dq_hat, tokens, o_k, m_tile, 2, CALL)
        b_dkhat = load_sum(p.dk_hat, tokens, o_k, m_tile, 2, CALL)
        # decays within a block of R tokens: from its start through each token
        decays = split_rows(b_decay, LR)
        since = (decays[0],)
        for r in tl.static_range(1, R):
            since += (since[r - 1] * decays[r],)
        b_since = join_rows(since, o_r)
        # and outside of it: to where its level's halves meet (`outer`), and at last to the chunk's start and end
        b_total = tl.reshape(since[R - 1], [C // R, 1, BK])
        b_before = tl.full([C // R, 1, BK], 1.0, tl.float32)
        b_after = b_before
        outer = ()
        for i_level in tl.static_range(LR, LEVELS):
            m_late = is_late(o_r, o_b, i_level, LR)
            outer += (tl.where(m_late, b_before, b_after),)
            b_beside = sibling(b_total, 1 << (i_level - LR))
            b_before *= tl.where(m_late, b_beside, 1.0)
            b_after *= tl.where(m_late, 1.0, b_beside)
            b_total *= b_beside
        # gradients through states, by a token's score with itself, and by pairs within a block
        p_block = p_dscore + (o_b * (R * C + R))[:, None, None]
        b_pair_dq, b_pair_dk, b_until = pair_gradients(split_rows(b_q, LR), b_k, decays, p_block, o_r, C)
        b_diagonal = tl.load(p_block + (o_r * (C + 1))[None, :, None])
        b_fade = b_since * b_before
        b_summand = scaled(b_q, b_fade).to(tl.float32) * b_dqhat + b_q.to(tl.float32) * b_pair_dq
        b_dq = b_dqhat * b_fade + (b_pair_dq + b_diagonal * b_k.to(tl.float32))
        b_fade = b_until * b_after
        b_summand -= scaled(b_k, b_fade).to(tl.float32) * b_dkhat + b_k.to(tl.float32) * b_pair_dk
        b_dk = b_dkhat * b_fade + (b_pair_dk + b_diagonal * b_q.to(tl.float32))
        for i_level in tl.static_range(LR, LEVELS):
            m_late = is_late(o_r, o_b, i_level, LR)
            b_late = tl.where(m_late, 1.0, 0.0)
            b_fade = tl.where(m_late, b_since, b_until) * outer[i_level - LR]
            b_fold = scaled(tl.where(m_late, b_q, b_k), b_fade)
            b_tokens = tl.reshape(b_fold, [C, BK])
            b_grad = tl.zeros([BK, C], tl.float32)
            for _ in tl.range(0, n_turns):
                # transposed: the matrix of scores, the same for all key dims, is what has to lie in shared memory
                b_grad = tl.dot(tl.trans(b_tokens), levels[i_level - LR], input_precision=CALL.precision)
                b_tokens = tl.zeros_like(b_tokens)
            b_grad = held_as_loaded(tl.reshape(tl.trans(b_grad), [C // R, R, BK]))
            b_summand += b_fold.to(tl.float32) * b_grad * (2.0 * b_late - 1.0)
            b_grad *= b_fade
            b_dq += b_grad * b_late
            b_dk += b_grad * (1.0 - b_late)
        tl.store(pointers(p.summand, tokens, o_k, 2, CALL, CALL.parts), b_summand, mask=m_tile)
        p_tile = pointers(p.d_query, tokens, o_k, 2, CALL)
        tl.store(p_tile, b_dq.to(p.d_query.dtype.element_ty), mask=m_tile)
        p_tile = pointers(p.d_key, tokens, o_k, 2, CALL)
        tl.store(p_tile, b_dk.to(p.d_key.dtype.element_ty), mask=m_tile)


@triton.jit
def exact_gradients(p, CALL: tl.constexpr):
    """dq and dk of the chunks on the exact path, and the summands of the gates' gradient.

    dq̂ and dk̂ hold the gradients through states, in parts to be added. The summands `q·dq - k·dk` take q̂ and k̂ as they
    were rounded, and leave out a token's score with itself: both cancel in the sum, which strong gates make so small
    that rounding errors would drown it. Summands are stored in the place of dq̂'s first part.
    """
    C: tl.constexpr = CALL.chunk
    p_dscore = p.d_score + tl.program_id(0).to(tl.int64) * (C * C)
    for_each_exact_chunk(p, p_dscore, exact_gradients_of, CALL)
