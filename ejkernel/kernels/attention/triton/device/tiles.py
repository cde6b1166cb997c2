"""Device code that all kernels of attention share: a program's block, the block's keys in sight, scores, and dropout.

Names: `i_` index, `n_` count, `b_` block in registers, `p_` pointer, `o_` offset, `m_` mask; letters as in `Call`.
Positions `i` and `j` of queries and keys count from 0 in their sequence, which begins in its row at `q_at` and `k_at`.
Scores are in units of log 2, so that their exponential is one instruction.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# No token is further away than this, and sums of positions and bounds up to it stay within int32.
FAR = tl.constexpr(1 << 30)

# How many borders of packed sequences, or blocks of ids, are compared at once.
WAYS = tl.constexpr(64)

# Flags of a mask's or a bias' layout: that there is one, and which of its axes are not broadcast.
PRESENT = tl.constexpr(1)
ROWS = tl.constexpr(2)
QUERIES = tl.constexpr(4)
KEYS = tl.constexpr(8)
# The keys of its rows are padded to a multiple of this.
ALIGNED = tl.constexpr(16)

# The stages of a walk over the keys in sight: blocks at the left edge (0), which need masks; inner blocks, which all
# rows see whole; blocks at the right edge.
INNER = tl.constexpr(1)
RIGHT_EDGE = tl.constexpr(2)


@triton.jit
def last_begun(i_block, p_cu, o_n, N, BLOCK: tl.constexpr):
    """The last of the packed sequences `o_n` whose first block is not after `i_block`, or 0."""
    m_n = o_n <= N
    m_begun = m_n & (tl.load(p_cu + o_n, mask=m_n, other=0) // BLOCK + o_n <= i_block)
    return tl.max(tl.where(m_begun, o_n, 0), 0)


@triton.jit
def sequence_of(i_block, p_cu, N, apart, BLOCK: tl.constexpr):
    """The packed sequence that a block belongs to; N is the padding past the last.

    Sequence `n` has the blocks from `cu[n] // BLOCK + n` on. That may be one more than it needs, and spares a sum over
    the sequences before it. WAYS sequences are compared at once: first every `apart`-th one, then those in between.
    """
    o_w = tl.arange(0, WAYS)
    i_low = last_begun(i_block, p_cu, o_w * apart, N, BLOCK)
    i_n = i_low
    for i_step in range(1, apart, WAYS):
        i_n = tl.maximum(i_n, last_begun(i_block, p_cu, i_low + i_step + o_w, N, BLOCK))
    return i_n


@triton.jit
def block_of(i_program, HEADS: tl.constexpr, BACKWARDS: tl.constexpr):
    """The block of tokens of a program, where HEADS programs share each; BACKWARDS, the last blocks start first."""
    i_block = i_program // HEADS
    if BACKWARDS:
        i_block = tl.num_programs(0) // HEADS - 1 - i_block
    return i_block


@triton.jit
def locate(i_block, p, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, CALL: tl.constexpr):
    """A block's row and first position, where its sequence begins, how many queries and keys it has, and `bounds`."""
    if CALL.packed:
        i_n = sequence_of(i_block, p.cu_seqlens_kv if OF_KEYS else p.cu_seqlens, p.N, p.apart, BLOCK)
        i_next = tl.minimum(i_n + 1, p.N)
        q_at = tl.load(p.cu_seqlens + i_n)
        k_at = tl.load(p.cu_seqlens_kv + i_n)
        # padding counts as a sequence with queries alone, or keys alone
        n_q = tl.where(i_n < p.N, tl.load(p.cu_seqlens + i_next), 0 if OF_KEYS else p.S) - q_at
        n_k = tl.where(i_n < p.N, tl.load(p.cu_seqlens_kv + i_next), p.L if OF_KEYS else 0) - k_at
        i_first = (i_block - (k_at if OF_KEYS else q_at) // BLOCK - i_n) * BLOCK
        i_b = i_block * 0
        i_n = tl.minimum(i_n, p.N - 1)
    else:
        n_blocks = tl.cdiv(p.L if OF_KEYS else p.S, BLOCK)
        i_b = i_block // n_blocks
        i_first = i_block % n_blocks * BLOCK
        i_n = i_b
        q_at = i_block * 0
        k_at = i_block * 0
        n_q = q_at + p.S
        n_k = k_at + p.L
    lowest, highest = bounds(p, i_n, CALL)
    return i_b, i_first, q_at, n_q, k_at, n_k, lowest, highest


@triton.jit
def bounds(p, i_n, CALL: tl.constexpr):
    """How far from a query's own position the first and the last key are that it sees, in a row or sequence."""
    offset = (i_n * 0).to(tl.int64)
    if CALL.offsets:
        offset += tl.load(p.query_offset + (i_n if CALL.offsets == 2 else 0))
    lowest = tl.minimum(tl.maximum(offset - p.left, -FAR), FAR)
    highest = tl.minimum(tl.maximum(offset + p.right, -FAR), FAR)
    return lowest.to(tl.int32), highest.to(tl.int32)


@triton.jit
def in_sight(i_first, i_last, n_others, lowest, highest, STEP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which of `n_others` tokens the tokens `i_first … i_last` see.

    The first and one past the last that some of them see; that first rounded down to whole steps; and where the steps
    begin and end that all of them see whole.
    """
    low = n_others * 0
    high = n_others
    all_low = low
    all_high = high
    if LEFT:
        low = tl.maximum(i_first + lowest, 0)
        all_low = tl.maximum(i_last + lowest, 0)
    if RIGHT:
        high = tl.minimum(high, i_last + highest + 1)
        all_high = tl.minimum(high, i_first + highest + 1)
    start = low // STEP * STEP
    all_start = tl.maximum(tl.cdiv(all_low, STEP) * STEP, start)
    all_stop = tl.maximum(tl.maximum(all_high, 0) // STEP * STEP, all_start)
    return low, high, start, all_start, all_stop


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def load_ids(p_ids, i_row, o_r, m_r):
    """Ids of the tokens `o_r` of a row, -1 for padding and where `m_r` says that there is no token."""
    return tl.maximum(tl.load(p_ids + i_row + o_r, mask=m_r, other=-1), -1)


@triton.jit
def next_id(b_ids, m_r, i_id):
    """The next larger id than `i_id` among a block's tokens, and how many tokens have that or a larger one."""
    m_left = m_r & (b_ids > i_id)
    return tl.min(tl.where(m_left, b_ids, (1 << 31) - 1), 0), tl.sum(m_left.to(tl.int32), 0)


@triton.jit
def narrowed_to_id(sight, i_b, i_id, n_others, p, STEP: tl.constexpr):
    """`in_sight` narrowed to blocks of STEP tokens that may have the id `i_id`, judged by their least and largest ids.

    Steps that all see are narrowed to blocks in which every token has this id, if those blocks are adjacent; else none
    is left. `p.least` and `p.largest` are the least and the largest id of each block but for padding; `p.whole` says
    whether all of a block's tokens have one id.
    """
    low, high, start, all_start, all_stop = sight
    n_blocks = tl.cdiv(n_others, STEP)
    i_first = n_blocks * 0 + n_blocks
    i_last = n_blocks * 0 - 1
    i_whole = n_blocks * 0 + n_blocks
    i_whole_last = n_blocks * 0 - 1
    n_whole = n_blocks * 0
    o_row = i_b.to(tl.int64) * n_blocks
    for i_block in range(start // STEP, tl.cdiv(tl.maximum(high, 0), STEP), WAYS):
        o_block = i_block + tl.arange(0, WAYS)
        m_block = o_block < n_blocks
        b_least = tl.load(p.least + o_row + o_block, mask=m_block, other=0)
        b_largest = tl.load(p.largest + o_row + o_block, mask=m_block, other=-1)
        m_own = m_block & (b_least <= i_id) & (b_largest >= i_id)
        m_whole = m_own & (tl.load(p.whole + o_row + o_block, mask=m_block, other=0) != 0)
        i_first = tl.minimum(i_first, tl.min(tl.where(m_own, o_block, n_blocks), 0))
        i_last = tl.maximum(i_last, tl.max(tl.where(m_own, o_block, -1), 0))
        i_whole = tl.minimum(i_whole, tl.min(tl.where(m_whole, o_block, n_blocks), 0))
        i_whole_last = tl.maximum(i_whole_last, tl.max(tl.where(m_whole, o_block, -1), 0))
        n_whole += tl.sum(m_whole.to(tl.int32), 0)
    is_run = (n_whole > 0) & (n_whole == i_whole_last - i_whole + 1)
    low = tl.maximum(low, i_first * STEP)
    high = tl.minimum(high, (i_last + 1) * STEP)
    start = tl.maximum(start, i_first * STEP)
    all_start = tl.maximum(all_start, tl.where(is_run, i_whole, i_first) * STEP)
    all_stop = tl.maximum(tl.minimum(all_stop, tl.where(is_run, i_whole_last + 1, i_first) * STEP), all_start)
    return low, high, start, all_start, all_stop


@triton.constexpr_function
def has_stage(stage, first_edge, joined):
    """Whether the walk has this stage; a joined walk has only the last, which then visits all blocks."""
    return stage == RIGHT_EDGE or (not joined and (stage == INNER or first_edge))


@triton.jit
def stage_span(STAGE: tl.constexpr, start, all_start, all_stop, high, JOINED: tl.constexpr):
    """From where to where a stage of the walk goes."""
    if JOINED:
        return start, high
    elif STAGE == RIGHT_EDGE:
        return all_stop, high
    elif STAGE == INNER:
        return all_start, all_stop
    else:
        return start, tl.minimum(all_start, high)


@triton.jit
def at_edge(i_first, all_start, all_stop):
    """Whether some row does not see the whole step that begins at `i_first`."""
    return (i_first < all_start) | (i_first >= all_stop)


@triton.jit
def in_window(o_i, o_j, lowest, highest, CALL: tl.constexpr):
    """Whether causality and the window let the query at `o_i` see the key at `o_j`."""
    m_pair = (o_i == o_i) & (o_j == o_j)
    if CALL.left:
        m_pair = m_pair & (o_j >= o_i + lowest)
    if CALL.right:
        m_pair = m_pair & (o_j <= o_i + highest)
    return m_pair


@triton.jit
def load_rows(p, i_token, o_r, m_r, o_c, HEADS: tl.constexpr, D: tl.constexpr, UNMASKED: tl.constexpr):
    """A head's rows `i_token + o_r` as a tile, from an array of HEADS heads of D dims; 0 where `m_r` is false.

    UNMASKED, `m_r` is true everywhere.
    """
    PAD: tl.constexpr = o_c.shape[0] != D
    p_tile = p + i_token * (HEADS * D) + o_r[:, None] * (HEADS * D) + o_c[None, :]
    if UNMASKED and not PAD:
        return tl.load(p_tile)
    elif UNMASKED:
        return tl.load(p_tile, mask=o_c[None, :] < D, other=0.0)
    elif PAD:
        return tl.load(p_tile, mask=m_r[:, None] & (o_c[None, :] < D), other=0.0)
    else:
        return tl.load(p_tile, mask=m_r[:, None], other=0.0)


@triton.jit
def tokens_in_sight(p_ids, i_row, o_j, low, high, i_id, UNMASKED: tl.constexpr, CALL: tl.constexpr):
    """Which tokens at positions `o_j` are in sight of any row of a block, and have the id `i_id` if there are ids."""
    m_j = (o_j >= low) & (o_j < high)
    if CALL.ids and not UNMASKED:
        # tokens of other ids are not even loaded: 0 times NaN is not 0
        m_j = m_j & (load_ids(p_ids, i_row, o_j, m_j) == i_id)
    return m_j


@triton.jit
def pair_rows(i_b, i_h, o_token, p, HEADS: tl.constexpr, LAYOUT: tl.constexpr, CALL: tl.constexpr):
    """Where the queries' rows of a mask or a bias begin; one row if all queries share it."""
    o_row = i_b.to(tl.int64) * 0
    if HEADS > 1:
        o_row += i_h * HEADS // CALL.heads
    if ROWS & LAYOUT:
        o_row += i_b.to(tl.int64) * HEADS
    if QUERIES & LAYOUT:
        # past the end the last row is as good as any
        o_row = o_row * p.S + tl.minimum(o_token, p.S - 1)
    if KEYS & LAYOUT:
        o_row = o_row * padded(p.L)
    return o_row + tl.zeros([1], tl.int64)


@triton.jit
def rows_of_pairs(i_b, i_h, o_token, p, CALL: tl.constexpr):
    """Where the queries' rows of the mask and of the bias begin, and the queries' numbers for dropout's hash."""
    o_mask = o_token
    o_bias = o_token
    o_draw = o_token
    if CALL.mask:
        o_mask = pair_rows(i_b, i_h, o_token, p, CALL.mask_heads, CALL.mask, CALL)
    if CALL.bias:
        o_bias = pair_rows(i_b, i_h, o_token, p, CALL.bias_heads, CALL.bias, CALL)
    if CALL.drop_below:
        o_draw = draw_rows(i_b, i_h, o_token, p, CALL)
    return o_mask, o_bias, o_draw


@triton.jit
def draw_rows(i_b, i_h, o_token, p, CALL: tl.constexpr):
    """The queries' numbers for dropout's hash, counted in the whole call where this one is a device's part of it."""
    i_head = (i_b * CALL.heads + i_h).to(tl.int64)
    if CALL.part_of_call:
        i_head = tl.load(p.words + 2).to(tl.int64) + i_b * tl.load(p.words + 3).to(tl.int64) + i_h
    return (i_head * p.S + o_token).to(tl.uint32)


@triton.jit
def padded(L):
    """How many keys a row of a mask or a bias has in memory, so that each row begins aligned and loads are wide."""
    return tl.cdiv(L, ALIGNED) * ALIGNED


@triton.jit
def load_pairs(p_pairs, o_row, o_token, L, LAYOUT: tl.constexpr):
    """A tile of a mask or a bias, from the beginnings of its rows and the keys' tokens; broadcast axes have size 1."""
    if KEYS & LAYOUT:
        return tl.load(p_pairs + o_row + o_token, mask=o_token < padded(L), other=0)
    else:
        return tl.load(p_pairs + o_row)


@triton.jit
def load_bias(p, o_row, o_token, CALL: tl.constexpr):
    """A tile of the bias in units of log 2, except numbers that would become infinite by that."""
    b = load_pairs(p.bias, o_row, o_token, p.L, CALL.bias).to(tl.float32)
    return tl.where(tl.abs(b) < 2.0**126, b * LOG2E, b)


@triton.jit
def load_mask(p, o_row, o_token, CALL: tl.constexpr):
    """A tile of the mask."""
    return load_pairs(p.mask, o_row, o_token, p.L, CALL.mask) != 0


@triton.jit
def tanh(b, FAST: tl.constexpr):
    """The hyperbolic tangent; FAST is one instruction with an error of 2^-11 of the result."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        b_square = b * b
        b_near = b + b * b_square * (-1 / 3 + b_square * (2 / 15 - b_square * (17 / 315)))
        # exact to the last digits of 1, which is too little where the result is small
        return tl.where(b_square < 0.04, b_near, 1.0 - 2.0 / (tl.exp2(b * (2 * LOG2E)) + 1.0))


@triton.jit
def capped(b_s, CALL: tl.constexpr):
    """Scores before the bias, from products of queries and keys, and the slope of the soft cap.

    With `CALL.scaled_late` the scale is left to the exponential.
    """
    b_slope = 1.0
    if CALL.cap > 0:
        b_bent = tanh(b_s * (CALL.scale / CALL.cap), CALL.fast_tanh)
        b_s = b_bent * (CALL.cap * LOG2E)
        b_slope = 1.0 - b_bent * b_bent
    elif not CALL.scaled_late:
        b_s = b_s * (CALL.scale * LOG2E)
    return b_s, b_slope


@triton.jit
def rotated(b, BY: tl.constexpr):
    return (b << BY) | (b >> (32 - BY))


@triton.jit
def keep_mask(p, o_row, o_column, CALL: tl.constexpr):
    """Which weights dropout keeps: `dropout.keep_mask`, Threefry-2x32 in 13 rounds, bit for bit."""
    k_0 = tl.load(p.words)
    k_1 = tl.load(p.words + 1)
    k_2 = k_0 ^ k_1 ^ 0x1BD11BDA
    x_0 = o_row + k_0
    x_1 = o_column + k_1
    x_0, x_1 = tl.broadcast(x_0, x_1)
    x_0, x_1 = four_rounds(x_0, x_1, 13, 15, 26, 6)
    x_0, x_1 = four_rounds(x_0 + k_1, x_1 + k_2 + 1, 17, 29, 16, 24)
    x_0, x_1 = four_rounds(x_0 + k_2, x_1 + k_0 + 2, 13, 15, 26, 6)
    # the last round's second word is not needed
    return x_0 + k_0 + x_1 + k_1 + 3 >= CALL.drop_below


@triton.jit
def four_rounds(x_0, x_1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x_0 = x_0 + x_1
    x_1 = rotated(x_1, A) ^ x_0
    x_0 = x_0 + x_1
    x_1 = rotated(x_1, B) ^ x_0
    x_0 = x_0 + x_1
    x_1 = rotated(x_1, C) ^ x_0
    x_0 = x_0 + x_1
    x_1 = rotated(x_1, D) ^ x_0
    return x_0, x_1


@triton.jit
def visit_queries(p, VISIT: tl.constexpr, CALL: tl.constexpr):
    """Calls `VISIT(p, i_h, place, m_i, sight, i_id, CALL)` for a program's block of queries of one head.

    The longest walks begin first. Queries of several ids are visited one id after the other, so that no product mixes
    two sequences; `m_i` are the rows of the block that have the id `i_id`, or all rows.
    """
    H: tl.constexpr = CALL.heads
    BM: tl.constexpr = CALL.rows
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = block_of(i_program, H, CALL.right)
    i_b, i_first, q_at, n_q, k_at, n_k, lowest, highest = locate(i_block, p, BM, False, CALL)
    place = (i_b, i_first, q_at, k_at, lowest, highest)
    if i_first >= n_q:
        return
    o_m = tl.arange(0, BM)
    m_i = i_first + o_m < n_q
    i_last = tl.minimum(i_first + BM, n_q) - 1
    sight = in_sight(i_first, i_last, n_k, lowest, highest, CALL.columns, CALL.left, CALL.right)
    if CALL.ids:
        b_ids = load_ids(p.segment_ids, i_b.to(tl.int64) * p.S + i_first, o_m, m_i)
        i_id, n_left = next_id(b_ids, m_i, -2)
        while n_left > 0:
            own = narrowed_to_id(sight, i_b, i_id, n_k, p, CALL.columns)
            VISIT(p, i_h, place, m_i & (b_ids == i_id), own, i_id, CALL)
            i_id, n_left = next_id(b_ids, m_i, i_id)
    else:
        VISIT(p, i_h, place, m_i, sight, 0, CALL)
