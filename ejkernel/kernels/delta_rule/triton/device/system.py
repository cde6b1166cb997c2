"""Device code: the triangular system of every chunk, solved for whatever state the chunk begins with."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import locate_block, store_tile, token_of, token_offsets, visit
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import (
    BETA,
    IDLE,
    load_pair_decays,
    load_scalar,
    mark_idle,
    scalars_at,
)
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands, inverse, product, scores
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_beta, load_head, pairs_at, writable


@triton.jit
def solve_system(p, b_system, b_beta, rows, CALL: tl.constexpr):
    """Returns and stores `(I + M)⁻¹`; `b_system` is M, with betas.

    In the system, the row of an idle token is 0 below the diagonal. The stored inverse also has to give the walk an
    idle token's error, times `IDLE`, which beta's gradient needs, without adding it to other tokens: there the token's
    row is that of `I - M (I + M)⁻¹` and its column is 0. That is the inverse of a system whose columns, instead of
    rows, are 0. The inverse and its transpose, which keeps those columns, are stored with their columns in the order of
    operands.
    """
    C: tl.constexpr = CALL.chunk
    INVERT: tl.constexpr = CALL.invert
    SOLVE: tl.constexpr = CALL.solve
    m_idle = b_beta == IDLE
    o_pair = pairs_at(0, rows, p, CALL)
    m_pair = writable(rows)[:, None]
    if CALL.residuals:
        b_inverse = inverse(tl.where(m_idle[:, None], 0.0, b_system), C, INVERT)
        b_nearest = nearest(b_inverse, SOLVE)
        if tl.max((m_idle & rows.m_read).to(tl.int32), 0) > 0:
            b_forward = tl.where(m_idle[None, :], 0.0, b_inverse)
            b_unit = tl.where(rows.o_r[:, None] == rows.o_r[None, :], 1.0, 0.0)
            b_forward = tl.where(m_idle[:, None], b_unit - product(b_system, b_forward, INVERT), b_forward)
            b_forward = in_order_of_operands(nearest(b_forward, SOLVE), C, C)
            store_tile(p.inverse + o_pair, b_forward, m_pair, not CALL.listed)
        else:
            store_tile(p.inverse + o_pair, in_order_of_operands(b_nearest, C, C), m_pair, not CALL.listed)
        b_nearest = in_order_of_operands(tl.trans(b_nearest), C, C)
        store_tile(p.inverse_transposed + o_pair, b_nearest, m_pair, not CALL.listed)
    else:
        b_forward = inverse(tl.where(m_idle[None, :], 0.0, b_system), C, INVERT)
        b_nearest = in_order_of_operands(nearest(b_forward, SOLVE), C, C)
        store_tile(p.inverse + o_pair, b_nearest, m_pair, not CALL.listed)
        # an idle token adds nothing to what queries read
        b_inverse = tl.where(m_idle[:, None], 0.0, b_forward)
    return b_inverse


@triton.jit
def store_solved_scores(p, b_score, b_inverse, rows, CALL: tl.constexpr):
    """Stores `P (I + M)⁻¹`, where P are the decayed scores of queries with keys up to them."""
    # here and not in the walk, so that what cancels where keys resemble each other does so before it is rounded
    INVERT: tl.constexpr = CALL.invert
    b_read = product(b_score, b_inverse, INVERT)
    p_tile = pairs_at(p.solved_scores, rows, p, CALL)
    store_tile(p_tile, b_read.to(p.solved_scores.dtype.element_ty), writable(rows)[:, None], not CALL.listed)


@triton.jit
def solve_heads(p, chunk, block, i_first_head, WHOLE: tl.constexpr, CALL: tl.constexpr):
    """`solve` for one chunk and the heads of a program; WHOLE, all of the chunk's rows hold tokens."""
    K: tl.constexpr = CALL.key_dim
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    i_token = token_of(block.i_first, block.n_rows, chunk.i_row, CALL.flip)
    o_r = tl.arange(0, CALL.chunk)
    o_t = token_offsets(o_r, CALL.flip)
    o_k = tl.arange(0, CALL.key_block)
    m_read = chunk.i_row + o_r < chunk.n_read
    for i_each in tl.range(0, CALL.heads_per_program, disable_licm=True):
        i_h = i_first_head + i_each
        rows = Rows(chunk, i_h, block.i_block.to(tl.int64) * CALL.heads + i_h, i_token, o_r, o_t, m_read)
        b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL, WHOLE)
        b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL, WHOLE)
        if DECAY == "head":
            p_row = scalars_at(p.head_scalars, rows, p, CALL) + o_r
            b_beta = load_scalar(p_row, BETA, rows, p, CALL)
        else:
            p_row = scalars_at(p.row_scalars, rows, p, CALL) + o_r
            b_beta = mark_idle(load_beta(p, rows, CALL))
        b_system = scores(b_k, b_k, o_r[:, None] > o_r[None, :], PRECISION)
        if DECAY == "head":
            b_pair = load_pair_decays(p_row, rows, p, CALL)
            b_system = b_system * b_pair
        b_system = b_system * b_beta[:, None]
        if CALL.keys_may_coincide and DECAY != "head":
            store_squares(b_system, rows, p, CALL)
        b_inverse = solve_system(p, b_system, b_beta, rows, CALL)
        if DECAY != "head":
            # stored late, since the store waits for the load of betas
            store_tile(p_row, b_beta, writable(rows), not CALL.listed)
        b_score = scores(b_q, b_k, o_r[:, None] >= o_r[None, :], PRECISION)
        if DECAY == "head":
            b_score = b_score * b_pair
        store_solved_scores(p, b_score, b_inverse, rows, CALL)


@triton.jit
def solve(p, CALL: tl.constexpr):
    """For each chunk: `(I + M)⁻¹`, `P (I + M)⁻¹`, and the scalars of the rows, unless `prepare_rows` has stored these.

    `CALL.residuals` also stores the inverse transposed. A program takes EACH heads one after the other, and fetches the
    next head's rows meanwhile.
    """
    EACH: tl.constexpr = CALL.heads_per_program
    C: tl.constexpr = CALL.chunk
    i_program = tl.program_id(0)
    i_first_head = i_program % (CALL.heads // EACH) * EACH
    block = locate_block(i_program // (CALL.heads // EACH), p, CALL)
    if CALL.listed:
        # hoisted code would take registers, and prefetched rows shared memory
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
            # most chunks of packed sequences have all rows, and some blocks have no chunk
            is_whole = chunk.i_row + C <= block.n_read
        if is_whole:
            solve_heads(p, chunk, block, i_first_head, True, CALL)
        elif not CALL.packed or chunk.i_row < block.n_rows:
            solve_heads(p, chunk, block, i_first_head, False, CALL)
