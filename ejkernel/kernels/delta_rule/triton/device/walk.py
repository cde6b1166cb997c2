"""Device code: the walks, which carry the state, or its cotangent, through the chunks of a sequence.

Registers hold it as [value dims, key dims], the left operand of every large dot.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LARGEST
from ejkernel.kernels.chunks.triton.device.places import (
    CUT,
    REAL,
    chunk_here,
    first_entries,
    keep_branch,
    listed_chunk,
    listed_from,
    load_columns,
    load_flag,
    locate_segment,
    next_entries,
    token_of,
    token_offsets,
    visit,
)
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.delta_rule.triton.device.coinciding_keys import (
    any_coincide,
    any_weak,
    load_roundoff,
    roundoff,
    store_roundoff,
    store_weak_squares,
)
from ejkernel.kernels.delta_rule.triton.device.decays import (
    BETA,
    IDLE,
    SINCE,
    UNTIL,
    load_scalar,
    load_through,
    scalars_at,
)
from ejkernel.kernels.delta_rule.triton.device.gate_strength import MILD
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_head, load_pairs, store_head, writable


class Step(NamedTuple):
    """One chunk of a walk."""

    rows: Any
    p_decay: Any  # where its state decays lie, with one gate a key dim
    is_strong: Any  # its key gates are not mild, and its references are its ends
    is_real: Any  # it is no padding
    has_state: Any  # it takes the state of the chunk that was walked over before
    is_stored: Any  # the results of its sequence are stored


@triton.jit
def error_of(b_v, b_recalled, b_unit, PLAIN: tl.constexpr):
    """The errors of what the state recalls, `v - recalled`, `[value dims, rows]`.

    Only operands of dots are fetched ahead of their chunk, so values of 16 bits go through a dot with the unit matrix;
    not if PLAIN, as for time segments' local walks, which have no shared memory left for it.
    """
    if PLAIN or b_v.dtype == tl.float32:
        b = b_v.to(tl.float32) - b_recalled
    else:
        # the addition keeps the values in registers, which takes one buffer less
        b = tl.dot(b_v + 0.0, b_unit, acc=-b_recalled)
    return b


@triton.jit
def load_state_decay(p_decay, NUMBER: tl.constexpr, is_present, o_k, CALL: tl.constexpr):
    """One of the three decays of a state in a chunk; 1 where a listed chunk has none (`is_present`)."""
    K: tl.constexpr = CALL.key_dim
    if CALL.listed:
        return tl.load(p_decay + tl.where(is_present, NUMBER * K, 3 * K), mask=o_k < K, other=0.0)
    else:
        return tl.load(p_decay + NUMBER * K, mask=o_k < K, other=0.0)


@triton.jit
def load_start(p_start, i_n, i_block, i_h, o_state, o_v, o_k, m_start, CALL: tl.constexpr):
    """The state, or cotangent, that a walk starts from: that of its time segment or of its sequence."""
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    p_tile = p_start + (i_n.to(tl.int64) * CALL.heads + i_h) * (K * V) + o_state
    if CALL.time == "segments":
        p_tile = p_start + (i_block.to(tl.int64) * CALL.heads + i_h) * (K * V) + (o_v[:, None] * K + o_k[None, :])
    return tl.load(p_tile, mask=m_start, other=0.0)


@triton.jit
def enter_chunk(
    p, b_state, p_decay, p_marks, chunk, i_first, n_rows, i_chunk0, i_h, o_r, o_t, o_k,
    BACK: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """The next chunk of a walk, and the state there: zeros at a sequence's start, decayed in a listed chunk."""
    i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
    i_chunk = (i_chunk0 + chunk.i_c) * CALL.heads + i_h
    is_strong = False
    if CALL.middle:
        is_strong = load_flag(p.strength, chunk, i_chunk, i_h, p, CALL) != MILD
    rows = Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, chunk.i_row + o_r < chunk.n_read)
    is_real = True
    has_state = True
    is_stored = True
    if CALL.listed:
        is_real = (chunk.entry & REAL) != 0
        # no state passes from the chunk that was walked over before
        is_cut = ((chunk.next_entry if BACK else chunk.entry) & CUT) != 0
        if is_cut:
            keep_branch(p, chunk.i_n)
            b_state = tl.zeros(b_state.shape, tl.float32)
        has_state = is_real & (is_cut == 0)
        if CALL.keys_coincide:
            is_stored = tl.load(p_marks + chunk.i_row) != 0
        if CALL.decay == "key":
            p_decay = p.state_decays + i_chunk * (4 * CALL.key_dim) + o_k
        if CALL.middle:
            b_state = b_state * load_state_decay(p_decay, 2 if BACK else 0, has_state, o_k, CALL)[None, :]
    return Step(rows, p_decay, is_strong, is_real, has_state, is_stored), b_state


