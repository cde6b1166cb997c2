"""Device code for chunks whose keys coincide, in bfloat16: products that also have the operands' rounding errors.

Most of what such tokens write to the state cancels, and what is left is smaller than bfloat16's rounding errors. So a
computed operand goes into a product twice: rounded, and as what rounding took off. Second launches do so for the chunks
that need it; most often there are none. The contract promises it: gradients are exact, even if every token writes to
the same place.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import (
    CUT,
    REAL,
    load_flag,
    rows_kept,
    store_tile,
    token_of,
    token_offsets,
    visit,
)
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.decays import BETA, IDLE, load_pair_decays, load_scalar, scalars_at
from ejkernel.kernels.delta_rule.triton.device.inverse import inverse, product, scores
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_head, load_pairs, pairs_at, writable

# The mean over a chunk's rows of the squares of M, summed along a row, above which errors of outputs exceed twice those
# of rounding them.
COINCIDING = tl.constexpr(1.5)


@triton.jit
def store_squares(b_system, rows, p, CALL: tl.constexpr):
    """Stores the sum of squares of each row of M: how much of earlier tokens the row's key recalls."""
    p_tile = p.row_squares + rows_kept(rows.chunk, rows.i_chunk, rows.i_h, p, 1, CALL) + rows.o_r
    store_tile(p_tile, tl.sum(b_system * b_system, 1), writable(rows), not CALL.listed)


@triton.jit
def coincide(b_square, C: tl.constexpr):
    """In which chunks keys coincide, by the sums of squares `[chunks, rows]`."""
    return tl.sum(b_square, 1) > COINCIDING * C


@triton.jit
def load_weak(p_weak, i_chunk, o_chunk, n_chunks, H: tl.constexpr):
    """Which of a head's chunks have weak gates."""
    return tl.load(p_weak + i_chunk + o_chunk * H, mask=o_chunk < n_chunks, other=0)


@triton.jit
def any_weak(p_weak, i_chunk, n_chunks, H: tl.constexpr):
    """Whether any of a head's `n_chunks` chunks from the `i_chunk`-th on has weak gates."""
    b_weak = tl.zeros([64], tl.int32)
    for i in range(0, n_chunks, 64):
        b_weak += load_weak(p_weak, i_chunk, i + tl.arange(0, 64), n_chunks, H)
    return tl.sum(b_weak, 0) > 0


@triton.jit
def heads_that_coincide(p, block, chunk, o_h, CALL: tl.constexpr):
    """In which heads of a chunk keys coincide; a listed chunk is found without its block."""
    C: tl.constexpr = CALL.chunk
    o_r = tl.arange(0, C)
    m_head = o_h < CALL.heads
    if CALL.listed:
        i_first = 0
        o_head = (chunk.i_n.to(tl.int64) * CALL.heads + o_h) * p.T + chunk.i_row
        o_square = o_head[:, None]
        m_head = m_head & ((chunk.entry & REAL) != 0)
        m_row = chunk.i_row + o_r < chunk.n_end
    else:
        i_first = block.i_block.to(tl.int64) * CALL.heads
        o_head = o_h
        o_square = (i_first + o_h)[:, None] * C
        m_row = o_r < block.n_rows - block.i_c * C
    if CALL.decay == "head":
        m_head = tl.load(p.weak + i_first + o_head, mask=m_head, other=0) != 0
    p_tile = p.row_squares + o_square + o_r[None, :]
    return coincide(tl.load(p_tile, mask=m_head[:, None] & m_row[None, :], other=0.0), C).to(tl.int32)


@triton.jit
def mark_sequences(p, p_marks, i_n, i_from, n_steps, i_h, CALL: tl.constexpr):
    """Marks the chunks of sequences in which keys coincide anywhere; returns whether there are any.

    A program walks over the `n_steps` listed chunks from the `i_from`-th on, which are of several sequences. Its second
    run stores the results of marked sequences only: one sequence must not change the bits of another.
    """
    o_h = i_h + tl.arange(0, 1)
    is_any = 0
    is_marked = 0
    for i_step in range(0, n_steps):
        chunk = visit(i_from + i_step, i_n, 0, 0, p, CALL)
        b_coincide = tl.sum(heads_that_coincide(p, None, chunk, o_h, CALL), 0)
        is_marked = tl.where((chunk.entry & CUT) != 0, 0, is_marked) | b_coincide
        is_any = is_any | b_coincide
        tl.store(p_marks + chunk.i_row, is_marked)
    # other threads wrote what is loaded next
    tl.debug_barrier()
    for i_step in range(0, n_steps):
        chunk = visit(i_from + n_steps - 1 - i_step, i_n, 0, 0, p, CALL)
        is_marked = tl.where((chunk.next_entry & CUT) != 0, 0, is_marked) | tl.load(p_marks + chunk.i_row)
        tl.store(p_marks + chunk.i_row, is_marked)
    tl.debug_barrier()
    return is_any


