"""Device code: every gradient of a chunk, from the states and cotangents at its ends."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LEAST, LOG2E
from ejkernel.kernels.chunks.triton.device.places import leaves_state, takes_state
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import add_rest, heads_that_coincide, rest_of
from ejkernel.kernels.delta_rule.triton.device.decays import (
    SINCE,
    UNTIL,
    is_idle,
    load_pair_decays,
    load_through,
    load_weight,
    marked,
    weights_of,
)
from ejkernel.kernels.delta_rule.triton.device.rows import (
    gated,
    load_beta,
    load_head,
    of_block,
    of_flagged_heads,
    rows_of_block,
    store_head,
    writable,
)


@triton.jit
def of_values(p, rows, i_v, STORE: tl.constexpr, CALL: tl.constexpr):
    """Some value dims of a chunk: what is multiplied with states, and the gradients of scores and of the system.

    The latter is strictly below the diagonal, where a token meets itself, and which is 1. Where keys coincide what
    rounding has taken off `u` is given too, which otherwise is `u` once more. STORE stores dv, and this part of dβ.
    """
    BV: tl.constexpr = CALL.value_block
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    V: tl.constexpr = CALL.value_dim
    NV: tl.constexpr = (V + BV - 1) // BV
    o_r = rows.o_r
    o_v = i_v * BV + tl.arange(0, BV)
    b_do = load_head(p.d_output, rows, o_v, H, V, CALL)
    b_u = load_head(p.added, rows, o_v, H, V, CALL)
    b_dr = load_head(p.d_r, rows, o_v, H, V, CALL)
    b_u_rest = b_u
    if COINCIDE:
        b_u_rest = load_head(p.added_rest, rows, o_v, H, V, CALL)
    b_beta = load_beta(p, rows, CALL)
    if STORE:
        b_dv = b_dr.to(tl.float32) * b_beta[:, None]
        store_head(p.d_value, b_dv, rows, o_v, writable(rows)[:, None] & (o_v[None, :] < V), V, CALL)
        # u is beta times what the state lacks of the token's value
        b_added = b_u.to(tl.float32)
        if COINCIDE:
            b_added += b_u_rest.to(tl.float32)
        b_dbeta = tl.sum(b_dr.to(tl.float32) * b_added, 1) / marked(b_beta)
        p_tile = p.d_beta + (rows.i_token + rows.o_t) * (H * NV) + rows.i_h * NV + i_v
        tl.store(p_tile, b_dbeta, mask=writable(rows))
    m_idle = is_idle(b_beta)
    b_beta = tl.where(m_idle, 0.0, b_beta)
    b_u = tl.where(m_idle[:, None], 0.0, b_u).to(b_u.dtype)
    b_u_rest = tl.where(m_idle[:, None], 0.0, b_u_rest).to(b_u.dtype)
    b_dscore = tl.dot(b_do, tl.trans(b_u), input_precision=CALL.precision)
    b_dscore = add_rest(b_dscore, b_do, tl.trans(b_u_rest), COINCIDE) * CALL.scale
    b_dbelow = tl.dot(b_dr, tl.trans(b_u), input_precision=CALL.precision)
    b_dbelow = add_rest(b_dbelow, b_dr, tl.trans(b_u_rest), COINCIDE) * -b_beta[:, None]
    b_dscore = tl.where(o_r[:, None] >= o_r[None, :], b_dscore, 0.0)
    b_dbelow = tl.where(o_r[:, None] > o_r[None, :], b_dbelow, 0.0)
    return b_do, b_u, b_u_rest, b_dr, b_beta, b_dscore, b_dbelow


@triton.jit
def load_ends(p, rows, o_v, o_k, CALL: tl.constexpr):
    """The state that a chunk begins with and the cotangent of the one that it leaves, some dims of both."""
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
def of_chunk(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """What `gradients` gives, of one chunk and head."""
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
        # asked for as early as can be
        o_k = tl.arange(0, BK)
        b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
        b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
    b_do, b_u, b_u_rest, b_dr, b_beta, b_dscore, b_dbelow = of_values(p, rows, i_v, True, CALL)
    b_queries = tl.full([C], CALL.scale, tl.float32)
    b_starts = -b_beta
    if DECAY == "head":
        m_gate = gated(rows, CALL)
        o_gate = rows.i_token + rows.o_t
        b_gate = tl.load(p.gate + o_gate * H + i_h, mask=m_gate, other=0.0).to(tl.float32)
        p_row = weights_of(p.weights, rows, p, CALL) + o_r
        b_since = load_weight(p_row, SINCE, rows, p, CALL)
        b_until = load_weight(p_row, UNTIL, rows, p, CALL)
        b_queries = b_queries * b_since
        b_starts = b_starts * b_since
        b_added = b_u.to(tl.float32) * b_until[:, None]
        b_u = b_added.to(b_u.dtype)
        if COINCIDE:
            b_u_rest = (rest_of(b_added) + b_u_rest.to(tl.float32) * b_until[:, None]).to(b_u.dtype)
        b_pair = load_pair_decays(p_row, rows, p, CALL)
        b_dscore = b_dscore * b_pair
        b_dbelow = b_dbelow * b_pair
        b_arriving = tl.zeros([C], tl.float32)
        b_leaving = tl.zeros([C], tl.float32)
        b_through = 0.0
    # [key dims, rows] from here on: what is the same for all key dims is the right operand, and stays in shared memory
    b_do = tl.trans((b_do.to(tl.float32) * b_queries[:, None]).to(b_u.dtype))
    b_dr = tl.trans((b_dr.to(tl.float32) * b_starts[:, None]).to(b_u.dtype))
    b_ut = tl.trans(b_u)
    b_dscore_rest = rest_of(b_dscore)
    b_dbelow_rest = rest_of(b_dbelow)
    b_dscore = b_dscore.to(b_u.dtype)
    b_dbelow = b_dbelow.to(b_u.dtype)
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        if NK > 1:
            b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL)
            b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL)
        b_state, b_dstate = load_ends(p, rows, o_v, o_k, CALL)
        b_qt = tl.trans(b_q)
        b_kt = tl.trans(b_k)
        b_dend = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
        b_dend = add_rest(b_dend, tl.trans(b_dstate), tl.trans(b_u_rest), COINCIDE)
        if DECAY == "head":
            b_through += tl.sum(tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1), 0)
            b_leaving += tl.sum(b_kt.to(tl.float32) * b_dend, 0)
        b_dq = tl.dot(tl.trans(b_state), b_do, input_precision=PRECISION)
        b_dq = tl.dot(b_kt, tl.trans(b_dscore), acc=b_dq, input_precision=PRECISION)
        b_dq = add_rest(b_dq, b_kt, tl.trans(b_dscore_rest), COINCIDE)
        b_dlate = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION)
        b_dlate = tl.dot(b_kt, tl.trans(b_dbelow), acc=b_dlate, input_precision=PRECISION)
        b_dlate = add_rest(b_dlate, b_kt, tl.trans(b_dbelow_rest), COINCIDE)
        b_dearly = tl.dot(b_qt, b_dscore, input_precision=PRECISION)
        b_dearly = tl.dot(b_kt, b_dbelow, acc=b_dearly, input_precision=PRECISION)
        b_dearly = add_rest(b_dearly, b_qt, b_dscore_rest, COINCIDE)
        b_dearly = add_rest(b_dearly, b_kt, b_dbelow_rest, COINCIDE)
        if DECAY == "head":
            # what passes between two tokens cancels from both on: it is in a query's or late key's gradient, and in an
            # early key's
            b_arriving += tl.sum(b_qt.to(tl.float32) * b_dq + b_kt.to(tl.float32) * (b_dlate - b_dearly), 0)
        b_dq = tl.trans(b_dq)
        b_dk = tl.trans(b_dlate + b_dearly + b_dend)
        i_rows = ((rows.i_token * H + i_h) * NV + i_v) * K
        o_rows = rows.o_t[:, None] * (H * NV * K) + o_k[None, :]
        m_rows = m_write[:, None] & (o_k[None, :] < K)
        tl.store(p.d_query + i_rows + o_rows, b_dq.to(p.d_query.dtype.element_ty), mask=m_rows)
        tl.store(p.d_key + i_rows + o_rows, b_dk.to(p.d_key.dtype.element_ty), mask=m_rows)
    if DECAY == "head":
        # what arrives from a row on, less what has left from there on, and what has left for good before it
        m_later = o_r[:, None] > o_r[None, :]
        b_dgate = tl.sum(tl.where(m_later, b_leaving[None, :], 0.0), 1)
        b_dgate += tl.sum(tl.where(m_later, 0.0, b_arriving[None, :]), 1)
        b_dgate += b_through * load_through(weights_of(p.weights, rows, p, CALL), rows.chunk, p, CALL)
        b_dgate = tl.where(m_gate & (b_gate * LOG2E > LEAST), b_dgate, 0.0)
        tl.store(p.d_gate + o_gate * (H * NV) + i_h * NV + i_v, b_dgate, mask=m_write)


@triton.jit
def gradients(p, CALL: tl.constexpr):
    """dv of some value dims of a chunk, and their parts of dq, dk, dβ and the gates' gradient.

    A second launch does so with more digits where keys coincide, in the memory of the first one's results.
    """
    H: tl.constexpr = CALL.heads
    NV: tl.constexpr = (CALL.value_dim + CALL.value_block - 1) // CALL.value_block
    i_program = tl.program_id(0)
    i_v = i_program % NV
    if CALL.keys_coincide:
        of_flagged_heads(p, i_program // NV, i_v, heads_that_coincide, 1, of_chunk, CALL)
    else:
        of_block(p, i_program // (NV * H), (i_program // NV) % H, i_v, of_chunk, CALL)