@triton.jit
def load_keys(p, rows, o_k, CALL: tl.constexpr):
    """The keys that read the state, and those that write to it."""
    HEADS: tl.constexpr = CALL.heads if CALL.decay == "key" else CALL.key_heads
    b_k = load_head(p.key_since, rows, o_k, HEADS, CALL.key_dim, CALL, CALL.whole)
    b_k_until = b_k
    if CALL.decay == "key":
        b_k_until = load_head(p.key_until, rows, o_k, HEADS, CALL.key_dim, CALL, CALL.whole)
    return b_k, b_k_until


@triton.jit
def load_queries(p, rows, o_k, CALL: tl.constexpr):
    HEADS: tl.constexpr = CALL.heads if CALL.decay == "key" else CALL.query_heads
    return load_head(p.query_since, rows, o_k, HEADS, CALL.key_dim, CALL, CALL.whole)


@triton.jit
def load_row(p_row, NUMBER: tl.constexpr, rows, p, CALL: tl.constexpr):
    """The scalars of one kind, `[1, rows]`."""
    return load_scalar(p_row, NUMBER, rows, p, CALL, rows.o_r)[None, :]


@triton.jit
def decay_through(b_state, step, o_k, CALL: tl.constexpr):
    """Decays the state from the reference of `key_since` to that of `key_until`: the same one if gates are mild."""
    if CALL.middle:
        if step.is_strong:
            b_state = b_state * load_state_decay(step.p_decay, 1, step.has_state, o_k, CALL)[None, :]
    elif CALL.decay == "key":
        b_state = b_state * load_state_decay(step.p_decay, 1, step.has_state, o_k, CALL)[None, :]
    return b_state


