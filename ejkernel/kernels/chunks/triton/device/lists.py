"""Device code: the chunks of rows that hold several sequences, none of which crosses a border between two."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import CUT, FACTS, FIRST, REAL, token_of


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def load_ids(p, i_first, i_row, CALL: tl.constexpr):
    """Ids of rows; those of padding are all -1."""
    i_token = token_of(i_first, p.T, i_row, CALL.flip)
    return tl.maximum(tl.load(p.ids + i_token, mask=(i_row >= 0) & (i_row < p.T), other=-1), -1)


@triton.jit
def list_chunks(p, CALL: tl.constexpr):
    """Lists the chunks of a row, as `visit` reads them: `p.chunks`, two places more than tokens, and `p.before`.

    A chunk begins with a sequence, or with padding, and every `CALL.chunk` tokens from there. After the last chunk the
    list has the row's end. No state passes from one sequence to the next, nor through padding between them; a state
    does pass through padding before a row's first sequence, and behind its last.
    """
    C: tl.constexpr = CALL.chunk
    BLOCK: tl.constexpr = CALL.block
    i_n = tl.program_id(0).to(tl.int64)
    i_first = i_n * p.T
    p_chunks = p.chunks + i_n * (p.T + 2)
    p_before = p.before + i_n * (tl.cdiv(p.T, C) + 1)
    o_r = tl.arange(0, BLOCK)
    # the first and the last token of the row that is no padding
    n_low = p.T
    n_high = -1
    for i in range(0, p.T, BLOCK):
        m_real = load_ids(p, i_first, i + o_r, CALL) >= 0
        n_low = tl.minimum(n_low, tl.min(tl.where(m_real, i + o_r, p.T), 0))
        n_high = tl.maximum(n_high, tl.max(tl.where(m_real, i + o_r, -1), 0))
    n_listed = 0
    i_begin = 0
    for i in range(0, p.T, BLOCK):
        i_row = i + o_r
        m_row = i_row < p.T
        b_id = load_ids(p, i_first, i_row, CALL)
        m_first = m_row & ((i_row == 0) | (b_id != load_ids(p, i_first, i_row - 1, CALL)))
        b_begin = tl.maximum(tl.associative_scan(tl.where(m_first, i_row, 0), 0, larger), i_begin)
        m_chunk = m_row & ((i_row - b_begin) % C == 0)
        b_number = n_listed + tl.cumsum(m_chunk.to(tl.int32), 0)
        m_cut = m_first & (i_row > n_low) & (i_row <= n_high)
        b_facts = tl.where(b_id >= 0, REAL, 0) | tl.where(m_first, FIRST, 0) | tl.where(m_cut, CUT, 0)
        tl.store(p_chunks + b_number - 1, (i_row << FACTS) | b_facts, mask=m_chunk)
        tl.store(p_before + i_row // C, b_number - m_chunk.to(tl.int32), mask=m_row & (i_row % C == 0))
        n_listed += tl.sum(m_chunk.to(tl.int32), 0)
        i_begin = tl.max(b_begin, 0)
    tl.store(p_chunks + n_listed + tl.arange(0, 2), tl.full([2], 0, tl.int32) + (p.T << FACTS))
    tl.store(p_before + tl.cdiv(p.T, C), n_listed)
