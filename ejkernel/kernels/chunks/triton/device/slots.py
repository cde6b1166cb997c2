"""Device code: slots of a pool of states, which sequences start from and leave states in."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import CHUNKS, CUTS, rows_by_chunks


class Prompt(NamedTuple):
    """The tokens of a sequence that go by chunks."""

    i_n: Any  # the sequence
    i_first: Any  # where the first one lies
    n_rows: Any  # how many there are
    n_tokens: Any  # and how many tokens the sequence has
    i_chunk0: Any  # the number of its first chunk


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
            b = tl.load(p_from + o, mask=o < SIZE)
            tl.store(p_to + o, b.to(p.copies.dtype.element_ty), mask=o < SIZE)


@triton.jit
def state_at(p_states, i_slot, i_h, CALL: tl.constexpr):
    """Where the state of a slot, or of a sequence's copy, and a head begins."""
    return p_states + (i_slot.to(tl.int64) * CALL.heads + i_h) * (CALL.key_dim * CALL.value_dim)


@triton.jit
def read_slot(p, i_n, i_h, is_copied, o_state, m_state, CALL: tl.constexpr):
    """The state that a sequence starts from: its copy, that of its slot, or zeros."""
    i_slot = tl.load(p.reads + i_n, mask=i_n < p.N, other=-1)
    if is_copied | (tl.load(p.held + i_n, mask=i_n < p.N, other=0) != 0):
        b_state = tl.load(state_at(p.copies, i_n, i_h, CALL) + o_state, mask=m_state, other=0.0).to(tl.float32)
    else:
        p_slot = state_at(p.pool, i_slot, i_h, CALL)
        b_state = tl.load(p_slot + o_state, mask=m_state & (i_slot >= 0), other=0.0).to(tl.float32)
    return b_state


@triton.jit
def write_slots(p, b_state, i_n, i_h, n_done, n_by_chunks, o_state, m_state, CALL: tl.constexpr):
    """Writes the state after `n_done` tokens to the slots that want it; returns after how many tokens to write next.

    Among the `n_by_chunks` tokens that go by chunks, states are known at multiples of `CUTS` tokens. A slot that wants
    one in between gets the one before, from which the token-by-token kernel goes on.
    """
    n_next = 2147483647
    for i_c in range(0, p.C):
        n_at = tl.load(p.at + i_n * p.C + i_c, mask=i_n < p.N, other=-1)
        i_slot = tl.load(p.slots + i_n * p.C + i_c, mask=i_n < p.N, other=-1)
        n_at -= tl.where(n_at < n_by_chunks, n_at % CUTS, 0)
        if (n_at == n_done) & (i_slot >= 0):
            p_slot = state_at(p.pool, i_slot, i_h, CALL)
            tl.store(p_slot + o_state, b_state.to(p.pool.dtype.element_ty), mask=m_state)
        n_next = tl.where(n_at > n_done, tl.minimum(n_next, n_at), n_next)
    return n_next


@triton.jit
def locate_prompt(i_prompt, p, CALL: tl.constexpr):
    """The tokens of the i-th sequence that has any which go by chunks; the sequence is -1 if there are not so many."""
    i_listed = tl.load(p.prompts + i_prompt)
    i_n = tl.maximum(i_listed, 0)
    i_first = tl.load(p.packing + i_n)
    n_tokens = tl.load(p.packing + i_n + 1) - i_first
    i_chunk0 = tl.load(p.packing + CHUNKS * (p.N + 2) + i_n).to(tl.int64)
    return Prompt(i_listed, i_first.to(tl.int64), rows_by_chunks(n_tokens, CALL), n_tokens, i_chunk0)


@triton.jit
def write_border(p, b_state, i_h, n_done, prompt, o_state, m_state, CALL: tl.constexpr):
    """`write_slots` for a walk over chunks, which goes on to what this returns: past its tokens if it is at the end.

    There it leaves the state to the token-by-token kernel, if any tokens are left.
    """
    n_next = write_slots(p, b_state, prompt.i_n, i_h, n_done, prompt.n_rows, o_state, m_state, CALL)
    if (n_done == prompt.n_rows) & (prompt.n_rows < prompt.n_tokens):
        tl.store(state_at(p.copies, prompt.i_n, i_h, CALL) + o_state, b_state, mask=m_state)
    return tl.where(n_done < prompt.n_rows, tl.minimum(n_next, prompt.n_rows), prompt.n_rows + 1)
