"""Device code: the walk of prompts, which start from slots of a pool and leave states in slots."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import faded
from ejkernel.kernels.chunks.triton.device.places import load_flag, load_rows, visit
from ejkernel.kernels.chunks.triton.device.rounding import nearest
from ejkernel.kernels.chunks.triton.device.slots import locate_prompt, read_slot, write_border
from ejkernel.kernels.linear_recurrence.triton.device.programs import load_factors, load_weights, part_of_walk


@triton.jit
def walk_prompts(p, CALL: tl.constexpr):
    """`walk` in the role `output`, over the tokens of pooled sequences that go by chunks.

    What a sequence gets must not depend on where it was cut, nor on the rest of the call. So all decays of a chunk are
    applied to the state before any of the next, which leaves the state as it lies in a slot in between. Decays of a
    head are the exact ones, since a choice by the sequence would depend on the cut. And time is not cut in segments.
    """
    H: tl.constexpr = CALL.heads
    K: tl.constexpr = CALL.key_dim
    V: tl.constexpr = CALL.value_dim
    BK: tl.constexpr = CALL.key_block
    BV: tl.constexpr = CALL.value_block
    C: tl.constexpr = CALL.chunk
    WIDE: tl.constexpr = CALL.wide
    DECAY: tl.constexpr = CALL.decay
    PRECISION: tl.constexpr = CALL.precision
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    PAD_K: tl.constexpr = NK * BK != K
    PAD_V: tl.constexpr = NV * BV != V
    i_v, i_k, i_h, i_prompt = part_of_walk(NK, NV, H)
    prompt = locate_prompt(i_prompt, p, CALL)
    if prompt.i_n < 0:
        return
    o_r = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_state = o_v[:, None] + o_k[None, :] * V
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    # scores are [key, query]
    o_gap = o_r[None, :] - o_r[:, None]
    b_state = read_slot(p, prompt.i_n, i_h, False, o_state, m_state, CALL)
    n_done = 0
    n_next = 0
    # from one place where states are written to the next, of which the first is the start
    while n_next <= prompt.n_rows:
        for i_c in range(n_done // C, tl.cdiv(n_next, C)):
            chunk = visit(i_c, prompt.i_n, prompt.n_rows, prompt.n_rows, p, CALL)
            i_token = prompt.i_first + chunk.i_row
            i_chunk = (prompt.i_chunk0 + i_c) * H + i_h
            m_read = chunk.i_row + o_r < prompt.n_rows
            b_k = load_rows(
                p.key, i_token, i_h // (H // CALL.key_heads), o_r, m_read, o_k, CALL.key_heads, K, PAD_K, WIDE
            )
            b_v = load_rows(
                p.value, i_token, i_h // (H // CALL.value_heads), o_r, m_read, o_v, CALL.value_heads, V, PAD_V, WIDE
            )
            b_q = load_rows(
                p.query, i_token, i_h // (H // CALL.query_heads), o_r, m_read, o_k, CALL.query_heads, K, PAD_K, WIDE
            )
            b_k = nearest(b_k, PRECISION)
            b_v = nearest(tl.trans(b_v), PRECISION)
            b_q = nearest(tl.trans(b_q), PRECISION)
            # what is added to the state, and the state that queries read
            b_added = b_v
            b_read = b_state
            if DECAY == "head":
                p_weights = p.within + i_chunk * (4 * C)
                _, _, b_whole, b_part = load_weights(p_weights, o_r, m_read, CALL)
                b_whole_end = tl.load(p_weights + 4 * (C - 1) + 1)
                b_part_end = tl.load(p_weights + 4 * (C - 1) + 3)
                b_until = (b_whole_end - b_whole) + (b_part_end - b_part)
                b_added = nearest(faded(b_v, b_until[None, :]).to(b_v.dtype), PRECISION)
                b_state = faded(b_state, b_whole_end + b_part_end)
            if DECAY == "key":
                b_before, b_after = load_factors(p.factors, i_chunk, o_k, True, True, K, True, CALL)
                # queries and keys of chunks with strong gates are relative to the chunk's ends
                is_flagged = load_flag(p.flag, chunk, i_chunk, i_h, p, CALL) != 0
                b_read = b_state * tl.where(is_flagged, 1.0, b_before)
                b_state = b_state * b_before
            b_read = nearest(b_read.to(b_k.dtype), PRECISION)
            b_score = tl.dot(b_k, b_q, input_precision=PRECISION)
            b_out = tl.dot(b_read, b_q, input_precision=PRECISION)
            if DECAY == "head":
                b_gap = (b_whole[None, :] - b_whole[:, None]) + (b_part[None, :] - b_part[:, None])
                b_score = faded(b_score, b_gap)
                b_out = faded(b_out, (b_whole + b_part)[None, :])
            if DECAY == "key":
                if is_flagged:
                    p_score = p.within + i_chunk * (C * C) + (o_r[:, None] + o_r[None, :] * C)
                    b_score = tl.load(p_score).to(tl.float32)
                    if NK > 1:
                        # these are of all key dims, and count once
                        b_score = tl.where(i_k == 0, b_score, 0.0)
            b_score = nearest(tl.where(o_gap >= 0, b_score, 0.0).to(b_v.dtype), PRECISION)
            b_out = tl.dot(b_v, b_score, acc=b_out, input_precision=PRECISION) * CALL.scale
            p_rows = p.output + ((i_token * H + i_h) * NK + i_k) * V + o_r[:, None] * (H * NK * V) + o_v[None, :]
            b_rows = tl.trans(b_out.to(p.output.dtype.element_ty))
            m_rows = m_read[:, None]
            if PAD_V:
                m_rows = m_rows & (o_v[None, :] < V)
            tl.store(p_rows, b_rows, mask=m_rows)
            b_state = tl.dot(b_added, b_k, acc=b_state, input_precision=PRECISION)
            if DECAY == "key":
                b_state = b_state * b_after
        n_done = n_next
        n_next = write_border(p, b_state, i_h, n_done, prompt, o_state, m_state, CALL)
