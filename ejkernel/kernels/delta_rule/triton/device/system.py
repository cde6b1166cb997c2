"""Device code: the triangular system of every chunk, solved for whatever state the chunk begins with."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import (
    locate_block,
    store_tile,
    token_of,
    token_offsets,
    visit,
)
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import (
    BETA,
    IDLE,
    load_pair_decays,
    load_weight,
    marked,
    weights_of,
)
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands, inverse, product, scores
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_beta, load_head, pairs_at, writable


@triton.jit
def solve_system(p, b_below, b_beta, rows, CALL: tl.constexpr):
    """Returns the inverse of a chunk's system, whose rows below the diagonal come times betas, and stores it.

    The row of a token that writes nothing is 0 below the diagonal. What is stored for the walk forward finds what the
    state lacks of such a token's value too, times `IDLE`, and adds it to nothing: the token's row is as it came, and
    its column is 0. The inverse, and its transpose, are stored with their columns in the order of operands.
    """
    C: tl.constexpr = CALL.chunk
    INVERT: tl.constexpr = CALL.invert
    SOLVE: tl.constexpr = CALL.solve
    m_idle = b_beta == IDLE
    b_inverse = inverse(tl.where(m_idle[:, None], 0.0, b_below), C, INVERT)
    o_pair = pairs_at(0, rows, p, CALL)
    m_pair = writable(rows)[:, None]
    b_nearest = nearest(b_inverse, SOLVE)
    if tl.max((m_idle & rows.m_read).to(tl.int32), 0) > 0:
        b_forward = tl.where(m_idle[None, :], 0.0, b_inverse)
        b_unit = tl.where(rows.o_r[:, None] == rows.o_r[None, :], 1.0, 0.0)
        b_forward = tl.where(m_idle[:, None], b_unit - product(b_below, b_forward, INVERT), b_forward)
        store_tile(p.inverse + o_pair, in_order_of_operands(nearest(b_forward, SOLVE), C, C), m_pair, not CALL.listed)
    else:
        store_tile(p.inverse + o_pair, in_order_of_operands(b_nearest, C, C), m_pair, not CALL.listed)
    if CALL.keep:
        b_nearest = in_order_of_operands(tl.trans(b_nearest), C, C)
        store_tile(p.transposed + o_pair, b_nearest, m_pair, not CALL.listed)
    return b_inverse


@triton.jit
def store_reads(p, b_score, b_inverse, rows, CALL: tl.constexpr):
    """Stores what the inverse makes of the scores of queries with keys up to them, decayed."""
    # here and not in the walk: what cancels, as it does where keys coincide, does so before anything is rounded
    INVERT: tl.constexpr = CALL.invert
    b_read = product(b_score, b_inverse, INVERT)
    p_tile = pairs_at(p.reads, rows, p, CALL)
    store_tile(p_tile, b_read.to(p.reads.dtype.element_ty), writable(rows)[:, None], not CALL.listed)


@triton.jit
def solve_heads(p, chunk, block, i_first_head, WHOLE: tl.constexpr, CALL: tl.constexpr):
    """What `solve` gives, of one chunk, which may be known to have all rows."""
    K: tl.constexpr = CALL.key_dim
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    i_token = token_of(block.i_first, block.n_rows, chunk.i_row, CALL.flip)
    o_r = tl.arange(0, CALL.chunk)
    o_t = token_offsets(o_r, CALL.flip)
    o_k = tl.arange(0, CALL.key_block)
    m_read = chunk.i_row + o_r < chunk.n_read
    for i_each in range(0, CALL.each):
        i_h = i_first_head + i_each
        rows = Rows(chunk, i_h, block.i_block.to(tl.int64) * CALL.heads + i_h, i_token, o_r, o_t, m_read)
        b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL, WHOLE)
        b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL, WHOLE)
        if DECAY == "head":
            p_row = weights_of(p.known, rows, p, CALL) + o_r
            b_beta = load_weight(p_row, BETA, rows, p, CALL)
        else:
            p_row = weights_of(p.weights, rows, p, CALL) + o_r
            b_beta = marked(load_beta(p, rows, CALL))
        b_below = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
        if DECAY == "head":
            b_pair = load_pair_decays(p_row, rows, p, CALL)
            b_below = b_below * b_pair
        b_below = b_below * b_beta[:, None]
        if CALL.keys_may_coincide and DECAY != "head":
            store_squares(b_below, rows, p, CALL)
        b_inverse = solve_system(p, b_below, b_beta, rows, CALL)
        if DECAY != "head":
            # only now that it has come for sure
            store_tile(p_row, b_beta, writable(rows), not CALL.listed)
        b_score = scores(b_q, b_k, o_r[:, None] >= o_r[None, :], PRECISION)
        if DECAY == "head":
            b_score = b_score * b_pair
        store_reads(p, b_score, b_inverse, rows, CALL)


@triton.jit
def solve(p, CALL: tl.constexpr):
    """Of each chunk: the inverse of its system, `(I + M)⁻¹`, what its queries read, `P (I + M)⁻¹`, and `WEIGHTS`.

    With one gate a head weights are known, by `weigh`.

    KEEP stores the inverse transposed too. A program takes EACH heads, the next one's rows fetched meanwhile.
    """
    EACH: tl.constexpr = CALL.each
    C: tl.constexpr = CALL.chunk
    i_program = tl.program_id(0)
    i_first_head = i_program % (CALL.heads // EACH) * EACH
    block = locate_block(i_program // (CALL.heads // EACH), p, CALL)
    if CALL.listed:
        # what is the same for all chunks would take registers, and the next one's rows shared memory
        for i_c in tl.range(block.i_c, block.i_end, num_stages=1, disable_licm=True):
            chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
            if chunk.i_row + C <= chunk.n_read:
                solve_heads(p, chunk, block, i_first_head, True, CALL)
            else:
                solve_heads(p, chunk, block, i_first_head, False, CALL)
    else:
        chunk = visit(block.i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
        is_whole = CALL.whole
        if CALL.packed:
            # of packed sequences most chunks have all rows; there are fewer than could be
            is_whole = chunk.i_row + C <= block.n_read
        if is_whole:
            solve_heads(p, chunk, block, i_first_head, True, CALL)
        elif not CALL.packed or chunk.i_row < block.n_rows:
            solve_heads(p, chunk, block, i_first_head, False, CALL)
