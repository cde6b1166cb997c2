"""Device code: the triangular system of every chunk, solved for whatever state the chunk begins with."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import (
    load_rows,
    locate_block,
    rows_kept,
    store_tile,
    token_of,
    token_offsets,
    visit,
)
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import (
    IDLE,
    load_weight,
    marked,
    pair_decays,
    weight,
    weights_of,
)
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands, inverse, product, scores


@triton.jit
def solve_system(p, b_below, b_beta, m_read, chunk, i_chunk, i_h, o_r, CALL: tl.constexpr):
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
    p_pair = rows_kept(chunk, i_chunk, i_h, p, C, CALL) + o_r[:, None] * C + o_r[None, :]
    m_pair = (chunk.i_row + o_r < chunk.n_end)[:, None]
    b_nearest = nearest(b_inverse, SOLVE)
    if tl.max((m_idle & m_read).to(tl.int32), 0) > 0:
        b_forward = tl.where(m_idle[None, :], 0.0, b_inverse)
        b_unit = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0)
        b_forward = tl.where(m_idle[:, None], b_unit - product(b_below, b_forward, INVERT), b_forward)
        p_tile = p.inverse + p_pair
        store_tile(p_tile, in_order_of_operands(nearest(b_forward, SOLVE), C, C), m_pair, not CALL.listed)
    else:
        store_tile(p.inverse + p_pair, in_order_of_operands(b_nearest, C, C), m_pair, not CALL.listed)
    if CALL.keep:
        p_tile = p.transposed + p_pair
        store_tile(p_tile, in_order_of_operands(tl.trans(b_nearest), C, C), m_pair, not CALL.listed)
    return b_inverse


@triton.jit
def store_reads(p, b_score, b_inverse, chunk, i_chunk, i_h, o_r, CALL: tl.constexpr):
    """Stores what the inverse makes of the scores of queries with keys up to them, decayed."""
    # here and not in the walk: what cancels, as it does where keys coincide, does so before anything is rounded
    C: tl.constexpr = CALL.chunk
    INVERT: tl.constexpr = CALL.invert
    b_read = product(b_score, b_inverse, INVERT)
    p_pair = p.reads + rows_kept(chunk, i_chunk, i_h, p, C, CALL) + o_r[:, None] * C + o_r[None, :]
    m_pair = (chunk.i_row + o_r < chunk.n_end)[:, None]
    store_tile(p_pair, b_read.to(p.reads.dtype.element_ty), m_pair, not CALL.listed)


@triton.jit
def solve_heads(p, chunk, block, i_first_head, WHOLE: tl.constexpr, CALL: tl.constexpr):
    """What `solve` gives, of one chunk, which may be known to have all rows."""
    BK: tl.constexpr = CALL.key_block
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    i_row = chunk.i_row
    i_token = token_of(block.i_first, block.n_rows, i_row, CALL.flip)
    o_r = tl.arange(0, C)
    o_t = token_offsets(o_r, CALL.flip)
    o_k = tl.arange(0, BK)
    m_read = i_row + o_r < chunk.n_read
    for i_each in range(0, CALL.each):
        i_h = i_first_head + i_each
        i_chunk = block.i_block.to(tl.int64) * H + i_h
        b_k = load_rows(p.key, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, BK != K, False, WHOLE)
        b_q = load_rows(p.query, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, BK != K, False, WHOLE)
        if DECAY == "head":
            p_row = weights_of(p.known, chunk, i_chunk, i_h, p, CALL) + o_r
            b_beta = load_weight(p_row, o_r, chunk, CALL)
        else:
            p_row = weights_of(p.weights, chunk, i_chunk, i_h, p, CALL) + o_r
            b_beta = tl.load(p.beta + (i_token + o_t) * H + i_h, mask=m_read, other=0.0).to(tl.float32)
            b_beta = marked(b_beta)
        b_below = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
        if DECAY == "head":
            b_whole = load_weight(weight(p_row, 3, p, CALL), o_r, chunk, CALL)
            b_pair = pair_decays(b_whole, load_weight(weight(p_row, 4, p, CALL), o_r, chunk, CALL))
            b_below = b_below * b_pair
        b_below = b_below * b_beta[:, None]
        if CALL.keys_may_coincide and DECAY != "head":
            store_squares(b_below, chunk, i_chunk, i_h, o_r, p, CALL)
        b_inverse = solve_system(p, b_below, b_beta, m_read, chunk, i_chunk, i_h, o_r, CALL)
        if DECAY != "head":
            # only now that it has come for sure
            store_tile(p_row, b_beta, i_row + o_r < chunk.n_end, not CALL.listed)
        b_score = scores(b_q, b_k, o_r[:, None] >= o_r[None, :], PRECISION)
        if DECAY == "head":
            b_score = b_score * b_pair
        store_reads(p, b_score, b_inverse, chunk, i_chunk, i_h, o_r, CALL)


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
