"""Device code: the walks, which carry a state, or its cotangent, through the chunks of a sequence.

The state is kept as [value dims, key dims], the left operand of every large dot.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LARGEST
from ejkernel.kernels.chunks.triton.device.places import (
    CUT,
    REAL,
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
    load_rest,
    mark_sequences,
    measure,
    rest_of,
    store_rests,
)
from ejkernel.kernels.delta_rule.triton.device.decays import (
    BETA,
    IDLE,
    SINCE,
    UNTIL,
    load_through,
    load_weight,
    weights_of,
)
from ejkernel.kernels.delta_rule.triton.device.inverse import in_order_of_operands
from ejkernel.kernels.delta_rule.triton.device.kinds import MILD
from ejkernel.kernels.delta_rule.triton.device.rows import Rows, load_head, load_pairs, store_head, writable


class Step(NamedTuple):
    """One chunk of a walk."""

    rows: Any
    p_factor: Any  # what is left of states, by key dims
    is_strong: Any  # its key gates are too strong for one reference in the middle
    is_real: Any  # it is no padding
    takes: Any  # the state comes from the chunk that was walked over before
    is_mine: Any  # its results are stored


@triton.jit
def short_of(b_v, b_met, b_unit, PLAIN: tl.constexpr):
    """What a state lacks of the values.

    Only what a dot takes is fetched ahead of its chunk, so 16 bit go through one; segments' walks have no room for it.
    """
    if PLAIN or b_v.dtype == tl.float32:
        b = b_v.to(tl.float32) - b_met
    else:
        # the sum keeps the values in registers, which takes one buffer less
        b = tl.dot(b_v + 0.0, b_unit, acc=-b_met)
    return b


@triton.jit
def load_factor(p_factor, NUMBER: tl.constexpr, is_there, o_k, CALL: tl.constexpr):
    """A state's decays, one of three in a chunk, that a listed one may not have."""
    K: tl.constexpr = CALL.key_dim
    if CALL.listed:
        return tl.load(p_factor + tl.where(is_there, NUMBER * K, 3 * K), mask=o_k < K, other=0.0)
    else:
        return tl.load(p_factor + NUMBER * K, mask=o_k < K, other=0.0)


@triton.jit
def load_start(p_start, i_n, i_block, i_h, o_state, o_v, o_k, m_start, CALL: tl.constexpr):
    """The state, or cotangent, that a walk starts from: its time segment's or its sequence's."""
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    p_tile = p_start + (i_n.to(tl.int64) * CALL.heads + i_h) * (K * V) + o_state
    if CALL.time == "segments":
        p_tile = p_start + (i_block.to(tl.int64) * CALL.heads + i_h) * (K * V) + (o_v[:, None] * K + o_k[None, :])
    return tl.load(p_tile, mask=m_start, other=0.0)


@triton.jit
def enter_chunk(
    p, b_state, p_factor, p_mine, chunk, i_first, n_rows, i_chunk0, i_h, o_r, o_t, o_k,
    BACK: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """A walk's next chunk, and the state there: zeros where a sequence begins, decayed to a listed chunk's middle."""
    i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
    i_chunk = (i_chunk0 + chunk.i_c) * CALL.heads + i_h
    is_strong = False
    if CALL.middle:
        is_strong = load_flag(p.kinds, chunk, i_chunk, i_h, p, CALL) != MILD
    rows = Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, chunk.i_row + o_r < chunk.n_read)
    is_real = True
    takes = True
    is_mine = True
    if CALL.listed:
        is_real = (chunk.entry & REAL) != 0
        # nothing comes from what is walked over before this chunk
        is_cut = ((chunk.next_entry if BACK else chunk.entry) & CUT) != 0
        if is_cut:
            keep_branch(p, chunk.i_n)
            b_state = tl.zeros(b_state.shape, tl.float32)
        takes = is_real & (is_cut == 0)
        if CALL.keys_coincide:
            is_mine = tl.load(p_mine + chunk.i_row) != 0
        if CALL.decay == "key":
            p_factor = p.factors + i_chunk * (4 * CALL.key_dim) + o_k
        if CALL.middle:
            b_state = b_state * load_factor(p_factor, 2 if BACK else 0, takes, o_k, CALL)[None, :]
    return Step(rows, p_factor, is_strong, is_real, takes, is_mine), b_state