@triton.jit
def forward(p, CALL: tl.constexpr):
    """`O = scale ((Q ⊙ since) S + P U)`, `S ← S since_C + (K ⊙ until)ᵀ U`, `U = (I + M)⁻¹ β (V - (K ⊙ since) S)`.

    With one gate a key dim `p.query_since`, `p.key_since` and `p.key_until` have their decays already, since and until
    the chunk's ends or, where gates are mild, its middle, to which the state is decayed first.

    Stores the output and the final states; `CALL.residuals` also U and the states at the chunks' starts. Time is
    "whole", or cut in "segments", which start from states of their own, `[value dims, key dims]`. A "local" walk finds
    what these are composed of: each segment's final state from zeros, as `p.final`, and its transition, as `p.states`.

    The second run (`CALL.keys_coincide`) walks again where a chunk's keys coincide, with roundoff, in the memory of the
    first run's results. It also stores the systems' roundoff and, with residuals, that of U.

    Where rows hold several sequences, a program walks over all sequences of a row, and starts each from zeros.
    """
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    SOLVE: tl.constexpr = CALL.solve
    NV: tl.constexpr = (V + BV - 1) // BV
    LOCAL: tl.constexpr = CALL.time == "local"
    # residuals take the registers that the place of a chunk would be carried in
    LATE: tl.constexpr = CALL.listed and CALL.residuals
    PARTS: tl.constexpr = NV + (K + BV - 1) // BV if LOCAL else NV
    PAD_V: tl.constexpr = NV * BV != V or LOCAL
    i_program = tl.program_id(0)
    i_part = i_program % PARTS
    i_h = (i_program // PARTS) % H
    i_block = i_program // (PARTS * H)
    i_n, i_j, i_first, n_rows, n_read, i_chunk0, n_chunks, i_from, n_steps = locate_segment(i_block, p, CALL)
    o_r = tl.arange(0, C)
    o_t = token_offsets(o_r, CALL.flip)
    o_k = tl.arange(0, BK)
    o_v = i_part * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    is_last = i_from + n_steps >= n_chunks
    b_state = tl.zeros([BV, BK], tl.float32)
    m_start = m_state & (i_n < p.N)
    if LOCAL:
        # the last segment's local state is not needed, nor the first one's transition
        if is_last | (i_n >= p.N) | ((i_part >= NV) & (i_j == 0)):
            return
        m_start = m_start & (i_j == 0)
    if CALL.keys_coincide and DECAY == "head":
        if any_weak(p.any_weak if CALL.listed else p.weak, (i_chunk0 + i_from) * H + i_h, n_steps, H) == 0:
            return
    if CALL.listed:
        i_from, n_steps = listed_from(i_n, i_from, n_steps, p, CALL)
        entry, next_entry = first_entries(i_from, n_steps, i_n, p, False)
    p_marks = None
    if CALL.keys_coincide:
        if DECAY == "head":
            store_weak_squares(p, i_n, i_first, n_rows, n_read, i_from, n_steps, i_chunk0, i_h, CALL)
        if CALL.listed:
            p_marks = p.marks + ((i_n.to(tl.int64) * H + i_h) * PARTS + i_part) * p.T
        if any_coincide(p, p_marks, i_n, i_from, n_steps, (i_chunk0 + i_from) * H + i_h, i_h, CALL) == 0:
            return
        for i_c in range(i_from, i_from + n_steps):
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
            i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
            m_read = chunk.i_row + o_r < chunk.n_read
            i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
            store_roundoff(p, Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, m_read), CALL)
        # other threads wrote what is loaded next
        tl.debug_barrier()
    if LOCAL:
        b_state = tl.where((o_v - NV * BV)[:, None] == o_k[None, :], 1.0, 0.0)
    if CALL.start:
        b_state += load_start(p.start, i_n, i_block, i_h, o_state, o_v, o_k, m_start, CALL)
    p_decay = 0
    if DECAY == "key":
        p_decay = p.state_decays + ((i_chunk0 + i_from) * H + i_h) * (3 * K) + o_k
    if CALL.middle and not CALL.listed:
        b_state = b_state * tl.load(p_decay, mask=(o_k < K) & (n_steps > 0), other=1.0)[None, :]
    passes = i_n >= 0
    b_unit = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0).to(p.value.dtype.element_ty)
    for i_step in tl.range(0, n_steps, disable_licm=LATE):
        i_c = i_from + i_step
        if CALL.listed:
            chunk = listed_chunk(i_n, entry, next_entry, CALL)
            entry, next_entry = next_entries(i_c, i_n, p, False)
            here = chunk
            if LATE:
                here = chunk_here(i_c, i_n, p, CALL)
        else:
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
            here = chunk
        step, b_state = enter_chunk(
            p, b_state, p_decay, p_marks, here, i_first, n_rows, i_chunk0, i_h, o_r, o_t, o_k, False, CALL
        )
        i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
        i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
        rows = Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, chunk.i_row + o_r < chunk.n_read)
        if CALL.listed and LOCAL:
            passes = passes & (((chunk.entry | chunk.next_entry) & CUT) == 0)
        b_k, b_k_until = load_keys(p, rows, o_k, CALL)
        b_v = load_columns(
            p.value,
            rows.i_token,
            i_h // (H // CALL.value_heads),
            o_t,
            rows.m_read,
            o_v,
            CALL.value_heads,
            V,
            PAD_V,
            False,
            CALL.whole,
        )
        b_inverse = load_pairs(p.inverse, rows, p, CALL)
        if not LOCAL:
            b_q = load_queries(p, rows, o_k, CALL)
            b_solved = load_pairs(p.solved_scores, rows, p, CALL)
        p_row = scalars_at(p.row_scalars, rows, p, CALL)
        b_rounded = b_state.to(b_k.dtype)
        b_recalled = tl.dot(b_rounded, tl.trans(b_k), input_precision=CALL.precision)
        if not LOCAL:
            b_out = tl.dot(b_rounded, tl.trans(b_q), input_precision=CALL.precision)
        if DECAY == "head":
            b_since = load_row(p_row, SINCE, rows, p, CALL)
            b_recalled = b_recalled * b_since
            if not LOCAL:
                b_out = b_out * b_since
            b_state = b_state * load_through(p_row, chunk, p, CALL)
        b_beta = load_row(p_row, BETA, rows, p, CALL)
        b_error = error_of(b_v, b_recalled, b_unit, LOCAL) * b_beta
        m_idle = b_beta == IDLE
        if DECAY == "head":
            # never true, but what an operand of a dot depends on is fetched ahead of its chunk, and decays should be
            m_idle = m_idle | (b_since < 0.0)
        b_r = tl.where(m_idle, 0.0, b_error)
        if not LOCAL:
            b_out = tl.dot(b_r.to(b_k.dtype), tl.trans(b_solved), acc=b_out, input_precision=CALL.precision)
            if CALL.keys_coincide:
                b_out = tl.dot(roundoff(b_r), tl.trans(b_solved), acc=b_out)
                b_roundoff = load_roundoff(p, rows, False, CALL)
                b_out = tl.dot(b_r.to(b_k.dtype), tl.trans(b_roundoff), acc=b_out)
            b_out = b_out * CALL.scale
        b_ordered = in_order_of_operands(nearest(b_error, SOLVE), BV, C)
        b_u = tl.dot(b_ordered, tl.trans(b_inverse), input_precision=SOLVE)
        if CALL.keys_coincide:
            b_ordered = in_order_of_operands(b_error - nearest(b_error, SOLVE), BV, C)
            b_u = tl.dot(b_ordered, tl.trans(b_inverse), acc=b_u, input_precision=SOLVE)
            b_roundoff = load_roundoff(p, rows, True, CALL)
            b_u = tl.dot(b_r.to(b_k.dtype), b_roundoff, acc=b_u)
        b_until = tl.where(b_beta == IDLE, 0.0, 1.0)
        if DECAY == "head":
            b_until = b_until * load_row(p_row, UNTIL, rows, p, CALL)
        b_written = b_u * b_until
        if CALL.listed:
            b_written = tl.where(step.is_real, b_written, 0.0)
        b_state = decay_through(b_state, step, o_k, CALL)
        b_state = tl.dot(b_written.to(b_k.dtype), b_k_until, acc=b_state, input_precision=CALL.precision)
        if CALL.keys_coincide:
            b_state = tl.dot(roundoff(b_written), b_k_until, acc=b_state)
        if CALL.middle and not CALL.listed:
            b_decay = tl.load(p_decay + 2 * K, mask=o_k < K, other=0.0)
            b_decay = b_decay * tl.load(p_decay + 3 * H * K, mask=(o_k < K) & (i_step + 1 < n_steps), other=1.0)
            b_state = b_state * b_decay[None, :]
        if DECAY == "key" and not CALL.listed:
            p_decay += 3 * H * K
        if CALL.listed:
            if CALL.middle:
                b_state = b_state * load_state_decay(step.p_decay, 2, step.is_real, o_k, CALL)[None, :]
        # always true, but the compiler fetches the next chunk's rows before it comes to a branch
        if not LOCAL:
            rows = step.rows
            if here.i_c < n_chunks:
                m_rows = writable(rows)[:, None] & (o_v[None, :] < V)
                m_states = m_state
                if CALL.listed:
                    if step.is_real == 0:
                        store_head(p.output, tl.zeros([C, BV], tl.float32), rows, o_v, m_rows, V, CALL)
                    # the output of padding is 0, and the rest of its results is not read
                    m_rows = m_rows & step.is_real
                    m_states = m_states & step.has_state
                    if CALL.keys_coincide:
                        m_rows = m_rows & step.is_stored
                        m_states = m_states & step.is_stored
                b_rows = tl.trans(b_out.to(p.output.dtype.element_ty))
                store_head(p.output, b_rows, rows, o_v, m_rows, V, CALL, CALL.whole and not PAD_V)
                if CALL.residuals:
                    store_head(p.u, tl.trans(b_u.to(b_k.dtype)), rows, o_v, m_rows, V, CALL, CALL.whole and not PAD_V)
                    if CALL.keys_coincide:
                        store_head(p.u_roundoff, tl.trans(roundoff(b_u)), rows, o_v, m_rows, V, CALL)
                    p_tile = p.states + rows.i_chunk * (K * V) + (o_v[:, None] * K + o_k[None, :])
                    tl.store(p_tile, b_rounded, mask=m_states)
    if CALL.listed and CALL.keys_coincide:
        # the final state is that of the sequence that was walked over last
        if tl.load(p_marks + visit(i_from + n_steps - 1, i_n, n_rows, n_read, p, CALL).i_row) == 0:
            return
    if LOCAL:
        i_here = i_block.to(tl.int64) * H + i_h
        if i_part < NV:
            tl.store(p.final + i_here * (K * V) + (o_v[:, None] * K + o_k[None, :]), b_state, mask=m_state)
        else:
            o_from = o_v - NV * BV
            # finite, since 0 times infinity is NaN
            b_state = tl.minimum(tl.maximum(b_state, -LARGEST), LARGEST)
            if CALL.listed:
                b_state = tl.where(passes, b_state, 0.0)
            m_pair = (o_from[:, None] < K) & (o_k[None, :] < K)
            tl.store(p.states + i_here * (K * K) + (o_from[:, None] * K + o_k[None, :]), b_state, mask=m_pair)
    elif is_last & (i_n < p.N):
        tl.store(p.final + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state, b_state, mask=m_state)


