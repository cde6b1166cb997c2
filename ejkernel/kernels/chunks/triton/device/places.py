"""Device code: where blocks of tokens lie, packed or not, and their rows as tiles.

Names in device code: `i_` index, `b_` block in registers, `p_` pointer, `o_` offset, `m_` mask; letters as in `Call`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Rows of the packing table: sequence borders, then how many chunks, groups and segments lie before each sequence.
CHUNKS = tl.constexpr(1)
GROUPS = tl.constexpr(2)
SEGMENTS = tl.constexpr(3)
# Cuts of a prompt at multiples of so many tokens change no bit.
CUTS = tl.constexpr(128)
# An entry of a row's list of chunks is the chunk's first row and, in the last bits, three facts: the chunk is no
# padding; it is the first of its sequence; no state passes to it from the chunk before it.
REAL = tl.constexpr(1)
FIRST = tl.constexpr(2)
CUT = tl.constexpr(4)
FACTS = tl.constexpr(3)


class Chunk(NamedTuple):
    """One chunk that a program visits, in a sequence or, where chunks are listed, in a row of several sequences.

    Listed chunks, of `list_chunks`, begin at any row. Arrays that have an entry for each token need nothing special for
    them. Arrays that have one for each chunk have it at `i_c`, which several listed chunks may share: of these only one
    takes a state from before it, and only one leaves a state behind it.
    """

    i_n: Any  # its sequence, or row
    i_c: Any  # its number there; if listed, its first row divided by a chunk's size
    i_row: Any  # its first row
    n_read: Any  # the row that ends those that are read
    n_end: Any  # the row that ends those that are written
    entry: Any  # its entry in the list; if pooled, whether it is the first of a sequence that starts from no slot
    next_entry: Any  # and that of the next chunk


class Span(NamedTuple):
    """A block of tokens: where it lies in its sequence, and where the sequence lies in memory.

    The sequence past the last is padding: its tokens are written, as zeros, and never read. Where chunks are listed,
    the sequence is a whole row.
    """

    i_n: Any  # the sequence
    i_j: Any  # the block's number in it
    i_first: Any  # the sequence's first token
    n_rows: Any  # its tokens
    n_read: Any  # and how many of them can be read


class Block(NamedTuple):
    """The chunk of a program or, where chunks are listed, all that begin where this one would lie."""

    i_block: Any
    i_n: Any  # the sequence, or row
    i_c: Any  # the number of the first chunk
    i_end: Any  # the number after the last one
    i_first: Any  # as in `Span`
    n_rows: Any
    n_read: Any


@triton.jit
def rows_by_chunks(n_rows, CALL: tl.constexpr):
    """How many of a pooled sequence's tokens go by chunks; those behind them go token by token.

    It is a fact of the sequence alone. Of a prompt that is cut at multiples of `CUTS` tokens, each token goes the same
    way in a piece as it would in the whole.
    """
    if CALL.most_by_token is None:
        return n_rows * 0
    else:
        n_last = n_rows % CUTS
        return n_rows - tl.where(n_last <= CALL.most_by_token, n_last, 0)


@triton.jit
def locate(i_block, p, ROW: tl.constexpr, L, CALL: tl.constexpr):
    """The span of the i-th block of L tokens; ROW is the row of the packing table that counts such blocks."""
    if CALL.packed:
        i_n = tl.load(p.owner + i_block)
        i_first = tl.load(p.packing + i_n)
        n_rows = tl.load(p.packing + i_n + 1) - i_first
        i_j = i_block - tl.load(p.packing + ROW * (p.N + 2) + i_n)
        n_read = tl.where(i_n < p.N, n_rows, 0)
        if CALL.pooled:
            # other kernels take the rest, and padding
            n_read = rows_by_chunks(n_read, CALL)
            n_rows = n_read
        i_first = i_first.to(tl.int64)
    else:
        n_blocks = tl.cdiv(p.T, L)
        i_n = i_block // n_blocks
        i_j = i_block % n_blocks
        i_first = i_n.to(tl.int64) * p.T
        n_rows = i_block * 0 + p.T
        n_read = n_rows
    return Span(i_n, i_j, i_first, n_rows, n_read)


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
def load_entries(i_c, i_n, p):
    """The entries of the i-th chunk of a row's list, and of the next one."""
    p_entry = p.chunks + i_n.to(tl.int64) * (p.T + 2) + i_c
    return tl.load(p_entry), tl.load(p_entry + 1)


