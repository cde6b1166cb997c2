"""Device code for one gate a key dim, none too strong: gates folded into queries and keys, and systems of the result.

A chunk's gates are folded against one reference in its middle: queries and keys are decayed from there to their tokens,
keys also from their tokens to there, inversely before it. Sums go from token to token, one key dim a thread, which
takes a small part of the instructions of sums by products of tiles.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E
from ejkernel.kernels.chunks.triton.device.places import FIRST, locate_block, rows_kept, store_tile, token_of
from ejkernel.kernels.delta_rule.triton.device.bounded_gates import look_at, solve_bounded
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import store_squares
from ejkernel.kernels.delta_rule.triton.device.decays import marked, weights_of
from ejkernel.kernels.delta_rule.triton.device.inverse import scores
from ejkernel.kernels.delta_rule.triton.device.kinds import BOUNDED, MILD, STRONG, store_factors
from ejkernel.kernels.delta_rule.triton.device.rows import load_beta, load_head, rows_of_block, writable
from ejkernel.kernels.delta_rule.triton.device.system import solve_system, store_reads


@triton.jit
def load_each(
    p, i_row, i_before, n_read, m_k, ROWS: tl.constexpr, LATE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr
):
    """ROWS from the `i_row`-th outwards, later than `i_before`: all are asked for before any is waited for."""
    found = ()
    for i in tl.static_range(ROWS):
        o_row = i * STEP if LATE else -i * STEP
        if WHOLE:
            b = tl.load(p + o_row)
        else:
            i_here = i_row + i if LATE else i_row - i
            b = tl.load(p + o_row, mask=m_k & (i_here < n_read) & (i_here > i_before), other=0.0)
        found = found + (b.to(tl.float32),)  # noqa: RUF005 (Triton takes no star here)
    return found


@triton.jit
def load_half(
    p, i_first, n_rows, n_read, i_row, i_before, i_h, o_k, m_k,
    ROWS: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Gates, later than `i_before`, queries and keys from the `i_row`-th outwards."""
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
    """Sums of gates before each row and through the last of what `load_half` gave, and the largest of them."""
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
    """Folds what `load_half` gave, by its gates' sums."""
    STEP: tl.constexpr = (-1 if CALL.flip else 1) * (1 if LATE else -1) * CALL.heads * CALL.key_dim
    queries, keys = loaded[1], loaded[2]
    o_rows = (token_of(i_first, n_rows, i_row, CALL.flip) * CALL.heads + i_h) * CALL.key_dim + o_k
    for i in tl.static_range(ROWS):
        # before the middle, a row's own gate does not lie between
        b_there = tl.exp2(sums[i + 1] if LATE else -sums[i])
        b_back = tl.exp2(-sums[i + 1] if LATE else sums[i])
        b_query = (queries[i] * b_there).to(p.folded_query.dtype.element_ty)
        b_recall = (keys[i] * b_there).to(p.folded_query.dtype.element_ty)
        b_write = (keys[i] * b_back).to(p.folded_query.dtype.element_ty)
        if WHOLE:
            tl.store(p.folded_query + o_rows + i * STEP, b_query)
            tl.store(p.recall + o_rows + i * STEP, b_recall)
            tl.store(p.write + o_rows + i * STEP, b_write)
        else:
            m_row = m_k & ((i_row + i if LATE else i_row - i) < n_read)
            tl.store(p.folded_query + o_rows + i * STEP, b_query, mask=m_row)
            tl.store(p.recall + o_rows + i * STEP, b_recall, mask=m_row)
            tl.store(p.write + o_rows + i * STEP, b_write, mask=m_row)


