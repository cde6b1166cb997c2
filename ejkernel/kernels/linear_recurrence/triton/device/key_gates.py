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
    blocks_before,
    chunk_at,
    is_real,
    listed_from,
    load_flag,
    locate,
    takes_state,
    token_of,
)

# Four rows are streamed at a time, as tuples of four, so that their loads are in flight together.


@triton.jit
def rows_below(i0, n_rows, m_k):
    """Masks of a row and the three before it, of those before row `n_rows`."""
    return m_k & (i0 < n_rows), m_k & (i0 - 1 < n_rows), m_k & (i0 - 2 < n_rows), m_k & (i0 - 3 < n_rows)


@triton.jit
def load_four(p, o, STEP: tl.constexpr, masks):
    b = (tl.load(p + o, mask=masks[0], other=0.0).to(tl.float32),)
    for r in tl.static_range(1, 4):
        b += (tl.load(p + o + r * STEP, mask=masks[r], other=0.0).to(tl.float32),)
    return b


@triton.jit
def store_four(p, o, STEP: tl.constexpr, b, masks):
    tl.store(p + o, b[0].to(p.dtype.element_ty), mask=masks[0])
    for r in tl.static_range(1, 4):
        tl.store(p + o + r * STEP, b[r].to(p.dtype.element_ty), mask=masks[r])


@triton.jit
def add_four(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@triton.jit
def multiply_four(a, b):
    return a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]


@triton.jit
def powers_of_four(b_bits, SIGN: tl.constexpr):
    """2**bits, or 2**-bits with a negative SIGN."""
    b = ()
    for r in tl.static_range(4):
        b += (tl.exp2(b_bits[r] if SIGN > 0 else -b_bits[r]),)
    return b


@triton.jit
def fade_four(b, b_bits, SIGN: tl.constexpr):
    """`b 2**bits`, or `b 2**-bits` with a negative SIGN."""
    faded = ()
    for r in tl.static_range(4):
        faded += (b[r] * tl.exp2(b_bits[r] if SIGN > 0 else -b_bits[r]),)
    return faded


@triton.jit
def sum_four(b_sum, b, FACTOR: tl.constexpr):
    """`b_sum` plus FACTOR times the first row, the first two rows, and so on."""
    b0 = b_sum + b[0] * FACTOR
    b1 = b0 + b[1] * FACTOR
    b2 = b1 + b[2] * FACTOR
    return b0, b1, b2, b2 + b[3] * FACTOR


@triton.jit
def bits_before_four(b_bits, gates):
    """Bits of decay from the chunk's middle through each of four rows, last row first; the first has `b_bits`."""
    b1 = b_bits - gates[0] * LOG2E
    b2 = b1 - gates[1] * LOG2E
    return b_bits, b1, b2, b2 - gates[2] * LOG2E


