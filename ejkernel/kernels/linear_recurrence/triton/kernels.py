# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code shared by all decays: the chunk walk, the scan over time segments and the single-token step.

Names: `i_` index, `b_` block in registers, `p_` pointer, `o_` offset, `m_` mask; letters as in `Call`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2**-200 is 0 in float32.
LEAST = tl.constexpr(-200.0)
# 2**128 is the first power that float32 does not have, and 2**190 takes any number that matters beyond.
MOST = tl.constexpr(127.99)
BEYOND = tl.constexpr(190.0)

NONE = tl.constexpr(0)
CONSTANT = tl.constexpr(1)
HEAD = tl.constexpr(2)
# One decay a key dim, which lies along the columns or the rows of the walked state.
KEY_COLUMNS = tl.constexpr(3)
KEY_ROWS = tl.constexpr(4)

# Rows of the packing table: sequence borders, then how many chunks, groups and segments lie before each sequence.
CHUNKS = tl.constexpr(1)
GROUPS = tl.constexpr(2)
SEGMENTS = tl.constexpr(3)


@triton.jit
def locate(i_block, p_cu, p_owner, ROW: tl.constexpr, N, T, L, PACKED: tl.constexpr):
    """Sequence, block in it, first token, tokens and readable tokens of the i-th block of L tokens.

    The sequence past the last is padding: its tokens are written, as zeros, and never read.
    """
    if PACKED:
        i_n = tl.load(p_owner + i_block)
        i_first = tl.load(p_cu + i_n)
        n_rows = tl.load(p_cu + i_n + 1) - i_first
        i_j = i_block - tl.load(p_cu + ROW * (N + 2) + i_n)
        n_read = tl.where(i_n < N, n_rows, 0)
        i_first = i_first.to(tl.int64)
    else:
        n_blocks = tl.cdiv(T, L)
        i_n = i_block // n_blocks
        i_j = i_block % n_blocks
        i_first = i_n.to(tl.int64) * T
        n_rows = i_block * 0 + T
        n_read = n_rows
    return i_n, i_j, i_first, n_rows, n_read


@triton.jit
def blocks_before(i_n, p_cu, ROW: tl.constexpr, N, T, L, PACKED: tl.constexpr):
    """How many blocks of L tokens lie in the sequences before this one."""
    if PACKED:
        return tl.load(p_cu + ROW * (N + 2) + i_n).to(tl.int64)
    else:
        return (i_n * tl.cdiv(T, L)).to(tl.int64)


@triton.jit
def token_of(i_first, n_rows, i_row, FLIP: tl.constexpr):
    """Where row `i_row` of a sequence lies in memory; FLIP visits the last token first."""
    if FLIP:
        return i_first + (n_rows - 1 - i_row)
    else:
        return i_first + i_row


