"""Device code: every gradient of a chunk whose key gates are bounded, by blocks of 16 tokens. Tiles are [dims, rows].

Kept as `bounded_gates` is. A kernel of its own, since in the kernel of mild gates it would cost these registers.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import scaled
from ejkernel.kernels.chunks.triton.device.places import locate_block, visit
from ejkernel.kernels.delta_rule.triton.device.flows import add_flows, add_pairs, add_up, store_moving
from ejkernel.kernels.delta_rule.triton.device.gate_strength import BOUNDED
from ejkernel.kernels.delta_rule.triton.device.gradients import load_ends, pair_gradients
from ejkernel.kernels.delta_rule.triton.device.inverse import off_diagonal
from ejkernel.kernels.delta_rule.triton.device.rows import (
    for_chunks,
    gated,
    load_gate_columns,
    load_head_columns,
    rows_of_block,
    writable,
)

BLOCK = tl.constexpr(16)


@triton.jit
def at_row(b_sum, i_row, C: tl.constexpr):
    """One row of each block, `[dims, blocks]`."""
    b_blocks = tl.reshape(b_sum, (b_sum.shape[0], C // BLOCK, BLOCK))
    return tl.sum(tl.where(tl.arange(0, BLOCK)[None, None, :] == i_row, b_blocks, 0.0), 2)


@triton.jit
def at_rows(b, C: tl.constexpr):
    """`[dims, blocks]` repeated for the rows of each block, `[dims, rows]`."""
    return tl.reshape(tl.broadcast_to(b[:, :, None], (b.shape[0], C // BLOCK, BLOCK)), (b.shape[0], C))


@triton.jit
def sum_where(b_total, m_sum, C: tl.constexpr):
    """Sums over the blocks that columns of `m_sum` select, one for each block, repeated for its rows."""
    return at_rows(tl.sum(tl.where(m_sum[None, :, :], b_total[:, :, None], 0.0), 1), C)


@triton.jit
def masked(b, m_pair):
    """The pairs that `m_pair` selects; chosen in float32, which takes one instruction each."""
    return tl.where(m_pair, b.to(tl.float32), 0.0).to(b.dtype)


@triton.jit
def gradients_of_dims(
    b_state, b_dstate, b_q, b_k, b_gate, b_do, b_dr, b_ut, b_dscore, b_dsystem, o_r, CALL: tl.constexpr
):
    """dQ, dK, the flow (`q dq + k dk` of reads less that of writes), and what leaves the chunk, of some key dims.

    Contributions from outside a block are summed relative to its ends, by way of the ends of groups of 4 and of 2
    blocks; from one reference to the next they only decay. Inside a block the reference is its middle.
    """
    C: tl.constexpr = CALL.chunk
    LEVELS: tl.constexpr = CALL.levels
    PRECISION: tl.constexpr = CALL.precision
    m_block = o_r[:, None] // BLOCK == o_r[None, :] // BLOCK
    FINE: tl.constexpr = CALL.fine
    b_whole, b_rest = add_up(b_gate, m_block & (o_r[:, None] <= o_r[None, :]), FINE)
    # through a row since its block's start, and of all of a block
    b_sum = b_whole + b_rest
    b_total = at_row(b_sum, BLOCK - 1, C)
    o_b = tl.arange(0, C // BLOCK)
    o_of, o_at = o_b[:, None], o_b[None, :]
    b_queries = tl.dot(tl.trans(b_state), b_do, input_precision=PRECISION)
    b_keys = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION)
    b_read = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
    b_leaving = tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0) * tl.exp2(tl.sum(b_total, 1))
    b_leaving += tl.sum(b_read * (b_k * tl.exp2(sum_where(b_total, o_of >= o_at, C) - b_sum)), 1)
    for i in tl.static_range(LEVELS - 4):
        i_level = LEVELS - 5 - i
        # where the later half of a pair begins
        i_border = ((o_at >> i_level) | 1) << i_level
        m_other = tl.where(o_at >= i_border, o_of < i_border, o_of >= i_border)
        m_other = m_other & ((o_of >> (i_level + 1)) == (o_at >> (i_level + 1)))
        m_late = ((o_r >> (i_level + 4)) & 1)[None, :] != 0
        b_other = tl.exp2(sum_where(b_total, m_other, C))
        b_queries = b_queries * tl.where(m_late, b_other, 1.0)
        b_keys = b_keys * tl.where(m_late, b_other, 1.0)
        b_read = b_read * tl.where(m_late, 1.0, b_other)
        m_between = tl.where(o_at >= i_border, (o_of >= i_border) & (o_of < o_at), (o_of < i_border) & (o_of >= o_at))
        b_fade = tl.exp2(sum_where(b_total, m_between, C) + tl.where(m_late, b_sum, -b_sum))
        b_key = scaled(b_k, b_fade)
        b_dscore_here = masked(b_dscore, off_diagonal(o_r, i_level + 4))
        b_dsystem_here = masked(b_dsystem, off_diagonal(o_r, i_level + 4))
        b_queries = tl.dot(b_key, tl.trans(b_dscore_here), acc=b_queries, input_precision=PRECISION)
        b_keys = tl.dot(b_key, tl.trans(b_dsystem_here), acc=b_keys, input_precision=PRECISION)
        b_read = tl.dot(scaled(b_q, b_fade), b_dscore_here, acc=b_read, input_precision=PRECISION)
        b_read = tl.dot(b_key, b_dsystem_here, acc=b_read, input_precision=PRECISION)
    b_fade = tl.exp2(b_sum)
    b_queries = b_queries * b_fade
    b_keys = b_keys * b_fade
    b_read = b_read * tl.exp2(at_rows(b_total, C) - b_sum)
    b_flow = b_q * b_queries + b_k * (b_keys - b_read)
    b_keys += b_read
    m_near = m_block & (o_r[:, None] > o_r[None, :])
    b_bits = b_sum - at_rows(at_row(b_sum, BLOCK // 2 - 1, C), C)
    # most of it is between tokens of one block
    b_queries, b_keys, b_flow = add_pairs(
        b_queries, b_keys, b_flow, b_q, b_k, masked(b_dscore, m_near), masked(b_dsystem, m_near),
        tl.exp2(b_bits), tl.exp2(-b_bits), PRECISION,
    )  # fmt: skip
    # a token's own key crosses no gate
    b_diagonal = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_dscore.to(tl.float32), 0.0), 0)[None, :]
    return b_queries + b_diagonal * b_k, b_keys + b_diagonal * b_q, b_flow, b_leaving


@triton.jit
def chunk_gradients(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """`gradients_bounded` for one chunk and head."""
    BK: tl.constexpr = CALL.part_block
    BV: tl.constexpr = CALL.value_block
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    K: tl.constexpr = CALL.key_dim
    NV: tl.constexpr = (CALL.value_dim + BV - 1) // BV
    PRECISION: tl.constexpr = CALL.precision
    rows = rows_of_block(block, i_c, i_h, p, CALL)
    o_r = rows.o_r
    o_v = i_v * BV + tl.arange(0, BV)
    m_write = writable(rows)
    m_gate = gated(rows, CALL)
    b_do, b_u, _, b_dr, b_beta, b_dscore, b_dsystem = pair_gradients(p, rows, i_v, True, CALL)
    b_do = tl.trans((b_do.to(tl.float32) * CALL.scale).to(b_u.dtype))
    b_dr = tl.trans((b_dr.to(tl.float32) * -b_beta[:, None]).to(b_u.dtype))
    b_dscore = b_dscore.to(b_u.dtype)
    b_dsystem = b_dsystem.to(b_u.dtype)
    i_rows = ((rows.i_token * H + i_h) * NV + i_v) * K
    # hoisted code would take registers
    for i_k in tl.range(0, (K + BK - 1) // BK, num_stages=1, disable_licm=True):
        o_k = i_k * BK + tl.arange(0, BK)
        b_gate = load_gate_columns(p, rows, o_k, CALL)
        b_k = load_head_columns(p.key, rows, o_k, CALL.key_heads, K, CALL)
        b_q = load_head_columns(p.query, rows, o_k, CALL.query_heads, K, CALL)
        b_state, b_dstate = load_ends(p, rows, o_v, o_k, CALL)
        b_dq, b_dk, b_flow, b_leaving = gradients_of_dims(
            b_state, b_dstate, b_q, b_k, b_gate, b_do, b_dr, tl.trans(b_u), b_dscore, b_dsystem, o_r, CALL
        )
        b_dgate = tl.zeros([BK, C], tl.float32) + b_leaving[:, None]
        b_dgate = add_flows(b_flow, o_r[:, None] >= o_r[None, :], b_dgate, PRECISION, b_u.dtype)
        b_dgate = tl.where(m_gate[None, :], b_dgate, 0.0)
        o_rows = rows.o_t[None, :] * (H * NV * K) + o_k[:, None]
        store_moving(p, i_rows + o_rows, m_write[None, :] & (o_k[:, None] < K), b_dq, b_dk, b_dgate)


@triton.jit
def gradients_bounded(p, CALL: tl.constexpr):
    """The gradients of chunks whose gates are bounded, in the memory of `gradients_keyed`'s results.

    A program takes `CALL.heads_per_program` heads of a chunk; most often it finds nothing to do.
    """
    H: tl.constexpr = CALL.heads
    EACH: tl.constexpr = CALL.heads_per_program
    NV: tl.constexpr = (CALL.value_dim + CALL.value_block - 1) // CALL.value_block
    i_program = tl.program_id(0)
    i_v = i_program % NV
    i_first = (i_program // NV) % (H // EACH) * EACH
    i_block = i_program // (NV * (H // EACH))
    o_h = tl.arange(0, CALL.flags)
    if CALL.listed:
        block = locate_block(i_block, p, CALL)
        for i_c in range(block.i_c, block.i_end):
            chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
            p_strength = p.strength + (block.i_n.to(tl.int64) * H + i_first + o_h) * p.T + chunk.i_row
            b_strength = tl.load(p_strength, mask=o_h < EACH, other=0)
            for i_h in range(0, EACH):
                if tl.sum(tl.where(o_h == i_h, b_strength, 0), 0) == BOUNDED:
                    chunk_gradients(p, block, i_c, i_first + i_h, i_v, CALL)
    else:
        b_strength = tl.load(p.strength + i_block.to(tl.int64) * H + i_first + o_h, mask=o_h < EACH, other=0)
        if tl.max(b_strength, 0) == BOUNDED:
            for i_h in range(0, EACH):
                if tl.sum(tl.where(o_h == i_h, b_strength, 0), 0) == BOUNDED:
                    for_chunks(p, i_block, i_first + i_h, i_v, chunk_gradients, CALL)