@triton.jit
def fold_half(p, span, chunk, i_gate, i_h, o_k, LATE: tl.constexpr, CALL: tl.constexpr):
    """Folds the gates of half a chunk, from its middle outwards: `q̂ = q e^{A_t - A_r}`, `k̂ = k e^{A_r - A_s}`.

    Returns the half's bits of decay, and the largest number of bits on the way. Gates count from row `i_gate` on.
    """
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    HALF: tl.constexpr = CALL.chunk // 2
    SIGN: tl.constexpr = (1 if LATE else -1) * (-1 if CALL.flip else 1)
    i_row = chunk.i_row
    n_read = chunk.n_read
    m_k = o_k < K
    b_sum = tl.zeros(o_k.shape, tl.float32)
    b_most = tl.zeros(o_k.shape, tl.float32)
    for i in range(0, HALF // 4):
        if LATE:
            i0 = i_row + HALF + 4 * i
            i1, i2, i3 = i0 + 1, i0 + 2, i0 + 3
        else:
            i0 = i_row + HALF - 1 - 4 * i
            i1, i2, i3 = i0 - 1, i0 - 2, i0 - 3
        m = m_k & (i0 < n_read), m_k & (i1 < n_read), m_k & (i2 < n_read), m_k & (i3 < n_read)
        i_token = token_of(span.i_first, span.n_rows, i0, CALL.flip)
        o_hat = (i_token * H + i_h) * K + o_k
        m_gate = m
        if not LATE and (CALL.listed or CALL.pooled or not CALL.start):
            # the first gate decays a state of 0, and must not make it infinite
            m_gate = m[0] & (i0 >= i_gate), m[1] & (i1 >= i_gate), m[2] & (i2 >= i_gate), m[3] & (i3 >= i_gate)
        gates = load_four(p.gate, o_hat, SIGN * H * K, m_gate)
        q = load_four(p.query, (i_token * HQ + i_h // (H // HQ)) * K + o_k, SIGN * HQ * K, m)
        k = load_four(p.key, (i_token * HK + i_h // (H // HK)) * K + o_k, SIGN * HK * K, m)
        sums = sum_four(b_sum, gates, LOG2E)
        bits = sums if LATE else (b_sum, sums[0], sums[1], sums[2])
        b_sum = sums[3]
        q_factors = powers_of_four(bits, 1 if LATE else -1)
        k_factors = powers_of_four(bits, -1 if LATE else 1)
        b_most = tl.maximum(b_most, tl.maximum(tl.abs(bits[1]), tl.abs(bits[2])))
        b_most = tl.maximum(b_most, tl.maximum(tl.abs(bits[3]), tl.abs(b_sum)))
        store_four(p.q_hat, o_hat, SIGN * H * K, multiply_four(q, q_factors), m)
        store_four(p.k_hat, o_hat, SIGN * H * K, multiply_four(k, k_factors), m)
    return b_sum, b_most


@triton.jit
def load_late_gates(p, span, chunk, i_h, o_k, m_k, i_row, CALL: tl.constexpr):
    """Gates of four rows from `i_row` on."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    m3, m2, m1, m0 = rows_below(i_row + 3, chunk.n_read, m_k)
    o_gate = (token_of(span.i_first, span.n_rows, i_row, CALL.flip) * H + i_h) * K + o_k
    return load_four(p.gate, o_gate, SIGN * H * K, (m0, m1, m2, m3))


@triton.jit
def is_surely_strong(p, span, chunk, i_h, o_k, m_k, CALL: tl.constexpr):
    """Whether the gates of a chunk's later half surely come to more than the limit, from as few of them as it takes.

    Rows are read as long as those so far come to their share of the limit: with mild gates, the first eight. `False`
    says nothing.
    """
    HALF: tl.constexpr = CALL.chunk // 2
    b_sum = tl.zeros(o_k.shape, tl.float32)
    n_summed = 0
    bits = 0.0
    # a NaN ends the loop
    while (n_summed < HALF) & (bits * HALF >= CALL.limit * n_summed) & (bits <= CALL.limit):
        for _ in tl.static_range(2):
            g0, g1, g2, g3 = load_late_gates(p, span, chunk, i_h, o_k, m_k, chunk.i_row + HALF + n_summed, CALL)
            b_sum += ((g0 + g1) + (g2 + g3)) * LOG2E
            n_summed += 4
        bits = tl.max(tl.abs(b_sum), 0)
    # flagged even if later gates that grow make it less; the margin is far more than the sums' rounding errors
    return bits > CALL.limit * 1.0001


@triton.jit
def store_factors(p, chunk, i_chunk, o_k, b_before, b_after, b_before_back, b_after_back, CALL: tl.constexpr):
    """Stores a state's decays to a chunk's reference and on to its end, and the same of the walk in reverse."""
    K: tl.constexpr = CALL.key_dim
    m_early = o_k < K
    m_late = m_early
    if CALL.listed:
        # several listed chunks share a place: one of them at most takes a state, and one leaves one
        m_early = m_early & takes_state(chunk)
        m_late = m_late & is_real(chunk) & ((chunk.next_entry & CUT) == 0)
    p_row = p.factors + i_chunk * ((5 if CALL.listed else 4) * K) + o_k
    if CALL.listed:
        # for chunks that pass a state on as it is
        tl.store(p_row + 4 * K, tl.full(o_k.shape, 1.0, tl.float32), mask=o_k < K)
    tl.store(p_row, b_before, mask=m_early)
    tl.store(p_row + K, b_after, mask=m_late)
    tl.store(p_row + 2 * K, b_before_back, mask=m_late)
    tl.store(p_row + 3 * K, b_after_back, mask=m_early)


@triton.jit
def first_gate(chunk, CALL: tl.constexpr):
    """The first row of a chunk whose gate counts: a sequence's first gate does not where it has no state to decay."""
    if CALL.listed or CALL.pooled:
        is_first = (chunk.entry & FIRST) != 0
        if CALL.start:
            is_first = (chunk.entry & CUT) != 0
        return chunk.i_row + is_first.to(tl.int32)
    else:
        return 1


@triton.jit
def fold_mild_chunk(p, span, chunk, i_h, i_chunk, o_k, CALL: tl.constexpr):
    """Folds a chunk's gates against its middle; returns whether they are too strong for that."""
    K: tl.constexpr = CALL.key_dim
    m_k = o_k < K
    i_gate = first_gate(chunk, CALL)
    b_early, b_most = fold_half(p, span, chunk, i_gate, i_h, o_k, False, CALL)
    b_late, b_most_late = fold_half(p, span, chunk, i_gate, i_h, o_k, True, CALL)
    is_flagged = tl.max(tl.maximum(b_most, b_most_late), 0) > CALL.limit
    if is_flagged == 0:
        if not CALL.listed:
            tl.store(p.late + i_chunk * K + o_k, b_late, mask=m_k)
        b_first = tl.exp2(b_early)
        b_second = tl.exp2(b_late)
        store_factors(p, chunk, i_chunk, o_k, b_first, b_second, b_second, b_first, CALL)
    return is_flagged


@triton.jit
def fold_chunk(p, span, chunk, i_h, i_chunk, CALL: tl.constexpr):
    """The results of `fold_gates` for one chunk, whose flag it returns."""
    o_k = tl.arange(0, CALL.key_block)
    is_flagged = is_surely_strong(p, span, chunk, i_h, o_k, o_k < CALL.key_dim, CALL)
    if is_flagged == 0:
        is_flagged = fold_mild_chunk(p, span, chunk, i_h, i_chunk, o_k, CALL)
    if not CALL.listed:
        tl.store(p.flag + i_chunk, is_flagged.to(tl.int32))
    return is_flagged


@triton.jit
def fold_gates(p, CALL: tl.constexpr):
    """Reads q, k and gates of a chunk once; stores q̂, k̂, the state's decays through the chunk, and its flag.

    Of a flagged chunk nothing but the flag is of use, and a chunk that is surely strong is hardly read.
    """
    H: tl.constexpr = CALL.heads
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = i_program // H
    span = locate(i_block, p, CHUNKS, CALL.chunk, CALL)
    i_chunk = i_program.to(tl.int64)
    if CALL.listed:
        i_from, n_listed = listed_from(span.i_n, span.i_j, 1, p, CALL)
        p_flags = p.flag + (span.i_n.to(tl.int64) * H + i_h) * p.T
        any_flag = 0
        for i in range(i_from, i_from + n_listed):
            chunk = chunk_at(i, span, p, CALL)
            flag = fold_chunk(p, span, chunk, i_h, i_chunk, CALL).to(tl.int32)
            tl.store(p_flags + chunk.i_row, flag)
            any_flag = any_flag | flag
        tl.store(p.any_flag + i_chunk, any_flag)
    elif not CALL.pooled or span.i_j * CALL.chunk < span.n_rows:
        fold_chunk(p, span, chunk_at(span.i_j, span, p, CALL), i_h, i_chunk, CALL)
    else:
        # few blocks have a chunk where most sequences are of one token
        tl.store(p.flag + i_chunk, 0)


@triton.jit
def late_bits(p, span, chunk, i_chunk, i_h, o_k, m_k, CALL: tl.constexpr):
    """Bits of decay in a chunk's later half, which `fold_gates` has stored but for listed chunks."""
    if CALL.listed:
        HALF: tl.constexpr = CALL.chunk // 2
        b_sum = tl.zeros(o_k.shape, tl.float32)
        for i in range(0, HALF // 4):
            gates = load_late_gates(p, span, chunk, i_h, o_k, m_k, chunk.i_row + HALF + 4 * i, CALL)
            b_sum = sum_four(b_sum, gates, LOG2E)[3]
        return b_sum
    else:
        return tl.load(p.late + i_chunk * CALL.key_dim + o_k, mask=m_k, other=0.0)


@triton.jit
def unfold_rows_of(p, span, chunk, i_h, i_chunk, o_k, CALL: tl.constexpr):
    """The results of `unfold_rows` for one chunk."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    SIGN: tl.constexpr = 1 if CALL.flip else -1
    m_k = o_k < K
    if load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) == 0:
        b_bits = late_bits(p, span, chunk, i_chunk.to(tl.int64), i_h, o_k, m_k, CALL)
        for i in range(0, C // 4):
            i0 = chunk.i_row + C - 1 - 4 * i
            m = rows_below(i0, chunk.n_end, m_k)
            m_read = rows_below(i0, chunk.n_read, m_k)
            o_hat = (token_of(span.i_first, span.n_rows, i0, CALL.flip) * H + i_h) * K + o_k
            gates = load_four(p.gate, o_hat, SIGN * H * K, m_read)
            dq = load_four(p.hat, o_hat, SIGN * H * K, m_read)
            bits = bits_before_four(b_bits, gates)
            dq = fade_four(dq, bits, 1)
            b_bits = bits[3] - gates[3] * LOG2E
            store_four(p.d_query, o_hat, SIGN * H * K, dq, m)


@triton.jit
def unfold_rows(p, CALL: tl.constexpr):
    """dq of mild chunks from dq̂, for calls that want no other gradient; flagged chunks have theirs already."""
    H: tl.constexpr = CALL.heads
    BK: tl.constexpr = CALL.key_block
    NK: tl.constexpr = (CALL.key_dim + BK - 1) // BK
    i_program = tl.program_id(0) // NK
    i_h = i_program % H
    span = locate(i_program // H, p, CHUNKS, CALL.chunk, CALL)
    o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    if CALL.listed:
        i_from, n_listed = listed_from(span.i_n, span.i_j, 1, p, CALL)
        for i in range(i_from, i_from + n_listed):
            unfold_rows_of(p, span, chunk_at(i, span, p, CALL), i_h, i_program, o_k, CALL)
    else:
        unfold_rows_of(p, span, chunk_at(span.i_j, span, p, CALL), i_h, i_program, o_k, CALL)


@triton.jit
def is_bounded_group(p, i_chunk, n_chunks, i_h, CALL: tl.constexpr):
    """Whether all `n_chunks` chunks of a group and head, from `i_chunk` on, are bounded; of listed chunks always False.

    `bounded_gradients` then computes the gates' gradient as well.
    """
    o_g = tl.arange(0, CALL.group)
    m_chunk = o_g < n_chunks
    if CALL.listed:
        m_chunk = m_chunk & (n_chunks < 0)
    b_flag = tl.load(p.flag + (i_chunk + o_g) * CALL.heads + i_h, mask=m_chunk, other=0)
    n_bounded = tl.sum((b_flag == BOUNDED).to(tl.int32), 0)
    return (n_bounded == n_chunks) & (n_bounded > 0)


@triton.jit
def load_product(p, i_group, o_k, CALL: tl.constexpr):
    """⟨S, dS⟩ of each key dim at the end of a group, scaled."""
    PARTS: tl.constexpr = CALL.product_parts
    b_product = tl.zeros(o_k.shape, tl.float32)
    for i_part in tl.static_range(PARTS):
        p_product = p.product + (i_group.to(tl.int64) * PARTS + i_part) * CALL.key_dim + o_k
        b_product += tl.load(p_product, mask=o_k < CALL.key_dim, other=0.0)
    return b_product * CALL.scale


@triton.jit
def unfold_gates(p, CALL: tl.constexpr):
    """dq and dk from dq̂ and dk̂, and the gates' gradient: sums to a group's end of q·dq - k·dk, plus S·dS there.

    dq̂ and dk̂ come in parts to be added. Flagged chunks have their dq and dk already, and the summands in the first
    part of dq̂; a group whose chunks are all bounded has everything.
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
    span = locate(i_program // H, p, GROUPS, C * G, CALL)
    i_chunk0 = blocks_before(span.i_n, p, CHUNKS, C, CALL)
    o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    m_k = o_k < K
    i_from = span.i_j * G
    n_chunks = tl.minimum(tl.cdiv(span.n_rows, C) - span.i_j * G, G)
    if CALL.listed:
        i_from, n_chunks = listed_from(span.i_n, i_from, n_chunks, p, CALL)
    if CALL.bounded and not CALL.listed:
        n_chunks = tl.where(is_bounded_group(p, i_chunk0 + i_from, n_chunks, i_h, CALL), 0, n_chunks)
    b_sum = tl.zeros([BK], tl.float32)
    if n_chunks > 0:
        i_last = (i_chunk0 + span.i_j * G + n_chunks - 1) * H + i_h
        last = chunk_at(i_from + n_chunks - 1, span, p, CALL)
        if CALL.listed:
            i_last = (i_chunk0 + last.i_c) * H + i_h
        b_sum = load_product(p, i_program, o_k, CALL)
        # the walk of dq has taken S to the chunk's end, that of dk, for a mild chunk, dS to its middle
        b_before = tl.load(p.factors + i_last * ((5 if CALL.listed else 4) * K) + 2 * K + o_k, mask=m_k, other=1.0)
        if CALL.listed:
            # padding leaves a state as it is
            b_before = tl.where(is_real(last), b_before, 1.0)
        b_sum = b_sum / tl.where(load_flag(p.flag, last, i_last, i_h, p, CALL) != 0, 1.0, b_before)
    for i_step in range(0, n_chunks):
        chunk = chunk_at(i_from + n_chunks - 1 - i_step, span, p, CALL)
        i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
        is_exact = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) != 0
        b_bits = late_bits(p, span, chunk, i_chunk, i_h, o_k, m_k, CALL)
        if CALL.listed:
            b_sum = tl.where((chunk.next_entry & CUT) == 0, b_sum, 0.0)
        for i in range(0, C // 4):
            i0 = chunk.i_row + C - 1 - 4 * i
            m = rows_below(i0, chunk.n_end, m_k)
            m_read = rows_below(i0, chunk.n_read, m_k)
            i_token = token_of(span.i_first, span.n_rows, i0, CALL.flip)
            o_q = (i_token * H + i_h) * K + o_k
            gates = load_four(p.gate, o_q, SIGN * H * K, m_read)
            o_hat = (i_token * H + i_h) * (PARTS * K) + o_k
            dq = load_four(p.dq_hat, o_hat, SIGN * H * PARTS * K, m_read)
            if is_exact:
                summands = dq
            else:
                dk = load_four(p.dk_hat, o_hat, SIGN * H * PARTS * K, m_read)
                for i_part in tl.static_range(1, PARTS):
                    o_part = o_hat + i_part * K
                    dq = add_four(dq, load_four(p.dq_hat, o_part, SIGN * H * PARTS * K, m_read))
                    dk = add_four(dk, load_four(p.dk_hat, o_part, SIGN * H * PARTS * K, m_read))
                q = load_four(p.q_hat, o_q, SIGN * H * K, m_read)
                k = load_four(p.k_hat, o_q, SIGN * H * K, m_read)
                summands = (q[0] * dq[0] - k[0] * dk[0],)
                for r in tl.static_range(1, 4):
                    summands += (q[r] * dq[r] - k[r] * dk[r],)
                bits = bits_before_four(b_bits, gates)
                b_bits = bits[3] - gates[3] * LOG2E
                dq = fade_four(dq, bits, 1)
                dk = fade_four(dk, bits, -1)
                store_four(p.d_query, o_q, SIGN * H * K, dq, m)
                store_four(p.d_key, o_q, SIGN * H * K, dk, m)
            sums = sum_four(b_sum, summands, 1.0)
            b_sum = sums[3]
            d_gates = ()
            for r in tl.static_range(4):
                # an infinite gate has no gradient
                d_gates += (tl.where(gates[r] * LOG2E < LEAST, 0.0, sums[r]),)
            if CALL.listed:
                # nor has a first gate without a state, or padding
                i_gate = chunk.i_row + ((chunk.entry & CUT) != 0).to(tl.int32)
                counted = ()
                for r in tl.static_range(4):
                    counted += (tl.where(m_read[r] & (i0 - r >= i_gate), d_gates[r], 0.0),)
                d_gates = counted
            store_four(p.d_gate, o_q, SIGN * H * K, d_gates, m)
