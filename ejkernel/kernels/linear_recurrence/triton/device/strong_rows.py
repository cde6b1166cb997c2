# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: a chunk with its rows in registers, and decays multiplied up level by level.

A chunk's tokens lie in blocks of R. The r-th rows of all blocks are one tile, and a chunk is a tuple of R tiles. A
thread has the same place in each of them: so it has whole blocks, and nothing is exchanged until these are done.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.gates import LOG2E, MOST


@triton.jit
def place_rows(i_token, i_head, o_t, o_k, HEADS: tl.constexpr, D: tl.constexpr):
    """Where rows of one head lie."""
    return (i_token * HEADS + i_head) * D + (o_t[:, None] * (HEADS * D) + o_k[None, :])


@triton.jit
def mask_rows(i_row, n_read, o_k, K: tl.constexpr, PAD: tl.constexpr):
    """Which of some rows can be read."""
    m_tile = (i_row < n_read)[:, None]
    if PAD:
        m_tile = m_tile & (o_k < K)[None, :]
    return m_tile


@triton.jit
def load_row(p_tile, m_tile, DIMS: tl.constexpr):
    """One row of every block, of which a thread takes so many dims whatever their size."""
    return tl.load(tl.max_contiguous(p_tile, (1, DIMS)), mask=m_tile, other=0.0)


@triton.jit
def load_chunk(
    p_q,
    p_k,
    p_gate,
    i_token,
    i_h,
    i_first,
    n_read,
    o_b,
    o_k,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    PAD: tl.constexpr,
    LR: tl.constexpr,
    DIMS: tl.constexpr,
    SIGN: tl.constexpr,
    START: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows of queries and keys, and each token's own decays; `i_first` is the first of them in its sequence."""
    R: tl.constexpr = 1 << LR
    o_t = o_b * (R * SIGN)
    p_q += place_rows(i_token, i_h // (H // HQ), o_t, o_k, HQ, K)
    p_k += place_rows(i_token, i_h // (H // HK), o_t, o_k, HK, K)
    p_gate += place_rows(i_token, i_h, o_t, o_k, H, K)
    queries = ()
    keys = ()
    decays = ()
    for r in tl.static_range(R):
        i_row = i_first + o_b * R + r
        m_tile = mask_rows(i_row, n_read, o_k, K, PAD)
        m_gate = m_tile
        if not START and r == 0:
            # the first gate meets no state, and must not make an infinite one of it
            m_gate = m_gate & (i_row > 0)[:, None]
        b_gate = load_row(p_gate + r * (SIGN * H * K), m_gate, DIMS).to(tl.float32)
        b_q = load_row(p_q + r * (SIGN * HQ * K), m_tile, DIMS)
        b_k = load_row(p_k + r * (SIGN * HK * K), m_tile, DIMS)
        if WIDE:
            b_q = b_q.to(tl.float32)
            b_k = b_k.to(tl.float32)
        queries += (b_q,)
        keys += (b_k,)
        decays += (tl.exp2(tl.minimum(b_gate * LOG2E, MOST)),)
    return queries, keys, decays


@triton.jit
def join_rows(b_rows, R: tl.constexpr):
    """Rows of blocks as one tile of tokens and dims."""
    NB: tl.constexpr = b_rows[0].shape[0]
    BK: tl.constexpr = b_rows[0].shape[1]
    o_r = tl.arange(0, R)[:, None, None]
    # by `tl.join` a thread's rows would come before its dims, and shared memory would be written with conflicts
    b = tl.broadcast_to(tl.reshape(b_rows[0], [1, NB, BK]), [R, NB, BK])
    for r in tl.static_range(1, R):
        b = tl.where(o_r == r, tl.reshape(b_rows[r], [1, NB, BK]), b)
    return tl.reshape(tl.permute(b, (1, 0, 2)), [NB * R, BK])


@triton.jit
def split_rows(b, LR: tl.constexpr):
    """One tile of tokens and dims as rows of blocks."""
    R: tl.constexpr = 1 << LR
    NB: tl.constexpr = b.shape[0] // R
    BK: tl.constexpr = b.shape[1]
    parts = (tl.permute(tl.reshape(b, [NB, R, BK]), (0, 2, 1)),)
    for i in tl.static_range(LR):
        halves = ()
        for j in tl.static_range(1 << i):
            b_early, b_late = tl.split(tl.permute(tl.reshape(parts[j], [NB, BK, 2, R >> (i + 1)]), (0, 1, 3, 2)))
            halves += (b_early, b_late)
        parts = halves
    rows = ()
    for r in tl.static_range(R):
        rows += (tl.reshape(parts[r], [NB, BK]),)
    return rows


@triton.jit
def sibling(b, W: tl.constexpr):
    """To each W rows what the W rows beside them have, of each pair of these."""
    NB: tl.constexpr = b.shape[0]
    BK: tl.constexpr = b.shape[1]
    b_bits = tl.reshape(b.to(tl.int32, bitcast=True), [NB // (2 * W), 2, W, BK])
    return tl.reshape(tl.xor_sum(b_bits, 1, keep_dims=True) ^ b_bits, [NB, BK]).to(tl.float32, bitcast=True)


@triton.jit
def is_late(o_b, LEVEL: tl.constexpr, LR: tl.constexpr):
    """Whether blocks come second where pairs of 2**LEVEL tokens meet."""
    return ((o_b >> (LEVEL - LR)) & 1)[:, None] != 0


@triton.jit
def climb(b_q, b_k, b_total, o_b, LEVEL: tl.constexpr, LR: tl.constexpr):
    """One dyadic level: late rows of q and early rows of k, and what the next one starts from.

    Queries come decayed since the start of their block of 2**LEVEL tokens, keys until its end, and `b_total` is the
    decay through each such block: a level takes one more factor, that of the block beside. R is 2**LR.
    """
    R: tl.constexpr = 1 << LR
    folded = ()
    since = ()
    until = ()
    total = ()
    if LEVEL < LR:
        for r in tl.static_range(R):
            if (r >> LEVEL) & 1:
                folded += (b_q[r],)
                since += (b_q[r] * b_total[(r >> LEVEL) - 1],)
                until += (b_k[r],)
            else:
                folded += (b_k[r],)
                since += (b_q[r],)
                until += (b_k[r] * b_total[(r >> LEVEL) + 1],)
        for i in tl.static_range(R >> (LEVEL + 1)):
            total += (b_total[2 * i] * b_total[2 * i + 1],)
    else:
        m_late = is_late(o_b, LEVEL, LR)
        b_beside = sibling(b_total[0], 1 << (LEVEL - LR))
        b_before = tl.where(m_late, b_beside, 1.0)
        b_after = tl.where(m_late, 1.0, b_beside)
        for r in tl.static_range(R):
            folded += (tl.where(m_late, b_q[r], b_k[r]),)
            since += (b_q[r] * b_before,)
            until += (b_k[r] * b_after,)
        total = (b_total[0] * b_beside,)
    return folded, since, until, total
