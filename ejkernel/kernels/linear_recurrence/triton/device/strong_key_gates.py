# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code for chunks whose key gates are flagged as strong: their scores, and the gradients of these.

What tokens of a chunk do to each other is computed over dyadic blocks: no exponent of a decay is ever positive there. A
decay is the product of its tokens' own, which are the only powers computed.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.places import CHUNKS, load_rows, locate, token_of
from ejkernel.kernels.linear_recurrence.triton.device.strong_rows import (
    climb,
    is_late,
    join_rows,
    load_chunk,
    load_row,
    mask_rows,
    place_rows,
    sibling,
    split_rows,
)


@triton.jit
def heads_to_visit(p_flag, HEADS: tl.constexpr):
    """How many heads a program goes through: none where, as most often, none of its heads is flagged."""
    return tl.max(tl.load(p_flag + tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)), 0) * HEADS


@triton.jit
def exact_scores(
    p_q,
    p_k,
    p_gate,
    p_flag,
    p_qhat_in,
    p_khat_in,
    p_cu,
    p_owner,
    T,
    N,
    p_qhat,
    p_khat,
    p_score,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    LR: tl.constexpr,
    HEADS: tl.constexpr,
    START: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For a flagged chunk: its scores over dyadic blocks, and q̂, k̂ against its ends, in place of those folded."""
    PAD: tl.constexpr = K % BK != 0
    R: tl.constexpr = 1 << LR
    SIGN: tl.constexpr = -1 if FLIP else 1
    # what is the same for all heads would take registers
    for i_part in tl.range(0, heads_to_visit(p_flag, HEADS), disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        i_chunk = i_program.to(tl.int64)
        # 1 or 0. The dots below are loops of so many turns: only from one turn to the next does an operand that was
        # computed stay in shared memory, and both of theirs are one tile.
        is_flagged = tl.load(p_flag + i_chunk)
        if is_flagged != 0:
            _, i_c, i_first, n_rows, n_read = locate(i_program // H, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
            i_token = token_of(i_first, n_rows, i_c * C, FLIP)
            o_row = tl.arange(0, C)[:, None]
            o_column = tl.arange(0, C)[None, :]
            o_b = tl.arange(0, C // R)
            # rows meet earlier columns at the level of the highest bit in which they differ
            b_apart = tl.where(o_row < o_column, -1, o_row ^ o_column)
            b_score = tl.zeros([C, C], tl.float32)
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                own_q, own_k, b_total = load_chunk(
                    p_q,
                    p_k,
                    p_gate,
                    i_token,
                    i_h,
                    i_c * C,
                    n_read,
                    o_b,
                    o_k,
                    H,
                    HQ,
                    HK,
                    K,
                    PAD,
                    LR,
                    4,
                    SIGN,
                    START,
                    WIDE,
                )
                b_q = ()
                b_k = ()
                for r in tl.static_range(R):
                    b_q += (own_q[r].to(tl.float32) * b_total[r],)
                    b_k += (own_k[r].to(tl.float32),)
                b_fold = join_rows(own_q, R)
                b_other = join_rows(own_k, R)
                b_part = tl.zeros([C, C], tl.float32)
                for _ in tl.range(0, is_flagged):
                    b_pair = tl.dot(b_fold, tl.trans(b_other), input_precision=PRECISION)
                    b_part = tl.where(b_apart == 0, b_pair, 0.0)
                    b_fold = tl.zeros_like(b_fold)
                for i_level in tl.static_range(0, LEVELS):
                    folded, b_q, b_k, b_total = climb(b_q, b_k, b_total, o_b, i_level, LR)
                    b_fold = join_rows(folded, R).to(b_other.dtype)
                    for _ in tl.range(0, is_flagged):
                        b_pair = tl.dot(b_fold, tl.trans(b_fold), input_precision=PRECISION)
                        # what meets at a higher level is written over there
                        b_part = tl.where(b_apart >= 2**i_level, b_pair, b_part)
                        b_fold = tl.zeros_like(b_fold)
                b_score += b_part
                o_hat = place_rows(i_token, i_h, o_b * (R * SIGN), o_k, H, K)
                for r in tl.static_range(R):
                    m_tile = mask_rows(i_c * C + o_b * R + r, n_read, o_k, K, PAD)
                    o_tile = o_hat + r * (SIGN * H * K)
                    tl.store(p_qhat + o_tile, b_q[r].to(p_qhat.dtype.element_ty), mask=m_tile)
                    tl.store(p_khat + o_tile, b_k[r].to(p_khat.dtype.element_ty), mask=m_tile)
            tl.store(p_score + i_chunk * (C * C) + (o_row * C + o_column), b_score.to(p_score.dtype.element_ty))


@triton.jit
def load_parts(p_tile, m_tile, K: tl.constexpr, PARTS: tl.constexpr):
    """The sum of a head's parts in float32."""
    b = load_row(p_tile, m_tile, 2).to(tl.float32)
    for i_part in tl.static_range(1, PARTS):
        b += load_row(p_tile + i_part * K, m_tile, 2).to(tl.float32)
    return b


@triton.jit
def faded(b, b_fade):
    return (b.to(tl.float32) * b_fade).to(b.dtype)


@triton.jit
def within_blocks(queries, keys, decays, p_block, C: tl.constexpr, R: tl.constexpr):
    """Gradients of query and key by pairs of one block, one by one; the gradients of their scores lie at `p_block`."""
    b_none = tl.zeros_like(decays[0])
    dqueries = ()
    for t in tl.static_range(R):
        b_sum = b_none
        for s in tl.static_range(t):
            b_pair = tl.load(p_block + (t * C + s)) * keys[s].to(tl.float32)
            if s == 0:
                b_sum = b_pair
            else:
                b_sum = b_sum * decays[s] + b_pair
        dqueries += (b_sum * decays[t],)
    dkeys = ()
    for s in tl.static_range(R):
        b_sum = b_none
        for i in tl.static_range(1, R - s):
            # from the last row on
            b_pair = tl.load(p_block + ((R - i) * C + s)) * queries[R - i].to(tl.float32)
            if i == 1:
                b_sum = b_pair * decays[R - i]
            else:
                b_sum = (b_sum + b_pair) * decays[R - i]
        dkeys += (b_sum,)
    return dqueries, dkeys


@triton.jit
def exact_gradients(
    p_q,
    p_k,
    p_v,
    p_gate,
    p_dout,
    p_flag,
    p_dqhat,
    p_dkhat,
    p_cu,
    p_owner,
    T,
    N,
    p_summand,
    p_dq,
    p_dk,
    p_dscore,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    LR: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    START: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For a flagged chunk: dq and dk, of which dq̂ and dk̂ hold the state's part, and what a gate's gradient sums up.

    The summand takes q̂ and k̂ as they were rounded, and leaves out what a token does to itself: both cancel in the sum,
    which strong gates make so small that the rounding errors would drown it.
    dq̂ and dk̂ come in parts to be added, of which the first of dq̂ is the summand's place.
    Each program has a place of its own for the gradients of a chunk's scores.
    """
    PAD: tl.constexpr = K % BK != 0
    R: tl.constexpr = 1 << LR
    SIGN: tl.constexpr = -1 if FLIP else 1
    p_dscore += tl.program_id(0).to(tl.int64) * (C * C)
    # what is the same for all heads would take registers
    for i_part in tl.range(0, heads_to_visit(p_flag, HEADS), disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        # 1 or 0, and the turns of the loop around a dot, as for the scores
        is_flagged = tl.load(p_flag + i_program.to(tl.int64))
        if is_flagged != 0:
            _, i_c, i_first, n_rows, n_read = locate(i_program // H, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
            i_token = token_of(i_first, n_rows, i_c * C, FLIP)
            o_r = tl.arange(0, C)
            o_row = o_r[:, None]
            o_column = o_r[None, :]
            o_b = tl.arange(0, C // R)
            m_read = i_c * C + o_r < n_read
            b_dscore = tl.zeros([C, C], tl.float32)
            for i_v in range(0, (V + BV - 1) // BV):
                o_v = i_v * BV + tl.arange(0, BV)
                b_dout = load_rows(p_dout, i_token, i_h // (H // HO), o_r * SIGN, m_read, o_v, HO, V, V % BV != 0, WIDE)
                b_v = load_rows(p_v, i_token, i_h // (H // HV), o_r * SIGN, m_read, o_v, HV, V, V % BV != 0, WIDE)
                b_dscore = tl.dot(b_dout, tl.trans(b_v), acc=b_dscore, input_precision=PRECISION)
            b_dscore = b_dscore * SCALE
            # nobody reads those of the last chunk any more, and from here on threads read what others wrote
            tl.debug_barrier()
            tl.store(p_dscore + (o_row * C + o_column), b_dscore)
            tl.debug_barrier()
            # pairs of one level meet both ways: row of q with row of k, and back
            b_both = tl.where(o_row > o_column, b_dscore, tl.where(o_row < o_column, tl.trans(b_dscore), 0.0))
            if not WIDE:
                b_both = b_both.to(p_q.dtype.element_ty)
            b_meet = ()
            for i_level in tl.static_range(LR, LEVELS):
                # each block meets its neighbour
                b_meet += (tl.where(((o_row ^ o_column) >> i_level) == 1, b_both, 0.0),)
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                queries, keys, decays = load_chunk(
                    p_q, p_k, p_gate, i_token, i_h, i_c * C, n_read, o_b, o_k,
                    H, HQ, HK, K, PAD, LR, 2, SIGN, START, WIDE,
                )  # fmt: skip
                # on their way together with the others
                o_part = place_rows(i_token * PARTS, i_h * PARTS, o_b * (R * SIGN * PARTS), o_k, H, K)
                b_dqhat = ()
                b_dkhat = ()
                for r in tl.static_range(R):
                    m_tile = mask_rows(i_c * C + o_b * R + r, n_read, o_k, K, PAD)
                    b_dqhat += (load_parts(p_dqhat + (o_part + r * (SIGN * H * PARTS * K)), m_tile, K, PARTS),)
                    b_dkhat += (load_parts(p_dkhat + (o_part + r * (SIGN * H * PARTS * K)), m_tile, K, PARTS),)
                # decays since the start of a block and until its end, and from there to where it meets others
                b_since = (decays[0],)
                b_until = (tl.full([C // R, BK], 1.0, tl.float32),)
                for r in tl.static_range(1, R):
                    b_since += (b_since[r - 1] * decays[r],)
                    b_until += (b_until[r - 1] * decays[R - r],)
                b_total = b_since[R - 1]
                b_before = tl.full([C // R, BK], 1.0, tl.float32)
                b_after = b_before
                b_beyond = ()
                for i_level in tl.static_range(LR, LEVELS):
                    m_late = is_late(o_b, i_level, LR)
                    b_beyond += (tl.where(m_late, b_before, b_after),)
                    b_beside = sibling(b_total, 1 << (i_level - LR))
                    b_before *= tl.where(m_late, b_beside, 1.0)
                    b_after *= tl.where(m_late, 1.0, b_beside)
                    b_total *= b_beside
                # what states do, and what tokens do to themselves and to others of their block
                p_block = p_dscore + o_b[:, None] * (R * C + R)
                own_dq, own_dk = within_blocks(queries, keys, decays, p_block, C, R)
                b_dq = ()
                b_dk = ()
                b_summand = ()
                for r in tl.static_range(R):
                    b_q = queries[r].to(tl.float32)
                    b_k = keys[r].to(tl.float32)
                    b_fade = b_since[r] * b_before
                    b_moved = faded(queries[r], b_fade).to(tl.float32) * b_dqhat[r] + b_q * own_dq[r]
                    b_own = tl.load(p_block + r * (C + 1))
                    b_dq += (b_dqhat[r] * b_fade + (own_dq[r] + b_own * b_k),)
                    b_fade = b_until[R - 1 - r] * b_after
                    b_moved -= faded(keys[r], b_fade).to(tl.float32) * b_dkhat[r] + b_k * own_dk[r]
                    b_dk += (b_dkhat[r] * b_fade + (own_dk[r] + b_own * b_q),)
                    b_summand += (b_moved,)
                for i_level in tl.static_range(LR, LEVELS):
                    m_late = is_late(o_b, i_level, LR)
                    b_late = tl.where(m_late, 1.0, 0.0)
                    fades = ()
                    folds = ()
                    for r in tl.static_range(R):
                        fades += (tl.where(m_late, b_since[r], b_until[R - 1 - r]) * b_beyond[i_level - LR],)
                        folds += (faded(tl.where(m_late, queries[r], keys[r]), fades[r]),)
                    b_fold = join_rows(folds, R)
                    b_turned = tl.zeros([BK, C], tl.float32)
                    for _ in tl.range(0, is_flagged):
                        # turned, so that the matrix, the same for all key dims, is what has to lie in shared memory
                        b_turned = tl.dot(tl.trans(b_fold), b_meet[i_level - LR], input_precision=PRECISION)
                        b_fold = tl.zeros_like(b_fold)
                    grads = split_rows(tl.trans(b_turned), LR)
                    dq = ()
                    dk = ()
                    summand = ()
                    for r in tl.static_range(R):
                        b_moved = folds[r].to(tl.float32) * grads[r]
                        b_back = grads[r] * fades[r]
                        dq += (b_dq[r] + b_back * b_late,)
                        dk += (b_dk[r] + b_back * (1.0 - b_late),)
                        summand += (b_summand[r] + b_moved * (2.0 * b_late - 1.0),)
                    b_dq = dq
                    b_dk = dk
                    b_summand = summand
                o_hat = place_rows(i_token, i_h, o_b * (R * SIGN), o_k, H, K)
                for r in tl.static_range(R):
                    m_tile = mask_rows(i_c * C + o_b * R + r, n_read, o_k, K, PAD)
                    tl.store(p_summand + (o_part + r * (SIGN * H * PARTS * K)), b_summand[r], mask=m_tile)
                    o_tile = o_hat + r * (SIGN * H * K)
                    tl.store(p_dq + o_tile, b_dq[r].to(p_dq.dtype.element_ty), mask=m_tile)
                    tl.store(p_dk + o_tile, b_dk[r].to(p_dk.dtype.element_ty), mask=m_tile)
