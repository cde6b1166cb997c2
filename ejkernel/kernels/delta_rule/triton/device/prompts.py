"""Device code: the walk of prompts, which start from slots of a pool and leave states in slots."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import load_columns, load_flag, visit
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.chunks.triton.device.slots import locate_prompt, read_slot, write_border
from ejkernel.kernels.delta_rule.triton.device.decays import BETA, IDLE, SINCE, UNTIL, load_through, scalars_at
from ejkernel.kernels.delta_rule.triton.device.gate_strength import MILD
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_pairs, store_head, writable
from ejkernel.kernels.delta_rule.triton.device.walk import error_of, load_keys, load_queries, load_row


@triton.jit
def load_decay(p, NUMBER: tl.constexpr, i_chunk, o_k, CALL: tl.constexpr):
    """One of the three decays of a state in a chunk, which `store_state_decays` lists."""
    K: tl.constexpr = CALL.key_dim
    return tl.load(p.state_decays + (i_chunk * 3 + NUMBER) * K + o_k, mask=o_k < K, other=0.0)[None, :]


@triton.jit
def walk_prompts(p, CALL: tl.constexpr):
    """`forward` over the tokens of pooled sequences that go by chunks, without a second run where keys coincide.

    What a sequence gets must not depend on where it was cut, nor on the rest of the call. So all decays of a chunk are
    applied to the state before any of the next, which leaves the state as it lies in a slot in between, and time is not
    cut in segments. `forward` takes its second run by the sequence.
    """
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    H: tl.constexpr = CALL.heads
    HV: tl.constexpr = CALL.value_heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    SOLVE: tl.constexpr = CALL.solve
    NV: tl.constexpr = (V + BV - 1) // BV
    PAD_V: tl.constexpr = NV * BV != V
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    prompt = locate_prompt(i_program // (NV * H), p, CALL)
    if prompt.i_n < 0:
        return
    o_r = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    b_unit = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0).to(p.value.dtype.element_ty)
    b_state = read_slot(p, prompt.i_n, i_h, False, o_state, m_state, CALL)
    n_done = 0
    n_next = 0
    # from one place where states are written to the next, of which the first is the start
    while n_next <= prompt.n_rows:
        for i_c in range(n_done // C, tl.cdiv(n_next, C)):
            chunk = visit(i_c, prompt.i_n, prompt.n_rows, prompt.n_rows, p, CALL)
            i_chunk = (prompt.i_chunk0 + i_c) * H + i_h
            i_token = prompt.i_first + chunk.i_row
            rows = Rows(chunk, i_h, i_chunk, i_token, o_r, o_r, chunk.i_row + o_r < prompt.n_rows)
            b_k, b_k_until = load_keys(p, rows, o_k, CALL)
            b_v = load_columns(p.value, i_token, i_h // (H // HV), o_r, rows.m_read, o_v, HV, V, PAD_V, False)
            b_inverse = load_pairs(p.inverse, rows, p, CALL)
            b_q = load_queries(p, rows, o_k, CALL)
            b_solved = load_pairs(p.solved_scores, rows, p, CALL)
            p_row = scalars_at(p.row_scalars, rows, p, CALL)
            if CALL.middle:
                b_state = b_state * load_decay(p, 0, i_chunk, o_k, CALL)
            b_rounded = b_state.to(b_k.dtype)
            b_recalled = tl.dot(b_rounded, tl.trans(b_k), input_precision=PRECISION)
            b_out = tl.dot(b_rounded, tl.trans(b_q), input_precision=PRECISION)
            b_beta = load_row(p_row, BETA, rows, p, CALL)
            m_idle = b_beta == IDLE
            if DECAY == "head":
                b_since = load_row(p_row, SINCE, rows, p, CALL)
                b_recalled = b_recalled * b_since
                b_out = b_out * b_since
                b_state = b_state * load_through(p_row, chunk, p, CALL)
                # never true, but what an operand of a dot depends on is fetched ahead of its chunk
                m_idle = m_idle | (b_since < 0.0)
            b_error = error_of(b_v, b_recalled, b_unit, False) * b_beta
            b_r = tl.where(m_idle, 0.0, b_error).to(b_k.dtype)
            b_out = tl.dot(b_r, tl.trans(b_solved), acc=b_out, input_precision=PRECISION) * CALL.scale
            b_ordered = in_order_of_operands(nearest(b_error, SOLVE), BV, C)
            b_u = tl.dot(b_ordered, tl.trans(b_inverse), input_precision=SOLVE)
            b_until = tl.where(b_beta == IDLE, 0.0, 1.0)
            if DECAY == "head":
                b_until = b_until * load_row(p_row, UNTIL, rows, p, CALL)
            if CALL.middle:
                # with mild gates, keys are relative to one place in the chunk
                if load_flag(p.strength, chunk, i_chunk, i_h, p, CALL) != MILD:
                    b_state = b_state * load_decay(p, 1, i_chunk, o_k, CALL)
            elif DECAY == "key":
                b_state = b_state * load_decay(p, 1, i_chunk, o_k, CALL)
            b_written = (b_u * b_until).to(b_k.dtype)
            b_state = tl.dot(b_written, b_k_until, acc=b_state, input_precision=PRECISION)
            if CALL.middle:
                b_state = b_state * load_decay(p, 2, i_chunk, o_k, CALL)
            m_rows = writable(rows)[:, None] & (o_v[None, :] < V)
            store_head(p.output, tl.trans(b_out.to(p.output.dtype.element_ty)), rows, o_v, m_rows, V, CALL)
        n_done = n_next
        n_next = write_border(p, b_state, i_h, n_done, prompt, o_state, m_state, CALL)
