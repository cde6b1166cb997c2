"""Device code: the tables of a call with a pool, one kernel where JAX would launch several."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import rows_by_chunks

# A number larger than that of any write.
NONE = tl.constexpr(2147483647)


@triton.jit
def border(p, i_n):
    """Where a sequence begins; the one past the last is padding."""
    return tl.minimum(tl.load(p.cu_seqlens + i_n, mask=i_n <= p.N, other=2147483647), p.T)


@triton.jit
def load_reads(p, i_n):
    """The slots that sequences start from, -1 for none."""
    i_slot = tl.load(p.source + i_n, mask=i_n < p.N, other=-1)
    return tl.where((i_slot >= 0) & (i_slot < p.S), i_slot, -1)


@triton.jit
def load_writes(p, i_write):
    """The slots of some writes, -1 for none, and after how many tokens of a sequence they are written."""
    m_write = i_write < p.N * p.C
    i_slot = tl.load(p.target + i_write, mask=m_write, other=-1)
    i_n = i_write // p.C
    n_tokens = border(p, i_n + 1) - border(p, i_n)
    n_at = n_tokens
    if p.at is not None:
        n_at = tl.load(p.at + i_write, mask=m_write, other=-1)
    is_slot = (i_slot >= 0) & (i_slot < p.S) & (n_at >= 0) & (n_at <= n_tokens)
    return tl.where(is_slot, i_slot, -1), tl.minimum(tl.maximum(n_at, 0), n_tokens)


@triton.jit
def first_write(p, b_slot, CALL: tl.constexpr):
    """The first write to each of some slots, or `NONE`."""
    b_first = tl.full(b_slot.shape, NONE, tl.int32)
    for i in range(0, p.N * p.C, CALL.block):
        i_write = i + tl.arange(0, CALL.block)
        b_other = load_writes(p, i_write)[0]
        m_same = (b_other[None, :] == b_slot[:, None]) & (b_other >= 0)[None, :]
        b_first = tl.minimum(b_first, tl.min(tl.where(m_same, i_write[None, :], NONE), 1))
    return b_first


@triton.jit
def count_chunks(p, i_n, CALL: tl.constexpr):
    """How many chunks sequences have."""
    n_tokens = tl.where(i_n < p.N, border(p, i_n + 1) - border(p, i_n), 0)
    return tl.cdiv(rows_by_chunks(n_tokens, CALL), CALL.chunk)


@triton.jit
def make_tables(p, CALL: tl.constexpr):
    """What `Packing` and `Slots` have of a call's borders and slots.

    A program fills a block of one table: of writes, of sequences, or of chunks. The first one fills those for which
    sequences are counted.
    """
    BLOCK: tl.constexpr = CALL.block
    o = tl.arange(0, BLOCK)
    n_writes = tl.cdiv(p.N * p.C, BLOCK)
    n_sequences = tl.cdiv(p.N, BLOCK)
    i_part = tl.program_id(0) - 1
    if i_part < 0:
        n_chunks = 0
        n_prompts = 0
        for i in range(0, p.N + 2, BLOCK):
            i_n = i + o
            tl.store(p.packing + i_n, border(p, i_n), mask=i_n < p.N + 2)
            if CALL.chunk is not None:
                b_chunks = count_chunks(p, i_n, CALL)
                m_prompt = b_chunks > 0
                b_ends = n_chunks + tl.cumsum(b_chunks, 0)
                b_rank = n_prompts + tl.cumsum(m_prompt.to(tl.int32), 0) - 1
                tl.store(p.packing + (p.N + 2) + i_n, b_ends - b_chunks, mask=i_n < p.N + 2)
                # borders that decrease might make more prompts than there is room for
                tl.store(p.prompts + b_rank, i_n, mask=m_prompt & (b_rank < p.M))
                n_chunks += tl.sum(b_chunks, 0)
                n_prompts += tl.sum(m_prompt.to(tl.int32), 0)
        if CALL.chunk is not None:
            for i in range(n_prompts, p.M, BLOCK):
                tl.store(p.prompts + i + o, tl.full([BLOCK], -1, tl.int32), mask=i + o < p.M)
    elif i_part < n_writes:
        i_write = i_part * BLOCK + o
        i_slot, n_at = load_writes(p, i_write)
        # if several sequences write a slot, the first one does, with all heads
        i_slot = tl.where(first_write(p, i_slot, CALL) == i_write, i_slot, -1)
        tl.store(p.slots + i_write, i_slot, mask=i_write < p.N * p.C)
        tl.store(p.after + i_write, n_at, mask=i_write < p.N * p.C)
    elif i_part < n_writes + n_sequences:
        i_n = (i_part - n_writes) * BLOCK + o
        i_slot = load_reads(p, i_n)
        i_write = first_write(p, i_slot, CALL)
        is_held = (i_slot >= 0) & (i_write != NONE) & (i_write // p.C != i_n)
        tl.store(p.reads + i_n, i_slot, mask=i_n < p.N)
        tl.store(p.held + i_n, is_held.to(tl.int32), mask=i_n < p.N)
    elif CALL.chunk is not None:
        i_chunk = (i_part - n_writes - n_sequences) * BLOCK + o
        # as many sequences are before a chunk's own as have all their chunks before it
        n_before = tl.zeros([BLOCK], tl.int32)
        n_chunks = 0
        for i in range(0, p.N, BLOCK):
            b_chunks = count_chunks(p, i + o, CALL)
            b_ends = n_chunks + tl.cumsum(b_chunks, 0)
            m_before = (b_ends[None, :] <= i_chunk[:, None]) & (i + o < p.N)[None, :]
            n_before += tl.sum(m_before.to(tl.int32), 1)
            n_chunks += tl.sum(b_chunks, 0)
        tl.store(p.owner + i_chunk, n_before, mask=i_chunk < p.B)
