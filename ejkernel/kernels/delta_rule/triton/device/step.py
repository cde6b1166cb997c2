"""Device code: calls of a few tokens, one token at a time."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import token_of
from ejkernel.kernels.chunks.triton.device.tokens import fade_state, load_token, locate_sequence


@triton.jit
def step(p, CALL: tl.constexpr):
    """Token by token: the state is read once, decayed, corrected and queried, and written once."""
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_n = i_program // (NV * H)
    i_first, n_rows, is_real = locate_sequence(i_n, p, CALL)
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    m_k = (o_k < K) & is_real
    m_v = (o_v < V) & is_real
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V) + o_k[:, None] * V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    b_state = tl.zeros([BK, BV], tl.float32)
    if CALL.start:
        b_state = tl.load(p.start + o_state, mask=m_state, other=0.0).to(tl.float32)
    for i_row in range(0, n_rows):
        i_token = token_of(i_first, n_rows, i_row, CALL.flip)
        i_here = i_token * H + i_h
        b_q = load_token(p.query, i_token, i_h, o_k, m_k, H, CALL.query_heads, K)
        b_k = load_token(p.key, i_token, i_h, o_k, m_k, H, CALL.key_heads, K)
        b_v = load_token(p.value, i_token, i_h, o_v, m_v, H, CALL.value_heads, V)
        b_beta = tl.load(p.beta + i_here, mask=is_real, other=0.0).to(tl.float32)
        b_state = fade_state(b_state, p, i_here, o_k, m_k, is_real, CALL)
        b_new = b_beta * (b_v - tl.sum(b_k[:, None] * b_state, 0))
        b_state = b_state + b_k[:, None] * b_new[None, :]
        b_out = tl.sum(b_q[:, None] * b_state, 0) * CALL.scale
        tl.store(p.output + i_here * V + o_v, b_out.to(p.output.dtype.element_ty), mask=o_v < V)
    tl.store(p.final + o_state, b_state, mask=m_state)
