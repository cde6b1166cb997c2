# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code for one decay a key dim: gates folded into queries and keys, and the exact path for strong gates.

A chunk's gates are folded against one reference in its middle: `q̂ = q e^{A_t - A_r}`, `k̂ = k e^{A_r - A_s}`. Where the
gates of half a chunk are too strong for that, the chunk is flagged: `q̂ = q e^{A_t}`, `k̂ = k e^{A_C - A_s}`, and what
its tokens do to each other is computed over dyadic blocks, in which no exponent of a decay is ever positive.
"""

import triton
import triton.language as tl

from ejkernel.kernels.linear_recurrence.triton.kernels import (
    CHUNKS,
    GROUPS,
    LEAST,
    LOG2E,
    MOST,
    blocks_before,
    faded,
    in_bits,
    load_rows,
    locate,
    token_of,
)

# The largest number that bfloat16 has.
LARGEST = tl.constexpr((2.0 - 2.0**-7) * 2.0**127)


@triton.jit
def load_four(p, o, o_step, m0, m1, m2, m3):
    """Four rows at once, so that their loads are in flight together."""
    b0 = tl.load(p + o, mask=m0, other=0.0).to(tl.float32)
    b1 = tl.load(p + o + o_step, mask=m1, other=0.0).to(tl.float32)
    b2 = tl.load(p + o + 2 * o_step, mask=m2, other=0.0).to(tl.float32)
    b3 = tl.load(p + o + 3 * o_step, mask=m3, other=0.0).to(tl.float32)
    return b0, b1, b2, b3


@triton.jit
def store_four(p, o, o_step, b0, b1, b2, b3, m0, m1, m2, m3):
    tl.store(p + o, b0.to(p.dtype.element_ty), mask=m0)
    tl.store(p + o + o_step, b1.to(p.dtype.element_ty), mask=m1)
    tl.store(p + o + 2 * o_step, b2.to(p.dtype.element_ty), mask=m2)
    tl.store(p + o + 3 * o_step, b3.to(p.dtype.element_ty), mask=m3)


@triton.jit
def fold_half(
    p_q,
    p_k,
    p_gate,
    p_qhat,
    p_khat,
    i_first,
    n_rows,
    n_read,
    i_row,
    i_h,
    i_kh,
    o_k,
    m_k,
    H: tl.constexpr,
    HKV: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    LATE: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Folds the gates of half a chunk, from its middle outwards; returns their sums and the largest on the way."""
    SIGN: tl.constexpr = (1 if LATE else -1) * (-1 if FLIP else 1)
    b_sum = tl.zeros(o_k.shape, tl.float32)
    b_most = tl.zeros(o_k.shape, tl.float32)
    for i in range(0, HALF // 4):
        if LATE:
            i0 = i_row + HALF + 4 * i
            i1, i2, i3 = i0 + 1, i0 + 2, i0 + 3
        else:
            i0 = i_row + HALF - 1 - 4 * i
            i1, i2, i3 = i0 - 1, i0 - 2, i0 - 3
        m0, m1, m2, m3 = m_k & (i0 < n_read), m_k & (i1 < n_read), m_k & (i2 < n_read), m_k & (i3 < n_read)
        i_token = token_of(i_first, n_rows, i0, FLIP)
        o_q = (i_token * H + i_h) * K + o_k
        g0, g1, g2, g3 = load_four(p_gate, o_q, SIGN * H * K, m0, m1, m2, m3)
        q0, q1, q2, q3 = load_four(p_q, o_q, SIGN * H * K, m0, m1, m2, m3)
        k0, k1, k2, k3 = load_four(p_k, (i_token * HKV + i_kh) * K + o_k, SIGN * HKV * K, m0, m1, m2, m3)
        if LATE:
            s0 = b_sum + g0 * LOG2E
            s1 = s0 + g1 * LOG2E
            s2 = s1 + g2 * LOG2E
            s3 = s2 + g3 * LOG2E
            b_sum = s3
            u0, u1, u2, u3 = tl.exp2(s0), tl.exp2(s1), tl.exp2(s2), tl.exp2(s3)
            w0, w1, w2, w3 = tl.exp2(-s0), tl.exp2(-s1), tl.exp2(-s2), tl.exp2(-s3)
        else:
            s0 = b_sum
            s1 = s0 + g0 * LOG2E
            s2 = s1 + g1 * LOG2E
            s3 = s2 + g2 * LOG2E
            b_sum = s3 + g3 * LOG2E
            u0, u1, u2, u3 = tl.exp2(-s0), tl.exp2(-s1), tl.exp2(-s2), tl.exp2(-s3)
            w0, w1, w2, w3 = tl.exp2(s0), tl.exp2(s1), tl.exp2(s2), tl.exp2(s3)
        b_most = tl.maximum(b_most, tl.maximum(tl.abs(s1), tl.abs(s2)))
        b_most = tl.maximum(b_most, tl.maximum(tl.abs(s3), tl.abs(b_sum)))
        store_four(p_qhat, o_q, SIGN * H * K, q0 * u0, q1 * u1, q2 * u2, q3 * u3, m0, m1, m2, m3)
        store_four(p_khat, o_q, SIGN * H * K, k0 * w0, k1 * w1, k2 * w2, k3 * w3, m0, m1, m2, m3)
    return b_sum, b_most


@triton.jit
def fold_gates(
    p_q,
    p_k,
    p_gate,
    p_cu,
    p_owner,
    T,
    N,
    p_qhat,
    p_khat,
    p_factor,
    p_late,
    p_flag,
    H: tl.constexpr,
    HKV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LIMIT: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Streams q, k and the gates of a chunk once; writes q̂, k̂, the state's decays through the chunk, and the flag."""
    HALF: tl.constexpr = C // 2
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = i_program // H
    _, i_c, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
    i_row = i_c * C
    i_kh = i_h // (H // HKV)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_early, b_most = fold_half(
        p_q, p_k, p_gate, p_qhat, p_khat, i_first, n_rows, n_read, i_row, i_h, i_kh, o_k, m_k,
        H, HKV, K, HALF, False, FLIP,
    )  # fmt: skip
    b_late, b_most_late = fold_half(
        p_q, p_k, p_gate, p_qhat, p_khat, i_first, n_rows, n_read, i_row, i_h, i_kh, o_k, m_k,
        H, HKV, K, HALF, True, FLIP,
    )  # fmt: skip
    is_exact = tl.max(tl.maximum(b_most, b_most_late), 0) > LIMIT
    i_chunk = i_program.to(tl.int64)
    tl.store(p_flag + i_chunk, is_exact.to(tl.int32))
    tl.store(p_late + i_chunk * K + o_k, b_late, mask=m_k)
    # a flagged chunk's k̂ and q̂ carry the decay to its ends already
    b_all = tl.exp2(tl.minimum(b_early + b_late, MOST))
    b_first = tl.where(is_exact, b_all, tl.exp2(b_early))
    b_second = tl.where(is_exact, 1.0, tl.exp2(b_late))
    p_pair = p_factor + i_chunk * (4 * K) + o_k
    tl.store(p_pair, b_first, mask=m_k)
    tl.store(p_pair + K, b_second, mask=m_k)
    tl.store(p_pair + 2 * K, tl.where(is_exact, b_all, b_second), mask=m_k)
    tl.store(p_pair + 3 * K, tl.where(is_exact, 1.0, b_first), mask=m_k)


@triton.jit
def split_gate(b_gate):
    """A gate in base 2 as float16 summands: whole eighths, the rest, and what rounding took off the rest."""
    b_gate = in_bits(b_gate)
    b_whole = tl.floor(b_gate * 8.0 + 0.5) * 0.125
    b_rest = b_gate - b_whole
    b_part = b_rest.to(tl.float16)
    return b_whole.to(tl.float16), b_part, (b_rest - b_part.to(tl.float32)).to(tl.float16)


@triton.jit
def sum_gates(m_sum, b_gate, FINE: tl.constexpr):
    """Sums of gates over the rows that `m_sum` selects; only added, so that a strong gate costs no other digits."""
    b_whole, b_part, b_fine = split_gate(b_gate)
    b_pick = tl.where(m_sum, 1.0, 0.0).to(tl.float16)
    b_sum = tl.dot(b_pick, b_part)
    if FINE:
        b_sum = tl.dot(b_pick, b_fine, acc=b_sum)
    return tl.dot(b_pick, b_whole, acc=b_sum)


@triton.jit
def place_sum(o_row, o_k, C: tl.constexpr, KP: tl.constexpr):
    """Where a program keeps the sum of gates of a row and key dim: the halves of each eight dims apart.

    A thread has eight dims of a row, as many as one load of queries brings. With the halves apart, threads side by
    side read what lies side by side.
    """
    return ((o_k >> 2) & 1) * (C * KP // 2) + o_row * (KP // 2) + ((o_k >> 3) << 2) + (o_k & 3)


@triton.jit
def keep_sums(
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    o_r,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
):
    """Stores the sums of a chunk's gates since its start."""
    # nobody reads those of the last chunk any more
    tl.debug_barrier()
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_read, o_k, H, K, K % BK != 0, True)
        b_sum = sum_gates(o_r[None, :] <= o_r[:, None], b_gate, False)
        p_tile = p_sum + place_sum(o_r[:, None], o_k[None, :], C, KP)
        tl.store(tl.multiple_of(tl.max_contiguous(p_tile, (1, 4)), (1, 16)), b_sum)
    # rows of other threads are read from here on
    tl.debug_barrier()


@triton.jit
def load_sums(p_sum, o_row, o_k, C: tl.constexpr, KP: tl.constexpr):
    p_tile = p_sum + place_sum(o_row[None, :], o_k[:, None], C, KP)
    return tl.load(tl.multiple_of(tl.max_contiguous(p_tile, (4, 1)), (16, 1)))


@triton.jit
def sums_to_ends(
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    o_r,
    o_k,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PAD: tl.constexpr,
    C: tl.constexpr,
    FINE: tl.constexpr,
):
    """Sums of gates from a chunk's start to each row, and from there to its end."""
    if FINE:
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_read, o_k, H, K, PAD, True)
        b_since = tl.trans(sum_gates(o_r[None, :] <= o_r[:, None], b_gate, True))
        b_until = tl.trans(sum_gates(o_r[None, :] > o_r[:, None], b_gate, True))
    else:
        b_since = load_sums(p_sum, o_r, o_k, C, KP)
        b_until = load_sums(p_sum, o_r * 0 + (C - 1), o_k, C, KP) - b_since
    return b_since, b_until