@triton.jit
def load_keys(p, rows, o_k, CALL: tl.constexpr):
    """A chunk's keys, as the state is read with them and as it is written to."""
    HEADS: tl.constexpr = CALL.heads if CALL.decay == "key" else CALL.key_heads
    b_k = load_head(p.key, rows, o_k, HEADS, CALL.key_dim, CALL, CALL.whole)
    b_write = b_k
    if CALL.decay == "key":
        b_write = load_head(p.write, rows, o_k, HEADS, CALL.key_dim, CALL, CALL.whole)
    return b_k, b_write


@triton.jit
def load_queries(p, rows, o_k, CALL: tl.constexpr):
    HEADS: tl.constexpr = CALL.heads if CALL.decay == "key" else CALL.query_heads
    return load_head(p.query, rows, o_k, HEADS, CALL.key_dim, CALL, CALL.whole)


@triton.jit
def load_row(p_row, NUMBER: tl.constexpr, rows, p, CALL: tl.constexpr):
    """One of `WEIGHTS`, `[1, rows]`."""
    return load_weight(p_row, NUMBER, rows, p, CALL, rows.o_r)[None, :]


@triton.jit
def fade_through(b_state, step, o_k, CALL: tl.constexpr):
    """Decays a state, met where gates of key dims have their reference, to where it is written to."""
    if CALL.middle:
        if step.is_strong:
            b_state = b_state * load_factor(step.p_factor, 1, step.takes, o_k, CALL)[None, :]
    elif CALL.decay == "key":
        b_state = b_state * load_factor(step.p_factor, 1, step.takes, o_k, CALL)[None, :]
    return b_state


