"""Device code: calls of a few tokens, one token at a time."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E, faded
from ejkernel.kernels.chunks.triton.device.places import CUTS, rows_by_chunks, token_of
from ejkernel.kernels.chunks.triton.device.slots import read_slot, state_at, write_slots
from ejkernel.kernels.chunks.triton.device.tokens import fade_state, load_id, load_token, locate_sequence

# Tokens of padding that are written at once.
PADDING = tl.constexpr(32)


@triton.jit
def step(p, CALL: tl.constexpr):
    """A whole call token by token: the state is read once and written once.

    With `beta` a token corrects what its key reads (the delta rule); without, its value is added.

    In a call with a pool, a program takes the tokens of a sequence behind those that go by chunks. It starts from the
    sequence's slot or where the chunks end, and writes slots. With `CALL.inside`, it computes the state at a checkpoint
    among those that go by chunks, from the one in the checkpoint's slot, that of the last multiple of `CUTS` tokens.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    NV: tl.constexpr = (V + BV - 1) // BV
    INSIDE: tl.constexpr = CALL.inside
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_n = i_program // (NV * H)
    if INSIDE:
        i_checkpoint = i_n % p.C
        i_n = tl.load(p.prompts + i_n // p.C)
        if i_n < 0:
            return
        i_checkpoint += i_n * p.C
    i_first, n_rows, is_real = locate_sequence(i_n, p, CALL)
    i_from = 0
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    if INSIDE:
        n_at = tl.load(p.at + i_checkpoint)
        i_slot = tl.load(p.slots + i_checkpoint)
        if (i_slot < 0) | (n_at >= rows_by_chunks(n_rows, CALL)) | (n_at % CUTS == 0):
            return
        i_from = n_at - n_at % CUTS
        n_rows = n_at
    elif CALL.pooled:
        if is_real == 0:
            o_r = tl.arange(0, PADDING)
            for i_row in range(0, n_rows, PADDING):
                p_rows = p.output + ((i_first + i_row + o_r) * H + i_h)[:, None] * V + o_v[None, :]
                m_rows = (i_row + o_r < n_rows)[:, None] & (o_v < V)[None, :]
                tl.store(p_rows, tl.zeros([PADDING, BV], p.output.dtype.element_ty), mask=m_rows)
            return
        i_from = rows_by_chunks(n_rows, CALL)
        if (i_from > 0) & (i_from == n_rows):
            return
    m_k = (o_k < K) & is_real
    m_v = (o_v < V) & is_real
    o_head = o_k[:, None] * V + o_v[None, :]
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V) + o_head
    m_state = m_k[:, None] & m_v[None, :]
    b_state = tl.zeros([BK, BV], tl.float32)
    if CALL.start:
        b_state = tl.load(p.start + o_state, mask=m_state, other=0.0).to(tl.float32)
    if INSIDE:
        b_state = tl.load(state_at(p.pool, i_slot, i_h, CALL) + o_head, mask=m_state, other=0.0).to(tl.float32)
    elif CALL.pooled:
        b_state = read_slot(p, i_n, i_h, i_from > 0, o_head, m_state, CALL)
        n_next = write_slots(p, b_state, i_n, i_h, i_from, 0, o_head, m_state, CALL)
    if CALL.decay == "constant":
        b_gate = tl.load(p.gate + i_n.to(tl.int64) * H + i_h, mask=is_real, other=0.0).to(tl.float32)
    i_before = -1
    is_begun = i_n < 0
    for i_row in range(i_from, n_rows):
        i_token = token_of(i_first, n_rows, i_row, CALL.flip)
        i_here = i_token * H + i_h
        m_gate = m_k
        m_value_gate = m_v
        if CALL.listed:
            i_before, is_real, is_cut = load_id(p, i_token, i_before, is_begun)
            is_begun = is_begun | is_real
            m_k = (o_k < K) & is_real
            m_v = (o_v < V) & is_real
            m_gate = m_k & (is_cut == 0)
            m_value_gate = m_v & (is_cut == 0)
            b_state = tl.where(is_cut, 0.0, b_state)
            b_kept = b_state
        b_q = load_token(p.query, i_token, i_h, o_k, m_k, H, CALL.query_heads, K)
        b_k = load_token(p.key, i_token, i_h, o_k, m_k, H, CALL.key_heads, K)
        b_v = load_token(p.value, i_token, i_h, o_v, m_v, H, CALL.value_heads, V)
        if p.beta is not None:
            b_beta = tl.load(p.beta + i_here, mask=is_real, other=0.0).to(tl.float32)
        b_state = fade_state(b_state, p, i_here, o_k, m_gate, is_real, CALL)
        if CALL.decay == "constant":
            b_state = faded(b_state, b_gate * LOG2E)
        if p.value_gate is not None:
            b_faded = tl.load(p.value_gate + i_here * V + o_v, mask=m_value_gate, other=0.0).to(tl.float32)
            b_state = faded(b_state, (b_faded * LOG2E)[None, :])
        if p.beta is not None:
            b_v = b_beta * (b_v - tl.sum(b_k[:, None] * b_state, 0))
        b_state = b_state + b_k[:, None] * b_v[None, :]
        if not INSIDE:
            b_out = tl.sum(b_q[:, None] * b_state, 0) * CALL.scale
            if CALL.listed:
                b_state = tl.where(is_real, b_state, b_kept)
                b_out = tl.where(is_real, b_out, 0.0)
            tl.store(p.output + i_here * V + o_v, b_out.to(p.output.dtype.element_ty), mask=o_v < V)
            if CALL.pooled:
                if i_row + 1 == n_next:
                    n_next = write_slots(p, b_state, i_n, i_h, n_next, 0, o_head, m_state, CALL)
    if INSIDE:
        p_slot = state_at(p.pool, i_slot, i_h, CALL)
        tl.store(p_slot + o_head, b_state.to(p.pool.dtype.element_ty), mask=m_state)
    elif not CALL.pooled:
        tl.store(p.final + o_state, b_state, mask=m_state)
