"""Device code: a chunk with its rows in registers, and decays multiplied up level by level.

A chunk's tokens lie in blocks of R = 2**LR, and a chunk is one tile of blocks, rows and dims. A thread has its dims of
all rows: so it has whole blocks, and nothing is exchanged until these are done.

One tile, not one a row: for every load and store one of Triton's passes goes through all that the kernel computes.
"""

import triton
import triton.language as tl


@triton.jit
def join_rows(b_rows, o_r):
    """Blocks from their first rows, second rows and so on, a tile each."""
    R: tl.constexpr = o_r.shape[0]
    NB: tl.constexpr = b_rows[0].shape[0]
    BK: tl.constexpr = b_rows[0].shape[1]
    # by `tl.join` a thread's rows would come before its dims, and shared memory would be written with conflicts
    b = tl.broadcast_to(b_rows[0][:, None, :], [NB, R, BK])
    for r in tl.static_range(1, R):
        b = tl.where(o_r[None, :, None] == r, b_rows[r][:, None, :], b)
    return b


@triton.jit
def split_rows(b, LR: tl.constexpr):
    """First rows of blocks, second rows and so on, a tile each."""
    R: tl.constexpr = 1 << LR
    NB: tl.constexpr = b.shape[0]
    BK: tl.constexpr = b.shape[2]
    parts = (tl.permute(b, (0, 2, 1)),)
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
def held_as_loaded(b):
    """The same tile, its rows where threads loaded them: else what meets a dot's result moves to the dot's places."""
    NB: tl.constexpr = b.shape[0]
    R: tl.constexpr = b.shape[1]
    BK: tl.constexpr = b.shape[2]
    if R > 1:
        # only within a thread can a tile be split
        b_early, b_late = tl.split(tl.permute(tl.reshape(b, [NB, 2, R // 2, BK]), (0, 2, 3, 1)))
        m_late = (tl.arange(0, 2) == 1)[None, :, None, None]
        b = tl.reshape(tl.where(m_late, b_late[:, None, :, :], b_early[:, None, :, :]), [NB, R, BK])
    return b


@triton.jit
def sibling(b, W: tl.constexpr):
    """To each W rows what the W rows beside them have, of each pair of these."""
    return sibling_bits(b.to(tl.int32, bitcast=True), W).to(tl.float32, bitcast=True)


@triton.jit
def sibling_bits(b, W: tl.constexpr):
    """`sibling` of integers."""
    BK: tl.constexpr = b.shape[2]
    b_bits = tl.reshape(b, [b.numel // (2 * W * BK), 2, W, BK])
    return tl.reshape(tl.xor_sum(b_bits, 1, keep_dims=True) ^ b_bits, b.shape)


@triton.jit
def is_late(o_r, o_b, LEVEL: tl.constexpr, LR: tl.constexpr):
    """Whether tokens come second where pairs of 2**LEVEL of them meet."""
    if LEVEL < LR:
        m_late = ((o_r >> LEVEL) & 1)[None, :, None] != 0
    else:
        m_late = ((o_b >> (LEVEL - LR)) & 1)[:, None, None] != 0
    return m_late


@triton.jit
def climb(b_q, b_k, b_total, o_r, o_b, LEVEL: tl.constexpr, LR: tl.constexpr):
    """One dyadic level: late rows of q and early rows of k, and what the next one starts from.

    Queries come decayed since the start of their block of 2**LEVEL tokens, keys until its end, and `b_total` is the
    decay through each such block: a level takes one more factor, that of the block beside.
    """
    m_late = is_late(o_r, o_b, LEVEL, LR)
    b_beside = sibling(b_total, 1 << (LEVEL if LEVEL < LR else LEVEL - LR))
    b_folded = tl.where(m_late, b_q, b_k)
    b_q *= tl.where(m_late, b_beside, 1.0)
    b_k *= tl.where(m_late, 1.0, b_beside)
    b_total *= b_beside
    if LEVEL + 1 == LR:
        # rows are all the same by now
        b_total = tl.max(b_total, 1, keep_dims=True)
    return b_folded, b_q, b_k, b_total
