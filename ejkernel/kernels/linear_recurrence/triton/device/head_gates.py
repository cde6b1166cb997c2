"""Device code for one decay a head: gates as the walks read them, and their gradient."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LEAST, LOG2E, in_bits
from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    CUT,
    FIRST,
    GROUPS,
    chunk_at,
    is_real,
    listed_from,
    locate,
    rows_kept,
    takes_state,
    token_of,
)


@triton.jit
def fold_chunk(p, span, chunk, i_block, o_r, o_h, CALL: tl.constexpr):
    """The results of `fold_head_gates` for one chunk; returns its flags, which it stores unless chunks are listed."""
    H: tl.constexpr = CALL.heads
    C: tl.constexpr = CALL.chunk
    m_gate = (chunk.i_row + o_r < chunk.n_read)[:, None] & (o_h < H)[None, :]
    if CALL.listed:
        # the first gate after a cut has no state to decay
        m_gate = m_gate & ((o_r > 0) | ((chunk.entry & CUT) == 0))[:, None]
    if CALL.decay == "constant":
        p_tile = p.gate + chunk.i_n.to(tl.int64) * H + (o_r * 0)[:, None] + o_h[None, :]
    else:
        p_tile = p.gate + token_of(span.i_first, span.n_rows, chunk.i_row + o_r, CALL.flip)[:, None] * H + o_h[None, :]
    b_gate = in_bits(tl.load(p_tile, mask=m_gate, other=0.0).to(tl.float32))
    # whole and fractional parts are summed apart: no strong gate costs a later one its digits
    b_whole = tl.floor(b_gate + 0.5)
    b_part = tl.cumsum(b_gate - b_whole, 0)
    b_whole = tl.cumsum(b_whole, 0)
    m_middle = (o_r == C // 2 - 1)[:, None]
    m_end = (o_r == C - 1)[:, None]
    b_whole_middle = tl.sum(tl.where(m_middle, b_whole, 0.0), 0)[None, :]
    b_part_middle = tl.sum(tl.where(m_middle, b_part, 0.0), 0)[None, :]
    b_whole_end = tl.sum(tl.where(m_end, b_whole, 0.0), 0)[None, :]
    b_part_end = tl.sum(tl.where(m_end, b_part, 0.0), 0)[None, :]
    b_early = b_whole_middle + b_part_middle
    b_late = (b_whole_end - b_whole_middle) + (b_part_end - b_part_middle)
    b_from_middle = (b_whole - b_whole_middle) + (b_part - b_part_middle)
    b_most = tl.maximum(tl.max(tl.abs(b_from_middle), 0)[None, :], tl.abs(b_early))

    i_chunk = (i_block.to(tl.int64) * H + o_h)[None, :]
    m_chunk = (o_h < H)[None, :]
    b_weight = tl.join(
        tl.join(tl.exp2(b_from_middle), tl.exp2(-b_from_middle)),
        tl.join(b_whole, b_part),
    )
    o_pair = tl.arange(0, 2)
    o_weight = o_r[:, None, None, None] * 4 + o_pair[None, None, :, None] * 2 + o_pair[None, None, None, :]
    p_tile = p.weights + rows_kept(chunk, i_chunk, o_h[None, :], p, 4, CALL)[:, :, None, None] + o_weight
    m_weight = m_chunk
    m_early = m_chunk
    m_late = m_chunk
    if CALL.listed:
        m_weight = m_weight & (chunk.i_row + o_r < chunk.n_end)[:, None]
        # several listed chunks share a place: one of them at most takes a state, and one leaves one
        m_early = m_early & takes_state(chunk)
        m_late = m_late & is_real(chunk) & ((chunk.next_entry & CUT) == 0)
    tl.store(p_tile, b_weight, mask=m_weight[:, :, None, None])
    tl.store(p.factors + i_chunk * 2, tl.exp2(b_early), mask=m_early)
    tl.store(p.factors + i_chunk * 2 + 1, tl.exp2(b_late), mask=m_late)
    if not CALL.listed:
        tl.store(p.flag + i_chunk, (b_most > CALL.limit).to(tl.int32), mask=m_chunk)
    return b_most > CALL.limit


@triton.jit
def fold_head_gates(p, CALL: tl.constexpr):
    """One gate a head for the walks: weights of a chunk's rows, a state's decays through the chunk, and its flag.

    Weights are decays from and to a reference in the middle of the chunk. A chunk is flagged if the gates of one of its
    halves are too strong for that; the walks then compute decays between rows from the sums of gates, stored too.
    """
    H: tl.constexpr = CALL.heads
    BH: tl.constexpr = CALL.head_block
    NH: tl.constexpr = (H + BH - 1) // BH
    i_program = tl.program_id(0)
    i_block = i_program // NH
    span = locate(i_block, p, CHUNKS, CALL.chunk, CALL)
    o_r = tl.arange(0, CALL.chunk)
    o_h = (i_program % NH) * BH + tl.arange(0, BH)
    if CALL.listed:
        i_from, n_listed = listed_from(span.i_n, span.i_j, 1, p, CALL)
        m_chunk = (o_h < H)[None, :]
        p_flags = p.flag + (span.i_n.to(tl.int64) * H + o_h[None, :]) * p.T
        b_any = tl.zeros([1, BH], tl.int32)
        for i in range(i_from, i_from + n_listed):
            chunk = chunk_at(i, span, p, CALL)
            b_flag = fold_chunk(p, span, chunk, i_block, o_r, o_h, CALL).to(tl.int32)
            tl.store(p_flags + chunk.i_row, b_flag, mask=m_chunk)
            b_any = b_any | b_flag
        tl.store(p.any_flag + (i_block.to(tl.int64) * H + o_h)[None, :], b_any, mask=m_chunk)
    elif not CALL.pooled or span.i_j * CALL.chunk < span.n_rows:
        # few blocks have a chunk where most sequences of a pool are of one token
        fold_chunk(p, span, chunk_at(span.i_j, span, p, CALL), i_block, o_r, o_h, CALL)


@triton.jit
def sum_rows(p, i_block, span, n_read, i_low, n_high, takes, leaves, o_h, CALL: tl.constexpr):
    """The results of `sum_head_gates` for rows `i_low` to `n_high`, the rows of a group or of one sequence in it.

    `takes` and `leaves` say whether that sequence takes a state from before the group, and leaves one behind it.
    """
    H: tl.constexpr = CALL.heads
    BH: tl.constexpr = CALL.head_block
    NZ: tl.constexpr = CALL.parts
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    BLOCK: tl.constexpr = C * CALL.group
    o_r = tl.arange(0, BLOCK)
    i_row = i_low + o_r
    m_h = o_h < H
    m_tile = (i_row < n_high)[:, None] & m_h[None, :]
    i_token = token_of(span.i_first, span.n_rows, i_row, CALL.flip)
    o_tile = i_token[:, None] * H + o_h[None, :]
    if i_low < n_high:
        b_query = tl.zeros([BLOCK, BH], tl.float32)
        b_key = tl.zeros([BLOCK, BH], tl.float32)
        for i_z in tl.static_range(NZ):
            o_part = (i_token * NZ + i_z)[:, None] * H + o_h[None, :]
            b_query += tl.load(p.query_dots + o_part, mask=m_tile, other=0.0)
            b_key += tl.load(p.key_dots + o_part, mask=m_tile, other=0.0)
        if CALL.fine:
            # one gate for all tokens: in its gradient their sums mostly cancel
            b_query = b_query.to(tl.float64)
            b_key = b_key.to(tl.float64)
        b_sum = b_query - b_key
        p_end = p.product + (i_block.to(tl.int64) * H + o_h) * NZ
        b_end = tl.zeros([BH], tl.float32)
        b_start = tl.zeros([BH], tl.float32)
        m_end = m_h
        m_start = m_h
        if CALL.listed:
            m_end = m_end & leaves
            m_start = m_start & takes
        for i_z in tl.static_range(NZ):
            b_end += tl.load(p_end + i_z, mask=m_end, other=0.0) * CALL.scale
            b_start += tl.load(p_end - H * NZ + i_z, mask=m_start & (span.i_j > 0), other=0.0) * CALL.scale
        if CALL.start:
            m_first = m_start & (span.i_j == 0) & (span.i_n < p.N)
            b_start += tl.load(p.first + span.i_n.to(tl.int64) * H + o_h, mask=m_first, other=0.0)
        b_error = tl.sum(b_sum, 0) + b_end - b_start
        # in units of the largest term, lest squares overflow
        b_most = tl.max(tl.maximum(tl.abs(b_query), tl.abs(b_key)), 0)
        if DECAY == "constant":
            b_most = tl.maximum(b_most, tl.maximum(tl.abs(b_end), tl.abs(b_start)))
        b_unit = 1.0 / tl.maximum(b_most, 1e-30)
        b_of_query = b_query * b_unit[None, :]
        b_of_key = b_key * b_unit[None, :]
        b_at_end = tl.zeros([BH], tl.float32)
        b_at_start = tl.zeros([BH], tl.float32)
        if DECAY == "constant":
            # only the part that leaves a chunk counts, as the part within cancels; states are rounded at its ends
            b_gate = tl.load(p.gate + span.i_n.to(tl.int64) * H + o_h, mask=m_h & (span.i_n < p.N), other=0.0).to(
                tl.float32
            )
            b_gate = tl.minimum(in_bits(b_gate), 0.0)[None, :]
            o_in = (o_r % C)[:, None]
            b_of_query *= tl.exp2(b_gate * (o_in + 1))
            b_of_key *= tl.exp2(b_gate * (C - 1 - o_in))
            b_at_end = b_end * b_unit
            b_at_start = b_start * b_unit
        b_weight = b_of_query * b_of_query + b_of_key * b_of_key
        b_at_end = b_at_end * b_at_end
        b_all = tl.maximum(tl.sum(b_weight, 0) + b_at_end + b_at_start * b_at_start, 1e-30)
        b_share = tl.cumsum(b_weight / b_all[None, :], 0, reverse=True) + (b_at_end / b_all)[None, :]
        b_sum = tl.cumsum(b_sum, 0, reverse=True) + b_end[None, :] - b_share * b_error[None, :]
        if DECAY == "head":
            m_gate = (i_row < n_read)[:, None] & m_h[None, :]
            b_gate = tl.load(p.gate + o_tile, mask=m_gate, other=0.0).to(tl.float32)
            b_sum = tl.where(b_gate * LOG2E < LEAST, 0.0, b_sum)
        if CALL.listed:
            # neither a first gate without a state nor padding has a gradient
            b_sum = tl.where(((takes | (o_r > 0)) & (i_row < n_read))[:, None], b_sum, 0.0)
        tl.store(p.d_gate + o_tile, b_sum.to(p.d_gate.dtype.element_ty), mask=m_tile)


@triton.jit
def sum_head_gates(p, CALL: tl.constexpr):
    """Gradient of one gate a head: sums to the end of a group of q·dq - k·dk, plus ⟨S, dS⟩ there.

    The states at the group's start say what the whole sum should be. The difference is rounding errors. It is spread
    over the group by the squares of the terms, as the variances of their errors lie. For one gate of all tokens only
    the part of a term counts that leaves its chunk, and the two ends.
    """
    H: tl.constexpr = CALL.heads
    BH: tl.constexpr = CALL.head_block
    BLOCK: tl.constexpr = CALL.chunk * CALL.group
    NH: tl.constexpr = (H + BH - 1) // BH
    i_program = tl.program_id(0)
    i_block = i_program // NH
    span = locate(i_block, p, GROUPS, BLOCK, CALL)
    o_h = (i_program % NH) * BH + tl.arange(0, BH)
    i_low = span.i_j * BLOCK
    if CALL.listed:
        n_sizes = tl.minimum(tl.cdiv(span.n_rows, CALL.chunk) - span.i_j * CALL.group, CALL.group)
        i_from, n_listed = listed_from(span.i_n, span.i_j * CALL.group, n_sizes, p, CALL)
        n_high = 0
        # last chunk first: `is_connected` while a state passes from a chunk to the group's end, `leaves` if one passes
        # from the end of the chunk's sequence
        is_connected = True
        leaves = True
        for i in range(0, n_listed):
            chunk = chunk_at(i_from + n_listed - 1 - i, span, p, CALL)
            is_connected = is_connected & ((chunk.next_entry & CUT) == 0)
            is_end = (i == 0) | ((chunk.next_entry & FIRST) != 0)
            n_high = tl.where(is_end, chunk.n_end, n_high)
            leaves = tl.where(is_end, is_connected, leaves)
            if (i == n_listed - 1) | ((chunk.entry & FIRST) != 0):
                takes = (chunk.entry & CUT) == 0
                n_read = tl.where(is_real(chunk), n_high, 0)
                sum_rows(p, i_block, span, n_read, chunk.i_row, n_high, takes, leaves, o_h, CALL)
    else:
        sum_rows(p, i_block, span, span.n_read, i_low, span.n_rows, True, True, o_h, CALL)
