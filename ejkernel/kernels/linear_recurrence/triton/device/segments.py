"""Device code: the states at the starts of time segments."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import SEGMENTS, blocks_before


@triton.jit
def scan_segments(p, CALL: tl.constexpr):
    """The state at the start of each time segment, from the states that segments add and their decays.

    With `CALL.last` also the states that sequences end with.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    DECAYS: tl.constexpr = CALL.decays
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0)
    i_h = (i_program // (NK * NV)) % H
    i_n = i_program // (NK * NV * H)
    i_segment = blocks_before(i_n, p, SEGMENTS, p.L, CALL)
    if CALL.packed:
        n_segments = (tl.load(p.packing + SEGMENTS * (p.N + 2) + i_n + 1) - i_segment).to(tl.int32)
    else:
        n_segments = tl.cdiv(p.T, p.L)
    o_k = (i_program % NK) * BK + tl.arange(0, BK)
    o_v = ((i_program // NK) % NV) * BV + tl.arange(0, BV)
    o_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_state = tl.zeros([BK, BV], tl.float32)
    if CALL.start:
        p_tile = p.start + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state
        b_state = tl.load(p_tile, mask=m_state, other=0.0).to(tl.float32) * CALL.start_scale
    for i_step in range(0, n_segments):
        i_j = i_step
        if CALL.reverse:
            i_j = n_segments - 1 - i_step
        i_here = (i_segment + i_j) * H + i_h
        # a walk leaves out the last segment unless final states are wanted
        m_added = (i_step + 1 < n_segments) | CALL.last
        if (DECAYS == 1) and not (CALL.decay == "key"):
            b_decay = tl.load(p.decay + i_here, mask=m_added, other=0.0)
        else:
            b_decay = tl.load(p.decay + i_here * DECAYS + o_k, mask=(o_k < K) & m_added, other=0.0)[:, None]
            if DECAYS > K:
                p_row = p.decay + i_here * DECAYS + K + o_v
                b_decay = b_decay * tl.load(p_row, mask=(o_v < V) & m_added, other=0.0)[None, :]
        b_added = tl.load(p.segments + i_here * (K * V) + o_state, mask=m_state & m_added, other=0.0)
        tl.store(p.starts + i_here * (K * V) + o_state, b_state, mask=m_state)
        # a decay may be infinite, and 0 stays 0
        m_none = b_state == 0.0
        if CALL.listed:
            # an end of a sequence, where the state may be anything
            m_none = m_none | (b_decay == 0.0)
        b_state = tl.where(m_none, 0.0, b_state * b_decay) + b_added
    if CALL.last:
        p_tile = p.final + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state
        tl.store(p_tile, b_state * CALL.last_scale, mask=m_state)
