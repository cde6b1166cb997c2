"""Device code: the states at the starts of time segments, or their cotangents at the ends."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import SEGMENTS, blocks_before


@triton.jit
def scan_segments(p, CALL: tl.constexpr):
    """The state that each time segment starts from: the segments' transitions and local states, composed.

    A local state is what a segment's tokens write, from a state of zeros; the first segment's starts from its
    sequence's start state instead, and so needs no transition. States are [value dims, key dims]; a transition's rows
    are the key dims before the segment. BACK goes from the last segment to the first, with transposed transitions.
    """
    BC: tl.constexpr = CALL.part_block
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_n = i_program // (NV * H)
    i_first = blocks_before(i_n, p, SEGMENTS, p.L, CALL)
    n_segments = (blocks_before(i_n + 1, p, SEGMENTS, p.L, CALL) - i_first).to(tl.int32)
    o_k = tl.arange(0, BK)
    o_c = tl.arange(0, BC)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    i_step = 1
    if CALL.back:
        i_first = i_first + n_segments - 1
        i_step = -1
    b_state = tl.zeros([BV, BK], tl.float32)
    if CALL.start:
        p_tile = p.start + (i_n.to(tl.int64) * H + i_h) * (K * V) + (o_v[:, None] + o_k[None, :] * V)
        b_state = tl.load(p_tile, mask=m_state, other=0.0).to(tl.float32)
    o_state = o_v[:, None] * K + o_k[None, :]
    tl.store(p.start_states + (i_first * H + i_h) * (K * V) + o_state, b_state, mask=m_state)
    for i_j in range(0, n_segments - 1):
        i_here = (i_first + i_step * i_j) * H + i_h
        b_state = tl.load(p.local_states + i_here * (K * V) + o_state, mask=m_state, other=0.0)
        if i_j > 0:
            # in parts, since a whole transition may be more than a program holds; other threads wrote the state
            tl.debug_barrier()
            for i_c in range(0, (K + BC - 1) // BC):
                o_from = i_c * BC + o_c
                p_from = p.start_states + i_here * (K * V) + (o_v[:, None] * K + o_from[None, :])
                b_before = tl.load(p_from, mask=(o_v[:, None] < V) & (o_from[None, :] < K), other=0.0)
                o_pair = o_from[:, None] * K + o_k[None, :]
                if CALL.back:
                    o_pair = o_from[:, None] + o_k[None, :] * K
                m_pair = (o_from[:, None] < K) & (o_k[None, :] < K)
                b_transition = tl.load(p.transitions + i_here * (K * K) + o_pair, mask=m_pair, other=0.0)
                b_passed = tl.dot(b_before, b_transition, acc=b_state, input_precision=CALL.precision)
                if CALL.listed:
                    # an infinite state does not get through a transition of zeros, either
                    b_passed = tl.where(tl.max(tl.max(tl.abs(b_transition), 1), 0) == 0.0, b_state, b_passed)
                b_state = b_passed
        i_next = i_here + i_step * H
        tl.store(p.start_states + i_next * (K * V) + o_state, b_state, mask=m_state)