@triton.jit
def backward(p, CALL: tl.constexpr):
    """`dR = (I + M)⁻ᵀ (scale Pᵀ dO + (K ⊙ until) dS)`, `dS ← since_C dS + scale (Q ⊙ since)ᵀ dO - (K ⊙ since)ᵀ β dR`.

    From the last chunk to the first. Stores dR, the state's cotangent at each chunk's end and, if `CALL.last`, at the
    start. Time is cut as in `forward`; a "local" walk stores the cotangents from zeros as `p.d_start`. The second run
    is as in `forward`.
    """
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    SOLVE: tl.constexpr = CALL.solve
    NV: tl.constexpr = (V + BV - 1) // BV
    PAD_V: tl.constexpr = NV * BV != V
    LOCAL: tl.constexpr = CALL.time == "local"
    i_program = tl.program_id(0)
    i_h = (i_program // NV) % H
    i_block = i_program // (NV * H)
    i_n, i_j, i_first, n_rows, n_read, i_chunk0, n_chunks, i_from, n_steps = locate_segment(i_block, p, CALL)
    o_r = tl.arange(0, C)
    o_t = token_offsets(o_r, CALL.flip)
    o_k = tl.arange(0, BK)
    o_v = (i_program % NV) * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    b_dstate = tl.zeros([BV, BK], tl.float32)
    m_start = m_state & (i_n < p.N)
    if LOCAL:
        if (i_j == 0) | (i_n >= p.N):
            return
        m_start = m_start & (i_from + n_steps >= n_chunks)
    if CALL.keys_coincide and DECAY == "head":
        if any_weak(p.any_weak if CALL.listed else p.weak, (i_chunk0 + i_from) * H + i_h, n_steps, H) == 0:
            return
    if CALL.listed:
        i_from, n_steps = listed_from(i_n, i_from, n_steps, p, CALL)
        entry, next_entry = first_entries(i_from, n_steps, i_n, p, True)
    p_marks = None
    if CALL.keys_coincide:
        if CALL.listed:
            p_marks = p.marks + ((i_n.to(tl.int64) * H + i_h) * NV + i_program % NV) * p.T
        if any_coincide(p, p_marks, i_n, i_from, n_steps, (i_chunk0 + i_from) * H + i_h, i_h, CALL) == 0:
            return
    if CALL.start:
        b_dstate = load_start(p.d_final, i_n, i_block, i_h, o_state, o_v, o_k, m_start, CALL)
    p_decay = 0
    if DECAY == "key":
        p_decay = p.state_decays + ((i_chunk0 + i_from + n_steps - 1) * H + i_h) * (3 * K) + o_k
    if CALL.middle and not CALL.listed:
        b_dstate = b_dstate * tl.load(p_decay + 2 * K, mask=(o_k < K) & (n_steps > 0), other=1.0)[None, :]
    for i_step in range(0, n_steps):
        i_c = i_from + n_steps - 1 - i_step
        if CALL.listed:
            chunk = listed_chunk(i_n, entry, next_entry, CALL)
            entry, next_entry = next_entries(i_c, i_n, p, True)
        else:
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
        step, b_dstate = enter_chunk(
            p, b_dstate, p_decay, p_marks, chunk, i_first, n_rows, i_chunk0, i_h, o_r, o_t, o_k, True, CALL
        )
        rows = step.rows
        b_k, b_k_until = load_keys(p, rows, o_k, CALL)
        b_do = load_columns(p.d_output, rows.i_token, i_h, o_t, rows.m_read, o_v, H, V, PAD_V, False, CALL.whole)
        b_solved = load_pairs(p.solved_scores, rows, p, CALL)
        b_inverse = load_pairs(p.inverse_transposed, rows, p, CALL)
        b_q = load_queries(p, rows, o_k, CALL)
        p_row = scalars_at(p.row_scalars, rows, p, CALL)
        b_rounded = b_dstate.to(b_k.dtype)
        b_du = tl.dot(b_rounded, tl.trans(b_k_until), input_precision=CALL.precision)
        if CALL.keys_coincide:
            # where keys coincide, the part of the cotangent that they share is small beside the rest
            b_du = tl.dot(roundoff(b_dstate), tl.trans(b_k_until), acc=b_du)
        b_query = b_do.to(tl.float32) * CALL.scale
        b_beta = load_row(p_row, BETA, rows, p, CALL)
        b_beta = tl.where(b_beta == IDLE, 0.0, b_beta)
        if DECAY == "head":
            b_since = load_row(p_row, SINCE, rows, p, CALL)
            b_du = b_du * load_row(p_row, UNTIL, rows, p, CALL)
            b_query = b_query * b_since
            b_beta = b_beta * b_since
            b_dstate = b_dstate * load_through(p_row, chunk, p, CALL)
        b_dstate = decay_through(b_dstate, step, o_k, CALL)
        b_dstate = tl.dot(b_query.to(b_k.dtype), b_q, acc=b_dstate, input_precision=CALL.precision)
        b_dr = tl.dot(b_do, b_solved, input_precision=CALL.precision)
        if CALL.keys_coincide:
            b_dr = tl.dot(b_do, load_roundoff(p, rows, False, CALL), acc=b_dr)
        b_dr = b_dr * CALL.scale
        b_ordered = in_order_of_operands(nearest(b_du, SOLVE), BV, C)
        b_dr = tl.dot(b_ordered, tl.trans(b_inverse), acc=b_dr, input_precision=SOLVE)
        if CALL.keys_coincide:
            b_ordered = in_order_of_operands(b_du - nearest(b_du, SOLVE), BV, C)
            b_dr = tl.dot(b_ordered, tl.trans(b_inverse), acc=b_dr, input_precision=SOLVE)
            b_roundoff = load_roundoff(p, rows, True, CALL)
            b_dr = tl.dot(b_du.to(b_k.dtype), tl.trans(b_roundoff), acc=b_dr)
        b_written = b_dr * -b_beta
        if CALL.listed:
            b_written = tl.where(step.is_real, b_written, 0.0)
        b_dstate = tl.dot(b_written.to(b_k.dtype), b_k, acc=b_dstate, input_precision=CALL.precision)
        if CALL.keys_coincide:
            b_dstate = tl.dot(roundoff(b_written), b_k, acc=b_dstate)
        if CALL.middle and not CALL.listed:
            b_decay = tl.load(p_decay, mask=o_k < K, other=0.0)
            p_before = p_decay - 3 * H * K + 2 * K
            b_decay = b_decay * tl.load(p_before, mask=(o_k < K) & (i_step + 1 < n_steps), other=1.0)
            b_dstate = b_dstate * b_decay[None, :]
        if DECAY == "key" and not CALL.listed:
            p_decay -= 3 * H * K
        if CALL.listed:
            if CALL.middle:
                b_dstate = b_dstate * load_state_decay(step.p_decay, 0, step.is_real, o_k, CALL)[None, :]
        if not LOCAL:
            # always true, as in `forward`
            if chunk.i_c < n_chunks:
                b_rows = tl.trans(b_dr.to(b_k.dtype))
                m_rows = writable(rows)[:, None] & (o_v[None, :] < V)
                m_states = m_state
                if CALL.listed:
                    m_states = m_states & step.has_state
                    if CALL.keys_coincide:
                        m_rows = m_rows & step.is_stored
                        m_states = m_states & step.is_stored
                store_head(p.d_r, b_rows, rows, o_v, m_rows, V, CALL, CALL.whole and not PAD_V)
                p_tile = p.d_states + rows.i_chunk * (K * V) + (o_v[:, None] * K + o_k[None, :])
                tl.store(p_tile, b_rounded, mask=m_states)
    if CALL.listed and CALL.keys_coincide:
        # the final state is that of the sequence that was walked over last
        if tl.load(p_marks + visit(i_from, i_n, n_rows, n_read, p, CALL).i_row) == 0:
            return
    if LOCAL:
        p_tile = p.d_start + (i_block.to(tl.int64) * H + i_h) * (K * V) + (o_v[:, None] * K + o_k[None, :])
        tl.store(p_tile, b_dstate, mask=m_state)
    elif CALL.last:
        if (i_j == 0) & (i_n < p.N):
            tl.store(p.d_start + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state, b_dstate, mask=m_state)