@triton.jit
def fold_to_end(b, b_bits):
    """Rows of q or k with the gates to an end of the chunk folded in; finite, so that no state stays no state."""
    b_hat = faded(b.to(tl.float32), b_bits)
    return tl.where(b_hat > LARGEST, LARGEST, tl.where(b_hat < -LARGEST, -LARGEST, b_hat))


@triton.jit
def load_columns(
    p, i_token, i_head, o_t, m_r, o_c, HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr
):
    """Rows of one head as the columns of a tile; what the masks leave out is 0."""
    m_tile = m_r[None, :]
    if PAD:
        m_tile = m_tile & (o_c[:, None] < D)
    b = tl.load(
        p + (i_token * HEADS + i_head) * D + (o_t[None, :] * (HEADS * D) + o_c[:, None]), mask=m_tile, other=0.0
    )
    if WIDE:
        b = b.to(tl.float32)
    return b


@triton.jit
def fold_level(
    b_q,
    b_k,
    b_since,
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    o_r,
    o_k,
    i_level,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PAD: tl.constexpr,
    C: tl.constexpr,
    FINE: tl.constexpr,
):
    """At one dyadic level: late rows of q and early rows of k, decayed to the border between them, and the decays."""
    m_late = ((o_r >> i_level) & 1) != 0
    i_border = ((o_r >> i_level) | 1) << i_level
    if FINE:
        m_sum = tl.where(
            m_late[:, None],
            (o_r[None, :] >= i_border[:, None]) & (o_r[None, :] <= o_r[:, None]),
            (o_r[None, :] > o_r[:, None]) & (o_r[None, :] < i_border[:, None]),
        )
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_read, o_k, H, K, PAD, True)
        b_sum = tl.trans(sum_gates(m_sum, b_gate, True))
    else:
        b_sum = (b_since - load_sums(p_sum, i_border - 1, o_k, C, KP)) * tl.where(m_late, 1.0, -1.0)[None, :]
    b_fade = tl.exp2(b_sum)
    return (tl.where(m_late[None, :], b_q, b_k).to(tl.float32) * b_fade).to(b_q.dtype), b_fade


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
    p_sum,
    H: tl.constexpr,
    HKV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For a flagged chunk: its scores over dyadic blocks, and q̂, k̂ against its ends, in place of those folded."""
    PAD: tl.constexpr = K % BK != 0
    p_sum += tl.program_id(0).to(tl.int64) * (C * KP)
    # several a program, since most often none of them is flagged; what is the same for all of them would take registers
    for i_part in tl.range(0, HEADS, disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        i_kh = i_h // (H // HKV)
        i_chunk = i_program.to(tl.int64)
        if tl.load(p_flag + i_chunk) != 0:
            _, i_c, i_first, n_rows, n_read = locate(i_program // H, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
            i_token = token_of(i_first, n_rows, i_c * C, FLIP)
            o_r = tl.arange(0, C)
            o_t = o_r
            if FLIP:
                o_t = -o_r
            o_row = o_r[:, None]
            o_column = o_r[None, :]
            m_read = i_c * C + o_r < n_read
            if not FINE:
                keep_sums(p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, H, K, KP, BK, C)
            b_score = tl.zeros([C, C], tl.float32)
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_q = load_columns(p_q, i_token, i_h, o_t, m_read, o_k, H, K, PAD, WIDE)
                b_k = load_columns(p_k, i_token, i_kh, o_t, m_read, o_k, HKV, K, PAD, WIDE)
                b_since, b_until = sums_to_ends(
                    p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, o_k, H, K, KP, PAD, C, FINE
                )
                m_tile = m_read[None, :] & (o_k[:, None] < K)
                o_tile = (i_token * H + i_h) * K + (o_t[None, :] * (H * K) + o_k[:, None])
                b_hat = fold_to_end(b_q, b_since)
                tl.store(p_qhat + o_tile, b_hat.to(p_qhat.dtype.element_ty), mask=m_tile)
                b_hat = fold_to_end(b_k, b_until)
                tl.store(p_khat + o_tile, b_hat.to(p_khat.dtype.element_ty), mask=m_tile)
                b_own = tl.dot(tl.trans(b_q), b_k, input_precision=PRECISION)
                b_score += tl.where(o_row == o_column, b_own, 0.0)
                # a level's fold is made a turn ahead of its product, which so takes both operands from shared memory
                b_fold = fold_level(
                    b_q, b_k, b_since, p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, o_k, 0, H, K, KP, PAD, C, FINE
                )[0]
                for i_level in range(0, LEVELS):
                    b_pair = tl.dot(tl.trans(b_fold), b_fold, input_precision=PRECISION)
                    if i_level + 1 < LEVELS:
                        b_fold = fold_level(
                            b_q, b_k, b_since, p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, o_k, i_level + 1,
                            H, K, KP, PAD, C, FINE,
                        )[0]  # fmt: skip
                    # a late block meets the one before it
                    o_met = tl.where(((o_row >> i_level) & 1) != 0, (o_row >> i_level) - 1, -1)
                    b_score += tl.where((o_column >> i_level) == o_met, b_pair, 0.0)
            tl.store(p_score + i_chunk * (C * C) + (o_row * C + o_column), b_score.to(p_score.dtype.element_ty))


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
    HKV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For a flagged chunk: dq and dk, of which dq̂ and dk̂ hold the state's part, and what a gate's gradient sums up.

    The summand takes q̂ and k̂ as they were rounded, and leaves out what a token does to itself: both cancel in the sum,
    which strong gates make so small that the rounding errors would drown it.
    """
    PAD: tl.constexpr = K % BK != 0
    p_sum += tl.program_id(0).to(tl.int64) * (C * KP)
    # several a program, since most often none of them is flagged; what is the same for all of them would take registers
    for i_part in tl.range(0, HEADS, disable_licm=True):
        i_program = tl.program_id(0) * HEADS + i_part
        i_h = i_program % H
        i_kh = i_h // (H // HKV)
        if tl.load(p_flag + i_program.to(tl.int64)) != 0:
            _, i_c, i_first, n_rows, n_read = locate(i_program // H, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
            i_token = token_of(i_first, n_rows, i_c * C, FLIP)
            o_r = tl.arange(0, C)
            o_t = o_r
            if FLIP:
                o_t = -o_r
            o_row = o_r[:, None]
            o_column = o_r[None, :]
            m_read = i_c * C + o_r < n_read
            if not FINE:
                keep_sums(p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, H, K, KP, BK, C)
            b_dscore = tl.zeros([C, C], tl.float32)
            for i_v in range(0, (V + BV - 1) // BV):
                o_v = i_v * BV + tl.arange(0, BV)
                b_dout = load_rows(p_dout, i_token, i_h, o_t, m_read, o_v, H, V, V % BV != 0, WIDE)
                b_v = load_rows(p_v, i_token, i_kh, o_t, m_read, o_v, HKV, V, V % BV != 0, WIDE)
                b_dscore = tl.dot(b_dout, tl.trans(b_v), acc=b_dscore, input_precision=PRECISION)
            # pairs of one level meet both ways: row of q with row of k, and back
            b_dboth = tl.where(o_row > o_column, b_dscore, tl.where(o_row < o_column, tl.trans(b_dscore), 0.0)) * SCALE
            if not WIDE:
                b_dboth = b_dboth.to(p_q.dtype.element_ty)
            b_own = tl.trans(tl.sum(tl.where(o_row == o_column, b_dscore, 0.0), 1)[:, None]) * SCALE
            for i_k in range(0, (K + BK - 1) // BK):
                o_k = i_k * BK + tl.arange(0, BK)
                b_q = load_columns(p_q, i_token, i_h, o_t, m_read, o_k, H, K, PAD, WIDE)
                b_k = load_columns(p_k, i_token, i_kh, o_t, m_read, o_k, HKV, K, PAD, WIDE)
                b_since, b_until = sums_to_ends(
                    p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, o_k, H, K, KP, PAD, C, FINE
                )
                b_grad = load_columns(p_dqhat, i_token, i_h, o_t, m_read, o_k, H, K, PAD, False)
                b_summand = fold_to_end(b_q, b_since).to(b_q.dtype).to(tl.float32) * b_grad
                b_dq = faded(b_grad, b_since) + b_own * b_k.to(tl.float32)
                b_grad = load_columns(p_dkhat, i_token, i_h, o_t, m_read, o_k, H, K, PAD, False)
                b_summand -= fold_to_end(b_k, b_until).to(b_q.dtype).to(tl.float32) * b_grad
                b_dk = faded(b_grad, b_until) + b_own * b_q.to(tl.float32)
                # a level's fold is made after the last's gradients, which so come to its layout, and not it to theirs
                b_fold, b_fade = fold_level(
                    b_q, b_k, b_since, p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, o_k, 0, H, K, KP, PAD, C, FINE
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
                            b_q, b_k, b_since, p_gate, p_sum, i_token, i_h, o_t, m_read, o_r, o_k, i_level + 1,
                            H, K, KP, PAD, C, FINE,
                        )  # fmt: skip
                m_tile = m_read[None, :] & (o_k[:, None] < K)
                o_tile = (i_token * H + i_h) * K + (o_t[None, :] * (H * K) + o_k[:, None])
                tl.store(p_summand + o_tile, b_summand, mask=m_tile)
                tl.store(p_dq + o_tile, b_dq.to(p_dq.dtype.element_ty), mask=m_tile)
                tl.store(p_dk + o_tile, b_dk.to(p_dk.dtype.element_ty), mask=m_tile)


@triton.jit
def unfold_gates(
    p_gate,
    p_qhat,
    p_khat,
    p_dqhat,
    p_dkhat,
    p_late,
    p_flag,
    p_factor,
    p_state,
    p_dstate,
    p_dq_in,
    p_dk_in,
    p_cu,
    p_owner,
    T,
    N,
    p_dq,
    p_dk,
    p_dgate,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
):
    """dq and dk from dq̂ and dk̂, and the gates' gradient: sums to the end of a group of q·dq - k·dk and S·dS there.

    Of a flagged chunk, dq and dk are there already and dq̂ holds the summands.
    """
    SIGN: tl.constexpr = 1 if FLIP else -1
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = i_program // H
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, GROUPS, N, T, C * G, PACKED)
    i_chunk0 = blocks_before(i_n, p_cu, CHUNKS, N, T, C, PACKED)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    n_chunks = tl.minimum(tl.cdiv(n_rows, C) - i_j * G, G)
    b_sum = tl.zeros([BK], tl.float32)
    if n_chunks > 0:
        for i_v in range(0, V, 4):
            o_state = i_program.to(tl.int64) * (K * V) + i_v * K + o_k
            m0, m1, m2, m3 = m_k & (i_v < V), m_k & (i_v + 1 < V), m_k & (i_v + 2 < V), m_k & (i_v + 3 < V)
            a0, a1, a2, a3 = load_four(p_state, o_state, K, m0, m1, m2, m3)
            b0, b1, b2, b3 = load_four(p_dstate, o_state, K, m0, m1, m2, m3)
            b_sum += (a0 * b0 + a1 * b1) + (a2 * b2 + a3 * b3)
        i_last = (i_chunk0 + i_j * G + n_chunks - 1) * H + i_h
        b_reach = tl.load(p_factor + i_last * (4 * K) + 2 * K + o_k, mask=m_k, other=1.0)
        b_sum = b_sum * SCALE / tl.where(tl.load(p_flag + i_last) != 0, 1.0, b_reach)
    for i_step in range(0, n_chunks):
        i_c = i_j * G + n_chunks - 1 - i_step
        i_chunk = (i_chunk0 + i_c) * H + i_h
        is_exact = tl.load(p_flag + i_chunk) != 0
        b_fade = tl.load(p_late + i_chunk * K + o_k, mask=m_k, other=0.0)
        for i in range(0, C // 4):
            i0 = i_c * C + C - 1 - 4 * i
            m0, m1, m2, m3 = (
                m_k & (i0 < n_rows),
                m_k & (i0 - 1 < n_rows),
                m_k & (i0 - 2 < n_rows),
                m_k & (i0 - 3 < n_rows),
            )
            r0, r1, r2, r3 = (
                m_k & (i0 < n_read),
                m_k & (i0 - 1 < n_read),
                m_k & (i0 - 2 < n_read),
                m_k & (i0 - 3 < n_read),
            )
            i_token = token_of(i_first, n_rows, i0, FLIP)
            o_q = (i_token * H + i_h) * K + o_k
            g0, g1, g2, g3 = load_four(p_gate, o_q, SIGN * H * K, r0, r1, r2, r3)
            a0, a1, a2, a3 = load_four(p_dqhat, o_q, SIGN * H * K, r0, r1, r2, r3)
            if is_exact:
                x0, x1, x2, x3 = a0, a1, a2, a3
            else:
                b0, b1, b2, b3 = load_four(p_dkhat, o_q, SIGN * H * K, r0, r1, r2, r3)
                q0, q1, q2, q3 = load_four(p_qhat, o_q, SIGN * H * K, r0, r1, r2, r3)
                k0, k1, k2, k3 = load_four(p_khat, o_q, SIGN * H * K, r0, r1, r2, r3)
                x0, x1, x2, x3 = q0 * a0 - k0 * b0, q1 * a1 - k1 * b1, q2 * a2 - k2 * b2, q3 * a3 - k3 * b3
                f0 = b_fade
                f1 = f0 - g0 * LOG2E
                f2 = f1 - g1 * LOG2E
                f3 = f2 - g2 * LOG2E
                b_fade = f3 - g3 * LOG2E
                a0, a1, a2, a3 = a0 * tl.exp2(f0), a1 * tl.exp2(f1), a2 * tl.exp2(f2), a3 * tl.exp2(f3)
                b0, b1, b2, b3 = b0 * tl.exp2(-f0), b1 * tl.exp2(-f1), b2 * tl.exp2(-f2), b3 * tl.exp2(-f3)
                store_four(p_dq, o_q, SIGN * H * K, a0, a1, a2, a3, m0, m1, m2, m3)
                store_four(p_dk, o_q, SIGN * H * K, b0, b1, b2, b3, m0, m1, m2, m3)
            d0 = b_sum + x0
            d1 = d0 + x1
            d2 = d1 + x2
            d3 = d2 + x3
            b_sum = d3
            e0 = tl.where(g0 * LOG2E < LEAST, 0.0, d0)
            e1 = tl.where(g1 * LOG2E < LEAST, 0.0, d1)
            e2 = tl.where(g2 * LOG2E < LEAST, 0.0, d2)
            e3 = tl.where(g3 * LOG2E < LEAST, 0.0, d3)
            store_four(p_dgate, o_q, SIGN * H * K, e0, e1, e2, e3, m0, m1, m2, m3)
