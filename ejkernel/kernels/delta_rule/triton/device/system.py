"""Device code: the triangular system of every chunk, solved for whatever state the chunk begins with."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import CHUNKS, load_rows, locate, token_of, token_offsets
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import IDLE, WEIGHTS, marked, pair_decays
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands, inverse, product, scores


@triton.jit
def solve_system(p, b_below, b_beta, m_read, i_chunk, o_r, CALL: tl.constexpr):
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
    p_pair = i_chunk * (C * C) + o_r[:, None] * C + o_r[None, :]
    b_nearest = nearest(b_inverse, SOLVE)
    if tl.max((m_idle & m_read).to(tl.int32), 0) > 0:
        b_forward = tl.where(m_idle[None, :], 0.0, b_inverse)
        b_unit = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0)
        b_forward = tl.where(m_idle[:, None], b_unit - product(b_below, b_forward, INVERT), b_forward)
        tl.store(p.inverse + p_pair, in_order_of_operands(nearest(b_forward, SOLVE), C, C))
    else:
        tl.store(p.inverse + p_pair, in_order_of_operands(b_nearest, C, C))
    if CALL.keep:
        tl.store(p.transposed + p_pair, in_order_of_operands(tl.trans(b_nearest), C, C))
    return b_inverse


@triton.jit
def store_reads(p, b_score, b_inverse, i_chunk, o_r, CALL: tl.constexpr):
    """Stores what the inverse makes of the scores of queries with keys up to them, decayed."""
    # here and not in the walk: what cancels, as it does where keys coincide, does so before anything is rounded
    C: tl.constexpr = CALL.chunk
    INVERT: tl.constexpr = CALL.invert
    b_read = product(b_score, b_inverse, INVERT)
    tl.store(p.reads + i_chunk * (C * C) + o_r[:, None] * C + o_r[None, :], b_read.to(p.reads.dtype.element_ty))


@triton.jit
def solve_heads(p, i_block, i_first_head, i_row, i_first, n_rows, n_read, WHOLE: tl.constexpr, CALL: tl.constexpr):
    """What `solve` gives, of one chunk, which may be known to have all rows."""
    BK: tl.constexpr = CALL.key_block
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    i_token = token_of(i_first, n_rows, i_row, CALL.flip)
    o_r = tl.arange(0, C)
    o_t = token_offsets(o_r, CALL.flip)
    o_k = tl.arange(0, BK)
    m_read = i_row + o_r < n_read
    for i_each in range(0, CALL.each):
        i_h = i_first_head + i_each
        i_chunk = i_block.to(tl.int64) * H + i_h
        b_k = load_rows(p.key, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, BK != K, False, WHOLE)
        b_q = load_rows(p.query, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, BK != K, False, WHOLE)
        if DECAY == "head":
            p_row = p.known + i_chunk * (WEIGHTS * C) + o_r
            b_beta = tl.load(p_row)
        else:
            p_row = p.weights + i_chunk * (WEIGHTS * C) + o_r
            b_beta = tl.load(p.beta + (i_token + o_t) * H + i_h, mask=m_read, other=0.0).to(tl.float32)
            b_beta = marked(b_beta)
        b_below = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
        if DECAY == "head":
            b_pair = pair_decays(tl.load(p_row + 3 * C), tl.load(p_row + 4 * C))
            b_below = b_below * b_pair
        b_below = b_below * b_beta[:, None]
        if CALL.keys_may_coincide and DECAY != "head":
            store_squares(b_below, p.squares, i_chunk, o_r, C)
        b_inverse = solve_system(p, b_below, b_beta, m_read, i_chunk, o_r, CALL)
        if DECAY != "head":
            # only now that it has come for sure
            tl.store(p_row, b_beta)
        b_score = scores(b_q, b_k, o_r[:, None] >= o_r[None, :], PRECISION)
        if DECAY == "head":
            b_score = b_score * b_pair
        store_reads(p, b_score, b_inverse, i_chunk, o_r, CALL)


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
    i_block = i_program // (CALL.heads // EACH)
    _, i_c, i_first, n_rows, n_read = locate(i_block, p, CHUNKS, C, CALL)
    i_row = i_c * C
    is_whole = CALL.whole
    if CALL.packed:
        # of packed sequences most chunks have all rows; there are fewer than could be
        is_whole = i_row + C <= n_read
    if is_whole:
        solve_heads(p, i_block, i_first_head, i_row, i_first, n_rows, n_read, True, CALL)
    elif not CALL.packed or i_row < n_rows:
        solve_heads(p, i_block, i_first_head, i_row, i_first, n_rows, n_read, False, CALL)
