"""Device code: where blocks of tokens lie, packed or not, and their rows as tiles.

Names in device code: `i_` index, `b_` block in registers, `p_` pointer, `o_` offset, `m_` mask; letters as in `Call`.
"""

import triton
import triton.language as tl

# Rows of the packing table: sequence borders, then how many chunks, groups and segments lie before each sequence.
CHUNKS = tl.constexpr(1)
GROUPS = tl.constexpr(2)
SEGMENTS = tl.constexpr(3)


@triton.jit
def locate(i_block, p, ROW: tl.constexpr, L, CALL: tl.constexpr):
    """Sequence, block in it, first token, tokens and readable tokens of the i-th block of L tokens.

    The sequence past the last is padding: its tokens are written, as zeros, and never read.
    """
    if CALL.packed:
        i_n = tl.load(p.owner + i_block)
        i_first = tl.load(p.packing + i_n)
        n_rows = tl.load(p.packing + i_n + 1) - i_first
        i_j = i_block - tl.load(p.packing + ROW * (p.N + 2) + i_n)
        n_read = tl.where(i_n < p.N, n_rows, 0)
        i_first = i_first.to(tl.int64)
    else:
        n_blocks = tl.cdiv(p.T, L)
        i_n = i_block // n_blocks
        i_j = i_block % n_blocks
        i_first = i_n.to(tl.int64) * p.T
        n_rows = i_block * 0 + p.T
        n_read = n_rows
    return i_n, i_j, i_first, n_rows, n_read


@triton.jit
def blocks_before(i_n, p, ROW: tl.constexpr, L, CALL: tl.constexpr):
    """How many blocks of L tokens lie in the sequences before this one."""
    if CALL.packed:
        return tl.load(p.packing + ROW * (p.N + 2) + i_n).to(tl.int64)
    else:
        return (i_n * tl.cdiv(p.T, L)).to(tl.int64)


@triton.jit
def token_of(i_first, n_rows, i_row, FLIP: tl.constexpr):
    """Where row `i_row` of a sequence lies in memory; FLIP visits the last token first."""
    if FLIP:
        return i_first + (n_rows - 1 - i_row)
    else:
        return i_first + i_row


@triton.jit
def token_offsets(o_r, FLIP: tl.constexpr):
    """Where rows lie in memory, from the first of them on."""
    if FLIP:
        return -o_r
    else:
        return o_r


@triton.jit
def locate_chunk(i_block, i_h, p, CALL: tl.constexpr):
    """The i-th chunk of all sequences: its number among those of all heads; its first row in its sequence, where that
    lies, and how many rows the sequence has, and readable ones; and the chunk's rows, and `token_offsets` of these."""
    _, i_c, i_first, n_rows, n_read = locate(i_block, p, CHUNKS, CALL.chunk, CALL)
    i_chunk = i_block.to(tl.int64) * CALL.heads + i_h
    i_row = i_c * CALL.chunk
    i_token = token_of(i_first, n_rows, i_row, CALL.flip)
    o_r = tl.arange(0, CALL.chunk)
    return i_chunk, i_row, i_token, n_rows, n_read, o_r, token_offsets(o_r, CALL.flip)


@triton.jit
def locate_segment(i_block, p, CALL: tl.constexpr):
    """What `locate` gives of the i-th time segment, how many chunks lie in the sequences before its own, how many its
    sequence has, which of these is its first, and how many are its own."""
    C: tl.constexpr = CALL.chunk
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p, SEGMENTS, p.L, CALL)
    i_chunk0 = blocks_before(i_n, p, CHUNKS, C, CALL)
    n_chunks = tl.cdiv(n_rows, C)
    i_from = i_j * (p.L // C)
    n_steps = tl.minimum(n_chunks - i_from, tl.cdiv(p.L, C))
    return i_n, i_j, i_first, n_rows, n_read, i_chunk0, n_chunks, i_from, n_steps


@triton.jit
def load_rows(
    p, i_token, i_head, o_r, m_r, o_c,
    HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows of one head as a tile; what the masks leave out is 0."""
    p_tile = p + (i_token * HEADS + i_head) * D + o_r[:, None] * (HEADS * D) + o_c[None, :]
    if WHOLE and not PAD:
        b = tl.load(p_tile)
    else:
        m_tile = m_r[:, None]
        if PAD:
            m_tile = m_tile & (o_c[None, :] < D)
        b = tl.load(p_tile, mask=m_tile, other=0.0)
    if WIDE:
        b = b.to(tl.float32)
    return b


@triton.jit
def load_columns(
    p, i_token, i_head, o_t, m_r, o_c,
    HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows of one head as the columns of a tile; what the masks leave out is 0."""
    p_tile = p + (i_token * HEADS + i_head) * D + (o_t[None, :] * (HEADS * D) + o_c[:, None])
    if WHOLE and not PAD:
        b = tl.load(p_tile)
    else:
        m_tile = m_r[None, :]
        if PAD:
            m_tile = m_tile & (o_c[:, None] < D)
        b = tl.load(p_tile, mask=m_tile, other=0.0)
    if WIDE:
        b = b.to(tl.float32)
    return b


@triton.jit
def store_tile(p_tile, b, m_tile, WHOLE: tl.constexpr):
    """Stores all of a tile, or what a mask leaves of it."""
    if WHOLE:
        tl.store(p_tile, b)
    else:
        tl.store(p_tile, b, mask=m_tile)
