"""Device code for one gate a key dim, of chunks whose gates are bounded: too strong for one reference, none extreme.

Such a chunk is taken by blocks of 16 tokens. Tokens of one block meet in its middle, from where 8 tokens' gates can
still be inverted. Those of two blocks meet dyadically where the later half of 2 or 4 blocks begins, and there no decay
is inverted. Sums go over 16 tokens, all other decays are products of such sums' powers that are at most 1.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E
from ejkernel.kernels.chunks.triton.device.places import after_first_gate, store_tile, token_offsets
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import coincide
from ejkernel.kernels.delta_rule.triton.device.inverse import corner
from ejkernel.kernels.delta_rule.triton.device.kinds import BOUNDED, STRONG, store_factors
from ejkernel.kernels.delta_rule.triton.device.system import solve_system, store_reads

# Bits that 8 tokens may forget, which can be inverted.
BLOCK_LIMIT = tl.constexpr(80.0)


@triton.jit
def is_late(o_tile, i_level):
    """At a dyadic level of tiles, which are of the later half of their pair of blocks `[tiles, 1, 1]`."""
    return (((o_tile >> i_level) & 1) != 0)[:, None, None]


@triton.jit
def join(b_before, b_rest, b_total, m_late, LEVEL: tl.constexpr):
    """Joins pairs of blocks, of which these are sums of gates at all of their tiles `[tiles, 1, dims]`."""
    TILES: tl.constexpr = b_total.shape[0]
    SIZE: tl.constexpr = 1 << LEVEL
    b_pair = tl.reshape(b_total, (TILES // SIZE // 2, 2, SIZE, b_total.shape[2]))
    b_pair = tl.reshape(tl.broadcast_to(tl.sum(b_pair, 1)[:, None, :, :], b_pair.shape), b_total.shape)
    b_other = b_pair - b_total
    return b_before + tl.where(m_late, b_other, 0.0), b_rest + tl.where(m_late, 0.0, b_other), b_pair


@triton.jit
def load_tile(p_tile, m_tile, WHOLE: tl.constexpr):
    """All of a tile, or what a mask leaves of it, from memory again: what is kept of it would take registers."""
    tl.debug_barrier()
    if WHOLE:
        return tl.load(p_tile)
    else:
        return tl.load(p_tile, mask=m_tile, other=0.0)


@triton.jit
def as_rows(b):
    """A tile `[tiles, rows of a tile, dims]` as `[rows, dims]`."""
    return tl.reshape(b, (b.shape[0] * b.shape[1], b.shape[2]))


@triton.jit
def add_scores(b_scores, b_left, b_right, m_pair, PRECISION: tl.constexpr):
    """Adds scores of some pairs; a pair that nobody reads may have overflowed."""
    b_pair = tl.dot(as_rows(b_left), tl.trans(as_rows(b_right)), input_precision=PRECISION)
    return tl.where(m_pair, b_scores + b_pair, b_scores)


@triton.jit
def fold_dims(p, chunk, i_token, i_h, i_chunk, o_k, b_below, b_score, CALL: tl.constexpr):
    """Stores some dims of a chunk's queries and keys as states see them, and adds to the scores."""
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    PRECISION: tl.constexpr = CALL.precision
    LEVELS: tl.constexpr = CALL.levels
    WHOLE: tl.constexpr = CALL.whole and K % CALL.part_block == 0
    # tokens of a tile, which one thread of four warps sums up, and of how many tiles half a block is: 2 to this power
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
    # sums through a row since its tile's start, and of the tiles of its block before it, and from it on
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
    b_write = (b_k * tl.exp2(-b_bits)).to(dtype)
    b_below = add_scores(b_below, (b_k * b_since).to(dtype), b_write, m_block, PRECISION)
    b_q = load_tile(p_q, m_row, WHOLE)
    b_score = add_scores(b_score, (b_q * b_since).to(dtype), b_write, m_block, PRECISION)
    b_before, b_rest, b_total = join(b_before, b_rest, b_total, m_late, HALF)
    for i_level in tl.static_range(4, LEVELS):
        m_late = is_late(o_tile, i_level - 3 + HALF)
        b_fade = tl.exp2(b_sum * tl.where(m_late, 1.0, -1.0) + tl.where(m_late, b_before, b_rest))
        b_key = (load_tile(p_k, m_row, WHOLE) * b_fade).to(dtype)
        m_pair = corner(o_r, i_level)
        b_below = add_scores(b_below, b_key, b_key, m_pair, PRECISION)
        b_score = add_scores(b_score, (load_tile(p_q, m_row, WHOLE) * b_fade).to(dtype), b_key, m_pair, PRECISION)
        b_before, b_rest, b_total = join(b_before, b_rest, b_total, m_late, i_level - 3 + HALF)
    b_since = tl.exp2(b_sum + b_before)
    b_q = load_tile(p_q, m_row, WHOLE)
    b_k = load_tile(p_k, m_row, WHOLE)
    store_tile(p.folded_query + i_rows + o_rows, (b_q * b_since).to(dtype), m_row, WHOLE)
    store_tile(p.recall + i_rows + o_rows, (b_k * b_since).to(dtype), m_row, WHOLE)
    store_tile(p.write + i_rows + o_rows, (b_k * tl.exp2(b_rest - b_sum)).to(dtype), m_row, WHOLE)
    b_through = tl.sum(tl.where(o_tile[:, None] == 0, tl.reshape(b_total, (C // TILE, o_k.shape[0])), 0.0), 0)
    b_none = tl.zeros(o_k.shape, tl.float32)
    store_factors(p.factors, chunk, i_chunk, o_k, b_none, b_through, b_none, CALL)
    return b_below, b_score


@triton.jit
def look_at(p, chunk, i_token, i_h, CALL: tl.constexpr):
    """Whether a chunk's gates are bounded: at most 0, with 8 in a row that forget no more than the limit, none NaN.

    And how much half of the chunk forgets at most.
    """
    C: tl.constexpr = CALL.chunk
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    BK: tl.constexpr = CALL.part_block
    o_row = tl.arange(0, C // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    m_row = (chunk.i_row + o_row < chunk.n_read) & after_first_gate(chunk, chunk.i_row + o_row, CALL)
    m_bad = tl.zeros([C // 8, BK], tl.int32)
    b_most = tl.zeros([2, BK], tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_tile = p.gate + (i_token * H + i_h) * K
        p_tile += token_offsets(o_row, CALL.flip)[:, :, None] * (H * K) + o_k[None, None, :]
        b_gate = tl.load(p_tile, mask=m_row[:, :, None] & (o_k < K)[None, None, :], other=0.0).to(tl.float32)
        b_gate = tl.where(b_gate <= 0.0, b_gate * LOG2E, float("-inf"))
        b_sum = tl.sum(b_gate, 1)
        m_bad = m_bad | (b_sum < -BLOCK_LIMIT).to(tl.int32)
        b_most = tl.maximum(b_most, -tl.sum(tl.reshape(b_sum, (2, C // 16, BK)), 1))
    return tl.max(tl.reshape(m_bad, (C // 8 * BK,)), 0) == 0, tl.max(tl.reshape(b_most, (2 * BK,)), 0)


@triton.jit
def solve_bounded(p, b_beta, rows, CALL: tl.constexpr):
    """What `solve_folded` gives of a chunk whose gates are bounded; returns what kind it is after all.

    Keys that coincide need more digits than these scores have, so such a chunk is left to the exact path.
    """
    C: tl.constexpr = CALL.chunk
    BK: tl.constexpr = CALL.part_block
    b_below = tl.zeros([C, C], tl.float32)
    b_score = tl.zeros([C, C], tl.float32)
    # what is the same for all dims would take registers
    for i_k in tl.range(0, (CALL.key_dim + BK - 1) // BK, num_stages=1, disable_licm=True):
        o_k = i_k * BK + tl.arange(0, BK)
        b_below, b_score = fold_dims(p, rows.chunk, rows.i_token, rows.i_h, rows.i_chunk, o_k, b_below, b_score, CALL)
    b_below = b_below * b_beta[:, None]
    kind = BOUNDED
    if tl.sum(coincide(tl.sum(b_below * b_below, 1)[None, :], C).to(tl.int32), 0) > 0:
        kind = STRONG
    else:
        b_inverse = solve_system(p, b_below, b_beta, rows, CALL)
        store_reads(p, b_score, b_inverse, rows, CALL)
    return kind
