"""Device code: the triangular system of every chunk, solved for whatever state the chunk begins with."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import CHUNKS, load_rows, locate, token_of, token_offsets
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import WEIGHTS, pair_decays, writing
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands, inverse, product, scores


@triton.jit
def store_system(p, b_inverse, b_score, i_chunk, o_r, CALL: tl.constexpr):
    """Stores a chunk's inverse, and what it makes of the scores of queries with keys up to them, decayed.

    The inverse, and its transpose, have their columns in the order of operands.
    """
    C: tl.constexpr = CALL.chunk
    INVERT: tl.constexpr = CALL.invert
    SOLVE: tl.constexpr = CALL.solve
    i_pair = i_chunk * (C * C)
    o_pair = o_r[:, None] * C + o_r[None, :]
    b_nearest = nearest(b_inverse, SOLVE)
    tl.store(p.inverse + i_pair + o_pair, in_order_of_operands(b_nearest, C, C))
    if CALL.keep:
        tl.store(p.transposed + i_pair + o_pair, in_order_of_operands(tl.trans(b_nearest), C, C))
    # here and not in the walk: what cancels, as it does where keys coincide, does so before anything is rounded
    b_read = product(b_score, b_inverse, INVERT)
    tl.store(p.reads + i_pair + o_pair, b_read.to(p.reads.dtype.element_ty))


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
    INVERT: tl.constexpr = CALL.invert
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
            b_beta = writing(b_beta)
        b_below = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
        if DECAY == "head":
            b_pair = pair_decays(tl.load(p_row + 3 * C), tl.load(p_row + 4 * C))
            b_below = b_below * b_pair
        b_below = b_below * b_beta[:, None]
        if CALL.keys_may_coincide and DECAY != "head":
            store_squares(b_below, p.squares, i_chunk, o_r, C)
        b_inverse = inverse(b_below, C, INVERT)
        if DECAY != "head":
            # only now that it has come for sure
            tl.store(p_row, b_beta)
        b_score = scores(b_q, b_k, o_r[:, None] >= o_r[None, :], PRECISION)
        if DECAY == "head":
            b_score = b_score * b_pair
        store_system(p, b_inverse, b_score, i_chunk, o_r, CALL)


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
