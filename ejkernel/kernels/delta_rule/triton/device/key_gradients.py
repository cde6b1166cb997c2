"""Device code: every gradient of a chunk with one gate a key dim, from the states and cotangents at its ends."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LEAST, LOG2E, MOST, in_bits, largest, scaled
from ejkernel.kernels.chunks.triton.device.places import (
    after_first_gate,
    load_columns,
    load_flag,
    locate_block,
    rows_kept,
    visit,
    visit_of_block,
)
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import (
    add_rest,
    heads_that_coincide,
    listed_coincide,
    rest_of,
)
from ejkernel.kernels.delta_rule.triton.device.flows import add_flows, add_pairs, add_up, store_moving
from ejkernel.kernels.delta_rule.triton.device.gradients import load_ends, of_block, of_values
from ejkernel.kernels.delta_rule.triton.device.inverse import corner
from ejkernel.kernels.delta_rule.triton.device.key_gates import between_border
from ejkernel.kernels.delta_rule.triton.device.kinds import BOUNDED, MILD
from ejkernel.kernels.delta_rule.triton.device.kinds import STRONG as STRONG_KIND


@triton.jit
def of_chunk(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """What `gradients_keyed` gives, of one chunk and head."""
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    FINE: tl.constexpr = CALL.fine
    STRONG: tl.constexpr = CALL.strong
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    PRECISION: tl.constexpr = CALL.precision
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    PAD: tl.constexpr = K % BK != 0
    MIDDLE: tl.constexpr = CALL.middle
    chunk, i_chunk, i_token, o_r, o_t = visit_of_block(block, i_c, i_h, p, CALL)
    i_row = chunk.i_row
    o_v = i_v * BV + tl.arange(0, BV)
    m_read = i_row + o_r < chunk.n_read
    m_write = i_row + o_r < chunk.n_end
    m_gate = m_read & after_first_gate(chunk, i_row + o_r, CALL)
    if CALL.listed:
        i_flag = rows_kept(chunk, i_chunk, i_h, p, 1 if MIDDLE else NK, CALL)
    b_do, b_u, b_u_rest, b_dr, b_beta, b_dscore, b_dbelow = of_values(
        p, i_token, i_h, i_v, o_r, o_t, m_read, m_write, not STRONG, CALL
    )
    if STRONG:
        b_own = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_dscore, 0.0), 0)[None, :]
    # [key dims, rows] from here on: what is the same for all key dims is the right operand, and stays in shared memory
    b_do = tl.trans((b_do.to(tl.float32) * CALL.scale).to(b_u.dtype))
    b_dr = tl.trans((b_dr.to(tl.float32) * -b_beta[:, None]).to(b_u.dtype))
    b_ut = tl.trans(b_u)
    b_dscore_rest = rest_of(b_dscore)
    b_dbelow_rest = rest_of(b_dbelow)
    b_dscore = b_dscore.to(b_u.dtype)
    b_dbelow = b_dbelow.to(b_u.dtype)
    m_end = (o_r == C - 1)[None, :]
    i_rows = ((i_token * H + i_h) * NV + i_v) * K
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        if STRONG:
            if not CALL.listed:
                i_flag = i_chunk if MIDDLE else i_chunk * NK
            is_here = tl.load(p.kinds + (i_flag if MIDDLE else i_flag + i_k)) == STRONG_KIND
        else:
            b_gate = load_columns(p.gate, i_token, i_h, o_t, m_gate, o_k, H, K, PAD, True)
            b_whole, b_rest = add_up(b_gate, between_border(o_r, CALL.levels - 1, 0), FINE)
            b_bits = b_whole + b_rest
            if MIDDLE and COINCIDE and CALL.flat:
                # keys do not coincide where gates are strong; nor has Triton 3.6 code for a branch here on Blackwell
                is_here = True
            elif MIDDLE:
                is_here = tl.load(p.kinds + (i_flag if CALL.listed else i_chunk)) == MILD
            else:
                is_here = largest(tl.abs(b_bits), CALL.flat) <= CALL.limit
                if i_v == 0:
                    p_flag = p.flag + (i_flag if CALL.listed else i_chunk * NK) + i_k
                    tl.store(p_flag, (is_here == 0).to(tl.int32))
        if is_here:
            b_state, b_dstate = load_ends(p, chunk, i_chunk, o_v, o_k, CALL)
            b_k = load_columns(p.key, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, PAD, False)
            b_q = load_columns(p.query, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, PAD, False)
            b_leaving = tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0)
            o_rows = o_t[None, :] * (H * NV * K) + o_k[:, None]
            m_rows = m_write[None, :] & (o_k[:, None] < K)
            if STRONG:
                b_gate = load_columns(p.gate, i_token, i_h, o_t, m_gate, o_k, H, K, PAD, True)
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
                b_dq += b_own * b_k.to(tl.float32)
                b_dk += b_left + b_own * b_q.to(tl.float32)
                b_left = b_left * b_k.to(tl.float32)
                b_leaving += tl.sum(b_left, 1)
                b_flow -= b_left
                for i_level in range(0, CALL.levels):
                    b_whole, b_rest = add_up(b_gate, between_border(o_r, i_level, 0), FINE)
                    b_fade = tl.exp2(tl.minimum(b_whole + b_rest, MOST))
                    m_meet = corner(o_r, i_level)
                    b_dscore_here = tl.where(m_meet, b_dscore, 0.0).to(b_u.dtype)
                    b_dbelow_here = tl.where(m_meet, b_dbelow, 0.0).to(b_u.dtype)
                    b_dq, b_dk, b_flow = add_pairs(
                        b_dq, b_dk, b_flow, b_q, b_k, b_dscore_here, b_dbelow_here, b_fade, b_fade, PRECISION
                    )
            else:
                # states are met at the chunk's middle too
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
                b_grad = add_rest(b_grad, b_early_k, tl.trans(b_dscore_rest), COINCIDE)
                b_flow = b_late_q.to(tl.float32) * b_grad
                b_dq = b_grad * tl.exp2(b_bits)
                b_grad = tl.dot(tl.trans(b_state), b_dr, input_precision=PRECISION)
                if not MIDDLE:
                    b_grad = b_grad * b_first
                b_grad = tl.dot(b_early_k, tl.trans(b_dbelow), acc=b_grad, input_precision=PRECISION)
                b_grad = add_rest(b_grad, b_early_k, tl.trans(b_dbelow_rest), COINCIDE)
                b_flow += b_late_k.to(tl.float32) * b_grad
                b_dk = b_grad * tl.exp2(b_bits)
                b_grad = tl.dot(tl.trans(b_dstate), b_ut, input_precision=PRECISION)
                b_grad = add_rest(b_grad, tl.trans(b_dstate), tl.trans(b_u_rest), COINCIDE)
                if not MIDDLE:
                    b_grad = b_grad * tl.exp2(b_last)[:, None]
                b_leaving += tl.sum(b_early_k.to(tl.float32) * b_grad, 1)
                b_grad = tl.dot(b_late_q, b_dscore, acc=b_grad, input_precision=PRECISION)
                b_grad = tl.dot(b_late_k, b_dbelow, acc=b_grad, input_precision=PRECISION)
                b_grad = add_rest(b_grad, b_late_q, b_dscore_rest, COINCIDE)
                b_grad = add_rest(b_grad, b_late_k, b_dbelow_rest, COINCIDE)
                b_flow -= b_early_k.to(tl.float32) * b_grad
                b_dk += b_grad * tl.exp2(-b_bits)
            b_dgate = tl.zeros([BK, C], tl.float32) + b_leaving[:, None]
            b_dgate = add_flows(b_flow, o_r[:, None] >= o_r[None, :], b_dgate, PRECISION, b_u.dtype)
            b_dgate = tl.where(m_gate[None, :] & (b_gate * LOG2E > LEAST), b_dgate, 0.0)
            store_moving(p, i_rows + o_rows, m_rows, b_dq, b_dk, b_dgate)


@triton.jit
def of_other_chunk(p, block, i_c, i_h, i_v, CALL: tl.constexpr):
    """`of_chunk`, unless the gates are bounded, which `gradients_bounded` is for."""
    if CALL.middle:
        chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
        if load_flag(p.kinds, chunk, block.i_block.to(tl.int64) * CALL.heads + i_h, i_h, p, CALL) != BOUNDED:
            of_chunk(p, block, i_c, i_h, i_v, CALL)
    else:
        of_chunk(p, block, i_c, i_h, i_v, CALL)


@triton.jit
def gradients_keyed(p, CALL: tl.constexpr):
    """dv of some value dims of a chunk, and their parts of dq, dk, dβ and the gates' gradient.

    Decays are split in the middle of the chunk. Key dims whose gates are too strong for that are left out, and flagged
    unless the walks, which met states there, have flagged the chunk. A second launch finds these,
    split dyadically, in the memory of the first one's results, and a third one, with more digits, those of chunks whose
    keys coincide. Most often there are none, so a program looks after a chunk's heads at once, `CALL.look` flags.

    A gate's gradient is what flows through it: what arrives from its row on, less what is left there, and all that
    leaves the chunk.
    """
    H: tl.constexpr = CALL.heads
    NV: tl.constexpr = (CALL.value_dim + CALL.value_block - 1) // CALL.value_block
    FLAGS: tl.constexpr = H * (1 if CALL.middle else (CALL.key_dim + CALL.key_block - 1) // CALL.key_block)
    i_program = tl.program_id(0)
    i_v = i_program % NV
    if CALL.strong or CALL.keys_coincide:
        i_block = i_program // NV
        o_flag = tl.arange(0, CALL.look)
        if CALL.listed:
            block = locate_block(i_block, p, CALL)
            for i_c in range(block.i_c, block.i_end):
                chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
                if CALL.keys_coincide:
                    b_flag = listed_coincide(p, chunk, o_flag, CALL)
                else:
                    # as many of each head, at its first row
                    EACH: tl.constexpr = FLAGS // H
                    i_row = (block.i_n.to(tl.int64) * H + o_flag // EACH) * p.T + chunk.i_row
                    b_flag = tl.load(p.kinds + i_row * EACH + o_flag % EACH, mask=o_flag < FLAGS, other=0)
                    b_flag = (b_flag == STRONG_KIND).to(tl.int32)
                if tl.sum(b_flag, 0) > 0:
                    for i_h in range(0, H):
                        if tl.sum(tl.where(o_flag // (FLAGS // H) == i_h, b_flag, 0), 0) > 0:
                            of_chunk(p, block, i_c, i_h, i_v, CALL)
        else:
            if CALL.keys_coincide:
                block = locate_block(i_block, p, CALL)
                b_flag = heads_that_coincide(p, i_block, o_flag, block.n_rows - block.i_c * CALL.chunk, CALL)
            else:
                b_flag = tl.load(p.kinds + i_block.to(tl.int64) * FLAGS + o_flag, mask=o_flag < FLAGS, other=0)
                b_flag = (b_flag == STRONG_KIND).to(tl.int32)
            if tl.sum(b_flag, 0) > 0:
                for i_h in range(0, H):
                    if tl.sum(tl.where(o_flag // (FLAGS // H) == i_h, b_flag, 0), 0) > 0:
                        of_block(p, i_block, i_h, i_v, of_chunk, CALL)
    else:
        of_block(p, i_program // (NV * H), (i_program // NV) % H, i_v, of_other_chunk, CALL)
