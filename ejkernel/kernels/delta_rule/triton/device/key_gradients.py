"""Device code for one gate a key dim: every gradient of a chunk, from its state and cotangent.

Chunks with strong gates have a launch of their own, since the contract promises exact gradients for any gate.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LEAST, LOG2E, MOST, in_bits, largest, scaled
from ejkernel.kernels.chunks.triton.device.places import load_flag, rows_kept, visit
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import add_roundoff, heads_that_coincide, roundoff
from ejkernel.kernels.delta_rule.triton.device.flows import add_flows, add_pairs, add_up, store_moving
from ejkernel.kernels.delta_rule.triton.device.gate_strength import BOUNDED, MILD
from ejkernel.kernels.delta_rule.triton.device.gate_strength import STRONG as STRONG_GATES
from ejkernel.kernels.delta_rule.triton.device.gradients import load_ends, pair_gradients
from ejkernel.kernels.delta_rule.triton.device.inverse import off_diagonal
from ejkernel.kernels.delta_rule.triton.device.key_gates import between_border
from ejkernel.kernels.delta_rule.triton.device.rows import (
    for_chunks,
    for_flagged_heads,
    gated,
    load_gate_columns,
    load_head_columns,
    rows_of_block,
    writable,
)


@triton.jit
def chunk_gradients(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """`gradients_keyed` for one chunk and head."""
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    FINE: tl.constexpr = CALL.fine
    STRONG: tl.constexpr = CALL.strong
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    C: tl.constexpr = CALL.chunk
    PRECISION: tl.constexpr = CALL.precision
    NV: tl.constexpr = (CALL.value_dim + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    MIDDLE: tl.constexpr = CALL.middle
    rows = rows_of_block(block, i_c, i_h, p, CALL)
    o_r = rows.o_r
    o_v = i_v * BV + tl.arange(0, BV)
    m_write = writable(rows)
    m_gate = gated(rows, CALL)
    i_flag = rows.i_chunk * (1 if MIDDLE else NK)
    if CALL.listed:
        i_flag = rows_kept(rows.chunk, rows.i_chunk, i_h, p, 1 if MIDDLE else NK, CALL)
    b_do, b_u, b_u_roundoff, b_dr, b_beta, b_dscore, b_dsystem = pair_gradients(p, rows, i_v, not STRONG, CALL)
    if STRONG:
        b_diagonal = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_dscore, 0.0), 0)[None, :]
    # [key dims, rows] from here on: operands that are the same for all key dims are on the right, in shared memory
    b_do = tl.trans((b_do.to(tl.float32) * CALL.scale).to(b_u.dtype))
    b_dr = tl.trans((b_dr.to(tl.float32) * -b_beta[:, None]).to(b_u.dtype))
    b_ut = tl.trans(b_u)
    b_dscore_roundoff = roundoff(b_dscore)
    b_dsystem_roundoff = roundoff(b_dsystem)
    b_dscore = b_dscore.to(b_u.dtype)
    b_dsystem = b_dsystem.to(b_u.dtype)
    m_end = (o_r == C - 1)[None, :]
    i_rows = ((rows.i_token * H + i_h) * NV + i_v) * K
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        if STRONG:
            is_here = tl.load(p.strength + (i_flag if MIDDLE else i_flag + i_k)) == STRONG_GATES
        else:
            b_gate = load_gate_columns(p, rows, o_k, CALL)
            b_whole, b_rest = add_up(b_gate, between_border(o_r, CALL.levels - 1, 0), FINE)
            b_bits = b_whole + b_rest
            if MIDDLE and COINCIDE and CALL.blackwell_safe:
                # keys do not coincide where gates are strong; nor has Triton 3.6 code for a branch here on Blackwell
                is_here = True
            elif MIDDLE:
                is_here = tl.load(p.strength + i_flag) == MILD
            else:
                is_here = largest(tl.abs(b_bits), CALL.blackwell_safe) <= CALL.middle_limit
                if i_v == 0:
                    tl.store(p.flag + i_flag + i_k, (is_here == 0).to(tl.int32))
        if is_here:
            b_state, b_dstate = load_ends(p, rows, o_v, o_k, CALL)
            b_k = load_head_columns(p.key, rows, o_k, CALL.key_heads, K, CALL)
            b_q = load_head_columns(p.query, rows, o_k, CALL.query_heads, K, CALL)
            b_leaving = tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0)
            o_rows = rows.o_t[None, :] * (H * NV * K) + o_k[:, None]
            m_rows = m_write[None, :] & (o_k[:, None] < K)
            if STRONG:
                b_gate = load_gate_columns(p, rows, o_k, CALL)
                b_whole, b_rest = add_up(b_gate, o_r[:, None] <= o_r[None, :], FINE)
                b_since = tl.exp2(tl.minimum(b_whole + b_rest, MOST))
                b_leaving = b_leaving * tl.sum(tl.where(m_end, b_since, 0.0), 1)
                b_dq = tl.dot(tl.trans(b_state), b_do, input_precision=PRECISION) * b_since
                b_dk = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION) * b_since
                b_flow = b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * b_dk
                b_whole = tl.sum(tl.where(m_end, b_whole, 0.0), 1)[:, None] - b_whole
                b_rest = tl.sum(tl.where(m_end, b_rest, 0.0), 1)[:, None] - b_rest
                b_left = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
                b_left = b_left * tl.exp2(tl.minimum(b_whole + b_rest, MOST))
                # a token's own key crosses no gate
                b_dq += b_diagonal * b_k.to(tl.float32)
                b_dk += b_left + b_diagonal * b_q.to(tl.float32)
                b_left = b_left * b_k.to(tl.float32)
                b_leaving += tl.sum(b_left, 1)
                b_flow -= b_left
                for i_level in range(0, CALL.levels):
                    b_whole, b_rest = add_up(b_gate, between_border(o_r, i_level, 0), FINE)
                    b_fade = tl.exp2(tl.minimum(b_whole + b_rest, MOST))
                    m_meet = off_diagonal(o_r, i_level)
                    b_dscore_here = tl.where(m_meet, b_dscore, 0.0).to(b_u.dtype)
                    b_dsystem_here = tl.where(m_meet, b_dsystem, 0.0).to(b_u.dtype)
                    b_dq, b_dk, b_flow = add_pairs(
                        b_dq, b_dk, b_flow, b_q, b_k, b_dscore_here, b_dsystem_here, b_fade, b_fade, PRECISION
                    )
            else:
                # the middle is also the reference of the states
                b_bits = tl.where((o_r >= C // 2)[None, :], b_bits, -b_bits)
                if not MIDDLE:
                    b_first = tl.sum(tl.where((o_r == 0)[None, :], in_bits(b_gate) - b_bits, 0.0), 1)
                    b_last = tl.sum(tl.where(m_end, b_bits, 0.0), 1)
                    b_leaving = b_leaving * tl.exp2(tl.minimum(b_first + b_last, MOST))
                    b_first = tl.exp2(tl.minimum(b_first, MOST))[:, None]
                b_late_q = scaled(b_q, tl.exp2(b_bits))
                b_late_k = scaled(b_k, tl.exp2(b_bits))
                b_early_k = scaled(b_k, tl.exp2(-b_bits))
                b_grad = tl.dot(tl.trans(b_state), b_do, input_precision=PRECISION)
                if not MIDDLE:
                    b_grad = b_grad * b_first
                b_grad = tl.dot(b_early_k, tl.trans(b_dscore), acc=b_grad, input_precision=PRECISION)
                b_grad = add_roundoff(b_grad, b_early_k, tl.trans(b_dscore_roundoff), COINCIDE)
                b_flow = b_late_q.to(tl.float32) * b_grad
                b_dq = b_grad * tl.exp2(b_bits)
                b_grad = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION)
                if not MIDDLE:
                    b_grad = b_grad * b_first
                b_grad = tl.dot(b_early_k, tl.trans(b_dsystem), acc=b_grad, input_precision=PRECISION)
                b_grad = add_roundoff(b_grad, b_early_k, tl.trans(b_dsystem_roundoff), COINCIDE)
                b_flow += b_late_k.to(tl.float32) * b_grad
                b_dk = b_grad * tl.exp2(b_bits)
                b_grad = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
                b_grad = add_roundoff(b_grad, tl.trans(b_dstate), tl.trans(b_u_roundoff), COINCIDE)
                if not MIDDLE:
                    b_grad = b_grad * tl.exp2(b_last)[:, None]
                b_leaving += tl.sum(b_early_k.to(tl.float32) * b_grad, 1)
                b_grad = tl.dot(b_late_q, b_dscore, acc=b_grad, input_precision=PRECISION)
                b_grad = tl.dot(b_late_k, b_dsystem, acc=b_grad, input_precision=PRECISION)
                b_grad = add_roundoff(b_grad, b_late_q, b_dscore_roundoff, COINCIDE)
                b_grad = add_roundoff(b_grad, b_late_k, b_dsystem_roundoff, COINCIDE)
                b_flow -= b_early_k.to(tl.float32) * b_grad
                b_dk += b_grad * tl.exp2(-b_bits)
            b_dgate = tl.zeros([BK, C], tl.float32) + b_leaving[:, None]
            b_dgate = add_flows(b_flow, o_r[:, None] >= o_r[None, :], b_dgate, PRECISION, b_u.dtype)
            b_dgate = tl.where(m_gate[None, :] & (b_gate * LOG2E > LEAST), b_dgate, 0.0)
            store_moving(p, i_rows + o_rows, m_rows, b_dq, b_dk, b_dgate)


@triton.jit
def unbounded_chunk_gradients(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """`chunk_gradients`, unless gates are bounded: `gradients_bounded` takes those chunks."""
    if CALL.middle:
        chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
        if load_flag(p.strength, chunk, block.i_block.to(tl.int64) * CALL.heads + i_h, i_h, p, CALL) != BOUNDED:
            chunk_gradients(p, block, i_c, i_h, i_v, CALL)
    else:
        chunk_gradients(p, block, i_c, i_h, i_v, CALL)


@triton.jit
def strong_flags(p, block, chunk, o_flag, CALL: tl.constexpr):
    """Which heads of a chunk, or blocks of key dims of each head, have strong gates."""
    EACH: tl.constexpr = 1 if CALL.middle else (CALL.key_dim + CALL.key_block - 1) // CALL.key_block
    FLAGS: tl.constexpr = CALL.heads * EACH
    if CALL.listed:
        # EACH flags of every head, at the chunk's first row
        i_row = (block.i_n.to(tl.int64) * CALL.heads + o_flag // EACH) * p.T + chunk.i_row
        p_strength = p.strength + i_row * EACH + o_flag % EACH
    else:
        p_strength = p.strength + block.i_block.to(tl.int64) * FLAGS + o_flag
    return (tl.load(p_strength, mask=o_flag < FLAGS, other=0) == STRONG_GATES).to(tl.int32)


@triton.jit
def gradients_keyed(p, CALL: tl.constexpr):
    """dV of one block of value dims of a chunk, and the block's parts of dQ, dK, dβ and the gates' gradient.

    The first launch splits decays at the chunk's middle. It leaves out key dims whose gates are too strong for that,
    and flags them, unless `solve_folded` has flagged the whole chunk. The second launch computes these with decays
    split dyadically, and a third one computes chunks whose keys coincide again, with roundoff; both write to the memory
    of the first one's results.

    A gate's gradient is what flows through it: `q dq + k dk` of reads less that of writes, from its row on, and what
    leaves the chunk.
    """
    H: tl.constexpr = CALL.heads
    NV: tl.constexpr = (CALL.value_dim + CALL.value_block - 1) // CALL.value_block
    EACH: tl.constexpr = 1 if CALL.middle else (CALL.key_dim + CALL.key_block - 1) // CALL.key_block
    i_program = tl.program_id(0)
    i_v = i_program % NV
    if CALL.strong:
        for_flagged_heads(p, i_program // NV, i_v, strong_flags, EACH, chunk_gradients, CALL)
    elif CALL.keys_coincide:
        for_flagged_heads(p, i_program // NV, i_v, heads_that_coincide, EACH, chunk_gradients, CALL)
    else:
        for_chunks(p, i_program // (NV * H), (i_program // NV) % H, i_v, unbounded_chunk_gradients, CALL)
