"""Device code for chunks whose keys coincide: what rounding takes off what is multiplied there.

Most of what such tokens add to a state cancels, and with it what bfloat16 has digits for. So operands that were
computed go into products a second time, with what rounding has taken off them. Other chunks need none of it, so this
is done by launches of its own, which most often find nothing to do. Kept by the contract: gradients are exact, also
where every token writes to the same place.
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
from ejkernel.kernels.delta_rule.triton.device.decays import BETA, IDLE, load_pair_decays, load_weight, weights_of
from ejkernel.kernels.delta_rule.triton.device.inverse import inverse, product, scores
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_head, load_pairs, pairs_at, writable

# The mean square of a system's rows from which on outputs are not within twice their rounding error any more.
COINCIDING = tl.constexpr(1.5)


@triton.jit
def store_squares(b_system, rows, p, CALL: tl.constexpr):
    """Of each row of what stands below a system's diagonal: how much keys recall of those before them."""
    p_tile = p.squares + rows_kept(rows.chunk, rows.i_chunk, rows.i_h, p, 1, CALL) + rows.o_r
    store_tile(p_tile, tl.sum(b_system * b_system, 1), writable(rows), not CALL.listed)


@triton.jit
def coincide(b_square, C: tl.constexpr):
    """Whether keys are, by the squares of systems' rows, `[systems, rows]`."""
    return tl.sum(b_square, 1) > COINCIDING * C


@triton.jit
def load_weak(p_weak, i_chunk, o_chunk, n_chunks, H: tl.constexpr):
    """Which of a head's chunks have gates so weak that their keys may coincide."""
    return tl.load(p_weak + i_chunk + o_chunk * H, mask=o_chunk < n_chunks, other=0)


@triton.jit
def any_weak(p_weak, i_chunk, n_chunks, H: tl.constexpr):
    """Whether any of so many chunks of a head has."""
    b_weak = tl.zeros([64], tl.int32)
    for i in range(0, n_chunks, 64):
        b_weak += load_weak(p_weak, i_chunk, i + tl.arange(0, 64), n_chunks, H)
    return tl.sum(b_weak, 0) > 0


@triton.jit
def any_coincide(p, i_chunk, n_chunks, CALL: tl.constexpr):
    """Whether keys coincide in any of so many chunks of a head."""
    C: tl.constexpr = CALL.chunk
    o_r = tl.arange(0, C)
    b_coincide = tl.zeros([16], tl.int32)
    for i in range(0, n_chunks, 16):
        o_chunk = i + tl.arange(0, 16)
        m_chunk = o_chunk < n_chunks
        if CALL.decay == "head":
            m_chunk = load_weak(p.weak, i_chunk, o_chunk, n_chunks, CALL.heads) != 0
        p_tile = p.squares + (i_chunk + o_chunk * CALL.heads)[:, None] * C + o_r[None, :]
        b_coincide += coincide(tl.load(p_tile, mask=m_chunk[:, None], other=0.0), C).to(tl.int32)
    return tl.sum(b_coincide, 0) > 0


@triton.jit
def heads_that_coincide(p, block, chunk, o_h, CALL: tl.constexpr):
    """In which heads of a chunk keys coincide; a listed one needs no block."""
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
    p_tile = p.squares + o_square + o_r[None, :]
    return coincide(tl.load(p_tile, mask=m_head[:, None] & m_row[None, :], other=0.0), C).to(tl.int32)


@triton.jit
def mark_sequences(p, p_mine, i_n, i_from, n_steps, i_h, CALL: tl.constexpr):
    """Marks the listed chunks, `n_steps` from the `i_from`-th on, of sequences in which some chunk's keys coincide.

    A program walks over several sequences. One that takes more digits gives results for those that need them, and for
    no others: else one would change the bits of another. Returns whether there are any.
    """
    o_h = i_h + tl.arange(0, 1)
    is_any = 0
    is_mine = 0
    for i_step in range(0, n_steps):
        chunk = visit(i_from + i_step, i_n, 0, 0, p, CALL)
        b_coincide = tl.sum(heads_that_coincide(p, None, chunk, o_h, CALL), 0)
        is_mine = tl.where((chunk.entry & CUT) != 0, 0, is_mine) | b_coincide
        is_any = is_any | b_coincide
        tl.store(p_mine + chunk.i_row, is_mine)
    # what other threads have written
    tl.debug_barrier()
    for i_step in range(0, n_steps):
        chunk = visit(i_from + n_steps - 1 - i_step, i_n, 0, 0, p, CALL)
        is_mine = tl.where((chunk.next_entry & CUT) != 0, 0, is_mine) | tl.load(p_mine + chunk.i_row)
        tl.store(p_mine + chunk.i_row, is_mine)
    tl.debug_barrier()
    return is_any


