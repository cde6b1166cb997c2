"""Device code: a chunk with its rows in registers, and decays multiplied up level by level.

A chunk is one tile [blocks, R = 2**LR rows, dims]. A thread has some dims of all rows of a block, so that threads
exchange nothing until blocks are done. It is not a tile for each row, since Triton's own compile time grows with loads
and stores.
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
    """The same tile in the layout of the loads: else all that a dot's result is added to would move to its layout."""
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
    """A tile whose first and second W rows, third and fourth W rows and so on have changed places."""
    return sibling_bits(b.to(tl.int32, bitcast=True), W).to(tl.float32, bitcast=True)


@triton.jit
def sibling_bits(b, W: tl.constexpr):
    """`sibling` of integers."""
    BK: tl.constexpr = b.shape[2]
    b_bits = tl.reshape(b, [b.numel // (2 * W * BK), 2, W, BK])
    return tl.reshape(tl.xor_sum(b_bits, 1, keep_dims=True) ^ b_bits, b.shape)


@triton.jit
def is_late(o_r, o_b, LEVEL: tl.constexpr, LR: tl.constexpr):
    """Whether tokens are in the second half of their block of 2**(LEVEL + 1) tokens."""
    if LEVEL < LR:
        m_late = ((o_r >> LEVEL) & 1)[None, :, None] != 0
    else:
        m_late = ((o_b >> (LEVEL - LR)) & 1)[:, None, None] != 0
    return m_late


@triton.jit
def climb(b_q, b_k, b_total, o_r, o_b, LEVEL: tl.constexpr, LR: tl.constexpr):
    """One dyadic level: late rows of q and early rows of k as one tile, then q, k and `b_total` of the next level.

    Queries come decayed since the start of their block of 2**LEVEL tokens, keys until its end, and `b_total` is the
    decay through each such block. The next level has one more factor, the decay of the neighbouring block.
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
