# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: a chunk with its rows in registers, and decays multiplied up level by level.

A chunk's tokens lie in blocks of R. The r-th rows of all blocks are one tile, and a chunk is a tuple of R tiles. A
thread has the same place in each of them: so it has whole blocks, and nothing is exchanged until these are done.
"""

import triton
import triton.language as tl


@triton.jit
def place_rows(i_token, i_head, o_t, o_k, HEADS: tl.constexpr, D: tl.constexpr):
    """Where rows of one head lie."""
    return (i_token * HEADS + i_head) * D + (o_t[:, None] * (HEADS * D) + o_k[None, :])


@triton.jit
def load_row(p_tile, m_tile):
    """One row of every block, of which a thread takes four dims whatever their size."""
    return tl.load(tl.max_contiguous(p_tile, (1, 4)), mask=m_tile, other=0.0)


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
def sibling(b, W: tl.constexpr):
    """To each W rows what the W rows beside them have, of each pair of these."""
    NB: tl.constexpr = b.shape[0]
    BK: tl.constexpr = b.shape[1]
    b_bits = tl.reshape(b.to(tl.int32, bitcast=True), [NB // (2 * W), 2, W, BK])
    return tl.reshape(tl.xor_sum(b_bits, 1, keep_dims=True) ^ b_bits, [NB, BK]).to(tl.float32, bitcast=True)


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
        m_late = ((o_b >> (LEVEL - LR)) & 1)[:, None] != 0
        b_beside = sibling(b_total[0], 1 << (LEVEL - LR))
        b_before = tl.where(m_late, b_beside, 1.0)
        b_after = tl.where(m_late, 1.0, b_beside)
        for r in tl.static_range(R):
            folded += (tl.where(m_late, b_q[r], b_k[r]),)
            since += (b_q[r] * b_before,)
            until += (b_k[r] * b_after,)
        total = (b_total[0] * b_beside,)
    return folded, since, until, total
