"""Device code: the query's or key's gradient where many heads with one gate each share both, a chunk a program."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import MOST
from ejkernel.kernels.chunks.triton.device.places import CHUNKS, load_rows, locate, token_of, token_offsets


@triton.jit
def add_across_heads(p, CALL: tl.constexpr):
    """`dquery` and, in REVERSE, `dkey` of one chunk, from the states with which `walk` enters it; operands as there.

    A program adds up one head after the other in registers, and stores nothing of a single head but its row dots. A row
    dot has two parts. The part within the chunk is a sum of the products of w and z, which all heads share, weighed as
    the scores are; the part through the state is a product of x with what w reads of the state. Decays between rows are
    computed from the sums of the gates, so strong gates need no path of their own.
    """
    H: tl.constexpr = CALL.heads
    HZ: tl.constexpr = CALL.key_heads
    DX: tl.constexpr = CALL.value_dim
    DZ: tl.constexpr = CALL.key_dim
    BZ: tl.constexpr = CALL.key_block
    C: tl.constexpr = CALL.chunk
    WHOLE: tl.constexpr = CALL.whole
    PAD_X: tl.constexpr = CALL.value_block != DX
    PAD_Z: tl.constexpr = BZ != DZ
    i_program = tl.program_id(0)
    i_zh = i_program % HZ
    i_block = i_program // HZ
    span = locate(i_block, p, CHUNKS, C, CALL)
    o_r = tl.arange(0, C)
    o_x = tl.arange(0, CALL.value_block)
    o_z = tl.arange(0, BZ)
    o_t = token_offsets(o_r, CALL.flip)
    o_pair = tl.arange(0, 2)
    i_row = span.i_j * C
    m_read = i_row + o_r < span.n_read
    m_write = i_row + o_r < span.n_rows
    i_token = token_of(span.i_first, span.n_rows, i_row, CALL.flip)
    # scores are [row of x, row of y]
    o_gap = o_r[:, None] - o_r[None, :]
    if CALL.reverse:
        o_gap = -o_gap

    b_z = load_rows(p.z, i_token, i_zh, o_t, m_read, o_z, HZ, DZ, PAD_Z, False, WHOLE)
    b_w = load_rows(p.w, i_token, i_zh, o_t, m_read, o_z, HZ, DZ, PAD_Z, False, WHOLE)
    b_both = tl.dot(b_w, tl.trans(b_z))
    b_out = tl.zeros([C, BZ], tl.float32)
    for i_each in range(0, H // HZ):
        i_h = i_zh * (H // HZ) + i_each
        i_chunk = i_block.to(tl.int64) * H + i_h
        b_x = load_rows(p.x, i_token, i_h, o_t, m_read, o_x, H, DX, PAD_X, False, WHOLE)
        b_y = load_rows(p.y, i_token, i_h, o_t, m_read, o_x, H, DX, PAD_X, False, WHOLE)
        p_tile = p.state + i_chunk * (DX * DZ) + o_x[:, None] * DZ + o_z[None, :]
        if PAD_X or PAD_Z:
            b_state = tl.load(p_tile, mask=(o_x[:, None] < DX) & (o_z[None, :] < DZ), other=0.0)
        else:
            b_state = tl.load(p_tile)
        b_whole, b_part = tl.split(tl.load(p.within + i_chunk * (4 * C) + o_r[:, None] * 4 + o_pair[None, :] * 2 + 1))
        if CALL.reverse:
            # from the chunk's end instead of its start; loaded as a tile, which the compiler leaves in the layout of x
            p_end = p.within + i_chunk * (4 * C) + 4 * (C - 1) + 1
            b_whole_end, b_part_end = tl.split(tl.load(p_end + o_r[:, None] * 0 + o_pair[None, :] * 2))
            b_whole = b_whole_end - b_whole
            b_part = b_part_end - b_part
        # finite, since the state may be 0
        b_reach = tl.exp2(tl.minimum(b_whole + b_part, 100.0))
        b_gap = (b_whole[:, None] - b_whole[None, :]) + (b_part[:, None] - b_part[None, :])
        b_fade = tl.exp2(tl.where(o_gap >= 0, tl.minimum(b_gap, MOST), float("-inf")))

        b_score = tl.dot(b_x, tl.trans(b_y)) * b_fade
        b_read = tl.dot(b_w, tl.trans(b_state))
        b_rowdot = tl.sum(b_score * b_both, 1) + tl.sum(b_read * b_x.to(tl.float32), 1) * b_reach
        b_out = tl.dot((b_x * b_reach[:, None]).to(b_x.dtype), b_state, acc=b_out)
        b_out = tl.dot(b_score.to(b_z.dtype), b_z, acc=b_out)
        tl.store(p.row_dots + (i_token + o_t) * H + i_h, b_rowdot * CALL.scale, mask=m_write)

    p_rows = p.output + (i_token * HZ + i_zh) * DZ + o_t[:, None] * (HZ * DZ) + o_z[None, :]
    b_rows = (b_out * CALL.scale).to(p.output.dtype.element_ty)
    tl.store(p_rows, b_rows, mask=m_write[:, None] & (o_z[None, :] < DZ))
