"""Device code: the walk, which carries a state through the chunks of a sequence, in all of its roles."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import MOST, faded, in_bits
from ejkernel.kernels.chunks.triton.device.places import (
    CHUNKS,
    CUT,
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
    load_flag,
    load_kept,
    load_rows,
    locate,
    next_entries,
    rows_kept,
    store_tile,
    token_of,
    token_offsets,
)
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.linear_recurrence.triton.device.programs import (
    any_chunk,
    load_factors,
    load_start,
    load_weights,
    mark_sequences,
    part_of_walk,
)


@triton.jit
def walk(p, CALL: tl.constexpr):
    """Carries a state through the chunks of a time segment: `S ← decay S + z yᵀ`, `output = scale S x`.

    | `CALL.walk.role` | x | y | z | w | rows of S | time | stores |
    |---|---|---|---|---|---|---|---|
    | `segment` | | k̂, or q̂ in reverse | v, or do | | V | either | the state that each segment adds, and its decay |
    | `output` | q̂ | k̂ | v | | V | forward | the output, and the final state |
    | `dvalue` | k̂ | q̂ | do | | V | reverse | dv, and the gradient of the initial state if there is one |
    | `dquery` | do | v | k̂ | q | K | forward | dq̂; if gates have a gradient, also row dots and ⟨S, dS⟩ |
    | `dkey` | v | do | q̂ | k | K | reverse | dk̂; if gates have a gradient, also row dots and states |

    Without key gates q̂ and k̂ are q and k. The state is held as [z dims, x dims], the left operand of every large dot.
    If x has more dims than a program carries, each part of them has a program, and outputs are parts of a sum.

    Decays of a chunk are relative to a reference, as the kernels that fold gates store them. `p.within` is the gate
    itself (constant), weights of rows (head), or scores of flagged chunks (key); `p.other` has the state's decays along
    the value dims, when those decay too, and z and the output are then folded.
    Row dots, of w and the output's rows, are q·dq and k·dk, for gates of a head. `Border` lists what a walk stores at
    the later end of each group of chunks, or for every chunk.

    Two kernels share a walk by its segments, and the second one, with `CALL.walk.strong`, adds its results to the first
    one's in place: what strong gates need would take registers of the common case.
    Head gates: STRONG takes segments in which any chunk is flagged. Where rows hold several sequences, which a program
    walks over one after the other, the first kernel takes all, and STRONG stores those that have a flagged chunk.
    With `CALL.walk.alone` STRONG takes all, and there is no first kernel.
    Key gates, with `CALL.walk.apart`: STRONG takes segments whose chunks are all flagged. Scores are tiles like x, y
    and z there, fetched ahead of their chunk.
    float16 has too small a range: its operands are carried as float32, and multiplied in one pass of TF32.
    """
    H: tl.constexpr = CALL.heads
    HW: tl.constexpr = CALL.walk.w_heads
    DX: tl.constexpr = CALL.walk.x_dim
    DZ: tl.constexpr = CALL.walk.z_dim
    BX: tl.constexpr = CALL.walk.x_block
    BZ: tl.constexpr = CALL.walk.z_block
    C: tl.constexpr = CALL.chunk
    G: tl.constexpr = CALL.group
    WHOLE: tl.constexpr = CALL.whole
    FLIP: tl.constexpr = CALL.flip
    PRECISION: tl.constexpr = CALL.walk.precision
    WIDE: tl.constexpr = CALL.wide
    DECAY: tl.constexpr = CALL.decay
    REVERSE: tl.constexpr = CALL.reverse
    STRONG: tl.constexpr = 1 if CALL.walk.strong else 0
    MARKED: tl.constexpr = CALL.listed and CALL.walk.strong and not CALL.walk.alone
    ROW_DOTS: tl.constexpr = CALL.walk.row_dots
    BORDER: tl.constexpr = CALL.walk.border
    OUTPUT: tl.constexpr = CALL.walk.role != "segment"
    SCORES: tl.constexpr = (CALL.walk.role == "output") or (CALL.walk.role == "dvalue")
    # key dims are the rows of the walked state, or its columns
    BY_KEY: tl.constexpr = (CALL.walk.role == "dquery") or (CALL.walk.role == "dkey")
    STATE_ROW: tl.constexpr = DX if BY_KEY else 1
    STATE_COLUMN: tl.constexpr = 1 if BY_KEY else DZ
    KEYED: tl.constexpr = DECAY == "key"
    # the other side of the state decays too, and no chunk is flagged
    BOTH: tl.constexpr = CALL.walk.both
    # scores of all chunks are there
    SCORED: tl.constexpr = KEYED and CALL.walk.strong
    KEY_ROWS: tl.constexpr = KEYED and BY_KEY
    KEY_COLUMNS: tl.constexpr = KEYED and not BY_KEY
    # these walks would spill registers; others are faster with what is carried
    LATE: tl.constexpr = CALL.listed and ((DECAY == "head") or (CALL.walk.role == "dvalue"))
    NX: tl.constexpr = (DX + BX - 1) // BX
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    PAD_X: tl.constexpr = NX * BX != DX
    PAD_Z: tl.constexpr = NZ * BZ != DZ
    i_z, i_x, i_h, i_block = part_of_walk(NX, NZ, H)
    span = locate(i_block, p, SEGMENTS, p.L, CALL)
    i_n, i_j, i_first, n_rows, n_read = span
    i_chunk0 = blocks_before(i_n, p, CHUNKS, C, CALL)
    if (BORDER != "none") and (BORDER != "every chunk"):
        i_group0 = blocks_before(i_n, p, GROUPS, C * G, CALL)
    n_chunks = tl.cdiv(n_rows, C)
    i_from = i_j * (p.L // C)
    n_steps = tl.minimum(n_chunks - i_from, tl.cdiv(p.L, C))
    if (not OUTPUT) and (not CALL.last):
        # no segment starts from the state that a sequence ends with
        if (i_j == 0) if REVERSE else (i_from + n_steps >= n_chunks):
            return

    i_sizes = i_from
    n_sizes = n_steps
    if CALL.listed:
        i_from, n_steps = listed_from(i_n, i_sizes, n_sizes, p, CALL)
        entry, next_entry = first_entries(i_from, n_steps, i_n, p, REVERSE)

    o_r = tl.arange(0, C)
    o_x = i_x * BX + tl.arange(0, BX)
    o_z = i_z * BZ + tl.arange(0, BZ)
    o_t = token_offsets(o_r, FLIP)
    o_state = o_z[:, None] * STATE_ROW + o_x[None, :] * STATE_COLUMN
    o_border = o_z[:, None] * DX + o_x[None, :]
    m_state = (o_z[:, None] < DZ) & (o_x[None, :] < DX)
    i_xh = i_h // (H // CALL.walk.x_heads)
    i_yh = i_h // (H // CALL.walk.y_heads)
    i_zh = i_h // (H // CALL.walk.z_heads)

    # scores are [row of y, row of x]
    o_gap = o_r[None, :] - o_r[:, None]
    if REVERSE:
        o_gap = -o_gap

    if DECAY == "constant":
        b_gate = in_bits(tl.load(p.within + i_n.to(tl.int64) * H + i_h).to(tl.float32))
        # finite, since 0 times infinity would be no number
        b_pair = tl.exp2(tl.where(o_gap >= 0, tl.minimum(b_gate * o_gap, MOST), float("-inf")))
        b_near = tl.exp2(tl.minimum(b_gate * ((C - 1 - o_r) if REVERSE else (o_r + 1)), MOST))
        b_write = tl.exp2(tl.minimum(b_gate * ((o_r + 1) if REVERSE else (C - 1 - o_r)), MOST))
        b_through = tl.exp2(tl.minimum(b_gate * C, MOST))
    if DECAY == "head":
        if not CALL.listed:
            if not CALL.walk.alone:
                if (any_chunk(p.flag, i_chunk0 + i_from, n_steps, i_h, True, H) != 0) != STRONG:
                    return
        elif MARKED:
            if (any_chunk(p.any_flag, i_chunk0 + i_sizes, n_sizes, i_h, True, H) != 0) == 0:
                return
            p_marks = p.marks + (((i_n.to(tl.int64) * H + i_h) * NX + i_x) * NZ + i_z) * p.T
            mark_sequences(p, p_marks, span, i_from, n_steps, i_h, CALL)

    if CALL.walk.apart:
        any_mild = any_chunk(p.flag, i_chunk0 + i_from, n_steps, i_h, False, H)
        if ((any_mild == 0) & (n_steps > 0)) != STRONG:
            return

    b_state = tl.zeros([BZ, BX], tl.float32)
    if CALL.start:
        b_state = load_start(p, i_n, i_block, i_h, o_state, m_state, CALL)
    # with a gate a head, the decay from the last chunk's reference to its end, applied with the next chunk's decay
    b_due = 1.0
    if not OUTPUT:
        is_connected = i_n >= 0
        if BOTH:
            b_total_row = tl.full([BZ], 1.0, tl.float32)
        if KEY_COLUMNS:
            b_total = tl.full([BX], 1.0, tl.float32)
        elif KEY_ROWS:
            b_total = tl.full([BZ], 1.0, tl.float32)
        else:
            b_total = 1.0
    if ROW_DOTS:
        i_wh = i_h // (H // HW)
        if CALL.listed:
            ahead = listed_chunk(i_n, entry, next_entry, CALL)
        else:
            ahead = chunk_at(i_from + n_steps - 1 if REVERSE else i_from, span, p, CALL)
        m_w = (ahead.i_row + o_r < ahead.n_read) & (n_steps > 0)
        b_w = load_rows(p.w, token_of(i_first, n_rows, ahead.i_row, FLIP), i_wh, o_t, m_w, o_z, HW, DZ, PAD_Z, False)

    if BORDER == "state" and not CALL.listed:
        if n_steps > 0:
            i_border = i_group0 + (i_from + n_steps - 1) // G
            p_here = p.border + (i_border * H + i_h) * (DX * DZ) + o_border
            tl.store(p_here, b_state.to(p.border.dtype.element_ty), mask=m_state)
    for i_step in tl.range(0, n_steps, disable_licm=CALL.listed and DECAY == "head"):
        i_c = i_from + i_step
        if REVERSE:
            i_c = i_from + n_steps - 1 - i_step
        if CALL.listed:
            chunk = listed_chunk(i_n, entry, next_entry, CALL)
            entry, next_entry = next_entries(i_c, i_n, p, REVERSE)
            here = chunk
            if LATE:
                here = chunk_here(i_c, i_n, p, CALL)
        else:
            chunk = chunk_at(i_c, span, p, CALL)
            here = chunk
        i_row = chunk.i_row
        i_token = token_of(i_first, n_rows, i_row, FLIP)
        i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
        m_read = i_row + o_r < chunk.n_read
        m_chunk = m_read
        has_tokens = True
        takes = True
        if CALL.listed:
            m_chunk = i_row + o_r < chunk.n_end
            has_tokens = is_real(here)
            starts_anew = is_cut(here, REVERSE)
            if starts_anew:
                keep_branch(p, i_n)
                b_state = tl.zeros([BZ, BX], tl.float32)
            b_due = tl.where(starts_anew, 1.0, b_due)
            takes = has_tokens & (starts_anew == 0)
            ends_group = (i_step == (0 if REVERSE else n_steps - 1)) | (here.n_end // (C * G) > here.i_row // (C * G))
            if MARKED:
                is_marked = tl.load(p_marks + here.i_row) != 0
            if BORDER == "state":
                if ends_group:
                    p_here = p.border + ((i_group0 + here.i_c // G) * H + i_h) * (DX * DZ) + o_border
                    m_border = m_state & is_marked if MARKED else m_state
                    tl.store(p_here, (b_state * b_due).to(p.border.dtype.element_ty), mask=m_border)
        if BORDER == "every chunk":
            p_here = p.border + i_chunk * (DX * DZ) + o_border
            tl.store(p_here, (b_state * b_due).to(p.border.dtype.element_ty), mask=m_state)
        b_y = load_rows(p.y, i_token, i_yh, o_t, m_read, o_x, CALL.walk.y_heads, DX, PAD_X, WIDE, WHOLE)
        b_z = tl.trans(load_rows(p.z, i_token, i_zh, o_t, m_read, o_z, CALL.walk.z_heads, DZ, PAD_Z, WIDE, WHOLE))
        if OUTPUT:
            b_x = tl.trans(load_rows(p.x, i_token, i_xh, o_t, m_read, o_x, CALL.walk.x_heads, DX, PAD_X, WIDE, WHOLE))
        b_y = nearest(b_y, PRECISION)
        b_z = nearest(b_z, PRECISION)
        if OUTPUT:
            b_x = nearest(b_x, PRECISION)

        # what is added to the state, and the state that the rows of x read
        b_added = b_z
        b_read = b_state
        if DECAY == "head":
            p_weights = p.within + rows_kept(chunk, i_chunk, i_h, p, 4, CALL)
            b_near, b_far, b_whole_sum, b_part_sum = load_weights(p_weights, o_r, m_chunk, CALL)
            if STRONG:
                p_end = p_weights + 4 * (chunk.n_end - 1 - i_row if CALL.listed else C - 1)
                b_whole_end = tl.load(p_end + 1)
                b_part_end = tl.load(p_end + 3)
                # exponents still
                b_near = b_whole_sum + b_part_sum
                b_far = (b_whole_end - b_whole_sum) + (b_part_end - b_part_sum)
                b_all = b_whole_end + b_part_end
                b_before = 1.0
                b_after = 1.0
            else:
                b_before = tl.load(p.factors + i_chunk * 2 + (1 if REVERSE else 0))
                b_after = tl.load(p.factors + i_chunk * 2 + (0 if REVERSE else 1))
                if CALL.listed:
                    b_before = tl.where(takes, b_before, 1.0)
                    b_after = tl.where(has_tokens, b_after, 1.0)
            if REVERSE:
                b_near, b_far = b_far, b_near
            if STRONG:
                b_added = faded(b_z, b_far[None, :])
            else:
                b_added = b_z * b_far[None, :]
        if DECAY == "constant":
            b_added = b_z * b_write[None, :]
        if (DECAY == "head") or (DECAY == "constant"):
            b_added = nearest(b_added.to(b_z.dtype), PRECISION)
        if DECAY == "head":
            b_state = b_state * (b_due * b_before)
            b_due = b_after
            if STRONG:
                b_state = faded(b_state, b_all)
            else:
                b_read = b_state
        if KEYED:
            DK: tl.constexpr = DX if KEY_COLUMNS else DZ
            o_k = o_x if KEY_COLUMNS else o_z
            b_before, b_after = load_factors(p.factors, i_chunk, o_k, takes, has_tokens, DK, KEY_COLUMNS, CALL)
            if BOTH:
                DO: tl.constexpr = DZ if KEY_COLUMNS else DX
                o_o = o_z if KEY_COLUMNS else o_x
                b_other_before, b_other_after = load_factors(p.other, i_chunk, o_o, True, True, DO, KEY_ROWS, CALL)
                b_state = b_state * b_before * b_other_before
                b_read = b_state
            else:
                # SCORED needs no flag: all chunks are flagged. Loads for a product's operand are fetched ahead
                is_exact = n_steps > 0
                if not SCORED:
                    is_exact = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) != 0
                b_read = b_state * tl.where(is_exact, 1.0, b_before)
                b_state = b_state * b_before
            if BORDER == "read":
                if ends_group if CALL.listed else (i_c % G == G - 1) | (i_c == n_chunks - 1):
                    p_here = p.border + ((i_group0 + here.i_c // G) * H + i_h) * (DX * DZ) + o_border
                    tl.store(p_here, b_read.to(b_y.dtype), mask=m_state)

        if OUTPUT:
            if DECAY != "none":
                b_read = nearest(b_read.to(b_y.dtype), PRECISION)
            if SCORED:
                p_score = p.within + i_chunk * (C * C) + (o_r[:, None] * C + o_r[None, :])
                b_score = tl.load(p_score)
                if not REVERSE:
                    b_score = tl.trans(b_score)
                if NX > 1:
                    # these are of all dims of x, and count once
                    b_score = tl.where(i_x == 0, b_score, 0.0)
            else:
                b_score = tl.dot(b_y, b_x, input_precision=PRECISION)
            if DECAY == "none":
                # not before, so that this dot need not wait for the last chunk's
                b_read = nearest(b_read.to(b_y.dtype), PRECISION)
            b_out = tl.dot(b_read, b_x, input_precision=PRECISION)
            if DECAY == "constant":
                b_out = b_out * b_near[None, :]
                # a later token's score may be infinite, and is to become 0; a choice would take more registers
                b_score = tl.clamp(b_score, -3e38, 3e38, propagate_nan=tl.PropagateNan.ALL) * b_pair
            if DECAY == "head":
                if STRONG:
                    # whole and fractional parts are summed apart: no strong gate costs a later one its digits
                    b_gap = b_whole_sum[None, :] - b_whole_sum[:, None]
                    b_gap += b_part_sum[None, :] - b_part_sum[:, None]
                    b_score = faded(b_score, -b_gap if REVERSE else b_gap)
                    b_out = faded(b_out, b_near[None, :])
                else:
                    b_score = b_score * b_far[:, None]
                    if ROW_DOTS:
                        # all weights before rounding, so that the row dots that are subtracted have the same errors
                        b_score = b_score * b_near[None, :]
                        b_out = b_out * b_near[None, :]
            if KEYED and not BOTH and not SCORED:
                if is_exact:
                    if SCORES:
                        o_score = o_r[:, None] * C + o_r[None, :] if REVERSE else o_r[:, None] + o_r[None, :] * C
                        p_score = p.within + rows_kept(chunk, i_chunk, i_h, p, C, CALL) + o_score
                        m_score = m_chunk[:, None] if REVERSE else m_chunk[None, :]
                        b_score = load_kept(p_score, m_score, CALL).to(tl.float32)
                        if NX > 1:
                            # these are of all dims of x, and count once
                            b_score = tl.where(i_x == 0, b_score, 0.0)
                    else:
                        b_score = tl.zeros([C, C], tl.float32)
            if DECAY != "constant" and not SCORED:
                b_score = tl.where(o_gap >= 0, b_score, 0.0)
            b_score = nearest(b_score.to(b_z.dtype), PRECISION)
            b_out = tl.dot(b_z, b_score, acc=b_out, input_precision=PRECISION)
            if DECAY == "none":
                b_state = tl.dot(b_added, b_y, acc=b_state, input_precision=PRECISION)
            if (DECAY == "head") and (not STRONG) and (not ROW_DOTS):
                b_out = b_out * (b_near * CALL.scale)[None, :]
            else:
                b_out = b_out * CALL.scale
            m_write = i_row + o_r < chunk.n_end
            if LATE:
                i_token = token_of(i_first, n_rows, here.i_row, FLIP)
                m_read = here.i_row + o_r < here.n_read
                m_chunk = here.i_row + o_r < here.n_end
            if CALL.listed:
                # padding is written below
                m_write = m_read
                if MARKED:
                    m_write = m_read & is_marked
            p_rows = p.output + ((i_token * H + i_h) * NX + i_x) * DZ + o_t[:, None] * (H * NX * DZ) + o_z[None, :]
            b_rows = tl.trans(b_out.to(p.output.dtype.element_ty))
            m_out = m_write[:, None]
            if PAD_Z:
                m_out = m_out & (o_z[None, :] < DZ)
            store_tile(p_rows, b_rows, m_out, WHOLE and not PAD_Z)
            if CALL.listed:
                if has_tokens == 0:
                    tl.store(p_rows, tl.zeros_like(b_rows), mask=m_chunk[:, None] & (o_z[None, :] < DZ))
            if ROW_DOTS:
                # in the layout of the store, which is that of w; what rounding took off is added again
                b_error = b_out - b_out.to(p.output.dtype.element_ty).to(tl.float32)
                b_unrounded = b_rows.to(tl.float32) + tl.trans(b_error.to(tl.bfloat16)).to(tl.float32)
                b_rowdot = tl.sum(b_unrounded * b_w.to(tl.float32), 1)
                p_dots = p.row_dots + ((i_token + o_t) * (NX * NZ) + i_x * NZ + i_z) * H + i_h
                tl.store(p_dots, b_rowdot, mask=m_write)
                if CALL.listed:
                    if has_tokens == 0:
                        tl.store(p_dots, tl.zeros_like(b_rowdot), mask=m_chunk)
                # fetched a chunk ahead: it arrives while that chunk is worked on
                i_next = i_row - C if REVERSE else i_row + C
                n_next = n_read
                if CALL.listed:
                    coming = listed_chunk(i_n, entry, next_entry, CALL)
                    i_next = coming.i_row
                    n_next = coming.n_read
                i_token = token_of(i_first, n_rows, i_next, FLIP)
                m_w = (i_next + o_r < n_next) & (i_step + 1 < n_steps)
                b_w = load_rows(p.w, i_token, i_wh, o_t, m_w, o_z, HW, DZ, PAD_Z, False)

        if (DECAY != "none") or (not OUTPUT):
            if DECAY == "constant":
                b_state = b_state * b_through
            b_state = tl.dot(b_added, b_y, acc=b_state, input_precision=PRECISION)
            # 1 for flagged chunks
            if KEYED and not SCORED:
                b_state = b_state * b_after
            if BOTH:
                b_state = b_state * b_other_after
        if not OUTPUT:
            if DECAY == "constant":
                b_total = b_total * b_through
            elif (DECAY == "head") and (STRONG):
                b_total = faded(b_total, b_all)
            elif DECAY == "head":
                b_total = b_total * b_before * b_after
            elif DECAY != "none":
                b_total = b_total * tl.reshape(b_before * b_after, [BX if KEY_COLUMNS else BZ])
            if BOTH:
                b_total_row = b_total_row * tl.reshape(b_other_before * b_other_after, [BZ])
            if CALL.listed:
                # 0 and not the decay, once a sequence has ended
                is_connected = is_connected & (starts_anew == 0)
                b_total = tl.where(is_connected, b_total, 0.0)
        if BORDER == "state":
            # the next chunk is in the group before
            if not CALL.listed:
                if (i_c % G == 0) & (i_step + 1 < n_steps):
                    p_here = p.border + ((i_group0 + i_c // G - 1) * H + i_h) * (DX * DZ) + o_border
                    tl.store(p_here, (b_state * b_due).to(p.border.dtype.element_ty), mask=m_state)
        if BORDER == "product":
            if ends_group if CALL.listed else (i_c % G == G - 1) | (i_step + 1 == n_steps):
                i_border = (i_group0 + here.i_c // G) * H + i_h
                if CALL.listed:
                    passes = (here.next_entry & CUT) == 0
                b_product = tl.load(p.d_state + i_border * (DX * DZ) + o_border, mask=m_state, other=0.0).to(tl.float32)
                if BOTH:
                    # the dims of x decay on their way there as well
                    p_before = (p.factors if KEY_COLUMNS else p.other) + i_chunk * (4 * DX) + 2 * DX + o_x
                    b_product = b_product / tl.load(p_before, mask=o_x < DX, other=1.0)[None, :]
                b_product = b_product * (b_state * b_due)
                if KEYED:
                    b_product = tl.sum(b_product, 1)
                    if CALL.listed:
                        b_product = tl.where(passes, b_product, 0.0)
                    tl.store(p.border + (i_border * NX + i_x) * DZ + o_z, b_product, mask=o_z < DZ)
                else:
                    b_product = tl.sum(b_product) if CALL.walk.flat else tl.sum(tl.sum(b_product, 1), 0)
                    if CALL.listed:
                        b_product = tl.where(passes, b_product, 0.0)
                    p_product = p.border + (i_border * NX + i_x) * NZ + i_z
                    if MARKED:
                        tl.store(p_product, b_product, mask=is_marked)
                    else:
                        tl.store(p_product, b_product)
    if (DECAY == "head") or (DECAY == "constant"):
        b_state = b_state * b_due

    if MARKED:
        # the final state is that of the last sequence
        ahead = chunk_at(i_from if REVERSE else i_from + n_steps - 1, span, p, CALL)
        if tl.load(p_marks + ahead.i_row) == 0:
            return
    if OUTPUT:
        if CALL.last:
            is_last = i_sizes + n_sizes >= n_chunks
            if REVERSE:
                is_last = i_j == 0
            if CALL.packed:
                is_last = is_last & (i_n < p.N)
            if is_last:
                i_last = i_n.to(tl.int64) * H + i_h
                tl.store(p.final + i_last * (DX * DZ) + o_state, b_state * CALL.last_scale, mask=m_state)
    else:
        i_segment = i_block.to(tl.int64) * H + i_h
        tl.store(p.final + i_segment * (DX * DZ) + o_state, b_state, mask=m_state)
        if BORDER == "every chunk":
            pass
        elif BOTH:
            tl.store(p.border + i_segment * (DX + DZ) + o_x, b_total, mask=(o_x < DX) & (i_z == 0))
            tl.store(p.border + i_segment * (DX + DZ) + DX + o_z, b_total_row, mask=(o_z < DZ) & (i_x == 0))
        elif KEY_COLUMNS:
            tl.store(p.border + i_segment * DX + o_x, b_total, mask=(o_x < DX) & (i_z == 0))
        elif KEY_ROWS:
            tl.store(p.border + i_segment * DZ + o_z, b_total, mask=o_z < DZ)
        else:
            tl.store(p.border + i_segment, b_total, mask=(i_z == 0) & (i_x == 0))
