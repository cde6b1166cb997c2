# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code for chunks whose key gates are flagged as strong: their scores, and the gradients of these."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.gates import LOG2E, MOST
from ejkernel.kernels.chunks.triton.places import CHUNKS, load_columns, load_rows, locate, token_of
from ejkernel.kernels.chunks.triton.strong_gates import fold_level, keep_sums, sums_to_ends
from ejkernel.kernels.linear_recurrence.triton.device.strong_rows import climb, join_rows, load_row, place_rows


@triton.jit
def enter(
    p_gate,
    p_sum,
    i_program,
    p_cu,
    p_owner,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    START: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    FINE: tl.constexpr,
):
    """A flagged chunk's first token, its rows and where they lie, which can be read, and whose gates; sums these up."""
    _, i_c, i_first, n_rows, n_read = locate(i_program // H, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
    i_token = token_of(i_first, n_rows, i_c * C, FLIP)
    o_r = tl.arange(0, C)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    m_read = i_c * C + o_r < n_read
    m_gate = m_read
    if not START:
        # the first gate meets no state, and must not make an infinite one of it
        m_gate = m_gate & (i_c * C + o_r > 0)
    if not FINE:
        keep_sums(p_gate, p_sum, i_token, i_program % H, o_t, m_gate, o_r, H, K, KP, BK, C)
    return i_token, o_r, o_t, m_read, m_gate


@triton.jit
def load_part(
    p_q,
    p_k,
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    m_gate,
    o_r,
    o_k,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PAD: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    FINE: tl.constexpr,
):
    """Some key dims of a chunk's queries and keys, and the sums of their gates to either end."""
    b_q = load_columns(p_q, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, PAD, WIDE)
    b_k = load_columns(p_k, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, PAD, WIDE)
    b_since, b_until = sums_to_ends(p_gate, p_sum, i_token, i_h, o_t, m_gate, o_r, o_k, H, K, KP, PAD, C, FINE)
    return b_q, b_k, b_since, b_until


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
    """For a flagged chunk: its scores over dyadic blocks, and q̂, k̂ against its ends, in place of those folded.

    A decay is the product of its tokens' own, which are the only powers computed.
    """
    R: tl.constexpr = 1 << LR
    SIGN: tl.constexpr = -1 if FLIP else 1
    # several a program, since most often none of them is flagged; what is the same for all of them would take registers
    for i_part in tl.range(0, HEADS, disable_licm=True):
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
            o_t = o_b * (R * SIGN)
            # rows meet earlier columns at the level of the highest bit in which they differ
            b_apart = tl.where(o_row < o_column, -1, o_row ^ o_column)
            b_score = tl.zeros([C, C], tl.float32)
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                p_q0 = p_q + place_rows(i_token, i_h // (H // HQ), o_t, o_k, HQ, K)
                p_k0 = p_k + place_rows(i_token, i_h // (H // HK), o_t, o_k, HK, K)
                o_hat = place_rows(i_token, i_h, o_t, o_k, H, K)
                own_q = ()
                own_k = ()
                b_q = ()
                b_k = ()
                b_total = ()
                for r in tl.static_range(R):
                    i_row = i_c * C + o_b * R + r
                    m_tile = (i_row < n_read)[:, None]
                    if K % BK != 0:
                        m_tile = m_tile & (o_k < K)[None, :]
                    m_gate = m_tile
                    if not START and r == 0:
                        # the first gate meets no state, and must not make an infinite one of it
                        m_gate = m_gate & (i_row > 0)[:, None]
                    b_gate = load_row(p_gate + o_hat + r * (SIGN * H * K), m_gate).to(tl.float32)
                    b_qrow = load_row(p_q0 + r * (SIGN * HQ * K), m_tile)
                    b_krow = load_row(p_k0 + r * (SIGN * HK * K), m_tile)
                    if WIDE:
                        b_qrow = b_qrow.to(tl.float32)
                        b_krow = b_krow.to(tl.float32)
                    b_fade = tl.exp2(tl.minimum(b_gate * LOG2E, MOST))
                    own_q += (b_qrow,)
                    own_k += (b_krow,)
                    b_q += (b_qrow.to(tl.float32) * b_fade,)
                    b_k += (b_krow.to(tl.float32),)
                    b_total += (b_fade,)
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
                for r in tl.static_range(R):
                    m_tile = (i_c * C + o_b * R + r < n_read)[:, None]
                    if K % BK != 0:
                        m_tile = m_tile & (o_k < K)[None, :]
                    o_tile = o_hat + r * (SIGN * H * K)
                    tl.store(p_qhat + o_tile, b_q[r].to(p_qhat.dtype.element_ty), mask=m_tile)
                    tl.store(p_khat + o_tile, b_k[r].to(p_khat.dtype.element_ty), mask=m_tile)
            tl.store(p_score + i_chunk * (C * C) + (o_row * C + o_column), b_score.to(p_score.dtype.element_ty))


@triton.jit
def load_parts(
    p, i_token, i_head, o_t, m_r, o_c, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, PARTS: tl.constexpr
):
    """The sum of a head's parts in float32, as `load_columns` lays it out."""
    b = load_columns(p, i_token, i_head * PARTS, o_t, m_r, o_c, H * PARTS, D, PAD, True)
    for i_part in tl.static_range(1, PARTS):
        b += load_columns(p, i_token, i_head * PARTS + i_part, o_t, m_r, o_c, H * PARTS, D, PAD, True)
    return b


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
    p_sum,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    START: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For a flagged chunk: dq and dk, of which dq̂ and dk̂ hold the state's part, and what a gate's gradient sums up.

    The summand takes q̂ and k̂ as they were rounded, and leaves out what a token does to itself: both cancel in the sum,
    which strong gates make so small that the rounding errors would drown it.
    dq̂ and dk̂ come in parts to be added, of which the first of dq̂ is the summand's place.
    """
    PAD: tl.constexpr = K % BK != 0
    p_sum += tl.program_id(0).to(tl.int64) * (C * KP)
    # several a program, since most often none of them is flagged; what is the same for all of them would take registers
    for i_part in tl.range(0, HEADS, disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        if tl.load(p_flag + i_program.to(tl.int64)) != 0:
            i_token, o_r, o_t, m_read, m_gate = enter(
                p_gate, p_sum, i_program, p_cu, p_owner, T, N, H, K, KP, BK, C, START, PACKED, FLIP, FINE
            )
            o_row = o_r[:, None]
            o_column = o_r[None, :]
            b_dscore = tl.zeros([C, C], tl.float32)
            for i_v in range(0, (V + BV - 1) // BV):
                o_v = i_v * BV + tl.arange(0, BV)
                b_dout = load_rows(p_dout, i_token, i_h // (H // HO), o_t, m_read, o_v, HO, V, V % BV != 0, WIDE)
                b_v = load_rows(p_v, i_token, i_h // (H // HV), o_t, m_read, o_v, HV, V, V % BV != 0, WIDE)
                b_dscore = tl.dot(b_dout, tl.trans(b_v), acc=b_dscore, input_precision=PRECISION)
            # pairs of one level meet both ways: row of q with row of k, and back
            b_dboth = tl.where(o_row > o_column, b_dscore, tl.where(o_row < o_column, tl.trans(b_dscore), 0.0)) * SCALE
            if not WIDE:
                b_dboth = b_dboth.to(p_q.dtype.element_ty)
            b_own = tl.trans(tl.sum(tl.where(o_row == o_column, b_dscore, 0.0), 1)[:, None]) * SCALE
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_q, b_k, b_since, b_until = load_part(
                    p_q,
                    p_k,
                    p_gate,
                    p_sum,
                    i_token,
                    i_h,
                    o_t,
                    m_read,
                    m_gate,
                    o_r,
                    o_k,
                    H,
                    HQ,
                    HK,
                    K,
                    KP,
                    PAD,
                    C,
                    WIDE,
                    FINE,
                )
                b_fade = tl.exp2(b_since)
                b_grad = load_parts(p_dqhat, i_token, i_h, o_t, m_read, o_k, H, K, PAD, PARTS)
                b_summand = (b_q.to(tl.float32) * b_fade).to(b_q.dtype).to(tl.float32) * b_grad
                b_dq = b_grad * b_fade + b_own * b_k.to(tl.float32)
                b_fade = tl.exp2(b_until)
                b_grad = load_parts(p_dkhat, i_token, i_h, o_t, m_read, o_k, H, K, PAD, PARTS)
                b_summand -= (b_k.to(tl.float32) * b_fade).to(b_q.dtype).to(tl.float32) * b_grad
                b_dk = b_grad * b_fade + b_own * b_q.to(tl.float32)
                # a level's fold is made after the last's gradients, which so come to its layout, and not it to theirs
                b_fold, b_fade = fold_level(
                    b_q, b_k, b_since, p_gate, p_sum, i_token, i_h, o_t, m_gate, o_r, o_k, 0, H, K, KP, PAD, C, FINE
                )
                for i_level in range(0, LEVELS):
                    # each block meets its neighbour
                    b_meet = tl.where((o_column >> i_level) == ((o_row >> i_level) ^ 1), b_dboth, 0.0)
                    b_grad = tl.trans(tl.dot(b_meet, tl.trans(b_fold), input_precision=PRECISION))
                    b_late = ((o_column >> i_level) & 1).to(tl.float32)
                    b_summand += b_fold.to(tl.float32) * b_grad * (2.0 * b_late - 1.0)
                    b_grad = b_grad * b_fade
                    b_dq += b_grad * b_late
                    b_dk += b_grad * (1.0 - b_late)
                    if i_level + 1 < LEVELS:
                        b_fold, b_fade = fold_level(
                            b_q, b_k, b_since, p_gate, p_sum, i_token, i_h, o_t, m_gate, o_r, o_k, i_level + 1,
                            H, K, KP, PAD, C, FINE,
                        )  # fmt: skip
                m_tile = m_read[None, :] & (o_k[:, None] < K)
                o_tile = (i_token * H + i_h) * K + (o_t[None, :] * (H * K) + o_k[:, None])
                o_part = (i_token * H + i_h) * (PARTS * K) + (o_t[None, :] * (H * PARTS * K) + o_k[:, None])
                tl.store(p_summand + o_part, b_summand, mask=m_tile)
                tl.store(p_dq + o_tile, b_dq.to(p_dq.dtype.element_ty), mask=m_tile)
                tl.store(p_dk + o_tile, b_dk.to(p_dk.dtype.element_ty), mask=m_tile)
