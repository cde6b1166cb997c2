"""Device code for one decay a key dim: gates folded into queries and keys, and their gradient.

A chunk's gates are folded against one reference in its middle: `q̂ = q e^{A_t - A_r}`, `k̂ = k e^{A_r - A_s}`. Where the
gates of half a chunk are too strong for that, the chunk is flagged: `q̂ = q e^{A_t}`, `k̂ = k e^{A_C - A_s}`, which come
from `bounded_key_gates` or `strong_key_gates`.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.bounded_gates import BOUNDED
from ejkernel.kernels.chunks.triton.device.gates import LEAST, LOG2E
from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    CUT,
    FIRST,
    GROUPS,
    REAL,
    blocks_before,
    listed_from,
    load_flag,
    locate,
    token_of,
    visit,
)


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
def rows_below(i0, n_rows, m_k):
    """Masks of a row and the three before it, of those that there are."""
    return m_k & (i0 < n_rows), m_k & (i0 - 1 < n_rows), m_k & (i0 - 2 < n_rows), m_k & (i0 - 3 < n_rows)


@triton.jit
def fold_half(
    p, i_first, n_rows, n_read, i_row, i_gate, i_h, i_qh, i_kh, o_k, m_k,
    HALF: tl.constexpr, LATE: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Folds the gates of half a chunk, from its middle outwards; returns their sums and the largest on the way.

    Gates count from row `i_gate` on.
    """
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    SIGN: tl.constexpr = (1 if LATE else -1) * (-1 if CALL.flip else 1)
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
        i_token = token_of(i_first, n_rows, i0, CALL.flip)
        o_hat = (i_token * H + i_h) * K + o_k
        if LATE or (CALL.start and not CALL.listed):
            g0, g1, g2, g3 = load_four(p.gate, o_hat, SIGN * H * K, m0, m1, m2, m3)
        else:
            # the first gate meets no state, and must not make an infinite one of it
            e0, e1, e2, e3 = m0 & (i0 >= i_gate), m1 & (i1 >= i_gate), m2 & (i2 >= i_gate), m3 & (i3 >= i_gate)
            g0, g1, g2, g3 = load_four(p.gate, o_hat, SIGN * H * K, e0, e1, e2, e3)
        q0, q1, q2, q3 = load_four(p.query, (i_token * HQ + i_qh) * K + o_k, SIGN * HQ * K, m0, m1, m2, m3)
        k0, k1, k2, k3 = load_four(p.key, (i_token * HK + i_kh) * K + o_k, SIGN * HK * K, m0, m1, m2, m3)
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
        store_four(p.q_hat, o_hat, SIGN * H * K, q0 * u0, q1 * u1, q2 * u2, q3 * u3, m0, m1, m2, m3)
        store_four(p.k_hat, o_hat, SIGN * H * K, k0 * w0, k1 * w1, k2 * w2, k3 * w3, m0, m1, m2, m3)
    return b_sum, b_most


@triton.jit
def is_surely_strong(p, chunk, i_first, n_rows, i_h, o_k, m_k, CALL: tl.constexpr):
    """Whether gates of a chunk's later half come to more than the limit, from no more of them than it takes to say so.

    It reads on as long as the rows so far come to their share of the limit. Of mild gates these are the first eight,
    and that they do not says nothing.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    HALF: tl.constexpr = CALL.chunk // 2
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    b_sum = tl.zeros(o_k.shape, tl.float32)
    n_looked = 0
    bits = 0.0
    # a NaN ends it
    while (n_looked < HALF) & (bits * HALF >= CALL.limit * n_looked) & (bits <= CALL.limit):
        for _ in tl.static_range(2):
            i0 = chunk.i_row + HALF + n_looked
            m0, m1, m2, m3 = rows_below(i0 + 3, chunk.n_read, m_k)
            o_gate = (token_of(i_first, n_rows, i0, CALL.flip) * H + i_h) * K + o_k
            g0, g1, g2, g3 = load_four(p.gate, o_gate, SIGN * H * K, m3, m2, m1, m0)
            b_sum += ((g0 + g1) + (g2 + g3)) * LOG2E
            n_looked += 4
        bits = tl.max(tl.abs(b_sum), 0)
    # gates that grow may come to less by the end, which is flagged either way; by far more than sums are off by
    return bits > CALL.limit * 1.0001


@triton.jit
def store_factors(p, chunk, i_chunk, o_k, b_before, b_after, b_before_back, b_after_back, CALL: tl.constexpr):
    """Decays of a state until a chunk's rows meet it and from there on, and the same of what walks in reverse."""
    K: tl.constexpr = CALL.key_dim
    m_early = o_k < K
    m_late = m_early
    if CALL.listed:
        # of those chunks that take a state, and that leave one
        m_early = m_early & ((chunk.entry & (REAL | CUT)) == REAL)
        m_late = m_late & ((chunk.entry & REAL) != 0) & ((chunk.next_entry & CUT) == 0)
    p_row = p.factors + i_chunk * ((5 if CALL.listed else 4) * K) + o_k
    if CALL.listed:
        tl.store(p_row + 4 * K, tl.full(o_k.shape, 1.0, tl.float32), mask=o_k < K)
    tl.store(p_row, b_before, mask=m_early)
    tl.store(p_row + K, b_after, mask=m_late)
    tl.store(p_row + 2 * K, b_before_back, mask=m_late)
    tl.store(p_row + 3 * K, b_after_back, mask=m_early)


