"""Device code for one gate a key dim: what a chunk's gates make of its queries and keys.

Sums of gates are only ever added up, over runs of tokens, by products with matrices of zeros and ones: no strong gate
costs another its digits. Between two tokens a decay is split at a token between them. For most chunks that is the one
in the middle; a chunk with gates too strong for it is split dyadically, where no decay is ever inverted.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LARGEST, MOST, in_bits, largest, scaled
from ejkernel.kernels.chunks.triton.device.places import load_flag, load_rows, locate_block, store_tile, visit
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.chunks.triton.device.strong_gates import sum_gates
from ejkernel.kernels.delta_rule.triton.device.decays import marked, weights_of
from ejkernel.kernels.delta_rule.triton.device.inverse import corner
from ejkernel.kernels.delta_rule.triton.device.kinds import STRONG, store_factors
from ejkernel.kernels.delta_rule.triton.device.rows import (
    gated,
    load_beta,
    load_head,
    rows_of_block,
    store_head,
    writable,
)
from ejkernel.kernels.delta_rule.triton.device.system import solve_system, store_reads


@triton.jit
def between_border(o_r, i_level, AXIS: tl.constexpr):
    """At a dyadic level, which rows' gates lie between each row and the border of its pair of blocks, along AXIS."""
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
def folded(b, b_factor, SOLVE: tl.constexpr):
    """With more digits than `b` has, as scores need them."""
    return nearest(b.to(tl.float32) * b_factor, SOLVE)


