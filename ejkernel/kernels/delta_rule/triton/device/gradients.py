"""Device code: every gradient of a chunk, from the state at its start and the state's cotangent at its end."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LEAST, LOG2E
from ejkernel.kernels.chunks.triton.device.places import leaves_state, takes_state
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import add_roundoff, heads_that_coincide, roundoff
from ejkernel.kernels.delta_rule.triton.device.decays import (
    SINCE,
    UNTIL,
    is_idle,
    load_pair_decays,
    load_scalar,
    load_through,
    mark_idle,
    scalars_at,
)
from ejkernel.kernels.delta_rule.triton.device.rows import (
    for_chunks,
    for_flagged_heads,
    gated,
    load_beta,
    load_head,
    rows_of_block,
    store_head,
    writable,
)


@triton.jit
def pair_gradients(p, rows, i_v, STORE: tl.constexpr, CALL: tl.constexpr):
    """dO, U, U's roundoff, dR, beta, dP and dM of one block of value dims; STORE stores dV and this block's part of dβ.

    `dP = scale dO Uᵀ` is lower triangular and `dM = -β dR Uᵀ` strictly so. The roundoff is only right where keys
    coincide; elsewhere it is U again, and not used. Idle tokens have a beta and a U of 0.
    """
    BV: tl.constexpr = CALL.value_block
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    V: tl.constexpr = CALL.value_dim
    NV: tl.constexpr = (V + BV - 1) // BV
    o_r = rows.o_r
    o_v = i_v * BV + tl.arange(0, BV)
    b_do = load_head(p.d_output, rows, o_v, H, V, CALL)
    b_u = load_head(p.u, rows, o_v, H, V, CALL)
    b_dr = load_head(p.d_r, rows, o_v, H, V, CALL)
    b_u_roundoff = b_u
    if COINCIDE:
        b_u_roundoff = load_head(p.u_roundoff, rows, o_v, H, V, CALL)
    b_beta = load_beta(p, rows, CALL)
    if STORE:
        b_dv = b_dr.to(tl.float32) * b_beta[:, None]
        store_head(p.d_value, b_dv, rows, o_v, writable(rows)[:, None] & (o_v[None, :] < V), V, CALL)
        # u is beta times the token's error
        b_added = b_u.to(tl.float32)
        if COINCIDE:
            b_added += b_u_roundoff.to(tl.float32)
        b_dbeta = tl.sum(b_dr.to(tl.float32) * b_added, 1) / mark_idle(b_beta)
        p_tile = p.d_beta + (rows.i_token + rows.o_t) * (H * NV) + rows.i_h * NV + i_v
        tl.store(p_tile, b_dbeta, mask=writable(rows))
    m_idle = is_idle(b_beta)
    b_beta = tl.where(m_idle, 0.0, b_beta)
    b_u = tl.where(m_idle[:, None], 0.0, b_u).to(b_u.dtype)
    b_u_roundoff = tl.where(m_idle[:, None], 0.0, b_u_roundoff).to(b_u.dtype)
    b_dscore = tl.dot(b_do, tl.trans(b_u), input_precision=CALL.precision)
    b_dscore = add_roundoff(b_dscore, b_do, tl.trans(b_u_roundoff), COINCIDE) * CALL.scale
    b_dsystem = tl.dot(b_dr, tl.trans(b_u), input_precision=CALL.precision)
    b_dsystem = add_roundoff(b_dsystem, b_dr, tl.trans(b_u_roundoff), COINCIDE) * -b_beta[:, None]
    b_dscore = tl.where(o_r[:, None] >= o_r[None, :], b_dscore, 0.0)
    b_dsystem = tl.where(o_r[:, None] > o_r[None, :], b_dsystem, 0.0)
    return b_do, b_u, b_u_roundoff, b_dr, b_beta, b_dscore, b_dsystem


@triton.jit
def load_ends(p, rows, o_v, o_k, CALL: tl.constexpr):
    """A tile of the state at the chunk's start, and of the state's cotangent at its end."""
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    o_state = o_v[:, None] * K + o_k[None, :]
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    m_dstate = m_state
    if CALL.listed:
        m_dstate = m_state & leaves_state(rows.chunk)
        m_state = m_state & takes_state(rows.chunk)
    b_state = tl.load(p.states + rows.i_chunk * (K * V) + o_state, mask=m_state, other=0.0)
    b_dstate = tl.load(p.d_states + rows.i_chunk * (K * V) + o_state, mask=m_dstate, other=0.0)
    return b_state, b_dstate


@triton.jit
def chunk_gradients(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """`gradients` for one chunk and head."""
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    K: tl.constexpr = CALL.key_dim
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    NV: tl.constexpr = (CALL.value_dim + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    rows = rows_of_block(block, i_c, i_h, p, CALL)
    o_r = rows.o_r
    o_v = i_v * BV + tl.arange(0, BV)
    m_write = writable(rows)
    if NK == 1:
        # loaded as early as possible
        o_k = tl.arange(0, BK)
        b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
        b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
    b_do, b_u, b_u_roundoff, b_dr, b_beta, b_dscore, b_dsystem = pair_gradients(p, rows, i_v, True, CALL)
    b_queries = tl.full([C], CALL.scale, tl.float32)
    b_starts = -b_beta
    if DECAY == "head":
        m_gate = gated(rows, CALL)
        o_gate = rows.i_token + rows.o_t
        b_gate = tl.load(p.gate + o_gate * H + i_h, mask=m_gate, other=0.0).to(tl.float32)
        p_row = scalars_at(p.row_scalars, rows, p, CALL) + o_r
        b_since = load_scalar(p_row, SINCE, rows, p, CALL)
        b_until = load_scalar(p_row, UNTIL, rows, p, CALL)
        b_queries = b_queries * b_since
        b_starts = b_starts * b_since
        b_added = b_u.to(tl.float32) * b_until[:, None]
        b_u = b_added.to(b_u.dtype)
        if COINCIDE:
            b_u_roundoff = (roundoff(b_added) + b_u_roundoff.to(tl.float32) * b_until[:, None]).to(b_u.dtype)
        b_pair = load_pair_decays(p_row, rows, p, CALL)
        b_dscore = b_dscore * b_pair
        b_dsystem = b_dsystem * b_pair
        b_arriving = tl.zeros([C], tl.float32)
        b_leaving = tl.zeros([C], tl.float32)
        b_through = 0.0
    # [key dims, rows] from here on: operands that are the same for all key dims are on the right, in shared memory
    b_do = tl.trans((b_do.to(tl.float32) * b_queries[:, None]).to(b_u.dtype))
    b_dr = tl.trans((b_dr.to(tl.float32) * b_starts[:, None]).to(b_u.dtype))
    b_ut = tl.trans(b_u)
    b_dscore_roundoff = roundoff(b_dscore)
    b_dsystem_roundoff = roundoff(b_dsystem)
    b_dscore = b_dscore.to(b_u.dtype)
    b_dsystem = b_dsystem.to(b_u.dtype)
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        if NK > 1:
            b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
            b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
        b_state, b_dstate = load_ends(p, rows, o_v, o_k, CALL)
        b_qt = tl.trans(b_q)
        b_kt = tl.trans(b_k)
        b_dend = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
        b_dend = add_roundoff(b_dend, tl.trans(b_dstate), tl.trans(b_u_roundoff), COINCIDE)
        if DECAY == "head":
            b_through += tl.sum(tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1), 0)
            b_leaving += tl.sum(b_kt.to(tl.float32) * b_dend, 0)
        b_dq = tl.dot(tl.trans(b_state), b_do, input_precision=PRECISION)
        b_dq = tl.dot(b_kt, tl.trans(b_dscore), acc=b_dq, input_precision=PRECISION)
        b_dq = add_roundoff(b_dq, b_kt, tl.trans(b_dscore_roundoff), COINCIDE)
        b_dlate = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION)
        b_dlate = tl.dot(b_kt, tl.trans(b_dsystem), acc=b_dlate, input_precision=PRECISION)
        b_dlate = add_roundoff(b_dlate, b_kt, tl.trans(b_dsystem_roundoff), COINCIDE)
        b_dearly = tl.dot(b_qt, b_dscore, input_precision=PRECISION)
        b_dearly = tl.dot(b_kt, b_dsystem, acc=b_dearly, input_precision=PRECISION)
        b_dearly = add_roundoff(b_dearly, b_qt, b_dscore_roundoff, COINCIDE)
        b_dearly = add_roundoff(b_dearly, b_kt, b_dsystem_roundoff, COINCIDE)
        if DECAY == "head":
            # `q dq + k dk` of late tokens less that of early ones: a pair after a gate has both, which cancel
            b_arriving += tl.sum(b_qt.to(tl.float32) * b_dq + b_kt.to(tl.float32) * (b_dlate - b_dearly), 0)
        b_dq = tl.trans(b_dq)
        b_dk = tl.trans(b_dlate + b_dearly + b_dend)
        i_rows = ((rows.i_token * H + i_h) * NV + i_v) * K
        o_rows = rows.o_t[:, None] * (H * NV * K) + o_k[None, :]
        m_rows = m_write[:, None] & (o_k[None, :] < K)
        tl.store(p.d_query + i_rows + o_rows, b_dq.to(p.d_query.dtype.element_ty), mask=m_rows)
        tl.store(p.d_key + i_rows + o_rows, b_dk.to(p.d_key.dtype.element_ty), mask=m_rows)
    if DECAY == "head":
        # a gate gets what arrives at rows from its own on, and what leaves the chunk from rows before it
        m_later = o_r[:, None] > o_r[None, :]
        b_dgate = tl.sum(tl.where(m_later, b_leaving[None, :], 0.0), 1)
        b_dgate += tl.sum(tl.where(m_later, 0.0, b_arriving[None, :]), 1)
        b_dgate += b_through * load_through(scalars_at(p.row_scalars, rows, p, CALL), rows.chunk, p, CALL)
        b_dgate = tl.where(m_gate & (b_gate * LOG2E > LEAST), b_dgate, 0.0)
        tl.store(p.d_gate + o_gate * (H * NV) + i_h * NV + i_v, b_dgate, mask=m_write)


@triton.jit
def gradients(p, CALL: tl.constexpr):
    """dV of one block of value dims of a chunk, and the block's parts of dQ, dK, dβ and the gates' gradient.

    A second launch computes chunks whose keys coincide again, with roundoff, in the memory of the first one's results.
    """
    H: tl.constexpr = CALL.heads
    NV: tl.constexpr = (CALL.value_dim + CALL.value_block - 1) // CALL.value_block
    i_program = tl.program_id(0)
    i_v = i_program % NV
    if CALL.keys_coincide:
        for_flagged_heads(p, i_program // NV, i_v, heads_that_coincide, 1, chunk_gradients, CALL)
    else:
        for_chunks(p, i_program // (NV * H), (i_program // NV) % H, i_v, chunk_gradients, CALL)