@triton.jit
def may_coincide(p, i_n, i_from, n_steps, i_h, CALL: tl.constexpr):
    """False if keys surely coincide in none of the listed chunks: a quick look at blocks of rows.

    A chunk lies in two blocks at most, wherever it begins. So if no block's squares exceed half of what a chunk's have
    to, no chunk's do. A block with a NaN may hide others.
    """
    C: tl.constexpr = CALL.chunk
    o_block = tl.arange(0, 16)
    o_r = tl.arange(0, C)
    p_rows = p.row_squares + (i_n.to(tl.int64) * CALL.heads + i_h) * p.T
    i_first = visit(i_from, i_n, 0, 0, p, CALL).i_row // C
    n_blocks = tl.cdiv(visit(i_from + n_steps - 1, i_n, 0, 0, p, CALL).n_end, C)
    b_any = tl.zeros([16], tl.int32)
    for i in range(i_first, n_blocks, 16):
        i_row = (i + o_block)[:, None] * C + o_r[None, :]
        b_square = tl.sum(tl.load(p_rows + i_row, mask=i_row < p.T, other=0.0), 1)
        b_any = b_any | ((b_square <= COINCIDING * C / 2) == 0).to(tl.int32)
    return (tl.sum(b_any, 0) > 0) & (n_steps > 0)


@triton.jit
def any_coincide(p, p_marks, i_n, i_from, n_steps, i_chunk, i_h, CALL: tl.constexpr):
    """Whether keys coincide in any of a walk's chunks, of which the `i_chunk`-th is the first; marks listed ones."""
    if CALL.listed:
        is_any = 0
        # with one gate a head, squares are there for chunks with weak gates alone, and those have been looked for
        if CALL.decay == "head":
            is_any = mark_sequences(p, p_marks, i_n, i_from, n_steps, i_h, CALL)
        elif may_coincide(p, i_n, i_from, n_steps, i_h, CALL):
            is_any = mark_sequences(p, p_marks, i_n, i_from, n_steps, i_h, CALL)
        return is_any
    else:
        C: tl.constexpr = CALL.chunk
        o_r = tl.arange(0, C)
        b_coincide = tl.zeros([16], tl.int32)
        for i in range(0, n_steps, 16):
            o_chunk = i + tl.arange(0, 16)
            m_chunk = o_chunk < n_steps
            if CALL.decay == "head":
                m_chunk = load_weak(p.weak, i_chunk, o_chunk, n_steps, CALL.heads) != 0
            p_tile = p.row_squares + (i_chunk + o_chunk * CALL.heads)[:, None] * C + o_r[None, :]
            b_coincide += coincide(tl.load(p_tile, mask=m_chunk[:, None], other=0.0), C).to(tl.int32)
        return tl.sum(b_coincide, 0) > 0


@triton.jit
def roundoff(b):
    """What rounding to bfloat16 takes off, in bfloat16."""
    return (b - b.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def load_roundoff(p, rows, INVERSE: tl.constexpr, CALL: tl.constexpr):
    """The roundoff of the solved scores `[rows, columns]` or, INVERSE, of the inverse, transposed."""
    b_roundoff = load_pairs(p.system_roundoff, rows, p, CALL)
    return tl.where((rows.o_r[:, None] < rows.o_r[None, :]) == INVERSE, b_roundoff, 0.0).to(b_roundoff.dtype)


@triton.jit
def add_roundoff(b, b_left, b_right, COINCIDE: tl.constexpr):
    """Adds the product with one operand's roundoff, where keys coincide."""
    if COINCIDE:
        b = tl.dot(b_left, b_right, acc=b)
    return b


@triton.jit
def store_chunk_squares(p, chunk, i_first, n_rows, i_chunk, i_h, o_r, o_t, CALL: tl.constexpr):
    """`store_squares` for one chunk."""
    PRECISION: tl.constexpr = CALL.precision
    i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
    rows = Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, chunk.i_row + o_r < chunk.n_read)
    p_row = scalars_at(p.row_scalars, rows, p, CALL) + o_r
    b_k = load_head(p.key_since, rows, tl.arange(0, CALL.key_block), CALL.key_heads, CALL.key_dim, CALL)
    b_system = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
    b_system = b_system * load_scalar(p_row, BETA, rows, p, CALL)[:, None]
    b_system = b_system * load_pair_decays(p_row, rows, p, CALL)
    store_squares(b_system, rows, p, CALL)


