"""Device code: the walk of the query's or key's gradient where one gate a head has a gradient, in bfloat16.

Kept by its 24 % on `simple_gla` and a learned `g_gamma` with gradients, and 27 % of these walks at the heads of Mamba-2
models with 16 value heads a group, `K128 V64`.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    CUT,
    FACTS,
    GROUPS,
    SEGMENTS,
    blocks_before,
    chunk_at,
    chunk_here,
    first_entries,
    is_cut,
    is_real,
    keep_branch,
    listed_chunk,
    listed_from,
    load_kept,
    load_rows,
    locate,
    next_entries,
    rows_kept,
    store_tile,
    token_of,
    token_offsets,
)
from ejkernel.kernels.linear_recurrence.triton.device.programs import any_chunk, load_start, part_of_walk


@triton.jit
def walk_with_row_dots(p, CALL: tl.constexpr):
    """`walk` in the roles `dquery` and `dkey`, with row dots and borders, of time segments without a flagged chunk.

    Here the output's rows are tokens, as they are in memory and in `w`: the state goes through shared memory instead of
    the output, which would be read twice, and a row's dot is summed within four threads. A program has one warpgroup.
    Two programs fit on a Hopper multiprocessor, to the byte where x has 128 dims, with tiles fetched two chunks ahead.
    """
    H: tl.constexpr = CALL.heads
    DX: tl.constexpr = CALL.walk.x_dim
    DZ: tl.constexpr = CALL.walk.z_dim
    BX: tl.constexpr = CALL.walk.x_block
    BZ: tl.constexpr = CALL.walk.z_block
    C: tl.constexpr = CALL.chunk
    G: tl.constexpr = CALL.group
    WHOLE: tl.constexpr = CALL.whole
    REVERSE: tl.constexpr = CALL.reverse
    NX: tl.constexpr = (DX + BX - 1) // BX
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    PAD_X: tl.constexpr = NX * BX != DX
    PAD_Z: tl.constexpr = NZ * BZ != DZ
    i_z, i_x, i_h, i_block = part_of_walk(NX, NZ, H)
    span = locate(i_block, p, SEGMENTS, p.L, CALL)
    i_n, i_j, i_first, n_rows, _ = span
    i_chunk0 = blocks_before(i_n, p, CHUNKS, C, CALL)
    i_from = i_j * (p.L // C)
    i_group0 = blocks_before(i_n, p, GROUPS, C * G, CALL) + i_from // G
    n_steps = tl.minimum(tl.cdiv(n_rows, C) - i_from, tl.cdiv(p.L, C))

    if not CALL.listed:
        if any_chunk(p.flag, i_chunk0 + i_from, n_steps, i_h, True, H) != 0:
            return

    o_r = tl.arange(0, C)
    o_x = i_x * BX + tl.arange(0, BX)
    o_z = i_z * BZ + tl.arange(0, BZ)
    o_t = token_offsets(o_r, CALL.flip)
    o_pair = tl.arange(0, 2)
    o_state = o_z[:, None] * DX + o_x[None, :]
    m_state = (o_z[:, None] < DZ) & (o_x[None, :] < DX)
    i_xh = i_h // (H // CALL.walk.x_heads)
    i_yh = i_h // (H // CALL.walk.y_heads)
    i_zh = i_h // (H // CALL.walk.z_heads)
    i_wh = i_h // (H // CALL.walk.w_heads)
    # scores are [row of x, row of y]
    o_gap = o_r[:, None] - o_r[None, :]
    if REVERSE:
        o_gap = -o_gap

    b_state = tl.zeros([BZ, BX], tl.float32)
    if CALL.start:
        b_state = load_start(p, i_n, i_block, i_h, o_state, m_state, CALL)
    # the decay from the last chunk's reference to its end, applied with the next chunk's decay
    b_due = 1.0
    n_groups = tl.cdiv(n_steps, G)
    if CALL.listed:
        i_lowest, n_turns = listed_from(i_n, i_from, n_steps, p, CALL)
        entry, next_entry = first_entries(i_lowest, n_turns, i_n, p, REVERSE)
        i_next = tl.minimum((entry >> FACTS) // C, tl.cdiv(n_rows, C) - 1)
        b_before = tl.load(p.factors + ((i_chunk0 + i_next) * H + i_h) * 2 + (1 if REVERSE else 0))
    # a loop for each group: a branch in every chunk that stores or loads a state would take registers; so would
    # addresses that do not depend on the turn, without `disable_licm`
    for i_turn in tl.range(0, n_groups, disable_licm=BX > 64):
        i_group = i_turn
        if REVERSE:
            i_group = n_groups - 1 - i_turn
        i_border = (i_group0 + i_group) * H + i_h
        if REVERSE:
            p_here = p.border + i_border * (DX * DZ) + o_state
            b_border = b_state * b_due
            if CALL.listed:
                b_border = tl.where((next_entry & CUT) != 0, 0.0, b_border)
            tl.store(p_here, b_border.to(p.border.dtype.element_ty), mask=m_state)
        i_lowest = i_from + i_group * G
        n_turns = tl.minimum(n_steps - i_group * G, G)
        if CALL.listed:
            i_lowest, n_turns = listed_from(i_n, i_lowest, n_turns, p, CALL)
        else:
            i_c = i_lowest
            if REVERSE:
                i_c += n_turns - 1
            b_before = tl.load(p.factors + ((i_chunk0 + i_c) * H + i_h) * 2 + (1 if REVERSE else 0))
        for i_step in tl.range(0, n_turns, disable_licm=CALL.listed):
            i_c = i_lowest + i_step
            if REVERSE:
                i_c = i_lowest + n_turns - 1 - i_step
            if CALL.listed:
                chunk = listed_chunk(i_n, entry, next_entry, CALL)
                entry, next_entry = next_entries(i_c, i_n, p, REVERSE)
                here = chunk_here(i_c, i_n, p, CALL)
            else:
                chunk = chunk_at(i_c, span, p, CALL)
                here = chunk
            i_row = chunk.i_row
            i_token = token_of(i_first, n_rows, i_row, CALL.flip)
            i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
            m_read = i_row + o_r < chunk.n_read
            m_chunk = m_read
            if CALL.listed:
                m_chunk = i_row + o_r < chunk.n_end
            b_y = load_rows(p.y, i_token, i_yh, o_t, m_read, o_x, CALL.walk.y_heads, DX, PAD_X, False, WHOLE)
            b_z = load_rows(p.z, i_token, i_zh, o_t, m_read, o_z, CALL.walk.z_heads, DZ, PAD_Z, False, WHOLE)
            b_x = load_rows(p.x, i_token, i_xh, o_t, m_read, o_x, CALL.walk.x_heads, DX, PAD_X, False, WHOLE)
            b_w = load_rows(p.w, i_token, i_wh, o_t, m_read, o_z, CALL.walk.w_heads, DZ, PAD_Z, False, WHOLE)
            # a sum with 0, since an operand that comes from registers saves a buffer in shared memory
            b_x = b_x + 0.0
            p_weights = p.within + rows_kept(chunk, i_chunk, i_h, p, 4, CALL) + o_r[:, None] * 4 + o_pair[None, :] * 2
            b_near, b_far = tl.split(load_kept(p_weights, m_chunk[:, None], CALL))
            if REVERSE:
                b_near, b_far = b_far, b_near
            b_near = b_near * CALL.scale
            b_added = (tl.trans(b_z) * b_far[None, :]).to(b_z.dtype)
            if CALL.listed:
                has_tokens = is_real(here)
                starts_anew = is_cut(here, REVERSE)
                if starts_anew:
                    keep_branch(p, i_n)
                    b_state = tl.zeros([BZ, BX], tl.float32)
                b_due = tl.where(starts_anew, 1.0, b_due)
                b_state = b_state * (b_due * tl.where(has_tokens & (starts_anew == 0), b_before, 1.0))
                # the next chunk's, as below: loaded for this chunk it would be buffered in shared memory
                coming = chunk_here(tl.maximum(i_c - 1, 0) if REVERSE else i_c + 1, i_n, p, CALL)
                i_next = tl.minimum(coming.i_c, tl.cdiv(n_rows, C) - 1)
                b_before = tl.load(p.factors + ((i_chunk0 + i_next) * H + i_h) * 2 + (1 if REVERSE else 0))
                i_token = token_of(i_first, n_rows, here.i_row, CALL.flip)
                i_chunk = (i_chunk0 + here.i_c) * H + i_h
            else:
                b_state = b_state * (b_due * b_before)
                # the next chunk's, which arrives while this one is computed
                i_next = tl.where(i_step + 1 < n_turns, i_chunk + (-H if REVERSE else H), i_chunk)
                b_before = tl.load(p.factors + i_next * 2 + (1 if REVERSE else 0))
            b_due = tl.load(p.factors + i_chunk * 2 + (0 if REVERSE else 1))

            b_read = tl.trans(b_state.to(b_y.dtype))
            b_score = tl.dot(b_x, tl.trans(b_y))
            b_out = tl.dot(b_x, b_read) * b_near[:, None]
            # all weights before rounding, so that the row dots that are subtracted have the same errors
            b_score = tl.where(o_gap >= 0, b_score * b_far[None, :] * b_near[:, None], 0.0)
            b_out = tl.dot(b_score.to(b_z.dtype), b_z, acc=b_out)
            b_state = tl.dot(b_added, b_y, acc=b_state)
            if CALL.listed:
                b_due = tl.where(has_tokens, b_due, 1.0)

            # where chunks are listed, padding is written below
            m_write = here.i_row + o_r < (here.n_read if CALL.listed else here.n_end)
            p_rows = p.output + ((i_token * H + i_h) * NX + i_x) * DZ + o_t[:, None] * (H * NX * DZ) + o_z[None, :]
            b_rows = b_out.to(p.output.dtype.element_ty)
            store_tile(p_rows, b_rows, m_write[:, None] & (o_z[None, :] < DZ), WHOLE and not PAD_Z)
            b_rowdot = tl.sum(b_out * b_w.to(tl.float32), 1)
            p_dots = p.row_dots + ((i_token + o_t) * (NX * NZ) + i_x * NZ + i_z) * H + i_h
            tl.store(p_dots, b_rowdot, mask=m_write)
            if CALL.listed:
                if has_tokens == 0:
                    m_zeros = here.i_row + o_r < here.n_end
                    tl.store(p_rows, tl.zeros_like(b_rows), mask=m_zeros[:, None] & (o_z[None, :] < DZ))
                    tl.store(p_dots, tl.zeros_like(b_rowdot), mask=m_zeros)
        if not REVERSE:
            b_product = tl.load(p.d_state + i_border * (DX * DZ) + o_state, mask=m_state, other=0.0).to(tl.float32)
            b_product = tl.sum(tl.sum(b_product * (b_state * b_due), 1), 0)
            if CALL.listed:
                b_product = tl.where((entry & CUT) == 0, b_product, 0.0)
            tl.store(p.border + (i_border * NX + i_x) * NZ + i_z, b_product)