@triton.jit
def fold_chunk(p, chunk, i_first, n_rows, i_token, i_h, i_chunk, CALL: tl.constexpr):
    """What kind a chunk is of; if its gates are mild, stores its queries and keys, folded, and decays of states.

    Gates that turn out to be too strong may have been folded in vain. So those that go beyond their share of the limit
    are looked at once more, all of them, before that.
    """
    i_row = chunk.i_row
    n_read = chunk.n_read
    # the first gate is in the state that the sequence begins with
    i_before = 0
    if CALL.listed:
        i_before = i_row - ((chunk.entry & FIRST) == 0).to(tl.int32)
    BK: tl.constexpr = CALL.key_block
    K: tl.constexpr = CALL.key_dim
    HALF: tl.constexpr = CALL.chunk // 2
    WHOLE: tl.constexpr = CALL.whole and K == BK
    # of each half, on their way at once, as many as registers hold
    ROWS: tl.constexpr = min(HALF, 16, 2048 // BK)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_early = tl.zeros([BK], tl.float32)
    b_late = tl.zeros([BK], tl.float32)
    b_most = tl.zeros([BK], tl.float32)
    kind = MILD
    for i in range(0, HALF // ROWS):
        if kind == MILD:
            i_late = i_row + HALF + ROWS * i
            i_early = i_row + HALF - 1 - ROWS * i
            late = load_half(p, i_first, n_rows, n_read, i_late, i_before, i_h, o_k, m_k, ROWS, True, WHOLE, CALL)
            early = load_half(p, i_first, n_rows, n_read, i_early, i_before, i_h, o_k, m_k, ROWS, False, WHOLE, CALL)
            late_sums, b_most = sum_half(late, b_late, b_most, ROWS)
            early_sums, b_most = sum_half(early, b_early, b_most, ROWS)
            b_late = late_sums[ROWS]
            b_early = early_sums[ROWS]
            if tl.max(b_most, 0) > CALL.limit * ROWS / HALF * (i + 1):
                is_last = i + 1 == HALF // ROWS
                kind = tl.where(is_last, STRONG, MILD)
                # Triton 3.6 has no code for that on Blackwell
                if not CALL.flat:
                    is_bounded, most = look_at(p, chunk, i_token, i_h, CALL)
                    # others may be mild, until the last row
                    kind = tl.where(is_bounded & (is_last | (most > CALL.limit + 1.0)), BOUNDED, kind)
            if kind == MILD:
                store_half(p, late, late_sums, i_first, n_rows, n_read, i_late, i_h, o_k, m_k, ROWS, True, WHOLE, CALL)
                store_half(
                    p, early, early_sums, i_first, n_rows, n_read, i_early, i_h, o_k, m_k, ROWS, False, WHOLE, CALL
                )
    if kind == MILD:
        store_factors(p.factors, chunk, i_chunk, o_k, b_early, tl.zeros([BK], tl.float32), b_late, CALL)
    return kind


@triton.jit
def solve_chunk(p, b_beta, rows, CALL: tl.constexpr):
    """Solves a chunk's system, of queries and keys as they were folded."""
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    PRECISION: tl.constexpr = CALL.precision
    WHOLE: tl.constexpr = CALL.whole
    o_r = rows.o_r
    o_k = tl.arange(0, CALL.key_block)
    # what other threads have written
    tl.debug_barrier()
    b_recall = load_head(p.recall, rows, o_k, H, K, CALL, WHOLE)
    b_write = load_head(p.write, rows, o_k, H, K, CALL, WHOLE)
    b_query = load_head(p.folded_query, rows, o_k, H, K, CALL, WHOLE)
    b_below = scores(b_recall, b_write, o_r[:, None] > o_r[None, :], PRECISION) * b_beta[:, None]
    store_squares(b_below, rows, p, CALL)
    b_inverse = solve_system(p, b_below, b_beta, rows, CALL)
    b_score = scores(b_query, b_write, o_r[:, None] > o_r[None, :], PRECISION)
    # a token's own key crosses no gate
    b_k = load_head(p.key, rows, o_k, CALL.key_heads, K, CALL, WHOLE)
    b_q = load_head(p.query, rows, o_k, CALL.query_heads, K, CALL, WHOLE)
    b_own = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_score = tl.where(o_r[:, None] == o_r[None, :], b_own, b_score)
    store_reads(p, b_score, b_inverse, rows, CALL)


@triton.jit
def fold(p, block, rows, CALL: tl.constexpr):
    """Folds a chunk, or solves it if its gates are bounded; returns its kind and betas."""
    b_beta = marked(load_beta(p, rows, CALL))
    kind = fold_chunk(p, rows.chunk, block.i_first, block.n_rows, rows.i_token, rows.i_h, rows.i_chunk, CALL)
    p_row = weights_of(p.weights, rows, p, CALL) + rows.o_r
    store_tile(p_row, b_beta, writable(rows), not CALL.listed)
    if not CALL.flat:
        if kind == BOUNDED:
            kind = solve_bounded(p, b_beta, rows, CALL)
    return kind, b_beta


@triton.jit
def solve_folded(p, CALL: tl.constexpr):
    """What `solve_keyed` gives, against the chunk's middle, and whether that is no good since gates are too strong.

    Systems are of queries and keys as the walks read them: what rounding does to those is the same for tokens of one
    chunk and of two.
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
            kind, b_beta = fold(p, block, rows, CALL)
            i_rows = rows_kept(rows.chunk, rows.i_chunk, i_h, p, 1, CALL)
            tl.store(p.kinds + i_rows, kind)
            is_any = is_any | (kind == STRONG).to(tl.int32)
            if kind != MILD:
                # strong gates keep keys from coinciding
                tl.store(p.squares + i_rows + rows.o_r, tl.zeros([C], tl.float32), mask=writable(rows))
            else:
                solve_chunk(p, b_beta, rows, CALL)
        tl.store(p.any_strong + i_chunk, is_any)
    else:
        rows = rows_of_block(block, block.i_c, i_h, p, CALL)
        kind, b_beta = fold(p, block, rows, CALL)
        tl.store(p.kinds + i_chunk, kind)
        if (kind != MILD) | (rows.chunk.i_row >= block.n_rows):
            # strong gates keep keys from coinciding
            i_rows = rows_kept(rows.chunk, i_chunk, i_h, p, 1, CALL)
            tl.store(p.squares + i_rows + rows.o_r, tl.zeros([C], tl.float32))
            return
        solve_chunk(p, b_beta, rows, CALL)