@triton.jit
def forward(p, CALL: tl.constexpr):
    """`out = scale (e^A q S + P u)`, `S ← e^{A_C} S + (e^{A_C - A} k)ᵀ u`, where `u = (I + M)⁻¹ β (v - e^A k S)`.

    With one gate a key dim `e^A q`, `e^A k` and `e^{A_C - A} k` come as they are, as `p.query`, `p.key` and `p.write`,
    and so does `e^{A_C}`. Or, where gates are not too strong for it, they are all against the chunk's middle, to which
    states are decayed before they are met, and from there when they were written to.
    Stores the output and the last state; KEEP also `u` and the state at each chunk's start. Time is "whole", or cut in
    "segments" that start from states of their own, [value dims, key dims]. For those an "effects" walk finds what a
    segment makes of nothing, as `p.final`, and of each key dim, as `p.states`.
    A second launch does so once more, with more digits, where some chunk's keys coincide, in the memory of the first
    one's results, and stores what rounding step.takes off the systems' solutions, and KEEP off `u`.
    Where rows hold several sequences a program walks over all of a row's, and starts anew where nothing passes.
    """
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    HV: tl.constexpr = CALL.value_heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    MIDDLE: tl.constexpr = CALL.middle
    WHOLE: tl.constexpr = CALL.whole
    FLIP: tl.constexpr = CALL.flip
    PRECISION: tl.constexpr = CALL.precision
    SOLVE: tl.constexpr = CALL.solve
    NV: tl.constexpr = (V + BV - 1) // BV
    EFFECTS: tl.constexpr = CALL.time == "effects"
    PARTS: tl.constexpr = NV + (K + BV - 1) // BV if EFFECTS else NV
    PAD_V: tl.constexpr = NV * BV != V or EFFECTS
    i_program = tl.program_id(0)
    i_part = i_program % PARTS
    i_h = (i_program // PARTS) % H
    i_block = i_program // (PARTS * H)
    i_n, i_j, i_first, n_rows, n_read, i_chunk0, n_chunks, i_from, n_steps = locate_segment(i_block, p, CALL)
    o_r = tl.arange(0, C)
    o_t = token_offsets(o_r, FLIP)
    o_k = tl.arange(0, BK)
    o_v = i_part * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    is_last = i_from + n_steps >= n_chunks
    b_state = tl.zeros([BV, BK], tl.float32)
    m_start = m_state & (i_n < p.N)
    if EFFECTS:
        # nobody asks what becomes of states in the last segment, nor of any but the given one in the first
        if is_last | (i_n >= p.N) | ((i_part >= NV) & (i_j == 0)):
            return
        m_start = m_start & (i_j == 0)
    if COINCIDE and DECAY == "head":
        if any_weak(p.any_weak if CALL.listed else p.weak, (i_chunk0 + i_from) * H + i_h, n_steps, H) == 0:
            return
    if CALL.listed:
        i_from, n_steps = listed_from(i_n, i_from, n_steps, p, CALL)
        entry, next_entry = first_entries(i_from, n_steps, i_n, p, False)
    p_mine = None
    if COINCIDE:
        if DECAY == "head":
            measure(p, i_n, i_first, n_rows, n_read, i_from, n_steps, i_chunk0, i_h, CALL)
        if CALL.listed:
            p_mine = p.mine + ((i_n.to(tl.int64) * H + i_h) * PARTS + i_part) * p.T
            if mark_sequences(p, p_mine, i_n, i_from, n_steps, i_h, CALL) == 0:
                return
        elif any_coincide(p, (i_chunk0 + i_from) * H + i_h, n_steps, CALL) == 0:
            return
        for i_c in range(i_from, i_from + n_steps):
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
            i_token = token_of(i_first, n_rows, chunk.i_row, CALL.flip)
            m_read = chunk.i_row + o_r < chunk.n_read
            i_chunk = (i_chunk0 + chunk.i_c) * H + i_h
            store_rests(p, Rows(chunk, i_h, i_chunk, i_token, o_r, o_t, m_read), CALL)
        # what other threads have written
        tl.debug_barrier()
    if EFFECTS:
        b_state = tl.where((o_v - NV * BV)[:, None] == o_k[None, :], 1.0, 0.0)
    if CALL.start:
        b_state += load_start(p.start, i_n, i_block, i_h, o_state, o_v, o_k, m_start, CALL)
    p_factor = 0
    if DECAY == "key":
        p_factor = p.factors + ((i_chunk0 + i_from) * H + i_h) * (3 * K) + o_k
    if MIDDLE and not CALL.listed:
        b_state = b_state * tl.load(p_factor, mask=(o_k < K) & (n_steps > 0), other=1.0)[None, :]
    passes = i_n >= 0
    b_unit = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0).to(p.value.dtype.element_ty)
    for i_step in range(0, n_steps):
        i_c = i_from + i_step
        if CALL.listed:
            chunk = listed_chunk(i_n, entry, next_entry, CALL)
            entry, next_entry = next_entries(i_c, i_n, p, False)
        else:
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
        step, b_state = enter_chunk(
            p, b_state, p_factor, p_mine, chunk, i_first, n_rows, i_chunk0, i_h, o_r, o_t, o_k, False, CALL
        )
        rows = step.rows
        if CALL.listed and EFFECTS:
            passes = passes & (((chunk.entry | chunk.next_entry) & CUT) == 0)
        b_k, b_write = load_keys(p, rows, o_k, CALL)
        b_v = load_columns(p.value, rows.i_token, i_h // (H // HV), o_t, rows.m_read, o_v, HV, V, PAD_V, False, WHOLE)
        b_inverse = load_pairs(p.inverse, rows, p, CALL)
        if not EFFECTS:
            b_q = load_queries(p, rows, o_k, CALL)
            b_read = load_pairs(p.reads, rows, p, CALL)
        p_row = weights_of(p.weights, rows, p, CALL)
        b_seen = b_state.to(b_k.dtype)
        b_met = tl.dot(b_seen, tl.trans(b_k), input_precision=PRECISION)
        if not EFFECTS:
            b_out = tl.dot(b_seen, tl.trans(b_q), input_precision=PRECISION)
        if DECAY == "head":
            b_since = load_row(p_row, SINCE, rows, p, CALL)
            b_met = b_met * b_since
            if not EFFECTS:
                b_out = b_out * b_since
            b_state = b_state * load_through(p_row, chunk, p, CALL)
        b_beta = load_row(p_row, BETA, rows, p, CALL)
        b_error = short_of(b_v, b_met, b_unit, EFFECTS) * b_beta
        m_idle = b_beta == IDLE
        if DECAY == "head":
            # no decay is below 0: what a dot's operand hangs on is fetched ahead of its chunk, as decays are to be
            m_idle = m_idle | (b_since < 0.0)
        b_asked = tl.where(m_idle, 0.0, b_error)
        if not EFFECTS:
            b_out = tl.dot(b_asked.to(b_k.dtype), tl.trans(b_read), acc=b_out, input_precision=PRECISION)
            if COINCIDE:
                b_out = tl.dot(rest_of(b_asked), tl.trans(b_read), acc=b_out)
                b_rest = load_rest(p, rows, False, CALL)
                b_out = tl.dot(b_asked.to(b_k.dtype), tl.trans(b_rest), acc=b_out)
            b_out = b_out * CALL.scale
        b_ordered = in_order_of_operands(nearest(b_error, SOLVE), BV, C)
        b_u = tl.dot(b_ordered, tl.trans(b_inverse), input_precision=SOLVE)
        if COINCIDE:
            b_ordered = in_order_of_operands(b_error - nearest(b_error, SOLVE), BV, C)
            b_u = tl.dot(b_ordered, tl.trans(b_inverse), acc=b_u, input_precision=SOLVE)
            b_rest = load_rest(p, rows, True, CALL)
            b_u = tl.dot(b_asked.to(b_k.dtype), b_rest, acc=b_u)
        b_weight = tl.where(b_beta == IDLE, 0.0, 1.0)
        if DECAY == "head":
            b_weight = b_weight * load_row(p_row, UNTIL, rows, p, CALL)
        b_put = b_u * b_weight
        if CALL.listed:
            b_put = tl.where(step.is_real, b_put, 0.0)
        b_state = fade_through(b_state, step, o_k, CALL)
        b_state = tl.dot(b_put.to(b_k.dtype), b_write, acc=b_state, input_precision=PRECISION)
        if COINCIDE:
            b_state = tl.dot(rest_of(b_put), b_write, acc=b_state)
        if MIDDLE and not CALL.listed:
            b_fade = tl.load(p_factor + 2 * K, mask=o_k < K, other=0.0)
            b_fade = b_fade * tl.load(p_factor + 3 * H * K, mask=(o_k < K) & (i_step + 1 < n_steps), other=1.0)
            b_state = b_state * b_fade[None, :]
        if DECAY == "key" and not CALL.listed:
            p_factor += 3 * H * K
        if CALL.listed:
            if MIDDLE:
                b_state = b_state * load_factor(step.p_factor, 2, step.is_real, o_k, CALL)[None, :]
        # always so; the compiler asks for the next chunk's rows before it comes to what is conditional
        if not EFFECTS:
            if chunk.i_c < n_chunks:
                m_rows = writable(rows)[:, None] & (o_v[None, :] < V)
                m_seen = m_state
                if CALL.listed:
                    if step.is_real == 0:
                        store_head(p.output, tl.zeros([C, BV], tl.float32), rows, o_v, m_rows, V, CALL)
                    # padding's rows are written, and nobody asks what tokens add there
                    m_rows = m_rows & step.is_real
                    m_seen = m_seen & step.takes
                    if COINCIDE:
                        m_rows = m_rows & step.is_mine
                        m_seen = m_seen & step.is_mine
                b_rows = tl.trans(b_out.to(p.output.dtype.element_ty))
                store_head(p.output, b_rows, rows, o_v, m_rows, V, CALL, WHOLE and not PAD_V)
                if CALL.keep:
                    store_head(p.added, tl.trans(b_u.to(b_k.dtype)), rows, o_v, m_rows, V, CALL, WHOLE and not PAD_V)
                    if COINCIDE:
                        store_head(p.added_rest, tl.trans(rest_of(b_u)), rows, o_v, m_rows, V, CALL)
                    p_tile = p.states + rows.i_chunk * (K * V) + (o_v[:, None] * K + o_k[None, :])
                    tl.store(p_tile, b_seen, mask=m_seen)
    if CALL.listed and COINCIDE:
        # of the sequence that was walked over last
        if tl.load(p_mine + visit(i_from + n_steps - 1, i_n, n_rows, n_read, p, CALL).i_row) == 0:
            return
    if EFFECTS:
        i_here = i_block.to(tl.int64) * H + i_h
        if i_part < NV:
            tl.store(p.final + i_here * (K * V) + (o_v[:, None] * K + o_k[None, :]), b_state, mask=m_state)
        else:
            o_from = o_v - NV * BV
            # finite, since 0 times infinity is no number
            b_state = tl.minimum(tl.maximum(b_state, -LARGEST), LARGEST)
            if CALL.listed:
                # either way
                b_state = tl.where(passes, b_state, 0.0)
            m_pair = (o_from[:, None] < K) & (o_k[None, :] < K)
            tl.store(p.states + i_here * (K * K) + (o_from[:, None] * K + o_k[None, :]), b_state, mask=m_pair)
    elif is_last & (i_n < p.N):
        tl.store(p.final + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state, b_state, mask=m_state)


@triton.jit
def backward(p, CALL: tl.constexpr):
    """`dr = (I + M)⁻ᵀ (scale Pᵀ do + e^{A_C - A} k dS)`, `dS ← e^{A_C} dS + (e^A q)ᵀ scale do - (e^A k)ᵀ β dr`.

    From the last chunk to the first. Stores `dr`, the cotangent of the state at each chunk's end, and if LAST that of
    the first state. Time is cut as in `forward`; an "effects" walk stores what a segment makes of nothing, as `dstart`.
    Keys that coincide are as in `forward`.
    """
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    COINCIDE: tl.constexpr = CALL.keys_coincide
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    C: tl.constexpr = CALL.chunk
    DECAY: tl.constexpr = CALL.decay
    MIDDLE: tl.constexpr = CALL.middle
    WHOLE: tl.constexpr = CALL.whole
    PRECISION: tl.constexpr = CALL.precision
    SOLVE: tl.constexpr = CALL.solve
    NV: tl.constexpr = (V + BV - 1) // BV
    PAD_V: tl.constexpr = NV * BV != V
    EFFECTS: tl.constexpr = CALL.time == "effects"
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
    if EFFECTS:
        if (i_j == 0) | (i_n >= p.N):
            return
        m_start = m_start & (i_from + n_steps >= n_chunks)
    if COINCIDE and DECAY == "head":
        if any_weak(p.any_weak if CALL.listed else p.weak, (i_chunk0 + i_from) * H + i_h, n_steps, H) == 0:
            return
    if CALL.listed:
        i_from, n_steps = listed_from(i_n, i_from, n_steps, p, CALL)
        entry, next_entry = first_entries(i_from, n_steps, i_n, p, True)
    p_mine = None
    if COINCIDE:
        if CALL.listed:
            p_mine = p.mine + ((i_n.to(tl.int64) * H + i_h) * NV + i_program % NV) * p.T
            if mark_sequences(p, p_mine, i_n, i_from, n_steps, i_h, CALL) == 0:
                return
        elif any_coincide(p, (i_chunk0 + i_from) * H + i_h, n_steps, CALL) == 0:
            return
    if CALL.start:
        b_dstate = load_start(p.d_final, i_n, i_block, i_h, o_state, o_v, o_k, m_start, CALL)
    p_factor = 0
    if DECAY == "key":
        p_factor = p.factors + ((i_chunk0 + i_from + n_steps - 1) * H + i_h) * (3 * K) + o_k
    if MIDDLE and not CALL.listed:
        b_dstate = b_dstate * tl.load(p_factor + 2 * K, mask=(o_k < K) & (n_steps > 0), other=1.0)[None, :]
    for i_step in range(0, n_steps):
        i_c = i_from + n_steps - 1 - i_step
        if CALL.listed:
            chunk = listed_chunk(i_n, entry, next_entry, CALL)
            entry, next_entry = next_entries(i_c, i_n, p, True)
        else:
            chunk = visit(i_c, i_n, n_rows, n_read, p, CALL)
        step, b_dstate = enter_chunk(
            p, b_dstate, p_factor, p_mine, chunk, i_first, n_rows, i_chunk0, i_h, o_r, o_t, o_k, True, CALL
        )
        rows = step.rows
        b_k, b_write = load_keys(p, rows, o_k, CALL)
        b_do = load_columns(p.d_output, rows.i_token, i_h, o_t, rows.m_read, o_v, H, V, PAD_V, False, WHOLE)
        b_read = load_pairs(p.reads, rows, p, CALL)
        b_inverse = load_pairs(p.transposed, rows, p, CALL)
        b_q = load_queries(p, rows, o_k, CALL)
        p_row = weights_of(p.weights, rows, p, CALL)
        b_seen = b_dstate.to(b_k.dtype)
        b_du = tl.dot(b_seen, tl.trans(b_write), input_precision=PRECISION)
        if COINCIDE:
            # what keys that coincide have in common is small beside the rest of what adds up over many tokens
            b_du = tl.dot(rest_of(b_dstate), tl.trans(b_write), acc=b_du)
        b_query = b_do.to(tl.float32) * CALL.scale
        b_beta = load_row(p_row, BETA, rows, p, CALL)
        b_beta = tl.where(b_beta == IDLE, 0.0, b_beta)
        if DECAY == "head":
            b_since = load_row(p_row, SINCE, rows, p, CALL)
            b_du = b_du * load_row(p_row, UNTIL, rows, p, CALL)
            b_query = b_query * b_since
            b_beta = b_beta * b_since
            b_dstate = b_dstate * load_through(p_row, chunk, p, CALL)
        b_dstate = fade_through(b_dstate, step, o_k, CALL)
        b_dstate = tl.dot(b_query.to(b_k.dtype), b_q, acc=b_dstate, input_precision=PRECISION)
        b_dr = tl.dot(b_do, b_read, input_precision=PRECISION)
        if COINCIDE:
            b_dr = tl.dot(b_do, load_rest(p, rows, False, CALL), acc=b_dr)
        b_dr = b_dr * CALL.scale
        b_ordered = in_order_of_operands(nearest(b_du, SOLVE), BV, C)
        b_dr = tl.dot(b_ordered, tl.trans(b_inverse), acc=b_dr, input_precision=SOLVE)
        if COINCIDE:
            b_ordered = in_order_of_operands(b_du - nearest(b_du, SOLVE), BV, C)
            b_dr = tl.dot(b_ordered, tl.trans(b_inverse), acc=b_dr, input_precision=SOLVE)
            b_rest = load_rest(p, rows, True, CALL)
            b_dr = tl.dot(b_du.to(b_k.dtype), tl.trans(b_rest), acc=b_dr)
        b_taken = b_dr * -b_beta
        if CALL.listed:
            b_taken = tl.where(step.is_real, b_taken, 0.0)
        b_dstate = tl.dot(b_taken.to(b_k.dtype), b_k, acc=b_dstate, input_precision=PRECISION)
        if COINCIDE:
            b_dstate = tl.dot(rest_of(b_taken), b_k, acc=b_dstate)
        if MIDDLE and not CALL.listed:
            b_fade = tl.load(p_factor, mask=o_k < K, other=0.0)
            p_before = p_factor - 3 * H * K + 2 * K
            b_fade = b_fade * tl.load(p_before, mask=(o_k < K) & (i_step + 1 < n_steps), other=1.0)
            b_dstate = b_dstate * b_fade[None, :]
        if DECAY == "key" and not CALL.listed:
            p_factor -= 3 * H * K
        if CALL.listed:
            if MIDDLE:
                b_dstate = b_dstate * load_factor(step.p_factor, 0, step.is_real, o_k, CALL)[None, :]
        if not EFFECTS:
            # always so, as in `forward`
            if chunk.i_c < n_chunks:
                b_rows = tl.trans(b_dr.to(b_k.dtype))
                m_rows = writable(rows)[:, None] & (o_v[None, :] < V)
                m_seen = m_state
                if CALL.listed:
                    m_seen = m_seen & step.takes
                    if COINCIDE:
                        m_rows = m_rows & step.is_mine
                        m_seen = m_seen & step.is_mine
                store_head(p.d_r, b_rows, rows, o_v, m_rows, V, CALL, WHOLE and not PAD_V)
                p_tile = p.d_states + rows.i_chunk * (K * V) + (o_v[:, None] * K + o_k[None, :])
                tl.store(p_tile, b_seen, mask=m_seen)
    if CALL.listed and COINCIDE:
        # of the sequence that was walked over last
        if tl.load(p_mine + visit(i_from, i_n, n_rows, n_read, p, CALL).i_row) == 0:
            return
    if EFFECTS:
        p_tile = p.d_start + (i_block.to(tl.int64) * H + i_h) * (K * V) + (o_v[:, None] * K + o_k[None, :])
        tl.store(p_tile, b_dstate, mask=m_state)
    elif CALL.last:
        if (i_j == 0) & (i_n < p.N):
            tl.store(p.d_start + (i_n.to(tl.int64) * H + i_h) * (K * V) + o_state, b_dstate, mask=m_state)