@triton.jit
def rest_of(b):
    """What rounding to bfloat16 takes off, itself rounded."""
    return (b - b.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def load_rest(p, rows, INVERSE: tl.constexpr, CALL: tl.constexpr):
    """Of what queries read, or of the inverse, transposed."""
    b_rest = load_pairs(p.rests, rows, p, CALL)
    return tl.where((rows.o_r[:, None] < rows.o_r[None, :]) == INVERSE, b_rest, 0.0).to(b_rest.dtype)


@triton.jit
def add_rest(b, b_left, b_right, COINCIDE: tl.constexpr):
    """Adds a product with what rounding has taken off one operand, where keys coincide."""
    if COINCIDE:
        b = tl.dot(b_left, b_right, acc=b)
    return b


@triton.jit
def measure_chunk(p, chunk, i_first, n_rows, i_chunk, i_h, o_r, o_t, CALL: tl.constexpr):
    """`store_squares` of one chunk."""
    PRECISION: tl.constexpr = CALL.precision
    i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
    rows = Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, chunk.i_row + o_r < chunk.n_read)
    p_row = weights_of(p.weights, rows, p, CALL) + o_r
    b_k = load_head(p.key, rows, tl.arange(0, CALL.key_block), CALL.key_heads, CALL.key_dim, CALL)
    b_below = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
    b_below = b_below * load_weight(p_row, BETA, rows, p, CALL)[:, None]
    b_below = b_below * load_pair_decays(p_row, rows, p, CALL)
    store_squares(b_below, rows, p, CALL)


@triton.jit
def measure(p, i_n, i_first, n_rows, n_read, i_from, n_steps, i_chunk0, i_h, CALL: tl.constexpr):
    """`store_squares` of chunks whose gates are weak, with one gate a head, which no kernel before this has done."""
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
                measure_chunk(p, chunk, i_first, n_rows, 0, i_h, o_r, o_t, CALL)
        else:
            i_chunk = (i_chunk0 + i_c) * H + i_h
            # many at once, as most are not
            if i_step % 64 == 0:
                b_weak = load_weak(p.weak, i_chunk, o_weak, n_steps - i_step, H)
            if tl.sum(tl.where(o_weak == i_step % 64, b_weak, 0), 0) > 0:
                chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
                measure_chunk(p, chunk, i_first, n_rows, i_chunk, i_h, o_r, o_t, CALL)
    # what other threads have written
    tl.debug_barrier()


@triton.jit
def store_rests(p, rows, CALL: tl.constexpr):
    """Solves a chunk's system again, for what rounding has taken off what queries read and off the inverse.

    Both are triangular: one matrix holds them, the inverse's rest transposed.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    PRECISION: tl.constexpr = CALL.precision
    INVERT: tl.constexpr = CALL.invert
    SOLVE: tl.constexpr = CALL.solve
    o_r = rows.o_r
    o_k = tl.arange(0, CALL.key_block)
    p_row = weights_of(p.weights, rows, p, CALL) + o_r
    b_beta = load_weight(p_row, BETA, rows, p, CALL)
    b_beta = tl.where(b_beta == IDLE, 0.0, b_beta)
    m_late = o_r[:, None] > o_r[None, :]
    m_own = o_r[:, None] == o_r[None, :]
    b_k = load_head(p.own_key, rows, o_k, CALL.key_heads, K, CALL)
    b_q = load_head(p.own_query, rows, o_k, CALL.query_heads, K, CALL)
    if CALL.decay == "key":
        b_score = scores(b_q, b_k, m_own, PRECISION)
        b_q = load_head(p.query, rows, o_k, H, K, CALL)
        b_k = load_head(p.key, rows, o_k, H, K, CALL)
        b_write = load_head(p.write, rows, o_k, H, K, CALL)
        b_below = scores(b_k, b_write, m_late, PRECISION)
        b_score += scores(b_q, b_write, m_late, PRECISION)
    else:
        b_below = scores(b_k, b_k, m_late, PRECISION)
        b_score = scores(b_q, b_k, m_late | m_own, PRECISION)
        if CALL.decay == "head":
            b_pair = load_pair_decays(p_row, rows, p, CALL)
            b_below = b_below * b_pair
            b_score = b_score * b_pair
    b_inverse = inverse(b_below * b_beta[:, None], CALL.chunk, INVERT)
    b_rest = tl.trans((b_inverse - nearest(b_inverse, SOLVE)).to(tl.bfloat16))
    b_rest = tl.where(m_late | m_own, rest_of(product(b_score, b_inverse, INVERT)), b_rest)
    store_tile(pairs_at(p.rests, rows, p, CALL), b_rest, writable(rows)[:, None], not CALL.listed)
