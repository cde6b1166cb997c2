"""Device code: the scalars of a chunk's rows, betas and, with one gate a head, decays."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import MOST, in_bits
from ejkernel.kernels.chunks.triton.device.places import after_first_gate, locate_block, token_of, token_offsets, visit
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, writable

# The forward stores u, which is beta times the token's error, and beta's gradient needs the error: u / beta. A token
# whose beta is below LEAST_BETA writes nothing; u is computed with IDLE in the place of its beta then, and goes into
# beta's gradient and nowhere else. A beta that happens to be IDLE loses its last bit.
IDLE = tl.constexpr(2.0**-60 + 2.0**-83)
LEAST_BETA = tl.constexpr(2.0**-100)
# Keys can only coincide in chunks of so many tokens whose gates have more bits than this a token, on average; the
# second bound is for betas of 1 or more.
WEAK = tl.constexpr(-3.0 / 64)
WEAK_WRITTEN = tl.constexpr(-14.0 / 64)
FEWEST_COINCIDING = tl.constexpr(16)
# The scalars of a row: beta, the decay since the chunk's start, the decay until its end, and the sum of gates since the
# start in bits, in two summands: whole bits and the rest.
SCALARS = tl.constexpr(5)
BETA = tl.constexpr(0)
SINCE = tl.constexpr(1)
UNTIL = tl.constexpr(2)
WHOLE_BITS = tl.constexpr(3)
PART_BITS = tl.constexpr(4)


@triton.jit
def is_idle(b_beta):
    """Which betas are of tokens that write nothing."""
    return tl.abs(b_beta) < LEAST_BETA


@triton.jit
def mark_idle(b_beta):
    """Betas, with `IDLE` in the place of those of tokens that write nothing."""
    return tl.where(is_idle(b_beta), IDLE, tl.where(b_beta == IDLE, 2.0**-60, b_beta))


@triton.jit
def scalars_at(p_scalars, rows, p, CALL: tl.constexpr):
    """Where the first scalars of a chunk's rows lie."""
    if CALL.listed:
        return p_scalars + ((rows.chunk.i_n.to(tl.int64) * CALL.heads + rows.i_h) * (SCALARS * p.T) + rows.chunk.i_row)
    else:
        return p_scalars + rows.i_chunk * (SCALARS * CALL.chunk)


@triton.jit
def scalar_at(p_row, NUMBER: tl.constexpr, p, CALL: tl.constexpr):
    """Where the scalars of one kind lie, from where the first ones do."""
    if CALL.listed:
        return p_row + NUMBER * p.T
    else:
        return p_row + NUMBER * CALL.chunk


