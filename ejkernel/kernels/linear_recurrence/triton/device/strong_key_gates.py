"""Device code for chunks whose key gates are flagged as strong: their scores, and the gradients of these.

What tokens of a chunk do to each other is computed over dyadic blocks: no exponent of a decay is ever positive there. A
decay is the product of its tokens' own, which are the only powers computed.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.bounded_gates import STRONG
from ejkernel.kernels.chunks.triton.device.gates import scaled
from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    listed_from,
    load_flag,
    load_rows,
    locate,
    rows_kept,
    store_tile,
    token_of,
    visit,
)
from ejkernel.kernels.chunks.triton.device.rows import climb, held_as_loaded, is_late, join_rows, sibling, split_rows
from ejkernel.kernels.linear_recurrence.triton.device.key_gates import first_gate
from ejkernel.kernels.linear_recurrence.triton.device.strong_rows import load_chunk, mask_rows, place_rows, spread_rows


@triton.jit
def is_taken(b_flag, CALL: tl.constexpr):
    """Whether flags are of chunks that take the exact path: where `CALL.bounded`, bounded ones have their own."""
    if CALL.bounded:
        return (b_flag & STRONG) != 0
    else:
        return b_flag != 0


@triton.jit
def heads_to_visit(p, CALL: tl.constexpr):
    """How many heads a program goes through: none where, as most often, none of its heads is flagged."""
    HEADS: tl.constexpr = CALL.heads_at_once
    p_flag = p.any_flag if CALL.listed else p.flag
    b_flag = tl.load(p_flag + tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS))
    if not CALL.listed:
        b_flag = is_taken(b_flag, CALL).to(tl.int32)
    return tl.max(b_flag, 0) * HEADS


@triton.jit
def exact_scores_of(p, chunk, i_first, n_rows, i_h, i_chunk, is_flagged, CALL: tl.constexpr):
    """What `exact_scores` gives, of one chunk."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    PAD: tl.constexpr = K % BK != 0
    R: tl.constexpr = 1 << CALL.log_rows
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
    # rows meet earlier columns at the level of the highest bit in which they differ
    b_apart = tl.where(o_row < o_column, -1, o_row ^ o_column)
    b_score = tl.zeros([C, C], tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q, b_k, b_total = load_chunk(p, i_token, i_h, i_row, chunk.n_read, i_gate, o_r, o_b, o_k, PAD, 4, SIGN, CALL)
        b_fold = tl.reshape(b_q, [C, BK])
        b_other = tl.reshape(b_k, [C, BK])
        b_q = b_q.to(tl.float32) * b_total
        b_k = b_k.to(tl.float32)
        b_part = tl.zeros([C, C], tl.float32)
        for _ in tl.range(0, is_flagged):
            b_pair = tl.dot(b_fold, tl.trans(b_other), input_precision=CALL.precision)
            b_part = tl.where(b_apart == 0, b_pair, 0.0)
            b_fold = tl.zeros_like(b_fold)
        for i_level in tl.static_range(0, LEVELS):
            b_fold, b_q, b_k, b_total = climb(b_q, b_k, b_total, o_r, o_b, i_level, CALL.log_rows)
            b_fold = tl.reshape(b_fold, [C, BK]).to(b_other.dtype)
            for _ in tl.range(0, is_flagged):
                b_pair = tl.dot(b_fold, tl.trans(b_fold), input_precision=CALL.precision)
                # what meets at a higher level is written over there
                b_part = tl.where(b_apart >= 2**i_level, b_pair, b_part)
                b_fold = tl.zeros_like(b_fold)
        b_score += b_part
        m_tile = mask_rows(i_row + o_b[:, None] * R + o_r[None, :], chunk.n_read, o_k, K, PAD)
        o_hat = place_rows(i_token, i_h, o_b * (R * SIGN), o_k, H, K)
        p_tile = spread_rows(p.q_hat + o_hat, o_r, SIGN * H * K, 4)
        tl.store(p_tile, b_q.to(p.q_hat.dtype.element_ty), mask=m_tile)
        p_tile = spread_rows(p.k_hat + o_hat, o_r, SIGN * H * K, 4)
        tl.store(p_tile, b_k.to(p.k_hat.dtype.element_ty), mask=m_tile)
    p_score = p.score + rows_kept(chunk, i_chunk, i_h, p, C, CALL) + (o_row * C + o_column)
    store_tile(p_score, b_score.to(p.score.dtype.element_ty), i_row + o_row < chunk.n_end, not CALL.listed)


@triton.jit
def exact_scores(p, CALL: tl.constexpr):
    """For a flagged chunk: its scores over dyadic blocks, and q̂, k̂ against its ends, in place of those folded."""
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    # what is the same for all heads would take registers
    for i_part in tl.range(0, heads_to_visit(p, CALL), disable_licm=True):
        i_program = tl.program_id(0) * CALL.heads_at_once + i_part
        i_h = i_program % H
        i_chunk = i_program.to(tl.int64)
        if CALL.listed:
            i_n, i_c, i_first, n_rows, n_read = locate(i_program // H, p, CHUNKS, C, CALL)
            i_from, n_listed = listed_from(i_n, i_c, 1, p, CALL)
            for i in range(i_from, i_from + n_listed):
                chunk = visit(i, i_n, n_rows, n_read, p, CALL)
                flag = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL)
                if is_taken(flag, CALL):
                    is_flagged = tl.minimum(flag, 1)
                    exact_scores_of(p, chunk, i_first, n_rows, i_h, i_chunk, is_flagged, CALL)
        else:
            # The dots below are loops of one turn, which the compiler must not know: only from one turn to the next
            # does an operand that was computed stay in shared memory, and both of theirs are one tile.
            flag = tl.load(p.flag + i_chunk)
            if is_taken(flag, CALL):
                is_flagged = tl.minimum(flag, 1)
                i_n, i_c, i_first, n_rows, n_read = locate(i_program // H, p, CHUNKS, C, CALL)
                chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
                exact_scores_of(p, chunk, i_first, n_rows, i_h, i_chunk, is_flagged, CALL)


@triton.jit
def load_parts(p_tile, m_tile, K: tl.constexpr, PARTS: tl.constexpr):
    """The sum of a head's parts in float32."""
    b = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    for i_part in tl.static_range(1, PARTS):
        b += tl.load(p_tile + i_part * K, mask=m_tile, other=0.0).to(tl.float32)
    return b


@triton.jit
def within_blocks(queries, b_k, decays, p_block, o_r, C: tl.constexpr):
    """Gradients of query and key by pairs of one block, one by one; the gradients of their scores lie at `p_block`.

    And the decay of each token until the end of its block.
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
        # to add −0 changes nothing, which the compiler knows
        b_sum = tl.sum(tl.where(m_before, b_pair * b_keys, -0.0), 1)
        b_dq = tl.where((o_r == t)[None, :, None], b_sum[:, None, :], b_dq)
        b_dk = tl.where(m_before, b_dk + b_pair * queries[t].to(tl.float32)[:, None, :], b_dk)
    return b_dq, b_dk, b_until


@triton.jit
def exact_gradients_of(p, p_dscore, chunk, i_first, n_rows, i_h, is_flagged, CALL: tl.constexpr):
    """What `exact_gradients` gives, of one chunk; `is_flagged` is 1, and the turns of the loops around dots."""
    H: tl.constexpr = CALL.heads
    HV: tl.constexpr = CALL.value_heads
    HO: tl.constexpr = CALL.output_heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    LR: tl.constexpr = CALL.log_rows
    PARTS: tl.constexpr = CALL.parts
    WIDE: tl.constexpr = CALL.wide
    PAD: tl.constexpr = K % BK != 0
    R: tl.constexpr = 1 << LR
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    i_row = chunk.i_row
    i_gate = 1
    if CALL.listed:
        i_gate = first_gate(chunk, CALL)
    i_token = token_of(i_first, n_rows, i_row, CALL.flip)
    o_t = tl.arange(0, C)
    o_row = o_t[:, None]
    o_column = o_t[None, :]
    o_r = tl.arange(0, R)
    o_b = tl.arange(0, C // R)
    m_read = i_row + o_t < chunk.n_read
    b_dscore = tl.zeros([C, C], tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_dout = load_rows(p.d_output, i_token, i_h // (H // HO), o_t * SIGN, m_read, o_v, HO, V, V % BV != 0, WIDE)
        b_v = load_rows(p.value, i_token, i_h // (H // HV), o_t * SIGN, m_read, o_v, HV, V, V % BV != 0, WIDE)
        b_dscore = tl.dot(b_dout, tl.trans(b_v), acc=b_dscore, input_precision=CALL.precision)
    b_dscore = b_dscore * CALL.scale
    # nobody reads those of the last chunk any more, and from here on threads read what others wrote
    tl.debug_barrier()
    tl.store(p_dscore + (o_row * C + o_column), b_dscore)
    tl.debug_barrier()
    # pairs of one level meet both ways: row of q with row of k, and back
    b_both = tl.where(o_row > o_column, b_dscore, tl.where(o_row < o_column, tl.trans(b_dscore), 0.0))
    if not WIDE:
        b_both = b_both.to(p.query.dtype.element_ty)
    b_meet = ()
    for i_level in tl.static_range(LR, LEVELS):
        # each block meets its neighbour
        b_meet += (tl.where(((o_row ^ o_column) >> i_level) == 1, b_both, 0.0),)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q, b_k, b_decay = load_chunk(p, i_token, i_h, i_row, chunk.n_read, i_gate, o_r, o_b, o_k, PAD, 2, SIGN, CALL)
        # on their way together with the others
        m_tile = mask_rows(i_row + o_b[:, None] * R + o_r[None, :], chunk.n_read, o_k, K, PAD)
        o_part = place_rows(i_token * PARTS, i_h * PARTS, o_b * (R * SIGN * PARTS), o_k, H, K)
        b_dqhat = load_parts(spread_rows(p.dq_hat + o_part, o_r, SIGN * H * PARTS * K, 2), m_tile, K, PARTS)
        b_dkhat = load_parts(spread_rows(p.dk_hat + o_part, o_r, SIGN * H * PARTS * K, 2), m_tile, K, PARTS)
        # decays since the start of a block and until its end, and from there to where it meets others
        decays = split_rows(b_decay, LR)
        since = (decays[0],)
        for r in tl.static_range(1, R):
            since += (since[r - 1] * decays[r],)
        b_since = join_rows(since, o_r)
        b_total = tl.reshape(since[R - 1], [C // R, 1, BK])
        b_before = tl.full([C // R, 1, BK], 1.0, tl.float32)
        b_after = b_before
        b_beyond = ()
        for i_level in tl.static_range(LR, LEVELS):
            m_late = is_late(o_r, o_b, i_level, LR)
            b_beyond += (tl.where(m_late, b_before, b_after),)
            b_beside = sibling(b_total, 1 << (i_level - LR))
            b_before *= tl.where(m_late, b_beside, 1.0)
            b_after *= tl.where(m_late, 1.0, b_beside)
            b_total *= b_beside
        # what states do, and what tokens do to themselves and to others of their block
        p_block = p_dscore + (o_b * (R * C + R))[:, None, None]
        own_dq, own_dk, b_until = within_blocks(split_rows(b_q, LR), b_k, decays, p_block, o_r, C)
        b_own = tl.load(p_block + (o_r * (C + 1))[None, :, None])
        b_fade = b_since * b_before
        b_summand = scaled(b_q, b_fade).to(tl.float32) * b_dqhat + b_q.to(tl.float32) * own_dq
        b_dq = b_dqhat * b_fade + (own_dq + b_own * b_k.to(tl.float32))
        b_fade = b_until * b_after
        b_summand -= scaled(b_k, b_fade).to(tl.float32) * b_dkhat + b_k.to(tl.float32) * own_dk
        b_dk = b_dkhat * b_fade + (own_dk + b_own * b_q.to(tl.float32))
        for i_level in tl.static_range(LR, LEVELS):
            m_late = is_late(o_r, o_b, i_level, LR)
            b_late = tl.where(m_late, 1.0, 0.0)
            b_fade = tl.where(m_late, b_since, b_until) * b_beyond[i_level - LR]
            b_fold = scaled(tl.where(m_late, b_q, b_k), b_fade)
            b_tokens = tl.reshape(b_fold, [C, BK])
            b_turned = tl.zeros([BK, C], tl.float32)
            for _ in tl.range(0, is_flagged):
                # turned, so that the matrix, the same for all key dims, is what has to lie in shared memory
                b_turned = tl.dot(tl.trans(b_tokens), b_meet[i_level - LR], input_precision=CALL.precision)
                b_tokens = tl.zeros_like(b_tokens)
            b_grad = held_as_loaded(tl.reshape(tl.trans(b_turned), [C // R, R, BK]))
            b_summand += b_fold.to(tl.float32) * b_grad * (2.0 * b_late - 1.0)
            b_grad *= b_fade
            b_dq += b_grad * b_late
            b_dk += b_grad * (1.0 - b_late)
        tl.store(spread_rows(p.summand + o_part, o_r, SIGN * H * PARTS * K, 2), b_summand, mask=m_tile)
        o_hat = place_rows(i_token, i_h, o_b * (R * SIGN), o_k, H, K)
        p_tile = spread_rows(p.d_query + o_hat, o_r, SIGN * H * K, 2)
        tl.store(p_tile, b_dq.to(p.d_query.dtype.element_ty), mask=m_tile)
        p_tile = spread_rows(p.d_key + o_hat, o_r, SIGN * H * K, 2)
        tl.store(p_tile, b_dk.to(p.d_key.dtype.element_ty), mask=m_tile)


@triton.jit
def exact_gradients(p, CALL: tl.constexpr):
    """For a flagged chunk: dq and dk, of which dq̂ and dk̂ hold the state's part, and what a gate's gradient sums up.

    The summand takes q̂ and k̂ as they were rounded, and leaves out what a token does to itself: both cancel in the sum,
    which strong gates make so small that the rounding errors would drown it.
    dq̂ and dk̂ come in parts to be added, of which the first of dq̂ is the summand's place.
    Each program has a place of its own for the gradients of a chunk's scores.
    """
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    p_dscore = p.d_score + tl.program_id(0).to(tl.int64) * (C * C)
    # what is the same for all heads would take registers
    for i_part in tl.range(0, heads_to_visit(p, CALL), disable_licm=True):
        i_program = tl.program_id(0) * CALL.heads_at_once + i_part
        i_h = i_program % H
        if CALL.listed:
            i_n, i_c, i_first, n_rows, n_read = locate(i_program // H, p, CHUNKS, C, CALL)
            i_from, n_listed = listed_from(i_n, i_c, 1, p, CALL)
            for i in range(i_from, i_from + n_listed):
                chunk = visit(i, i_n, n_rows, n_read, p, CALL)
                flag = load_flag(p.flag, chunk, i_program, i_h, p, CALL)
                if is_taken(flag, CALL):
                    is_flagged = tl.minimum(flag, 1)
                    exact_gradients_of(p, p_dscore, chunk, i_first, n_rows, i_h, is_flagged, CALL)
        else:
            flag = tl.load(p.flag + i_program.to(tl.int64))
            if is_taken(flag, CALL):
                is_flagged = tl.minimum(flag, 1)
                i_n, i_c, i_first, n_rows, n_read = locate(i_program // H, p, CHUNKS, C, CALL)
                chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
                exact_gradients_of(p, p_dscore, chunk, i_first, n_rows, i_h, is_flagged, CALL)
