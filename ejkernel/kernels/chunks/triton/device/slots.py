"""Device code: slots of a pool of states, which sequences start from and leave states in."""

import triton
import triton.language as tl


@triton.jit
def hold(p, CALL: tl.constexpr):
    """Copies initial states out of slots that another sequence writes, since programs run in any order."""
    H: tl.constexpr = CALL.heads
    SIZE: tl.constexpr = CALL.key_dim * CALL.value_dim
    BLOCK: tl.constexpr = CALL.value_block
    i_program = tl.program_id(0)
    i_n = i_program // H
    if tl.load(p.held + i_n) != 0:
        p_from = p.states + (tl.load(p.reads + i_n).to(tl.int64) * H + i_program % H) * SIZE
        p_to = p.copies + i_program.to(tl.int64) * SIZE
        for i in range(0, SIZE, BLOCK):
            o = i + tl.arange(0, BLOCK)
            tl.store(p_to + o, tl.load(p_from + o, mask=o < SIZE), mask=o < SIZE)


@triton.jit
def read_slot(p, i_n, i_h, o_state, m_state, CALL: tl.constexpr):
    """The state that a sequence starts from: that of its slot, or zeros."""
    SIZE: tl.constexpr = CALL.key_dim * CALL.value_dim
    i_slot = tl.load(p.reads + i_n, mask=i_n < p.N, other=-1)
    if tl.load(p.held + i_n, mask=i_n < p.N, other=0) != 0:
        b_state = tl.load(p.copies + (i_n.to(tl.int64) * CALL.heads + i_h) * SIZE + o_state, mask=m_state, other=0.0)
    else:
        p_slot = p.pool + (i_slot.to(tl.int64) * CALL.heads + i_h) * SIZE
        b_state = tl.load(p_slot + o_state, mask=m_state & (i_slot >= 0), other=0.0)
    return b_state.to(tl.float32)


@triton.jit
def write_slots(p, b_state, i_n, i_h, n_done, o_state, m_state, CALL: tl.constexpr):
    """Writes the state after `n_done` tokens to the slots that want it; returns after how many tokens to write next."""
    SIZE: tl.constexpr = CALL.key_dim * CALL.value_dim
    n_next = 2147483647
    for i_c in range(0, p.C):
        n_at = tl.load(p.at + i_n * p.C + i_c, mask=i_n < p.N, other=-1)
        i_slot = tl.load(p.slots + i_n * p.C + i_c, mask=i_n < p.N, other=-1)
        if (n_at == n_done) & (i_slot >= 0):
            p_slot = p.pool + (i_slot.to(tl.int64) * CALL.heads + i_h) * SIZE
            tl.store(p_slot + o_state, b_state.to(p.pool.dtype.element_ty), mask=m_state)
        n_next = tl.where(n_at > n_done, tl.minimum(n_next, n_at), n_next)
    return n_next