@triton.jit
def listed_chunk(i_n, entry, next_entry, CALL: tl.constexpr):
    """The chunk of these entries of a row's list."""
    i_row = entry >> FACTS
    n_end = next_entry >> FACTS
    n_read = tl.where((entry & REAL) != 0, n_end, 0)
    return Chunk(i_n, i_row // CALL.chunk, i_row, n_read, n_end, entry, next_entry)


@triton.jit
def visit(i_c, i_n, n_rows, n_read, p, CALL: tl.constexpr):
    """The i-th chunk of a sequence, or of a row's list."""
    if CALL.listed:
        entry, next_entry = load_entries(i_c, i_n, p)
        return listed_chunk(i_n, entry, next_entry, CALL)
    else:
        facts = 0
        if CALL.pooled:
            starts_anew = (i_c == 0) & (tl.load(p.reads + i_n, mask=i_n < p.N, other=0) < 0)
            facts = tl.where(starts_anew, FIRST | CUT, 0)
        return Chunk(i_n, i_c, i_c * CALL.chunk, n_read, n_rows, facts, 0)


@triton.jit
def chunk_at(i_c, span, p, CALL: tl.constexpr):
    """The i-th chunk of the sequence, or row, of a span."""
    return visit(i_c, span.i_n, span.n_rows, span.n_read, p, CALL)


@triton.jit
def first_entries(i_from, n_steps, i_n, p, REVERSE: tl.constexpr):
    """The entries of the chunk that a walk over `n_steps` chunks of a row visits first."""
    return load_entries(tl.maximum(i_from + n_steps - 1, 0) if REVERSE else i_from, i_n, p)


@triton.jit
def next_entries(i_c, i_n, p, REVERSE: tl.constexpr):
    """The entries of the chunk that a walk visits after the i-th.

    A walk loads them one chunk ahead. Loaded with the chunk itself, its rows would be fetched one chunk less ahead; two
    chunks ahead, a value would go around the loop twice, and the compiler fetches nothing ahead of such a loop.
    """
    return load_entries(tl.maximum(i_c - 1, 0) if REVERSE else i_c + 1, i_n, p)


@triton.jit
def chunk_here(i_c, i_n, p, CALL: tl.constexpr):
    """The i-th chunk of a row's list, loaded once more for what is not fetched ahead.

    What a walk computes for rows that it fetches two chunks ahead would go around its loop twice, in registers that it
    does not have. This load is another instruction to the compiler, which would else join it with that of
    `next_entries`.
    """
    p_entry = p.chunks + i_n.to(tl.int64) * (p.T + 2) + i_c
    return listed_chunk(i_n, tl.load(p_entry, cache_modifier=".ca"), tl.load(p_entry + 1, cache_modifier=".ca"), CALL)


@triton.jit
def listed_before(i_n, i_c, p, CALL: tl.constexpr):
    """How many chunks of a row's list begin before row `i_c * chunk`."""
    return tl.load(p.before + i_n.to(tl.int64) * (tl.cdiv(p.T, CALL.chunk) + 1) + i_c)


@triton.jit
def listed_from(i_n, i_c, n_chunks, p, CALL: tl.constexpr):
    """The first chunk of a row's list that begins in `n_chunks` chunks' sizes from the `i_c`-th on; their number."""
    i_first = listed_before(i_n, i_c, p, CALL)
    return i_first, listed_before(i_n, i_c + n_chunks, p, CALL) - i_first


@triton.jit
def rows_kept(chunk, i_chunk, i_h, p, SIZE: tl.constexpr, CALL: tl.constexpr):
    """Where a chunk begins in an array of SIZE numbers of each row, by chunks or, if these are listed, by rows."""
    if CALL.listed:
        return ((chunk.i_n.to(tl.int64) * CALL.heads + i_h) * p.T + chunk.i_row) * SIZE
    else:
        return i_chunk * (SIZE * CALL.chunk)


@triton.jit
def flag_at(p_flag, chunk, i_chunk, i_h, p, CALL: tl.constexpr):
    """Where a chunk's flag lies; a listed one's is that of its first row."""
    if CALL.listed:
        return p_flag + (chunk.i_n.to(tl.int64) * CALL.heads + i_h) * p.T + chunk.i_row
    else:
        return p_flag + i_chunk


@triton.jit
def load_flag(p_flag, chunk, i_chunk, i_h, p, CALL: tl.constexpr):
    return tl.load(flag_at(p_flag, chunk, i_chunk, i_h, p, CALL))


@triton.jit
def load_kept(p_tile, m_tile, CALL: tl.constexpr):
    """Loads from an array of `rows_kept`, masked for listed chunks, which may have fewer rows than a chunk's size."""
    if CALL.listed:
        return tl.load(p_tile, mask=m_tile, other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def visit_of_block(block, i_c, i_h, p, CALL: tl.constexpr):
    """A chunk of a block, its number among the chunks of all heads, its first token, its rows and their offsets."""
    i_chunk = block.i_block.to(tl.int64) * CALL.heads + i_h
    chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
    i_token = token_of(block.i_first, block.n_rows, chunk.i_row, CALL.flip)
    o_r = tl.arange(0, CALL.chunk)
    return chunk, i_chunk, i_token, o_r, token_offsets(o_r, CALL.flip)


@triton.jit
def keep_branch(p, i_n):
    """Makes the compiler keep a branch that sets constants, where it would select them in every chunk.

    It stores nothing, as no row has a negative number, but the compiler does not know that.
    """
    tl.store(p.chunks, 0, mask=i_n < 0)


@triton.jit
def is_real(chunk):
    """Whether a listed chunk is no padding."""
    return (chunk.entry & REAL) != 0


@triton.jit
def is_cut(chunk, REVERSE: tl.constexpr):
    """Whether no state passes to a listed chunk from the one that a walk visits before it."""
    return ((chunk.next_entry if REVERSE else chunk.entry) & CUT) != 0


@triton.jit
def takes_state(chunk):
    """Whether a listed chunk takes a state from before it."""
    return (chunk.entry & (REAL | CUT)) == REAL


@triton.jit
def leaves_state(chunk):
    """Whether a listed chunk leaves a state behind it."""
    return ((chunk.entry & REAL) != 0) & ((chunk.next_entry & CUT) == 0)


@triton.jit
def after_first_gate(chunk, i_row, CALL: tl.constexpr):
    """Which rows are not the first of a sequence, whose gate has already been applied to the initial state.

    From a slot of a pool the first gate counts as any other; from nothing it has nothing to decay.
    """
    if CALL.listed or CALL.pooled:
        return (i_row > chunk.i_row) | ((chunk.entry & FIRST) == 0)
    else:
        return i_row > 0


@triton.jit
def locate_block(i_block, p, CALL: tl.constexpr):
    """The i-th chunk of all sequences; where chunks are listed, all that begin where it would lie."""
    i_n, i_c, i_first, n_rows, n_read = locate(i_block, p, CHUNKS, CALL.chunk, CALL)
    i_end = i_c + 1
    if CALL.listed:
        i_c, n_listed = listed_from(i_n, i_c, 1, p, CALL)
        i_end = i_c + n_listed
    return Block(i_block, i_n, i_c, i_end, i_first, n_rows, n_read)


@triton.jit
def locate_segment(i_block, p, CALL: tl.constexpr):
    """`locate` of the i-th time segment, the number of chunks in the sequences before its own and in its own, and the
    segment's first chunk and number of chunks."""
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
