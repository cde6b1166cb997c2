"""Device code for one gate a key dim, of any strength, as the contract promises: decayed queries and keys, and systems.

Gates are summed over runs of tokens, by products with matrices of zeros and ones, and no sums are subtracted: a strong
gate costs others no digits. The decay between two tokens is split at a token between them: the chunk's middle or, where
gates are too strong for that, dyadically, where no decay is inverted.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LARGEST, MOST, in_bits, largest, scaled
from ejkernel.kernels.chunks.triton.device.places import load_flag, load_rows, locate_block, store_tile, visit
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.chunks.triton.device.strong_gates import sum_gates
from ejkernel.kernels.delta_rule.triton.device.decays import mark_idle, scalars_at
from ejkernel.kernels.delta_rule.triton.device.gate_strength import STRONG, store_state_decays
from ejkernel.kernels.delta_rule.triton.device.inverse import off_diagonal
from ejkernel.kernels.delta_rule.triton.device.rows import (
    gated,
    load_beta,
    load_head,
    rows_of_block,
    store_head,
    writable,
)
from ejkernel.kernels.delta_rule.triton.device.system import solve_system, store_solved_scores


@triton.jit
def between_border(o_r, i_level, AXIS: tl.constexpr):
    """The rows, along AXIS, whose gates lie between each row and the border of its pair of blocks at a dyadic level."""
    m_late = tl.expand_dims(((o_r >> i_level) & 1) != 0, AXIS)
    i_border = tl.expand_dims(((o_r >> i_level) | 1) << i_level, AXIS)
    o_at = tl.expand_dims(o_r, AXIS)
    o_of = tl.expand_dims(o_r, 1 - AXIS)
    return tl.where(m_late, (o_of >= i_border) & (o_of <= o_at), (o_of > o_at) & (o_of < i_border))


@triton.jit
def bits_to_border(b_gate, o_r, i_level, FINE: tl.constexpr):
    """Sums of gates between each row and the border of its pair of blocks."""
    return sum_gates(between_border(o_r, i_level, 1), b_gate, FINE)


@triton.jit
def bits_from_middle(b_gate, o_r, LEVELS: tl.constexpr, FINE: tl.constexpr):
    """Sums of gates from the chunk's middle to each row, negative before it."""
    b_bits = bits_to_border(b_gate, o_r, LEVELS - 1, FINE)
    return tl.where((((o_r >> (LEVELS - 1)) & 1) != 0)[:, None], b_bits, -b_bits)


@triton.jit
def decayed(b, b_factor, SOLVE: tl.constexpr):
    """`b` times a decay, with the digits of float32 or TF32, which scores need."""
    return nearest(b.to(tl.float32) * b_factor, SOLVE)


