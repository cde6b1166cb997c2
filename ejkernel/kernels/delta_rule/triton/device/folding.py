"""Device code for one gate a key dim, in bfloat16: mild gates folded into queries and keys, and the systems of these.

The reference is the chunk's middle: queries and keys are decayed since it, keys also until it, with inverted decays on
the other side of it. Gates are summed token after token, one key dim a thread, which takes a small part of the
instructions that products of tiles take: kept by 481 instead of 824 µs for the systems of `kda`.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E
from ejkernel.kernels.chunks.triton.device.places import FIRST, locate_block, rows_kept, store_tile, token_of
from ejkernel.kernels.delta_rule.triton.device.bounded_gates import classify
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import mark_idle, scalars_at
from ejkernel.kernels.delta_rule.triton.device.gate_strength import BOUNDED, MILD, STRONG, store_state_decays
from ejkernel.kernels.delta_rule.triton.device.inverse import scores
from ejkernel.kernels.delta_rule.triton.device.rows import load_beta, load_head, rows_of_block, writable
from ejkernel.kernels.delta_rule.triton.device.system import solve_system, store_solved_scores


@triton.jit
def load_each(
    p, i_row, i_before, n_read, m_k, ROWS: tl.constexpr, LATE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr
):
    """ROWS rows from the `i_row`-th outwards, 0 up to the `i_before`-th; the loads are issued one after the other."""
    values = ()
    for i in tl.static_range(ROWS):
        o_row = i * STEP if LATE else -i * STEP
        if WHOLE:
            b = tl.load(p + o_row)
        else:
            i_here = i_row + i if LATE else i_row - i
            b = tl.load(p + o_row, mask=m_k & (i_here < n_read) & (i_here > i_before), other=0.0)
        values = values + (b.to(tl.float32),)  # noqa: RUF005 (Triton takes no star here)
    return values


@triton.jit
def load_half(
    p, i_first, n_rows, n_read, i_row, i_before, i_h, o_k, m_k,
    ROWS: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Gates, after the `i_before`-th row, queries and keys of ROWS rows from the `i_row`-th outwards."""
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    STEP: tl.constexpr = -K if CALL.flip else K
    i_token = token_of(i_first, n_rows, i_row, CALL.flip)
    p_gate = p.gate + ((i_token * H + i_h) * K + o_k)
    p_q = p.query + ((i_token * HQ + i_h // (H // HQ)) * K + o_k)
    p_k = p.key + ((i_token * HK + i_h // (H // HK)) * K + o_k)
    gates = load_each(p_gate, i_row, i_before, n_read, m_k, ROWS, LATE, STEP * H, WHOLE and LATE)
    keys = load_each(p_k, i_row, -1, n_read, m_k, ROWS, LATE, STEP * HK, WHOLE)
    queries = load_each(p_q, i_row, -1, n_read, m_k, ROWS, LATE, STEP * HQ, WHOLE)
    return gates, queries, keys


@triton.jit
def sum_half(loaded, b_sum, b_most, ROWS: tl.constexpr):
    """Sums of the gates that `load_half` loaded, before each row and after the last, and the largest sum so far."""
    gates = loaded[0]
    sums = (b_sum,)
    for i in tl.static_range(ROWS):
        b_sum += gates[i] * LOG2E
        b_most = tl.maximum(b_most, tl.abs(b_sum))
        sums = sums + (b_sum,)  # noqa: RUF005 (Triton takes no star here)
    return sums, b_most


@triton.jit
def store_half(
    p, loaded, sums, i_first, n_rows, n_read, i_row, i_h, o_k, m_k,
    ROWS: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Stores the decayed queries and keys of the rows that `load_half` loaded."""
    STEP: tl.constexpr = (-1 if CALL.flip else 1) * (1 if LATE else -1) * CALL.heads * CALL.key_dim
    queries, keys = loaded[1], loaded[2]
    o_rows = (token_of(i_first, n_rows, i_row, CALL.flip) * CALL.heads + i_h) * CALL.key_dim + o_k
    for i in tl.static_range(ROWS):
        # before the middle, a row's own gate is not between the row and the middle
        b_there = tl.exp2(sums[i + 1] if LATE else -sums[i])
        b_back = tl.exp2(-sums[i + 1] if LATE else sums[i])
        b_q_since = (queries[i] * b_there).to(p.query_since.dtype.element_ty)
        b_k_since = (keys[i] * b_there).to(p.query_since.dtype.element_ty)
        b_k_until = (keys[i] * b_back).to(p.query_since.dtype.element_ty)
        m_row = m_k & ((i_row + i if LATE else i_row - i) < n_read)
        store_tile(p.query_since + o_rows + i * STEP, b_q_since, m_row, WHOLE)
        store_tile(p.key_since + o_rows + i * STEP, b_k_since, m_row, WHOLE)
        store_tile(p.key_until + o_rows + i * STEP, b_k_until, m_row, WHOLE)


@triton.jit
def fold_chunk(p, block, rows, CALL: tl.constexpr):
    """Returns the strength of a chunk's gates; if they are mild, stores decayed queries and keys, and state decays.

    Rows are folded before all gates are summed, in vain if the gates turn out too strong. So when a sum exceeds its
    share of the limit, all gates of the chunk are classified before any further row is folded.
    """
    chunk, i_h = rows.chunk, rows.i_h
    i_first, n_rows = block.i_first, block.n_rows
    i_row, n_read = chunk.i_row, chunk.n_read
    # the first gate is in the state that the sequence begins with
    i_before = 0
    if CALL.listed or CALL.pooled:
        i_before = i_row - ((chunk.entry & FIRST) == 0).to(tl.int32)
    BK: tl.constexpr = CALL.key_block
    K: tl.constexpr = CALL.key_dim
    HALF: tl.constexpr = CALL.chunk // 2
    WHOLE: tl.constexpr = CALL.whole and K == BK
    # loads in flight for each half, as many as registers hold
    ROWS: tl.constexpr = min(HALF, 16, 2048 // BK)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_early = tl.zeros([BK], tl.float32)
    b_late = tl.zeros([BK], tl.float32)
    b_most = tl.zeros([BK], tl.float32)
    strength = MILD
    for i in range(0, HALF // ROWS):
        if strength == MILD:
            i_late = i_row + HALF + ROWS * i
            i_early = i_row + HALF - 1 - ROWS * i
            late = load_half(p, i_first, n_rows, n_read, i_late, i_before, i_h, o_k, m_k, ROWS, True, WHOLE, CALL)
            early = load_half(p, i_first, n_rows, n_read, i_early, i_before, i_h, o_k, m_k, ROWS, False, WHOLE, CALL)
            late_sums, b_most = sum_half(late, b_late, b_most, ROWS)
            early_sums, b_most = sum_half(early, b_early, b_most, ROWS)
            b_late = late_sums[ROWS]
            b_early = early_sums[ROWS]
            if tl.max(b_most, 0) > CALL.middle_limit * ROWS / HALF * (i + 1):
                is_last = i + 1 == HALF // ROWS
                strength = tl.where(is_last, STRONG, MILD)
                # Triton 3.6 cannot compile this for Blackwell
                if not CALL.blackwell_safe:
                    is_bounded, most = classify(p, rows, CALL)
                    # until the last rows, other chunks may still be mild
                    strength = tl.where(is_bounded & (is_last | (most > CALL.middle_limit + 1.0)), BOUNDED, strength)
            if strength == MILD:
                store_half(p, late, late_sums, i_first, n_rows, n_read, i_late, i_h, o_k, m_k, ROWS, True, WHOLE, CALL)
                store_half(
                    p, early, early_sums, i_first, n_rows, n_read, i_early, i_h, o_k, m_k, ROWS, False, WHOLE, CALL
                )
    if strength == MILD:
        store_state_decays(p.state_decays, rows, o_k, b_early, tl.zeros([BK], tl.float32), b_late, CALL)
    return strength


@triton.jit
def solve_chunk(p, b_beta, rows, CALL: tl.constexpr):
    """Solves the system of the folded queries and keys of a chunk."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    PRECISION: tl.constexpr = CALL.precision
    WHOLE: tl.constexpr = CALL.whole
    o_r = rows.o_r
    o_k = tl.arange(0, CALL.key_block)
    # other threads wrote what is loaded here
    tl.debug_barrier()
    b_k_since = load_head(p.key_since, rows, o_k, H, K, CALL, WHOLE)
    b_k_until = load_head(p.key_until, rows, o_k, H, K, CALL, WHOLE)
    b_q_since = load_head(p.query_since, rows, o_k, H, K, CALL, WHOLE)
    b_system = scores(b_k_since, b_k_until, o_r[:, None] > o_r[None, :], PRECISION) * b_beta[:, None]
    if CALL.keys_may_coincide:
        store_squares(b_system, rows, p, CALL)
    b_inverse = solve_system(p, b_system, b_beta, rows, CALL)
    b_score = scores(b_q_since, b_k_until, o_r[:, None] > o_r[None, :], PRECISION)
    # a token's own key crosses no gate
    b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL, WHOLE)
    b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL, WHOLE)
    b_diagonal = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_score = tl.where(o_r[:, None] == o_r[None, :], b_diagonal, b_score)
    store_solved_scores(p, b_score, b_inverse, rows, CALL)


@triton.jit
def fold(p, block, rows, CALL: tl.constexpr):
    """Folds a chunk with mild gates; returns the strength of any chunk's gates, and the betas."""
    b_beta = mark_idle(load_beta(p, rows, CALL))
    strength = fold_chunk(p, block, rows, CALL)
    p_row = scalars_at(p.row_scalars, rows, p, CALL) + rows.o_r
    store_tile(p_row, b_beta, writable(rows), not CALL.listed)
    return strength, b_beta


@triton.jit
def solve_folded(p, CALL: tl.constexpr):
    """What `solve_keyed` stores, of chunks with mild gates and relative to their middles; and the gates' strengths.

    The systems are those of the rounded queries and keys that the walks read, so that rounding has the same effect on
    pairs of tokens in one chunk and in two.
    """
    C: tl.constexpr = CALL.chunk
    i_program = tl.program_id(0)
    i_h = i_program % CALL.heads
    i_chunk = i_program.to(tl.int64)
    block = locate_block(i_program // CALL.heads, p, CALL)
    if CALL.listed:
        is_any = 0
        for i_c in tl.range(block.i_c, block.i_end, num_stages=1, disable_licm=True):
            rows = rows_of_block(block, i_c, i_h, p, CALL)
            strength, b_beta = fold(p, block, rows, CALL)
            i_rows = rows_kept(rows.chunk, rows.i_chunk, i_h, p, 1, CALL)
            tl.store(p.strength + i_rows, strength)
            is_any = is_any | (strength == STRONG).to(tl.int32)
            if strength != MILD:
                # keys do not coincide under strong gates
                tl.store(p.row_squares + i_rows + rows.o_r, tl.zeros([C], tl.float32), mask=writable(rows))
            else:
                solve_chunk(p, b_beta, rows, CALL)
        tl.store(p.any_strong + i_chunk, is_any)
    else:
        rows = rows_of_block(block, block.i_c, i_h, p, CALL)
        if CALL.pooled:
            # few blocks have a chunk where most sequences are of one token
            if rows.chunk.i_row >= block.n_rows:
                tl.store(p.strength + i_chunk, MILD)
                return
        strength, b_beta = fold(p, block, rows, CALL)
        tl.store(p.strength + i_chunk, strength)
        if (strength != MILD) | (rows.chunk.i_row >= block.n_rows):
            if CALL.keys_may_coincide:
                # keys do not coincide under strong gates
                i_rows = rows_kept(rows.chunk, i_chunk, i_h, p, 1, CALL)
                tl.store(p.row_squares + i_rows + rows.o_r, tl.zeros([C], tl.float32))
            return
        solve_chunk(p, b_beta, rows, CALL)