@triton.jit
def load_scalar(p_row, NUMBER: tl.constexpr, rows, p, CALL: tl.constexpr, o_r=0):
    """The scalars of one kind; 0 for rows that a listed chunk does not have."""
    p_tile = scalar_at(p_row, NUMBER, p, CALL) + o_r
    if CALL.listed:
        return tl.load(p_tile, mask=writable(rows), other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def load_pair_decays(p_row, rows, p, CALL: tl.constexpr):
    """The decays from earlier rows (columns) to later rows, `[C, C]`; above the diagonal anything finite."""
    b_whole = load_scalar(p_row, WHOLE_BITS, rows, p, CALL)
    b_part = load_scalar(p_row, PART_BITS, rows, p, CALL)
    b_gap = (b_whole[:, None] - b_whole[None, :]) + (b_part[:, None] - b_part[None, :])
    return tl.exp2(tl.minimum(b_gap, MOST))


@triton.jit
def load_through(p_row, chunk, p, CALL: tl.constexpr):
    """The decay of a state through the chunk; `p_row` is where its first scalar lies."""
    if CALL.listed:
        return tl.load(p_row + (p.T + chunk.n_end - 1 - chunk.i_row))
    else:
        return tl.load(p_row + (2 * CALL.chunk - 1))


@triton.jit
def prepare_chunk(p, block, i_c, i_head, CALL: tl.constexpr):
    """`prepare_rows` for one chunk, and the heads from the `i_head`-th on; returns which have weak gates."""
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
    i_row = chunk.i_row
    i_token = token_of(block.i_first, block.n_rows, i_row, CALL.flip)
    o_r = tl.arange(0, C)
    o_t = token_offsets(o_r, CALL.flip)
    o_h = i_head + tl.arange(0, CALL.head_block)
    m_read = (o_h[:, None] < H) & (i_row + o_r < chunk.n_read)[None, :]
    p_tile = (i_token + o_t)[None, :] * H + o_h[:, None]
    b_beta = tl.load(p.beta + p_tile, mask=m_read, other=0.0).to(tl.float32)
    # the first gate is in the state that the sequence begins with
    m_gate = m_read & after_first_gate(chunk, i_row + o_r, CALL)[None, :]
    b_gate = in_bits(tl.load(p.gate + p_tile, mask=m_gate, other=0.0).to(tl.float32))
    b_whole = tl.floor(b_gate + 0.5)
    b_part = b_gate - b_whole
    b_whole_end = tl.sum(b_whole, 1)[:, None]
    b_part_end = tl.sum(b_part, 1)[:, None]
    b_whole = tl.cumsum(b_whole, 1)
    b_part = tl.cumsum(b_part, 1)
    b_since = tl.exp2(tl.minimum(b_whole + b_part, MOST))
    b_until = tl.exp2(tl.minimum((b_whole_end - b_whole) + (b_part_end - b_part), MOST))
    i_chunk = (block.i_block.to(tl.int64) * H + o_h)[:, None]
    p_row = (
        scalars_at(p.row_scalars, Rows(chunk, o_h[:, None], i_chunk, i_token, o_r, o_t, m_read), p, CALL) + o_r[None, :]
    )
    m_head = (o_h < H)[:, None] & (o_r >= 0)[None, :]
    if CALL.listed:
        m_head = m_head & (i_row + o_r < chunk.n_end)[None, :]
    tl.store(p_row, mark_idle(b_beta), mask=m_head)
    tl.store(scalar_at(p_row, SINCE, p, CALL), b_since, mask=m_head)
    tl.store(scalar_at(p_row, UNTIL, p, CALL), b_until, mask=m_head)
    tl.store(scalar_at(p_row, WHOLE_BITS, p, CALL), b_whole, mask=m_head)
    tl.store(scalar_at(p_row, PART_BITS, p, CALL), b_part, mask=m_head)
    b_weak = tl.zeros(o_h.shape, tl.int32)
    if CALL.keys_may_coincide:
        b_least = tl.where(tl.max(tl.abs(b_beta), 1) < 1.0, WEAK, WEAK_WRITTEN)
        n_here = tl.minimum(chunk.n_read - i_row, C)
        is_weak = (tl.sum(b_whole_end + b_part_end, 1) > b_least * n_here) & (n_here >= FEWEST_COINCIDING)
        if CALL.listed:
            b_weak = is_weak.to(tl.int32)
            tl.store(p.weak + (block.i_n.to(tl.int64) * H + o_h) * p.T + i_row, b_weak, mask=o_h < H)
        else:
            tl.store(p.weak + block.i_block.to(tl.int64) * H + o_h, is_weak.to(tl.int32), mask=o_h < H)
    return b_weak


@triton.jit
def prepare_rows(p, CALL: tl.constexpr):
    """With one gate a head: stores the scalars of the rows, and which chunks' gates are so weak that keys may coincide.

    A program takes BH heads, since sums along rows have a long latency. Gates are summed in bits, whole bits and the
    rest apart, so that a strong gate costs others no digits. Decays are finite, since 0 times infinity is NaN. The
    memory of `row_squares` is allocated here and filled by the second run of the walk.
    """
    BH: tl.constexpr = CALL.head_block
    H: tl.constexpr = CALL.heads
    i_program = tl.program_id(0)
    NH: tl.constexpr = (H + BH - 1) // BH
    block = locate_block(i_program // NH, p, CALL)
    if CALL.listed:
        b_any = tl.zeros([BH], tl.int32)
        for i_c in range(block.i_c, block.i_end):
            b_any = b_any | prepare_chunk(p, block, i_c, (i_program % NH) * BH, CALL)
        if CALL.keys_may_coincide:
            o_h = (i_program % NH) * BH + tl.arange(0, BH)
            tl.store(p.any_weak + block.i_block.to(tl.int64) * H + o_h, b_any, mask=o_h < H)
    elif not CALL.pooled or block.i_c * CALL.chunk < block.n_rows:
        # few blocks have a chunk where most sequences of a pool are of one token
        prepare_chunk(p, block, block.i_c, (i_program % NH) * BH, CALL)
