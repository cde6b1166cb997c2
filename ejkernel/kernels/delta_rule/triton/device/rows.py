"""Device code: the rows of one chunk and head, and how their arrays are read and written."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import (
    after_first_gate,
    load_columns,
    load_kept,
    load_rows,
    locate_block,
    rows_kept,
    store_tile,
    visit,
    visit_of_block,
)


class Rows(NamedTuple):
    """The rows of one chunk and head."""

    chunk: Any
    i_h: Any  # the head
    i_chunk: Any  # the chunk's number among those of all sequences and heads
    i_token: Any  # where the first row lies in memory
    o_r: Any  # the rows' numbers in the chunk
    o_t: Any  # where they lie in memory, from the first of them on
    m_read: Any  # which rows hold tokens


@triton.jit
def rows_of_block(block, i_c, i_h, p, CALL: tl.constexpr):
    """The rows of one chunk of a block, and one head."""
    chunk, i_chunk, i_token, o_r, o_t = visit_of_block(block, i_c, i_h, p, CALL)
    return Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, chunk.i_row + o_r < chunk.n_read)


@triton.jit
def writable(rows):
    """The rows that have memory: those with tokens, and padding."""
    return rows.chunk.i_row + rows.o_r < rows.chunk.n_end


@triton.jit
def gated(rows, CALL: tl.constexpr):
    """The rows that have a gate; a sequence's first gate is already in the state that the sequence starts from."""
    return rows.m_read & after_first_gate(rows.chunk, rows.chunk.i_row + rows.o_r, CALL)


@triton.jit
def load_head(p_x, rows, o_d, HEADS: tl.constexpr, D: tl.constexpr, CALL: tl.constexpr, WHOLE: tl.constexpr = False):
    """`[rows, dims]` of an array with HEADS heads, each of which several heads of the call may share."""
    i_head = rows.i_h // (CALL.heads // HEADS)
    PAD: tl.constexpr = D // o_d.shape[0] * o_d.shape[0] != D
    return load_rows(p_x, rows.i_token, i_head, rows.o_t, rows.m_read, o_d, HEADS, D, PAD, False, WHOLE)


@triton.jit
def store_head(p_x, b, rows, o_d, m_tile, D: tl.constexpr, CALL: tl.constexpr, WHOLE: tl.constexpr = False):
    """Stores `[rows, dims]` in an array with as many heads as the call."""
    H: tl.constexpr = CALL.heads
    i_rows = (rows.i_token * H + rows.i_h) * D
    o_rows = rows.o_t[:, None] * (H * D) + o_d[None, :]
    store_tile(p_x + i_rows + o_rows, b.to(p_x.dtype.element_ty), m_tile, WHOLE)


@triton.jit
def load_head_columns(p_x, rows, o_d, HEADS: tl.constexpr, D: tl.constexpr, CALL: tl.constexpr):
    """`load_head` as `[dims, rows]`."""
    i_head = rows.i_h // (CALL.heads // HEADS)
    PAD: tl.constexpr = D // o_d.shape[0] * o_d.shape[0] != D
    return load_columns(p_x, rows.i_token, i_head, rows.o_t, rows.m_read, o_d, HEADS, D, PAD, False)


@triton.jit
def load_gate_columns(p, rows, o_k, CALL: tl.constexpr):
    """Gates of key dims, `[dims, rows]`."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    PAD: tl.constexpr = K // o_k.shape[0] * o_k.shape[0] != K
    return load_columns(p.gate, rows.i_token, rows.i_h, rows.o_t, gated(rows, CALL), o_k, H, K, PAD, True)


@triton.jit
def load_beta(p, rows, CALL: tl.constexpr):
    return tl.load(p.beta + (rows.i_token + rows.o_t) * CALL.heads + rows.i_h, mask=rows.m_read, other=0.0).to(
        tl.float32
    )


@triton.jit
def pairs_at(p_pair, rows, p, CALL: tl.constexpr):
    """Where a matrix of pairs of a chunk's rows lies."""
    C: tl.constexpr = CALL.chunk
    o_kept = rows_kept(rows.chunk, rows.i_chunk, rows.i_h, p, C, CALL)
    return p_pair + o_kept + rows.o_r[:, None] * C + rows.o_r[None, :]


@triton.jit
def load_pairs(p_pair, rows, p, CALL: tl.constexpr):
    """A matrix of pairs of a chunk's rows, `[C, C]`."""
    return load_kept(pairs_at(p_pair, rows, p, CALL), writable(rows)[:, None], CALL)


@triton.jit
def for_chunks(p, i_block, i_h, i_v, DO_CHUNK: tl.constexpr, CALL: tl.constexpr):
    """Calls `DO_CHUNK` for the chunks of one block and head."""
    block = locate_block(i_block, p, CALL)
    if CALL.listed:
        # hoisted code would take registers, and prefetched rows shared memory
        for i_c in tl.range(block.i_c, block.i_end, num_stages=1, disable_licm=True):
            DO_CHUNK(p, block, i_c, i_h, i_v, CALL)
    else:
        DO_CHUNK(p, block, block.i_c, i_h, i_v, CALL)


@triton.jit
def for_flagged_heads(
    p, i_block, i_v, FLAGS: tl.constexpr, EACH: tl.constexpr, DO_CHUNK: tl.constexpr, CALL: tl.constexpr
):
    """Calls `DO_CHUNK` for the chunks and heads of a block that the function FLAGS flags; a head has EACH flags.

    Most often there are none, so a program reads the flags of all heads at once.
    """
    o_flag = tl.arange(0, CALL.flags)
    block = locate_block(i_block, p, CALL)
    if CALL.listed:
        for i_c in range(block.i_c, block.i_end):
            chunk = visit(i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
            b_flag = FLAGS(p, block, chunk, o_flag, CALL)
            if tl.sum(b_flag, 0) > 0:
                for i_h in range(0, CALL.heads):
                    if tl.sum(tl.where(o_flag // EACH == i_h, b_flag, 0), 0) > 0:
                        DO_CHUNK(p, block, i_c, i_h, i_v, CALL)
    else:
        chunk = visit(block.i_c, block.i_n, block.n_rows, block.n_read, p, CALL)
        b_flag = FLAGS(p, block, chunk, o_flag, CALL)
        if tl.sum(b_flag, 0) > 0:
            for i_h in range(0, CALL.heads):
                if tl.sum(tl.where(o_flag // EACH == i_h, b_flag, 0), 0) > 0:
                    for_chunks(p, i_block, i_h, i_v, DO_CHUNK, CALL)