@triton.jit
def solve_chunk(p, block, i_c, i_h, CALL: tl.constexpr):
    """`solve_keyed` for one chunk and head."""
    BK: tl.constexpr = CALL.key_block
    FINE: tl.constexpr = CALL.fine
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    SOLVE: tl.constexpr = CALL.solve
    rows = rows_of_block(block, i_c, i_h, p, CALL)
    o_r = rows.o_r
    m_gate = gated(rows, CALL)
    b_beta = mark_idle(load_beta(p, rows, CALL))
    if not CALL.strong:
        store_tile(scalars_at(p.row_scalars, rows, p, CALL) + o_r, b_beta, writable(rows), not CALL.listed)
    b_system = tl.zeros([C, C], tl.float32)
    b_score = tl.zeros([C, C], tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
        b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
        b_gate = load_rows(p.gate, rows.i_token, i_h, rows.o_t, m_gate, o_k, H, K, K % BK != 0, True)
        b_bits = bits_from_middle(b_gate, o_r, CALL.levels, FINE)
        if largest(tl.abs(b_bits), CALL.blackwell_safe) <= CALL.middle_limit:
            b_late = tl.exp2(b_bits)
            b_early = tl.exp2(-b_bits)
            b_right = tl.trans(decayed(b_k, b_early, SOLVE))
            b_system = tl.dot(decayed(b_k, b_late, SOLVE), b_right, acc=b_system, input_precision=SOLVE)
            b_score = tl.dot(decayed(b_q, b_late, SOLVE), b_right, acc=b_score, input_precision=SOLVE)
            # by way of the middle, and finite, since 0 times infinity is NaN
            b_first = tl.sum(tl.where((o_r == 0)[:, None], in_bits(b_gate) - b_bits, 0.0), 0)
            b_last = tl.sum(tl.where((o_r == C - 1)[:, None], b_bits, 0.0), 0)
            b_since = tl.minimum(b_late * tl.exp2(tl.minimum(b_first, MOST))[None, :], LARGEST)
            b_until = tl.minimum(b_early * tl.exp2(b_last)[None, :], LARGEST)
            b_total = b_first + b_last
        else:
            b_diagonal = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
            b_score += tl.where(o_r[:, None] == o_r[None, :], b_diagonal, 0.0)
            for i_level in range(0, CALL.levels):
                b_fade = tl.exp2(tl.minimum(bits_to_border(b_gate, o_r, i_level, FINE), MOST))
                b_key = decayed(b_k, b_fade, SOLVE)
                m_meet = off_diagonal(o_r, i_level)
                b_pair = tl.dot(b_key, tl.trans(b_key), input_precision=SOLVE)
                b_system += tl.where(m_meet, b_pair, 0.0)
                b_pair = tl.dot(decayed(b_q, b_fade, SOLVE), tl.trans(b_key), input_precision=SOLVE)
                b_score += tl.where(m_meet, b_pair, 0.0)
            b_since = sum_gates(o_r[None, :] <= o_r[:, None], b_gate, FINE)
            b_until = sum_gates(o_r[None, :] > o_r[:, None], b_gate, FINE)
            b_total = tl.sum(tl.where((o_r == C - 1)[:, None], b_since, 0.0), 0)
            b_since = tl.exp2(tl.minimum(b_since, MOST))
            b_until = tl.exp2(tl.minimum(b_until, MOST))
        m_rows = rows.m_read[:, None] & (o_k[None, :] < K)
        store_head(p.query_since, scaled(b_q, b_since), rows, o_k, m_rows, K, CALL)
        store_head(p.key_since, scaled(b_k, b_since), rows, o_k, m_rows, K, CALL)
        store_head(p.key_until, scaled(b_k, b_until), rows, o_k, m_rows, K, CALL)
        # references are the chunk's start and its end
        b_none = tl.zeros([BK], tl.float32)
        store_state_decays(p.state_decays, rows, o_k, b_none, b_total, b_none, CALL)
    # selected before they are multiplied: a pair that is not selected may have overflowed
    b_system = tl.where(o_r[:, None] > o_r[None, :], b_system, 0.0)
    b_score = tl.where(o_r[:, None] >= o_r[None, :], b_score, 0.0)
    b_system = b_system * b_beta[:, None]
    b_inverse = solve_system(p, b_system, b_beta, rows, CALL)
    store_solved_scores(p, b_score, b_inverse, rows, CALL)


@triton.jit
def solve_block(p, i_block, i_h, CALL: tl.constexpr):
    """`solve_keyed` for the chunks of one block and head, or `CALL.strong` for those of them with strong gates."""
    block = locate_block(i_block, p, CALL)
    if CALL.listed:
        for i_c in range(block.i_c, block.i_end):
            if CALL.strong:
                chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
                if load_flag(p.strength, chunk, 0, i_h, p, CALL) == STRONG:
                    solve_chunk(p, block, i_c, i_h, CALL)
            else:
                solve_chunk(p, block, i_c, i_h, CALL)
    elif not CALL.pooled or block.i_c * CALL.chunk < block.n_rows:
        # few blocks have a chunk where most sequences of a pool are of one token
        solve_chunk(p, block, block.i_c, i_h, CALL)


@triton.jit
def solve_keyed(p, CALL: tl.constexpr):
    """What `solve` stores, and queries and keys decayed since the chunk's start, keys until its end, and state decays.

    `CALL.strong` does so for the chunks that `solve_folded` leaves out, in the memory of its results. Most often there
    are none, so a program reads the flags of a chunk's heads at once.
    """
    H: tl.constexpr = CALL.heads
    i_program = tl.program_id(0)
    if CALL.strong:
        o_flag = tl.arange(0, CALL.flags)
        p_flag = p.any_strong if CALL.listed else p.strength
        b_flag = tl.load(p_flag + i_program.to(tl.int64) * H + o_flag, mask=o_flag < H, other=0)
        b_flag = (b_flag == STRONG).to(tl.int32)
        if tl.sum(b_flag, 0) > 0:
            for i_h in range(0, H):
                if tl.sum(tl.where(o_flag == i_h, b_flag, 0), 0) > 0:
                    solve_block(p, i_program, i_h, CALL)
    else:
        solve_block(p, i_program // H, i_program % H, CALL)