@triton.jit
def store_weak_squares(p, i_n, i_first, n_rows, n_read, i_from, n_steps, i_chunk0, i_h, CALL: tl.constexpr):
    """`store_squares` for the chunks with weak gates, with one gate a head, where `solve` has not stored them."""
    H: tl.constexpr = CALL.heads
    o_r = tl.arange(0, CALL.chunk)
    o_t = token_offsets(o_r, CALL.flip)
    o_weak = tl.arange(0, 64)
    b_weak = tl.zeros([64], tl.int32)
    for i_step in range(0, n_steps):
        i_c = i_from + i_step
        if CALL.listed:
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
            if load_flag(p.weak, chunk, 0, i_h, p, CALL) > 0:
                store_chunk_squares(p, chunk, i_first, n_rows, 0, i_h, o_r, o_t, CALL)
        else:
            i_chunk = (i_chunk0 + i_c) * H + i_h
            # 64 flags in one load, since most are 0
            if i_step % 64 == 0:
                b_weak = load_weak(p.weak, i_chunk, o_weak, n_steps - i_step, H)
            if tl.sum(tl.where(o_weak == i_step % 64, b_weak, 0), 0) > 0:
                chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
                store_chunk_squares(p, chunk, i_first, n_rows, i_chunk, i_h, o_r, o_t, CALL)
    # other threads wrote what is loaded next
    tl.debug_barrier()


@triton.jit
def store_roundoff(p, rows, CALL: tl.constexpr):
    """Solves a chunk's system again, and stores the roundoff of the solved scores and of the inverse.

    Both are triangular, so one matrix holds them, the inverse's transposed.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    PRECISION: tl.constexpr = CALL.precision
    INVERT: tl.constexpr = CALL.invert
    SOLVE: tl.constexpr = CALL.solve
    o_r = rows.o_r
    o_k = tl.arange(0, CALL.key_block)
    p_row = scalars_at(p.row_scalars, rows, p, CALL) + o_r
    b_beta = load_scalar(p_row, BETA, rows, p, CALL)
    b_beta = tl.where(b_beta == IDLE, 0.0, b_beta)
    m_late = o_r[:, None] > o_r[None, :]
    m_diagonal = o_r[:, None] == o_r[None, :]
    b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
    b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
    if CALL.decay == "key":
        b_score = scores(b_q, b_k, m_diagonal, PRECISION)
        b_q = load_head(p.query_since, rows, o_k, H, K, CALL)
        b_k = load_head(p.key_since, rows, o_k, H, K, CALL)
        b_k_until = load_head(p.key_until, rows, o_k, H, K, CALL)
        b_system = scores(b_k, b_k_until, m_late, PRECISION)
        b_score += scores(b_q, b_k_until, m_late, PRECISION)
    else:
        b_system = scores(b_k, b_k, m_late, PRECISION)
        b_score = scores(b_q, b_k, m_late | m_diagonal, PRECISION)
        if CALL.decay == "head":
            b_pair = load_pair_decays(p_row, rows, p, CALL)
            b_system = b_system * b_pair
            b_score = b_score * b_pair
    b_inverse = inverse(b_system * b_beta[:, None], CALL.chunk, INVERT)
    b_roundoff = tl.trans((b_inverse - nearest(b_inverse, SOLVE)).to(tl.bfloat16))
    b_roundoff = tl.where(m_late | m_diagonal, roundoff(product(b_score, b_inverse, INVERT)), b_roundoff)
    store_tile(pairs_at(p.system_roundoff, rows, p, CALL), b_roundoff, writable(rows)[:, None], not CALL.listed)