@triton.jit
def fold_chunk(p, chunk, i_first, n_rows, i_h, i_chunk, CALL: tl.constexpr):
    """What `fold_gates` gives, of one chunk; a listed one's flag is left to the caller."""
    o_k = tl.arange(0, CALL.key_block)
    is_flagged = is_surely_strong(p, chunk, i_first, n_rows, i_h, o_k, o_k < CALL.key_dim, CALL)
    if is_flagged == 0:
        is_flagged = fold_as_mild(p, chunk, i_first, n_rows, i_h, i_chunk, CALL)
    if not CALL.listed:
        tl.store(p.flag + i_chunk, is_flagged.to(tl.int32))
    return is_flagged


@triton.jit
def fold_as_mild(p, chunk, i_first, n_rows, i_h, i_chunk, CALL: tl.constexpr):
    """Folds a chunk's gates against its middle; returns whether they are too strong for that."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    HALF: tl.constexpr = CALL.chunk // 2
    i_qh = i_h // (H // CALL.query_heads)
    i_kh = i_h // (H // CALL.key_heads)
    o_k = tl.arange(0, CALL.key_block)
    m_k = o_k < K
    i_row = chunk.i_row
    n_read = chunk.n_read
    i_gate = 1
    if CALL.listed:
        i_gate = first_gate(chunk, CALL)
    b_early, b_most = fold_half(p, i_first, n_rows, n_read, i_row, i_gate, i_h, i_qh, i_kh, o_k, m_k, HALF, False, CALL)
    b_late, b_most_late = fold_half(
        p, i_first, n_rows, n_read, i_row, i_gate, i_h, i_qh, i_kh, o_k, m_k, HALF, True, CALL
    )
    is_flagged = tl.max(tl.maximum(b_most, b_most_late), 0) > CALL.limit
    if is_flagged == 0:
        if not CALL.listed:
            tl.store(p.late + i_chunk * K + o_k, b_late, mask=m_k)
        b_first = tl.exp2(b_early)
        b_second = tl.exp2(b_late)
        store_factors(p, chunk, i_chunk, o_k, b_first, b_second, b_second, b_first, CALL)
    return is_flagged


@triton.jit
def first_gate(chunk, CALL: tl.constexpr):
    """The row of a listed chunk from which on gates count: that of a sequence that begins with no state does not."""
    is_first = (chunk.entry & FIRST) != 0
    if CALL.start:
        is_first = (chunk.entry & CUT) != 0
    return chunk.i_row + is_first.to(tl.int32)


@triton.jit
def fold_gates(p, CALL: tl.constexpr):
    """Streams q, k and the gates of a chunk once; writes q̂, k̂, the state's decays through the chunk, and the flag.

    Of a flagged chunk it writes nothing else that is of use, and reads little where it is seen early.
    """
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = i_program // H
    i_n, i_c, i_first, n_rows, n_read = locate(i_block, p, CHUNKS, C, CALL)
    i_chunk = i_program.to(tl.int64)
    if CALL.listed:
        i_from, n_listed = listed_from(i_n, i_c, 1, p, CALL)
        p_flags = p.flag + (i_n.to(tl.int64) * H + i_h) * p.T
        is_any = 0
        for i in range(i_from, i_from + n_listed):
            chunk = visit(i, i_n, n_rows, n_read, p, CALL)
            is_here = fold_chunk(p, chunk, i_first, n_rows, i_h, i_chunk, CALL).to(tl.int32)
            tl.store(p_flags + chunk.i_row, is_here)
            is_any = is_any | is_here
        tl.store(p.any_flag + i_chunk, is_any)
    else:
        fold_chunk(p, visit(i_c, i_n, n_rows, n_read, p, CALL), i_first, n_rows, i_h, i_chunk, CALL)


@triton.jit
def late_gates(p, chunk, i_first, n_rows, i_h, o_k, m_k, CALL: tl.constexpr):
    """Bits of decay in a listed chunk's later half, as `fold_half` sums them up."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    HALF: tl.constexpr = CALL.chunk // 2
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    b_sum = tl.zeros(o_k.shape, tl.float32)
    for i in range(0, HALF // 4):
        i0 = chunk.i_row + HALF + 4 * i
        m0, m1, m2, m3 = rows_below(i0 + 3, chunk.n_read, m_k)
        o_gate = (token_of(i_first, n_rows, i0, CALL.flip) * H + i_h) * K + o_k
        g0, g1, g2, g3 = load_four(p.gate, o_gate, SIGN * H * K, m3, m2, m1, m0)
        b_sum = b_sum + g0 * LOG2E
        b_sum = b_sum + g1 * LOG2E
        b_sum = b_sum + g2 * LOG2E
        b_sum = b_sum + g3 * LOG2E
    return b_sum


@triton.jit
def unfold_rows_of(p, chunk, i_first, n_rows, i_h, i_chunk, o_k, CALL: tl.constexpr):
    """What `unfold_rows` gives, of one chunk."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    SIGN: tl.constexpr = 1 if CALL.flip else -1
    m_k = o_k < K
    if load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) == 0:
        if CALL.listed:
            b_fade = late_gates(p, chunk, i_first, n_rows, i_h, o_k, m_k, CALL)
        else:
            b_fade = tl.load(p.late + i_chunk.to(tl.int64) * K + o_k, mask=m_k, other=0.0)
        for i in range(0, C // 4):
            i0 = chunk.i_row + C - 1 - 4 * i
            m0, m1, m2, m3 = rows_below(i0, chunk.n_end, m_k)
            r0, r1, r2, r3 = rows_below(i0, chunk.n_read, m_k)
            o_hat = (token_of(i_first, n_rows, i0, CALL.flip) * H + i_h) * K + o_k
            g0, g1, g2, g3 = load_four(p.gate, o_hat, SIGN * H * K, r0, r1, r2, r3)
            a0, a1, a2, a3 = load_four(p.hat, o_hat, SIGN * H * K, r0, r1, r2, r3)
            f1 = b_fade - g0 * LOG2E
            f2 = f1 - g1 * LOG2E
            f3 = f2 - g2 * LOG2E
            a0, a1, a2, a3 = a0 * tl.exp2(b_fade), a1 * tl.exp2(f1), a2 * tl.exp2(f2), a3 * tl.exp2(f3)
            b_fade = f3 - g3 * LOG2E
            store_four(p.d_query, o_hat, SIGN * H * K, a0, a1, a2, a3, m0, m1, m2, m3)


@triton.jit
def unfold_rows(p, CALL: tl.constexpr):
    """dq from dq̂, which is all that is wanted where dq is an output; of a flagged chunk it is there already."""
    H: tl.constexpr = CALL.heads
    BK: tl.constexpr = CALL.key_block
    NK: tl.constexpr = (CALL.key_dim + BK - 1) // BK
    i_program = tl.program_id(0) // NK
    i_h = i_program % H
    i_n, i_c, i_first, n_rows, n_read = locate(i_program // H, p, CHUNKS, CALL.chunk, CALL)
    o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    if CALL.listed:
        i_from, n_listed = listed_from(i_n, i_c, 1, p, CALL)
        for i in range(i_from, i_from + n_listed):
            chunk = visit(i, i_n, n_rows, n_read, p, CALL)
            unfold_rows_of(p, chunk, i_first, n_rows, i_h, i_program, o_k, CALL)
    else:
        chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
        unfold_rows_of(p, chunk, i_first, n_rows, i_h, i_program, o_k, CALL)


@triton.jit
def is_bounded_group(p, i_chunk, n_chunks, i_h, CALL: tl.constexpr):
    """Whether all chunks of a group and head are bounded: `bounded_gradients` then gives the gates' gradient as well.

    `i_chunk` is the first of them. Of listed chunks it never is.
    """
    o_g = tl.arange(0, CALL.group)
    m_here = o_g < n_chunks
    if CALL.listed:
        m_here = m_here & (n_chunks < 0)
    b_flag = tl.load(p.flag + (i_chunk + o_g) * CALL.heads + i_h, mask=m_here, other=0)
    n_bounded = tl.sum((b_flag == BOUNDED).to(tl.int32), 0)
    return (n_bounded == n_chunks) & (n_bounded > 0)


@triton.jit
def load_met(p, i_group, o_k, CALL: tl.constexpr):
    """⟨S, dS⟩ of key dims at the end of a group, scaled."""
    MET: tl.constexpr = CALL.met_parts
    b_met = tl.zeros(o_k.shape, tl.float32)
    for i_part in tl.static_range(MET):
        p_met = p.met + (i_group.to(tl.int64) * MET + i_part) * CALL.key_dim + o_k
        b_met += tl.load(p_met, mask=o_k < CALL.key_dim, other=0.0)
    return b_met * CALL.scale


@triton.jit
def unfold_gates(p, CALL: tl.constexpr):
    """dq and dk from dq̂ and dk̂, and the gates' gradient: sums to the end of a group of q·dq - k·dk and S·dS there.

    Of a flagged chunk, dq and dk are there already and dq̂ holds the summands; of a group whose chunks are all bounded,
    all is there. dq̂ and dk̂ come in parts to be added, of
    which the first holds those, and S·dS in MET parts.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    G: tl.constexpr = CALL.group
    PARTS: tl.constexpr = CALL.parts
    SIGN: tl.constexpr = 1 if CALL.flip else -1
    NK: tl.constexpr = (K + BK - 1) // BK
    i_program = tl.program_id(0) // NK
    i_h = i_program % H
    i_block = i_program // H
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p, GROUPS, C * G, CALL)
    i_chunk0 = blocks_before(i_n, p, CHUNKS, C, CALL)
    o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    m_k = o_k < K
    i_from = i_j * G
    n_chunks = tl.minimum(tl.cdiv(n_rows, C) - i_j * G, G)
    if CALL.listed:
        i_from, n_chunks = listed_from(i_n, i_from, n_chunks, p, CALL)
    if CALL.bounded and not CALL.listed:
        n_chunks = tl.where(is_bounded_group(p, i_chunk0 + i_from, n_chunks, i_h, CALL), 0, n_chunks)
    b_sum = tl.zeros([BK], tl.float32)
    if n_chunks > 0:
        i_last = (i_chunk0 + i_j * G + n_chunks - 1) * H + i_h
        last = visit(i_from + n_chunks - 1, i_n, n_rows, n_read, p, CALL)
        if CALL.listed:
            i_last = (i_chunk0 + last.i_c) * H + i_h
        b_sum = load_met(p, i_program, o_k, CALL)
        b_reach = tl.load(p.factors + i_last * ((5 if CALL.listed else 4) * K) + 2 * K + o_k, mask=m_k, other=1.0)
        if CALL.listed:
            # padding passes on what it is given
            b_reach = tl.where((last.entry & REAL) != 0, b_reach, 1.0)
        b_sum = b_sum / tl.where(load_flag(p.flag, last, i_last, i_h, p, CALL) != 0, 1.0, b_reach)
    for i_step in range(0, n_chunks):
        chunk = visit(i_from + n_chunks - 1 - i_step, i_n, n_rows, n_read, p, CALL)
        i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
        is_exact = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) != 0
        if CALL.listed:
            b_fade = late_gates(p, chunk, i_first, n_rows, i_h, o_k, m_k, CALL)
            b_sum = tl.where((chunk.next_entry & CUT) == 0, b_sum, 0.0)
        else:
            b_fade = tl.load(p.late + i_chunk * K + o_k, mask=m_k, other=0.0)
        for i in range(0, C // 4):
            i0 = chunk.i_row + C - 1 - 4 * i
            m0, m1, m2, m3 = rows_below(i0, chunk.n_end, m_k)
            r0, r1, r2, r3 = rows_below(i0, chunk.n_read, m_k)
            i_token = token_of(i_first, n_rows, i0, CALL.flip)
            o_q = (i_token * H + i_h) * K + o_k
            g0, g1, g2, g3 = load_four(p.gate, o_q, SIGN * H * K, r0, r1, r2, r3)
            o_hat = (i_token * H + i_h) * (PARTS * K) + o_k
            a0, a1, a2, a3 = load_four(p.dq_hat, o_hat, SIGN * H * PARTS * K, r0, r1, r2, r3)
            if is_exact:
                x0, x1, x2, x3 = a0, a1, a2, a3
            else:
                b0, b1, b2, b3 = load_four(p.dk_hat, o_hat, SIGN * H * PARTS * K, r0, r1, r2, r3)
                for i_part in tl.static_range(1, PARTS):
                    o_part = o_hat + i_part * K
                    c0, c1, c2, c3 = load_four(p.dq_hat, o_part, SIGN * H * PARTS * K, r0, r1, r2, r3)
                    a0, a1, a2, a3 = a0 + c0, a1 + c1, a2 + c2, a3 + c3
                    c0, c1, c2, c3 = load_four(p.dk_hat, o_part, SIGN * H * PARTS * K, r0, r1, r2, r3)
                    b0, b1, b2, b3 = b0 + c0, b1 + c1, b2 + c2, b3 + c3
                q0, q1, q2, q3 = load_four(p.q_hat, o_q, SIGN * H * K, r0, r1, r2, r3)
                k0, k1, k2, k3 = load_four(p.k_hat, o_q, SIGN * H * K, r0, r1, r2, r3)
                x0, x1, x2, x3 = q0 * a0 - k0 * b0, q1 * a1 - k1 * b1, q2 * a2 - k2 * b2, q3 * a3 - k3 * b3
                f0 = b_fade
                f1 = f0 - g0 * LOG2E
                f2 = f1 - g1 * LOG2E
                f3 = f2 - g2 * LOG2E
                b_fade = f3 - g3 * LOG2E
                a0, a1, a2, a3 = a0 * tl.exp2(f0), a1 * tl.exp2(f1), a2 * tl.exp2(f2), a3 * tl.exp2(f3)
                b0, b1, b2, b3 = b0 * tl.exp2(-f0), b1 * tl.exp2(-f1), b2 * tl.exp2(-f2), b3 * tl.exp2(-f3)
                store_four(p.d_query, o_q, SIGN * H * K, a0, a1, a2, a3, m0, m1, m2, m3)
                store_four(p.d_key, o_q, SIGN * H * K, b0, b1, b2, b3, m0, m1, m2, m3)
            d0 = b_sum + x0
            d1 = d0 + x1
            d2 = d1 + x2
            d3 = d2 + x3
            b_sum = d3
            e0 = tl.where(g0 * LOG2E < LEAST, 0.0, d0)
            e1 = tl.where(g1 * LOG2E < LEAST, 0.0, d1)
            e2 = tl.where(g2 * LOG2E < LEAST, 0.0, d2)
            e3 = tl.where(g3 * LOG2E < LEAST, 0.0, d3)
            if CALL.listed:
                # a first gate that meets no state, and padding
                i_gate = chunk.i_row + ((chunk.entry & CUT) != 0).to(tl.int32)
                e0 = tl.where(r0 & (i0 >= i_gate), e0, 0.0)
                e1 = tl.where(r1 & (i0 - 1 >= i_gate), e1, 0.0)
                e2 = tl.where(r2 & (i0 - 2 >= i_gate), e2, 0.0)
                e3 = tl.where(r3 & (i0 - 3 >= i_gate), e3, 0.0)
            store_four(p.d_gate, o_q, SIGN * H * K, e0, e1, e2, e3, m0, m1, m2, m3)
