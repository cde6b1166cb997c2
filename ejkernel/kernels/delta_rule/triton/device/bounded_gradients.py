"""Device code: gradients of a chunk whose key gates are bounded, by blocks of 16 tokens. Tiles lie [dims, rows]."""

import triton
import triton.language as tl

from ejkernel.kernels.delta_rule.triton.device.flows import add_pairs, add_up
from ejkernel.kernels.delta_rule.triton.device.inverse import corner

BLOCK = tl.constexpr(16)


@triton.jit
def at_row(b_sum, i_row, C: tl.constexpr):
    """The column of one row of each block `[dims, blocks]`."""
    b_blocks = tl.reshape(b_sum, (b_sum.shape[0], C // BLOCK, BLOCK))
    return tl.sum(tl.where(tl.arange(0, BLOCK)[None, None, :] == i_row, b_blocks, 0.0), 2)


@triton.jit
def at_rows(b, C: tl.constexpr):
    """What is the same for all rows of a block, at these."""
    return tl.reshape(tl.broadcast_to(b[:, :, None], (b.shape[0], C // BLOCK, BLOCK)), (b.shape[0], C))


@triton.jit
def sum_where(b_total, m_sum):
    """Sums over the blocks that `m_sum` selects of each block, transposed."""
    return tl.sum(tl.where(m_sum[None, :, :], b_total[:, :, None], 0.0), 1)


@triton.jit
def of_bounded(b_state, b_dstate, b_q, b_k, b_gate, b_do, b_dr, b_ut, b_dscore, b_dbelow, o_r, CALL: tl.constexpr):
    """Gradients of queries and keys, what arrives at rows less what is left there, and all that leaves the chunk."""
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    PRECISION: tl.constexpr = CALL.precision
    m_block = o_r[:, None] // BLOCK == o_r[None, :] // BLOCK
    # a token's own key crosses no gate
    m_own = o_r[:, None] == o_r[None, :]
    b_own = tl.sum(tl.where(m_own, b_dscore, 0.0).to(tl.float32), 0)[None, :]
    b_whole, b_rest = add_up(b_gate, m_block & (o_r[:, None] <= o_r[None, :]), CALL.fine)
    # through a row since its block's start, and of all of a block
    b_sum = b_whole + b_rest
    b_total = at_row(b_sum, BLOCK - 1, C)
    b_bits = b_sum - at_rows(at_row(b_sum, BLOCK // 2 - 1, C), C)
    m_here = m_block & (m_own == 0)
    b_dq = b_own * b_k.to(tl.float32)
    b_dk = b_own * b_q.to(tl.float32)
    b_flow = tl.zeros(b_sum.shape, tl.float32)
    b_dq, b_dk, b_flow = add_pairs(
        b_dq, b_dk, b_flow, b_q, b_k, tl.where(m_here, b_dscore, 0.0).to(b_k.dtype),
        tl.where(m_here, b_dbelow, 0.0).to(b_k.dtype), tl.exp2(b_bits), tl.exp2(-b_bits), PRECISION,
    )  # fmt: skip
    o_b = tl.arange(0, C // BLOCK)
    o_of, o_at = o_b[:, None], o_b[None, :]
    for i_level in tl.static_range(4, LEVELS):
        # where the later half of a pair of blocks begins
        i_border = ((o_at >> (i_level - 4)) | 1) << (i_level - 4)
        m_late = o_at >= i_border
        m_sum = tl.where(m_late, (o_of >= i_border) & (o_of < o_at), (o_of < i_border) & (o_of >= o_at))
        b_bits = at_rows(sum_where(b_total, m_sum), C)
        b_bits += tl.where(((o_r >> i_level) & 1)[None, :] != 0, b_sum, -b_sum)
        b_fade = tl.exp2(b_bits)
        m_here = corner(o_r, i_level)
        b_dq, b_dk, b_flow = add_pairs(
            b_dq, b_dk, b_flow, b_q, b_k, tl.where(m_here, b_dscore, 0.0).to(b_k.dtype),
            tl.where(m_here, b_dbelow, 0.0).to(b_k.dtype), b_fade, b_fade, PRECISION,
        )  # fmt: skip
    b_since = tl.exp2(b_sum + at_rows(sum_where(b_total, o_of < o_at), C))
    b_leaving = tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0) * tl.exp2(tl.sum(b_total, 1))
    b_grad = tl.dot(tl.trans(b_state), b_do, input_precision=PRECISION) * b_since
    b_flow += b_q.to(tl.float32) * b_grad
    b_dq += b_grad
    b_grad = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION) * b_since
    b_flow += b_k.to(tl.float32) * b_grad
    b_dk += b_grad
    b_grad = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
    b_grad = b_grad * tl.exp2(at_rows(sum_where(b_total, o_of >= o_at), C) - b_sum)
    b_dk += b_grad
    b_grad = b_grad * b_k.to(tl.float32)
    b_leaving += tl.sum(b_grad, 1)
    return b_dq, b_dk, b_flow - b_grad, b_leaving