@triton.jit
def load_rows(
    p,
    i_token,
    i_head,
    o_r,
    m_r,
    o_c,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAD: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
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
def load_weights(p_weight, i_chunk, o_r, C: tl.constexpr):
    """A chunk's rows: weights towards its end and towards its start, and sums of gates, whole and fractional."""
    # a tile of all four is large enough for the compiler to fetch it ahead of its chunk, as one of them is not
    o_pair = tl.arange(0, 2)
    p_tile = p_weight + i_chunk * (4 * C) + o_r[:, None, None] * 4 + o_pair[None, :, None] * 2 + o_pair[None, None, :]
    b_weight, b_sum = tl.split(tl.load(p_tile))
    b_near, b_far = tl.split(b_weight)
    b_whole, b_part = tl.split(b_sum)
    return b_near, b_far, b_whole, b_part


@triton.jit
def in_bits(b_gate):
    """A gate in base 2, no further from 0 than what forgets all, or makes too much of all."""
    return tl.minimum(tl.maximum(b_gate * LOG2E, LEAST), -LEAST)


@triton.jit
def faded(b, b_bits):
    """`b 2**bits`, also where the power alone would overflow: nothing stays nothing however much it would grow."""
    m_beyond = b_bits > MOST
    b_power = tl.exp2(tl.minimum(b_bits, BEYOND) - tl.where(m_beyond, 64.0, 0.0))
    return b * b_power * tl.where(m_beyond, 2.0**64, 1.0)


@triton.jit
def nearest(b, PRECISION: tl.constexpr):
    """Rounded to what a dot of one TF32 pass takes of a number; the dot itself would cut the rest off."""
    if PRECISION == "tf32":
        # half of the last digit that stays is added; a NaN stays one
        b_power = (b.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        b = ((b + b_power * 2.0**-11).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return b


@triton.jit
def in_range(b, AXIS: tl.constexpr, LEAST_PEAK: tl.constexpr):
    """Powers of two that bring what lies along AXIS to float16's range, its largest value between 1 and 2, and back."""
    b_peak = tl.maximum(tl.minimum(tl.max(tl.abs(b), AXIS), 2.0**100), LEAST_PEAK)
    b_power = b_peak.to(tl.int32, bitcast=True) & 0x7F800000
    return (0x7F000000 - b_power).to(tl.float32, bitcast=True), b_power.to(tl.float32, bitcast=True)


@triton.jit
def walk(
    p_x,
    p_y,
    p_z,
    p_w,
    p_gate,
    p_weight,
    p_factor,
    p_flag,
    p_score,
    p_start,
    p_out_in,
    p_last_in,
    p_rowdot_in,
    p_border_in,
    p_cu,
    p_owner,
    T,
    N,
    L,
    p_out,
    p_last,
    p_rowdot,
    p_border,
    H: tl.constexpr,
    HX: tl.constexpr,
    HY: tl.constexpr,
    HZ: tl.constexpr,
    HW: tl.constexpr,
    DX: tl.constexpr,
    DZ: tl.constexpr,
    BX: tl.constexpr,
    BZ: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    STATE_ROW: tl.constexpr,
    STATE_COLUMN: tl.constexpr,
    DECAY: tl.constexpr,
    SCALE: tl.constexpr,
    START_SCALE: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    FLIP: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    SEGMENTED: tl.constexpr,
    OUTPUT: tl.constexpr,
    SCORES: tl.constexpr,
    LAST: tl.constexpr,
    STRONG: tl.constexpr,
    ROWDOT: tl.constexpr,
    BORDER: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carries a state through the chunks of a sequence: `S ← decay S + z yᵀ`, `out = scale S x`, all roles swappable.

    The state is kept as [z dims, x dims], the left operand of every large dot. Decays are split at a reference, as
    the kernels that fold gates lay down. With OUTPUT off only a segment's own state and whole decay are computed.
    BORDER stores the state at the later end of each group of G chunks: 1 as it is, 2 as the rows of x see it.
    Head gates are walked by two kernels, each of which leaves out the other's programs: with STRONG those in which a
    chunk is flagged. What strong gates need would take the registers of the common case.
    float16 operands have the digits but not the range: rows of the state and of z, and columns of the scores, are
    rounded after a power of two has brought them in range.
    """
    RANGED: tl.constexpr = (p_y.dtype.element_ty == tl.float16) and (not WIDE)
    # weighed in full, scores fit in float16, and are rounded alike in the two walks whose row dots are subtracted
    WEIGHED: tl.constexpr = ROWDOT or RANGED
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    PAD_X: tl.constexpr = BX != DX
    PAD_Z: tl.constexpr = NZ * BZ != DZ
    i_program = tl.program_id(0)
    i_z = i_program % NZ
    i_h = (i_program // NZ) % H
    i_block = i_program // (NZ * H)
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, SEGMENTS, N, T, L, PACKED)
    i_chunk0 = blocks_before(i_n, p_cu, CHUNKS, N, T, C, PACKED)
    if BORDER:
        i_group0 = blocks_before(i_n, p_cu, GROUPS, N, T, C * G, PACKED)
    n_chunks = tl.cdiv(n_rows, C)
    i_from = i_j * (L // C)
    n_steps = tl.minimum(n_chunks - i_from, tl.cdiv(L, C))
    if not OUTPUT:
        # nobody starts from where a sequence ends
        if (i_j == 0) if REVERSE else (i_from + n_steps >= n_chunks):
            return

    o_r = tl.arange(0, C)
    o_x = tl.arange(0, BX)
    o_z = i_z * BZ + tl.arange(0, BZ)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    o_state = o_z[:, None] * STATE_ROW + o_x[None, :] * STATE_COLUMN
    o_border = o_z[:, None] + o_x[None, :] * DZ
    m_state = (o_z[:, None] < DZ) & (o_x[None, :] < DX)
    i_xh = i_h // (H // HX)
    i_yh = i_h // (H // HY)
    i_zh = i_h // (H // HZ)

    # scores are [row of y, row of x]
    o_gap = o_r[None, :] - o_r[:, None]
    if REVERSE:
        o_gap = -o_gap

    if DECAY == CONSTANT:
        b_gate = in_bits(tl.load(p_gate + i_n.to(tl.int64) * H + i_h).to(tl.float32))
        # finite, since 0 times infinity would be no number
        b_pair = tl.exp2(tl.minimum(b_gate * o_gap, MOST))
        b_near = tl.exp2(tl.minimum(b_gate * ((C - 1 - o_r) if REVERSE else (o_r + 1)), MOST))
        b_write = tl.exp2(tl.minimum(b_gate * ((o_r + 1) if REVERSE else (C - 1 - o_r)), MOST))
        b_through = tl.exp2(tl.minimum(b_gate * C, MOST))
    if DECAY == HEAD:
        o_flag = tl.arange(0, 64)
        b_flag = tl.zeros([64], tl.int32)
        for i_step in range(0, n_steps, 64):
            p_flags = p_flag + (i_chunk0 + i_from + i_step + o_flag) * H + i_h
            b_flag = b_flag | tl.load(p_flags, mask=i_step + o_flag < n_steps, other=0)
        if (tl.max(b_flag, 0) != 0) != STRONG:
            return

    b_state = tl.zeros([BZ, BX], tl.float32)
    if START:
        i_start = i_n.to(tl.int64)
        if SEGMENTED:
            i_start = i_block.to(tl.int64)
        m_start = m_state
        if PACKED:
            m_start = m_start & (i_n < N)
        b_state = (
            tl.load(p_start + (i_start * H + i_h) * (DX * DZ) + o_state, mask=m_start, other=0.0).to(tl.float32)
            * START_SCALE
        )
    # One decay a head: what is left of a chunk's own decay is due when the state is next multiplied anyway.
    b_due = tl.full([BZ], 1.0, tl.float32) if RANGED else 1.0
    if not OUTPUT:
        if DECAY == KEY_COLUMNS:
            b_whole = tl.full([BX], 1.0, tl.float32)
        elif DECAY == KEY_ROWS:
            b_whole = tl.full([BZ], 1.0, tl.float32)
        else:
            b_whole = 1.0
    if ROWDOT:
        i_wh = i_h // (H // HW)
        i_row = (i_from + n_steps - 1 if REVERSE else i_from) * C
        m_w = (i_row + o_r < n_read) & (n_steps > 0)
        b_w = load_rows(p_w, token_of(i_first, n_rows, i_row, FLIP), i_wh, o_t, m_w, o_z, HW, DZ, PAD_Z, False)

    if (BORDER == 1) and REVERSE:
        if n_steps > 0:
            i_border = i_group0 + (i_from + n_steps - 1) // G
            p_here = p_border + (i_border * H + i_h) * (DX * DZ) + o_border
            tl.store(p_here, b_state.to(p_border.dtype.element_ty), mask=m_state)
    for i_step in range(0, n_steps):
        i_c = i_from + i_step
        if REVERSE:
            i_c = i_from + n_steps - 1 - i_step
        i_row = i_c * C
        i_token = token_of(i_first, n_rows, i_row, FLIP)
        i_chunk = (i_chunk0 + i_c) * H + i_h
        m_read = i_row + o_r < n_read
        b_y = load_rows(p_y, i_token, i_yh, o_t, m_read, o_x, HY, DX, PAD_X, WIDE, WHOLE)
        b_z = tl.trans(load_rows(p_z, i_token, i_zh, o_t, m_read, o_z, HZ, DZ, PAD_Z, WIDE, WHOLE))
        if OUTPUT:
            b_x = tl.trans(load_rows(p_x, i_token, i_xh, o_t, m_read, o_x, HX, DX, PAD_X, WIDE, WHOLE))
        if DECAY >= KEY_COLUMNS:
            b_y = nearest(b_y, PRECISION)
            b_z = nearest(b_z, PRECISION)
            if OUTPUT:
                b_x = nearest(b_x, PRECISION)

        # what is added to the state, the state as the rows of x see it, and the state that is added to
        b_added = b_z
        b_seen = b_state
        if DECAY == HEAD:
            b_near, b_far, b_whole_sum, b_part_sum = load_weights(p_weight, i_chunk, o_r, C)
            if STRONG == 1:
                p_end = p_weight + i_chunk * (4 * C) + 4 * (C - 1)
                b_whole_end = tl.load(p_end + 1)
                b_part_end = tl.load(p_end + 3)
                # these are still exponents
                b_near = b_whole_sum + b_part_sum
                b_far = (b_whole_end - b_whole_sum) + (b_part_end - b_part_sum)
                b_all = b_whole_end + b_part_end
                b_before = 1.0
                b_after = 1.0
            else:
                b_before = tl.load(p_factor + i_chunk * 2 + (1 if REVERSE else 0))
                b_after = tl.load(p_factor + i_chunk * 2 + (0 if REVERSE else 1))
            if REVERSE:
                b_near, b_far = b_far, b_near
            if STRONG == 1:
                b_added = faded(b_z, b_far[None, :])
            else:
                b_added = b_z * b_far[None, :]
        if DECAY == CONSTANT:
            b_added = b_z * b_write[None, :]
        if (DECAY == HEAD) or (DECAY == CONSTANT):
            if RANGED:
                b_down, b_up = in_range(b_added, 1, 2.0**-50)
                b_added = b_added * b_down[:, None]
            b_added = b_added.to(b_z.dtype)
        b_lag = b_due
        if DECAY == HEAD:
            if RANGED:
                b_state = b_state * (b_due * b_before * b_down)[:, None]
                b_due = b_after * b_up
            else:
                b_state = b_state * (b_due * b_before)
                b_due = b_after
            if STRONG == 1:
                b_state = faded(b_state, b_all)
            else:
                b_seen = b_state
                if RANGED:
                    b_lag = b_up
        if DECAY >= KEY_COLUMNS:
            DK: tl.constexpr = DX if DECAY == KEY_COLUMNS else DZ
            o_k = o_x if DECAY == KEY_COLUMNS else o_z
            p_pair = p_factor + i_chunk * (4 * DK) + (2 * DK if REVERSE else 0)
            b_before = tl.load(p_pair + o_k, mask=o_k < DK, other=0.0)
            b_after = tl.load(p_pair + DK + o_k, mask=o_k < DK, other=0.0)
            if DECAY == KEY_COLUMNS:
                b_before = b_before[None, :]
                b_after = b_after[None, :]
            else:
                b_before = b_before[:, None]
                b_after = b_after[:, None]
            is_exact = tl.load(p_flag + i_chunk) != 0
            b_seen = b_state * tl.where(is_exact, 1.0, b_before)
            b_state = b_state * b_before
            if BORDER == 2:
                if (i_c % G == G - 1) | (i_c == n_chunks - 1):
                    p_here = p_border + ((i_group0 + i_c // G) * H + i_h) * (DX * DZ) + o_border
                    tl.store(p_here, b_seen.to(b_y.dtype), mask=m_state)

        if OUTPUT:
            if RANGED:
                b_down_seen, b_up_seen = in_range(b_seen, 1, 2.0**-126)
                b_seen = b_seen * b_down_seen[:, None]
            if DECAY != NONE:
                b_seen = nearest(b_seen.to(b_y.dtype), PRECISION)
            b_score = tl.dot(b_y, b_x, input_precision=PRECISION)
            if DECAY == NONE:
                # not before, so that this dot need not wait for the last chunk's
                b_seen = b_seen.to(b_y.dtype)
            b_out = tl.dot(b_seen, b_x, input_precision=PRECISION)
            if RANGED:
                b_out = b_out * (b_lag * b_up_seen)[:, None]
            if DECAY == CONSTANT:
                b_out = b_out * b_near[None, :]
                b_score = b_score * b_pair
            if DECAY == HEAD:
                if STRONG == 1:
                    # whole and fractional parts are summed apart: no strong gate costs a later one its digits
                    b_gap = b_whole_sum[None, :] - b_whole_sum[:, None]
                    b_gap += b_part_sum[None, :] - b_part_sum[:, None]
                    b_score = faded(b_score, -b_gap if REVERSE else b_gap)
                    b_out = faded(b_out, b_near[None, :])
                else:
                    b_score = b_score * b_far[:, None]
                    if WEIGHED:
                        b_score = b_score * b_near[None, :]
                        b_out = b_out * b_near[None, :]
            if DECAY >= KEY_COLUMNS:
                if is_exact:
                    if SCORES:
                        o_score = o_r[:, None] * C + o_r[None, :] if REVERSE else o_r[:, None] + o_r[None, :] * C
                        b_score = tl.load(p_score + i_chunk * (C * C) + o_score).to(tl.float32)
                    else:
                        b_score = tl.zeros([C, C], tl.float32)
            b_score = tl.where(o_gap >= 0, b_score, 0.0)
            if RANGED:
                b_down_score, b_up_score = in_range(b_score, 0, 2.0**-50)
                b_score = b_score * b_down_score[None, :]
                b_out = b_out * b_down_score[None, :]
            b_score = nearest(b_score.to(b_z.dtype), PRECISION)
            b_out = tl.dot(b_z, b_score, acc=b_out, input_precision=PRECISION)
            if DECAY == NONE:
                b_state = tl.dot(b_added, b_y, acc=b_state, input_precision=PRECISION)
            if (DECAY == HEAD) and (STRONG == 0) and (not WEIGHED):
                b_out = b_out * (b_near * SCALE)[None, :]
            elif RANGED:
                b_out = b_out * (b_up_score * SCALE)[None, :]
            else:
                b_out = b_out * SCALE
            m_write = i_row + o_r < n_rows
            p_rows = p_out + (i_token * H + i_h) * DZ + o_t[:, None] * (H * DZ) + o_z[None, :]
            b_rows = tl.trans(b_out.to(p_out.dtype.element_ty))
            if WHOLE and not PAD_Z:
                tl.store(p_rows, b_rows)
            else:
                m_out = m_write[:, None]
                if PAD_Z:
                    m_out = m_out & (o_z[None, :] < DZ)
                tl.store(p_rows, b_rows, mask=m_out)
            if ROWDOT:
                # in the layout of the store, which is that of the other factor; rounding's rest is taken along
                b_rest = b_out - b_out.to(p_out.dtype.element_ty).to(tl.float32)
                b_whole_row = b_rows.to(tl.float32) + tl.trans(b_rest.to(tl.bfloat16)).to(tl.float32)
                b_rowdot = tl.sum(b_whole_row * b_w.to(tl.float32), 1)
                tl.store(p_rowdot + ((i_token + o_t) * H + i_h) * NZ + i_z, b_rowdot, mask=m_write)
                # fetched a chunk ahead: it arrives while that chunk is worked on
                i_next = i_row - C if REVERSE else i_row + C
                i_token = token_of(i_first, n_rows, i_next, FLIP)
                m_w = (i_next + o_r < n_read) & (i_step + 1 < n_steps)
                b_w = load_rows(p_w, i_token, i_wh, o_t, m_w, o_z, HW, DZ, PAD_Z, False)

        if (DECAY != NONE) or (not OUTPUT):
            if DECAY == CONSTANT:
                if RANGED:
                    b_state = b_state * (b_due * b_through * b_down)[:, None]
                    b_due = b_up
                else:
                    b_state = b_state * b_through
            b_state = tl.dot(b_added, b_y, acc=b_state, input_precision=PRECISION)
            if DECAY >= KEY_COLUMNS:
                b_state = b_state * b_after
        if not OUTPUT:
            if DECAY == CONSTANT:
                b_whole = b_whole * b_through
            elif (DECAY == HEAD) and (STRONG == 1):
                b_whole = faded(b_whole, b_all)
            elif DECAY == HEAD:
                b_whole = b_whole * b_before * b_after
            elif DECAY != NONE:
                b_whole = b_whole * tl.reshape(b_before * b_after, [BX if DECAY == KEY_COLUMNS else BZ])
        if BORDER == 1:
            # the state at a group's later end: forward it has just left the group, in reverse it is about to enter it
            if REVERSE:
                is_border = (i_c % G == 0) & (i_step + 1 < n_steps)
            else:
                is_border = (i_c % G == G - 1) | (i_step + 1 == n_steps)
            if is_border:
                i_border = i_group0 + i_c // G - (1 if REVERSE else 0)
                p_here = p_border + (i_border * H + i_h) * (DX * DZ) + o_border
                b_true = b_state * (b_due[:, None] if RANGED else b_due)
                tl.store(p_here, b_true.to(p_border.dtype.element_ty), mask=m_state)
    if (DECAY == HEAD) or (DECAY == CONSTANT):
        b_state = b_state * (b_due[:, None] if RANGED else b_due)

    if OUTPUT:
        if LAST:
            is_last = i_from + n_steps >= n_chunks
            if REVERSE:
                is_last = i_j == 0
            if PACKED:
                is_last = is_last & (i_n < N)
            if is_last:
                i_last = i_n.to(tl.int64) * H + i_h
                tl.store(p_last + i_last * (DX * DZ) + o_state, b_state * LAST_SCALE, mask=m_state)
    else:
        i_segment = i_block.to(tl.int64) * H + i_h
        tl.store(p_last + i_segment * (DX * DZ) + o_state, b_state, mask=m_state)
        if DECAY == KEY_COLUMNS:
            tl.store(p_border + i_segment * DX + o_x, b_whole, mask=(o_x < DX) & (i_z == 0))
        elif DECAY == KEY_ROWS:
            tl.store(p_border + i_segment * DZ + o_z, b_whole, mask=o_z < DZ)
        else:
            tl.store(p_border + i_segment, b_whole, mask=i_z == 0)


@triton.jit
def scan_segments(
    p_segment,
    p_decay,
    p_start,
    p_cu,
    T,
    N,
    L,
    p_out,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAYS: tl.constexpr,
    START: tl.constexpr,
    START_SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The state at the start of each time segment, from the segments' own states and whole decays."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_program = tl.program_id(0)
    i_h = (i_program // NK) % H
    i_n = i_program // (NK * H)
    i_segment = blocks_before(i_n, p_cu, SEGMENTS, N, T, L, PACKED)
    if PACKED:
        n_segments = (tl.load(p_cu + SEGMENTS * (N + 2) + i_n + 1) - i_segment).to(tl.int32)
    else:
        n_segments = tl.cdiv(T, L)
    o_k = (i_program % NK) * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    o_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_state = tl.zeros([BK, BV], tl.float32)
    if START:
        p_tile = p_start + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state
        b_state = tl.load(p_tile, mask=m_state, other=0.0).to(tl.float32) * START_SCALE
    for i_step in range(0, n_segments):
        i_j = i_step
        if REVERSE:
            i_j = n_segments - 1 - i_step
        i_here = (i_segment + i_j) * H + i_h
        # the last segment's own state is of no use, and not there
        m_own = i_step + 1 < n_segments
        if DECAYS == 1:
            b_decay = tl.load(p_decay + i_here, mask=m_own, other=0.0)
        else:
            b_decay = tl.load(p_decay + i_here * K + o_k, mask=(o_k < K) & m_own, other=0.0)[:, None]
        b_own = tl.load(p_segment + i_here * (K * V) + o_state, mask=m_state & m_own, other=0.0)
        tl.store(p_out + i_here * (K * V) + o_state, b_state, mask=m_state)
        # a decay may be infinite
        b_state = tl.where(b_state == 0.0, 0.0, b_state * b_decay) + b_own


@triton.jit
def step(
    p_q,
    p_k,
    p_v,
    p_gate,
    p_start,
    p_cu,
    T,
    N,
    p_out,
    p_last,
    H: tl.constexpr,
    HKV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    START: tl.constexpr,
):
    """Token by token, for calls of a few tokens a sequence: the state is read once and written once."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_n = i_program // (NV * H)
    if PACKED:
        i_first = tl.load(p_cu + i_n).to(tl.int64)
        n_rows = tl.load(p_cu + i_n + 1) - tl.load(p_cu + i_n)
        is_real = i_n < N
    else:
        i_first = i_n.to(tl.int64) * T
        n_rows = T
        is_real = i_n >= 0
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    m_k = (o_k < K) & is_real
    m_v = (o_v < V) & is_real
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V) + o_k[:, None] * V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    b_state = tl.zeros([BK, BV], tl.float32)
    if START:
        b_state = tl.load(p_start + o_state, mask=m_state, other=0.0).to(tl.float32)
    if DECAY == CONSTANT:
        b_gate = tl.load(p_gate + i_n.to(tl.int64) * H + i_h, mask=is_real, other=0.0).to(tl.float32)
    for i_row in range(0, n_rows):
        i_token = token_of(i_first, n_rows, i_row, FLIP)
        i_q = i_token * H + i_h
        i_k = i_token * HKV + i_h // (H // HKV)
        b_q = tl.load(p_q + i_q * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + i_k * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + i_k * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        if DECAY == HEAD:
            b_gate = tl.load(p_gate + i_q, mask=is_real, other=0.0).to(tl.float32)
            b_state = faded(b_state, b_gate * LOG2E)
        elif DECAY == KEY_COLUMNS:
            b_gate = tl.load(p_gate + i_q * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_state = faded(b_state, (b_gate * LOG2E)[:, None])
        elif DECAY == CONSTANT:
            b_state = faded(b_state, b_gate * LOG2E)
        b_state = b_state + b_k[:, None] * b_v[None, :]
        b_out = tl.sum(b_q[:, None] * b_state, 0) * SCALE
        tl.store(p_out + i_q * V + o_v, b_out.to(p_out.dtype.element_ty), mask=o_v < V)
    tl.store(p_last + o_state, b_state, mask=m_state)


@triton.jit
def fold_head_gates(
    p_gate,
    p_cu,
    p_owner,
    T,
    N,
    p_weight,
    p_factor,
    p_flag,
    H: tl.constexpr,
    BH: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    LIMIT: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
):
    """What the walks need of one gate a head: weights of a chunk's rows, a state's decays through it, and its flag.

    Weights are against a reference in the middle of the chunk. Where the gates of half a chunk are too strong for
    that the chunk is flagged, and the walks compute the decay between rows themselves, from the sums of the gates.
    """
    NH: tl.constexpr = (H + BH - 1) // BH
    i_program = tl.program_id(0)
    i_block = i_program // NH
    i_n, i_c, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
    o_r = tl.arange(0, C)
    o_h = (i_program % NH) * BH + tl.arange(0, BH)
    m_gate = (i_c * C + o_r < n_read)[:, None] & (o_h < H)[None, :]
    if DECAY == CONSTANT:
        p_tile = p_gate + i_n.to(tl.int64) * H + (o_r * 0)[:, None] + o_h[None, :]
    else:
        p_tile = p_gate + token_of(i_first, n_rows, i_c * C + o_r, FLIP)[:, None] * H + o_h[None, :]
    b_gate = in_bits(tl.load(p_tile, mask=m_gate, other=0.0).to(tl.float32))
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
    p_tile = p_weight + (i_chunk * (4 * C))[:, :, None, None] + o_weight
    tl.store(p_tile, b_weight, mask=m_chunk[:, :, None, None])
    tl.store(p_factor + i_chunk * 2, tl.exp2(b_early), mask=m_chunk)
    tl.store(p_factor + i_chunk * 2 + 1, tl.exp2(b_late), mask=m_chunk)
    tl.store(p_flag + i_chunk, (b_most > LIMIT).to(tl.int32), mask=m_chunk)


@triton.jit
def meet_states(
    p_state,
    p_dstate,
    p_cu,
    p_owner,
    T,
    N,
    p_out,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """⟨S, dS⟩ at the later end of each group of chunks: the gradient of the gate that comes next."""
    ROWS: tl.constexpr = 16
    i_program = tl.program_id(0)
    _, i_j, _, n_rows, _ = locate(i_program // H, p_cu, p_owner, GROUPS, N, T, C * G, PACKED)
    o_v = tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    b_sum = tl.zeros([ROWS, BK], tl.float32)
    if i_j * (C * G) < n_rows:
        for i_v in range(0, V, ROWS):
            o_state = i_program.to(tl.int64) * (K * V) + (i_v + o_v)[:, None] * K + o_k[None, :]
            m_state = (i_v + o_v < V)[:, None] & (o_k < K)[None, :]
            b_state = tl.load(p_state + o_state, mask=m_state, other=0.0).to(tl.float32)
            b_sum += b_state * tl.load(p_dstate + o_state, mask=m_state, other=0.0).to(tl.float32)
    tl.store(p_out + i_program, tl.sum(tl.sum(b_sum, 1), 0) * SCALE)


@triton.jit
def sum_head_gates(
    p_gate,
    p_query,
    p_key,
    p_border,
    p_first,
    p_cu,
    p_owner,
    T,
    N,
    p_out,
    H: tl.constexpr,
    BH: tl.constexpr,
    NZ: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    DECAY: tl.constexpr,
    START: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Gradient of one gate a head: sums of q·dq - k·dk to the end of a group, and ⟨S, dS⟩ there.

    What the sum should have come to at the group's start is known too, from the states there: the difference, which is
    the rounding errors on the way, is spread over the group as their variances are, by the squares of the terms.
    """
    BLOCK: tl.constexpr = C * G
    NH: tl.constexpr = (H + BH - 1) // BH
    i_program = tl.program_id(0)
    i_block = i_program // NH
    i_n, i_j, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, GROUPS, N, T, BLOCK, PACKED)
    o_r = tl.arange(0, BLOCK)
    i_row = i_j * BLOCK + o_r
    o_h = (i_program % NH) * BH + tl.arange(0, BH)
    m_h = o_h < H
    m_tile = (i_row < n_rows)[:, None] & m_h[None, :]
    o_tile = token_of(i_first, n_rows, i_row, FLIP)[:, None] * H + o_h[None, :]
    if i_j * BLOCK < n_rows:
        b_query = tl.zeros([BLOCK, BH], tl.float32)
        b_key = tl.zeros([BLOCK, BH], tl.float32)
        for i_z in tl.static_range(NZ):
            b_query += tl.load(p_query + o_tile * NZ + i_z, mask=m_tile, other=0.0)
            b_key += tl.load(p_key + o_tile * NZ + i_z, mask=m_tile, other=0.0)
        if DECAY == CONSTANT:
            # one number for all tokens, in which the sums of each mostly cancel
            b_query = b_query.to(tl.float64)
            b_key = b_key.to(tl.float64)
        b_sum = b_query - b_key
        p_end = p_border + i_block.to(tl.int64) * H + o_h
        b_end = tl.load(p_end, mask=m_h, other=0.0)
        b_start = tl.load(p_end - H, mask=m_h & (i_j > 0), other=0.0)
        if START:
            b_start += tl.load(p_first + i_n.to(tl.int64) * H + o_h, mask=m_h & (i_j == 0) & (i_n < N), other=0.0)
        b_rest = tl.sum(b_sum, 0) + b_end - b_start
        # of the largest, lest squares overflow
        b_unit = 1.0 / tl.maximum(tl.max(tl.maximum(tl.abs(b_query), tl.abs(b_key)), 0), 1e-30)[None, :]
        b_weight = (b_query * b_unit) * (b_query * b_unit) + (b_key * b_unit) * (b_key * b_unit)
        b_share = tl.cumsum(b_weight / tl.maximum(tl.sum(b_weight, 0), 1e-30)[None, :], 0, reverse=True)
        b_sum = tl.cumsum(b_sum, 0, reverse=True) + b_end[None, :] - b_share * b_rest[None, :]
        if DECAY == HEAD:
            m_gate = (i_row < n_read)[:, None] & m_h[None, :]
            b_gate = tl.load(p_gate + o_tile, mask=m_gate, other=0.0).to(tl.float32)
            b_sum = tl.where(b_gate * LOG2E < LEAST, 0.0, b_sum)
        tl.store(p_out + o_tile, b_sum.to(p_out.dtype.element_ty), mask=m_tile)
