"""Device code for one gate a key dim, where gates are bounded: too strong for one reference a chunk, none extreme.

Kept by more than 10 % for Kimi-K3's gates: `kda` takes less time than its exact systems and gradients alone would. A
chunk is computed by blocks of 16 tokens. Decays inside a block are split at its middle: over 8 tokens they can be
inverted. Between blocks they are split dyadically, where the later half of 2 or 4 blocks begins, and are not inverted.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E
from ejkernel.kernels.chunks.triton.device.places import (
    after_first_gate,
    flag_at,
    load_flag,
    locate_block,
    store_tile,
    token_offsets,
)
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import coincide
from ejkernel.kernels.delta_rule.triton.device.decays import BETA, load_scalar, scalars_at
from ejkernel.kernels.delta_rule.triton.device.gate_strength import BOUNDED, STRONG, store_state_decays
from ejkernel.kernels.delta_rule.triton.device.inverse import off_diagonal
from ejkernel.kernels.delta_rule.triton.device.rows import rows_of_block
from ejkernel.kernels.delta_rule.triton.device.system import solve_system, store_solved_scores

# The most bits that 8 tokens may forget: that decay can be inverted.
BLOCK_LIMIT = tl.constexpr(80.0)


@triton.jit
def is_late(o_tile, i_level):
    """Which tiles are in the later half of their pair of blocks, at a dyadic level, `[tiles, 1, 1]`."""
    return (((o_tile >> i_level) & 1) != 0)[:, None, None]


@triton.jit
def join(b_before, b_rest, b_total, m_late, LEVEL: tl.constexpr):
    """Sums of gates before, from and over each tile's block, when pairs of blocks become one, `[tiles, 1, dims]`."""
    TILES: tl.constexpr = b_total.shape[0]
    SIZE: tl.constexpr = 1 << LEVEL
    b_pair = tl.reshape(b_total, (TILES // SIZE // 2, 2, SIZE, b_total.shape[2]))
    b_pair = tl.reshape(tl.broadcast_to(tl.sum(b_pair, 1)[:, None, :, :], b_pair.shape), b_total.shape)
    b_other = b_pair - b_total
    return b_before + tl.where(m_late, b_other, 0.0), b_rest + tl.where(m_late, 0.0, b_other), b_pair


@triton.jit
def load_tile(p_tile, m_tile, WHOLE: tl.constexpr):
    """Loads a tile again: to hold it would take registers."""
    tl.debug_barrier()
    if WHOLE:
        return tl.load(p_tile)
    else:
        return tl.load(p_tile, mask=m_tile, other=0.0)


@triton.jit
def as_rows(b):
    """`[tiles, rows of a tile, dims]` as `[rows, dims]`."""
    return tl.reshape(b, (b.shape[0] * b.shape[1], b.shape[2]))


@triton.jit
def add_scores(b_scores, b_left, b_right, m_pair, PRECISION: tl.constexpr):
    """Adds scores of the pairs that `m_pair` selects; a pair that is not selected may overflow."""
    b_pair = tl.dot(as_rows(b_left), tl.trans(as_rows(b_right)), input_precision=PRECISION)
    return tl.where(m_pair, b_scores + b_pair, b_scores)


@triton.jit
def fold_dims(p, rows, o_k, b_system, b_score, CALL: tl.constexpr):
    """Stores some dims of a chunk's decayed queries and keys, and adds their part of M and P."""
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    PRECISION: tl.constexpr = CALL.precision
    LEVELS: tl.constexpr = CALL.levels
    chunk, i_token, i_h = rows.chunk, rows.i_token, rows.i_h
    WHOLE: tl.constexpr = CALL.whole and K % CALL.part_block == 0
    # tokens of a tile, which one thread of four warps sums, and the power of 2 that is half a block in tiles
    TILE: tl.constexpr = 8 if CALL.part_block >= 128 else 4
    HALF: tl.constexpr = 0 if TILE == 8 else 1
    o_tile = tl.arange(0, C // TILE)
    o_row = o_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    m_k = (o_k < K)[None, None, :]
    m_row = (chunk.i_row + o_row < chunk.n_read)[:, :, None] & m_k
    m_gate = m_row & after_first_gate(chunk, chunk.i_row + o_row, CALL)[:, :, None]
    o_t = token_offsets(o_row, CALL.flip)[:, :, None]
    i_rows = (i_token * H + i_h) * K
    o_rows = o_t * (H * K) + o_k[None, None, :]
    p_k = p.key + (i_token * HK + i_h // (H // HK)) * K + (o_t * (HK * K) + o_k[None, None, :])
    p_q = p.query + (i_token * HQ + i_h // (H // HQ)) * K + (o_t * (HQ * K) + o_k[None, None, :])
    b_gate = tl.load(p.gate + i_rows + o_rows, mask=m_gate, other=0.0).to(tl.float32) * LOG2E
    dtype = p.key.dtype.element_ty
    # sums of gates: since the tile's start, of its block's tiles before it, and of those from it on
    b_sum = tl.cumsum(b_gate, 1)
    b_before = tl.zeros([C // TILE, 1, o_k.shape[0]], tl.float32)
    b_rest = tl.sum(b_gate, 1)[:, None, :]
    b_total = b_rest
    for i_level in tl.static_range(HALF):
        b_before, b_rest, b_total = join(b_before, b_rest, b_total, is_late(o_tile, i_level), i_level)
    m_late = is_late(o_tile, HALF)
    b_bits = b_sum + tl.where(m_late, b_before, -b_rest)
    b_since = tl.exp2(b_bits)
    o_r = tl.arange(0, C)
    m_block = (o_r[:, None] // 16 == o_r[None, :] // 16) & (o_r[:, None] > o_r[None, :])
    # a token's own key crosses no gate
    b_score = add_scores(
        b_score, load_tile(p_q, m_row, WHOLE), load_tile(p_k, m_row, WHOLE), o_r[:, None] == o_r[None, :], PRECISION
    )
    b_k = load_tile(p_k, m_row, WHOLE)
    b_k_until = (b_k * tl.exp2(-b_bits)).to(dtype)
    b_system = add_scores(b_system, (b_k * b_since).to(dtype), b_k_until, m_block, PRECISION)
    b_q = load_tile(p_q, m_row, WHOLE)
    b_score = add_scores(b_score, (b_q * b_since).to(dtype), b_k_until, m_block, PRECISION)
    b_before, b_rest, b_total = join(b_before, b_rest, b_total, m_late, HALF)
    for i_level in tl.static_range(4, LEVELS):
        m_late = is_late(o_tile, i_level - 3 + HALF)
        b_fade = tl.exp2(b_sum * tl.where(m_late, 1.0, -1.0) + tl.where(m_late, b_before, b_rest))
        b_key = (load_tile(p_k, m_row, WHOLE) * b_fade).to(dtype)
        m_pair = off_diagonal(o_r, i_level)
        b_system = add_scores(b_system, b_key, b_key, m_pair, PRECISION)
        b_score = add_scores(b_score, (load_tile(p_q, m_row, WHOLE) * b_fade).to(dtype), b_key, m_pair, PRECISION)
        b_before, b_rest, b_total = join(b_before, b_rest, b_total, m_late, i_level - 3 + HALF)
    b_since = tl.exp2(b_sum + b_before)
    b_q = load_tile(p_q, m_row, WHOLE)
    b_k = load_tile(p_k, m_row, WHOLE)
    store_tile(p.query_since + i_rows + o_rows, (b_q * b_since).to(dtype), m_row, WHOLE)
    store_tile(p.key_since + i_rows + o_rows, (b_k * b_since).to(dtype), m_row, WHOLE)
    store_tile(p.key_until + i_rows + o_rows, (b_k * tl.exp2(b_rest - b_sum)).to(dtype), m_row, WHOLE)
    b_through = tl.sum(tl.where(o_tile[:, None] == 0, tl.reshape(b_total, (C // TILE, o_k.shape[0])), 0.0), 0)
    b_none = tl.zeros(o_k.shape, tl.float32)
    store_state_decays(p.state_decays, rows, o_k, b_none, b_through, b_none, CALL)
    return b_system, b_score


@triton.jit
def classify(p, rows, CALL: tl.constexpr):
    """Whether a chunk's gates are bounded, and the most bits that either half of the chunk forgets.

    Bounded gates are at most 0, none is NaN, and no 8 of them, from a multiple of 8 on, forget more than BLOCK_LIMIT.
    """
    C: tl.constexpr = CALL.chunk
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.part_block
    chunk = rows.chunk
    o_row = tl.arange(0, C // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    m_row = (chunk.i_row + o_row < chunk.n_read) & after_first_gate(chunk, chunk.i_row + o_row, CALL)
    m_bad = tl.zeros([C // 8, BK], tl.int32)
    b_most = tl.zeros([2, BK], tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_tile = p.gate + (rows.i_token * H + rows.i_h) * K
        p_tile += token_offsets(o_row, CALL.flip)[:, :, None] * (H * K) + o_k[None, None, :]
        b_gate = tl.load(p_tile, mask=m_row[:, :, None] & (o_k < K)[None, None, :], other=0.0).to(tl.float32)
        b_gate = tl.where(b_gate <= 0.0, b_gate * LOG2E, float("-inf"))
        b_sum = tl.sum(b_gate, 1)
        m_bad = m_bad | (b_sum < -BLOCK_LIMIT).to(tl.int32)
        b_most = tl.maximum(b_most, -tl.sum(tl.reshape(b_sum, (2, C // 16, BK)), 1))
    return tl.max(tl.reshape(m_bad, (C // 8 * BK,)), 0) == 0, tl.max(tl.reshape(b_most, (2 * BK,)), 0)


@triton.jit
def solve_chunk(p, rows, CALL: tl.constexpr):
    """Folds and solves a chunk with bounded gates.

    Keys that coincide need more digits than these scores have: such a chunk is marked as one with strong gates, and
    left to the kernel of those.
    """
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.part_block
    b_beta = load_scalar(scalars_at(p.row_scalars, rows, p, CALL), BETA, rows, p, CALL, rows.o_r)
    b_system = tl.zeros([C, C], tl.float32)
    b_score = tl.zeros([C, C], tl.float32)
    # hoisted code would take registers
    for i_k in tl.range(0, (CALL.key_dim + BK - 1) // BK, num_stages=1, disable_licm=True):
        o_k = i_k * BK + tl.arange(0, BK)
        b_system, b_score = fold_dims(p, rows, o_k, b_system, b_score, CALL)
    b_system = b_system * b_beta[:, None]
    if tl.sum(coincide(tl.sum(b_system * b_system, 1)[None, :], C).to(tl.int32), 0) > 0:
        tl.store(flag_at(p.strength, rows.chunk, rows.i_chunk, rows.i_h, p, CALL), STRONG)
        if CALL.listed:
            tl.store(p.any_strong + rows.i_chunk, 1)
    else:
        b_inverse = solve_system(p, b_system, b_beta, rows, CALL)
        store_solved_scores(p, b_score, b_inverse, rows, CALL)


@triton.jit
def solve_bounded(p, CALL: tl.constexpr):
    """What `solve_folded` stores, for chunks that it has found to have bounded gates.

    A kernel of its own: in that of mild gates it would cost these registers. A program takes `CALL.heads_per_program`
    heads of a chunk; most often it finds nothing to do.
    """
    H: tl.constexpr = CALL.heads
    EACH: tl.constexpr = CALL.heads_per_program
    i_program = tl.program_id(0)
    i_first_head = i_program % (H // EACH) * EACH
    block = locate_block(i_program // (H // EACH), p, CALL)
    # hoisted code would take registers
    for i_each in tl.range(0, EACH, num_stages=1, disable_licm=True):
        i_h = i_first_head + i_each
        for i_c in tl.range(block.i_c, block.i_end, num_stages=1, disable_licm=True):
            rows = rows_of_block(block, i_c, i_h, p, CALL)
            if load_flag(p.strength, rows.chunk, rows.i_chunk, i_h, p, CALL) == BOUNDED:
                solve_chunk(p, rows, CALL)