@triton.jit
def of_chunk(p, block, i_c, i_h, CALL: tl.constexpr):
    """What `solve_keyed` gives, of one chunk and head."""
    BK: tl.constexpr = CALL.key_block
    FINE: tl.constexpr = CALL.fine
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    SOLVE: tl.constexpr = CALL.solve
    rows = rows_of_block(block, i_c, i_h, p, CALL)
    o_r = rows.o_r
    m_gate = gated(rows, CALL)
    b_beta = marked(load_beta(p, rows, CALL))
    if not CALL.strong:
        store_tile(weights_of(p.weights, rows, p, CALL) + o_r, b_beta, writable(rows), not CALL.listed)
    b_below = tl.zeros([C, C], tl.float32)
    b_score = tl.zeros([C, C], tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
        b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
        b_gate = load_rows(p.gate, rows.i_token, i_h, rows.o_t, m_gate, o_k, H, K, K % BK != 0, True)
        b_bits = bits_from_middle(b_gate, o_r, CALL.levels, FINE)
        if largest(tl.abs(b_bits), CALL.flat) <= CALL.limit:
            b_late = tl.exp2(b_bits)
            b_early = tl.exp2(-b_bits)
            b_right = tl.trans(folded(b_k, b_early, SOLVE))
            b_below = tl.dot(folded(b_k, b_late, SOLVE), b_right, acc=b_below, input_precision=SOLVE)
            b_score = tl.dot(folded(b_q, b_late, SOLVE), b_right, acc=b_score, input_precision=SOLVE)
            # by way of the middle, and finite, since 0 times infinity is no number
            b_first = tl.sum(tl.where((o_r == 0)[:, None], in_bits(b_gate) - b_bits, 0.0), 0)
            b_last = tl.sum(tl.where((o_r == C - 1)[:, None], b_bits, 0.0), 0)
            b_since = tl.minimum(b_late * tl.exp2(tl.minimum(b_first, MOST))[None, :], LARGEST)
            b_until = tl.minimum(b_early * tl.exp2(b_last)[None, :], LARGEST)
            b_total = b_first + b_last
        else:
            b_own = tl.dot(b_q, tl.trans(b_k), input_precision=CALL.precision)
            b_score += tl.where(o_r[:, None] == o_r[None, :], b_own, 0.0)
            for i_level in range(0, CALL.levels):
                b_fade = tl.exp2(tl.minimum(bits_to_border(b_gate, o_r, i_level, FINE), MOST))
                b_key = folded(b_k, b_fade, SOLVE)
                m_meet = corner(o_r, i_level)
                b_pair = tl.dot(b_key, tl.trans(b_key), input_precision=SOLVE)
                b_below += tl.where(m_meet, b_pair, 0.0)
                b_pair = tl.dot(folded(b_q, b_fade, SOLVE), tl.trans(b_key), input_precision=SOLVE)
                b_score += tl.where(m_meet, b_pair, 0.0)
            b_since = sum_gates(o_r[None, :] <= o_r[:, None], b_gate, FINE)
            b_until = sum_gates(o_r[None, :] > o_r[:, None], b_gate, FINE)
            b_total = tl.sum(tl.where((o_r == C - 1)[:, None], b_since, 0.0), 0)
            b_since = tl.exp2(tl.minimum(b_since, MOST))
            b_until = tl.exp2(tl.minimum(b_until, MOST))
        m_rows = rows.m_read[:, None] & (o_k[None, :] < K)
        store_head(p.folded_query, scaled(b_q, b_since), rows, o_k, m_rows, K, CALL)
        store_head(p.recall, scaled(b_k, b_since), rows, o_k, m_rows, K, CALL)
        store_head(p.write, scaled(b_k, b_until), rows, o_k, m_rows, K, CALL)
        # states are met at the chunk's start and written to at its end
        b_none = tl.zeros([BK], tl.float32)
        store_factors(p.factors, rows.chunk, rows.i_chunk, o_k, b_none, b_total, b_none, CALL)
    # selected before anything multiplies them: a pair that nobody reads may have overflowed
    b_below = tl.where(o_r[:, None] > o_r[None, :], b_below, 0.0)
    b_score = tl.where(o_r[:, None] >= o_r[None, :], b_score, 0.0)
    b_below = b_below * b_beta[:, None]
    b_inverse = solve_system(p, b_below, b_beta, rows, CALL)
    store_reads(p, b_score, b_inverse, rows, CALL)


@triton.jit
def of_block(p, i_block, i_h, CALL: tl.constexpr):
    """What `solve_keyed` gives, of the chunks of one block and head; if it is of strong ones alone, of these."""
    block = locate_block(i_block, p, CALL)
    if CALL.listed:
        for i_c in range(block.i_c, block.i_end):
            if CALL.strong:
                chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
                if load_flag(p.kinds, chunk, 0, i_h, p, CALL) == STRONG:
                    of_chunk(p, block, i_c, i_h, CALL)
            else:
                of_chunk(p, block, i_c, i_h, CALL)
    else:
        of_chunk(p, block, block.i_c, i_h, CALL)


@triton.jit
def solve_keyed(p, CALL: tl.constexpr):
    """What `solve` gives, and queries and keys as states see them, whatever the gates.

    These are queries and keys decayed since the chunk's start (`query`, `recall`), keys decayed until its end
    (`write`), and what is left of a state at the chunk's end, as one of three factors.

    A second launch does so where `p.kinds` says, in the memory of what others have found. Most often there is nothing
    to do, so a program looks after a chunk's heads at once, at most `CALL.look`.
    """
    H: tl.constexpr = CALL.heads
    i_program = tl.program_id(0)
    if CALL.strong:
        o_flag = tl.arange(0, CALL.look)
        p_flag = p.any_strong if CALL.listed else p.kinds
        b_flag = tl.load(p_flag + i_program.to(tl.int64) * H + o_flag, mask=o_flag < H, other=0)
        b_flag = (b_flag == STRONG).to(tl.int32)
        if tl.sum(b_flag, 0) > 0:
            for i_h in range(0, H):
                if tl.sum(tl.where(o_flag == i_h, b_flag, 0), 0) > 0:
                    of_block(p, i_program, i_h, CALL)
    else:
        of_block(p, i_program // H, i_program % H, CALL)
