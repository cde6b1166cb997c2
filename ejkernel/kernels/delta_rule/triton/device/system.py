# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: the triangular system of every chunk, solved for whatever state the chunk begins with."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.places import CHUNKS, load_rows, locate, token_of
from ejkernel.kernels.delta_rule.triton.device.decays import decays, pair_decays, sum_gates
from ejkernel.kernels.delta_rule.triton.device.inverse import inverse


@triton.jit
def times(b_left, b_right, PRECISION: tl.constexpr):
    """The product of a float32 matrix with one of few digits, to float32's."""
    if b_right.dtype == tl.float32:
        return tl.dot(b_left, b_right, input_precision=PRECISION)
    b_most = b_left.to(b_right.dtype)
    b_rest = (b_left - b_most.to(tl.float32)).to(b_right.dtype)
    return tl.dot(b_most, b_right, acc=tl.dot(b_rest, b_right))


@triton.jit
def solve(
    p_q,
    p_k,
    p_v,
    p_beta,
    p_gate,
    p_cu,
    p_owner,
    T,
    N,
    p_recalled,
    p_added,
    p_score,
    p_inverse,
    p_weight,
    H: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    KEEP: tl.constexpr,
    PACKED: tl.constexpr,
    FLIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of each chunk: `recalled = (I + M)⁻¹ β k e^A`, `added = (I + M)⁻¹ β v`, the scores of its queries, and weights.

    A chunk then adds `added - recalled S` to the state `S` it begins with. KEEP stores the inverse too.
    """
    i_program = tl.program_id(0)
    i_h = i_program % H
    i_block = i_program // H
    _, i_c, i_first, n_rows, n_read = locate(i_block, p_cu, p_owner, CHUNKS, N, T, C, PACKED)
    i_chunk = i_program.to(tl.int64)
    i_row = i_c * C
    i_token = token_of(i_first, n_rows, i_row, FLIP)
    o_r = tl.arange(0, C)
    o_t = o_r
    if FLIP:
        o_t = -o_r
    o_k = tl.arange(0, BK)
    m_read = i_row + o_r < n_read
    m_write = i_row + o_r < n_rows
    b_beta = tl.load(p_beta + (i_token + o_t) * H + i_h, mask=m_read, other=0.0).to(tl.float32)
    b_k = load_rows(p_k, i_token, i_h // (H // HK), o_t, m_read, o_k, HK, K, BK != K, False)
    b_q = load_rows(p_q, i_token, i_h // (H // HQ), o_t, m_read, o_k, HQ, K, BK != K, False)
    # selected before anything multiplies them: a pair that nobody reads may have overflowed
    m_earlier = o_r[:, None] > o_r[None, :]
    b_below = tl.where(m_earlier, tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION), 0.0)
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_score = tl.where(o_r[:, None] >= o_r[None, :], b_score, 0.0)
    if DECAY == "head":
        # the first gate is in the state that the sequence begins with
        m_gate = m_read & (i_row + o_r > 0)
        b_whole, b_part, _ = sum_gates(p_gate, i_token, i_h, o_t, m_gate, H)
        b_since, b_until = decays(b_whole, b_part, o_r, C)
        b_pair = pair_decays(b_whole, b_part, o_r)
        b_below = b_below * b_pair
        b_score = b_score * b_pair
        p_row = p_weight + i_chunk * (2 * C) + o_r
        tl.store(p_row, b_since)
        tl.store(p_row + C, b_until)
    o_pair = i_chunk * (C * C) + o_r[:, None] * C + o_r[None, :]
    tl.store(p_score + o_pair, b_score.to(p_score.dtype.element_ty))
    b_inverse = inverse(b_below * b_beta[:, None], C, PRECISION)
    if KEEP:
        tl.store(p_inverse + o_pair, b_inverse.to(p_inverse.dtype.element_ty))
    b_inverse = b_inverse * b_beta[None, :]
    for i_v in range(0, (V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_v = load_rows(p_v, i_token, i_h // (H // HV), o_t, m_read, o_v, HV, V, V % BV != 0, False)
        b_added = times(b_inverse, b_v, PRECISION)
        o_rows = (i_token * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
        m_rows = m_write[:, None] & (o_v[None, :] < V)
        tl.store(p_added + o_rows, b_added.to(p_added.dtype.element_ty), mask=m_rows)
    if DECAY == "head":
        b_inverse = b_inverse * b_since[None, :]
    b_recalled = times(b_inverse, b_k, PRECISION)
    o_rows = (i_token * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    m_rows = m_write[:, None] & (o_k[None, :] < K)
    tl.store(p_recalled + o_rows, b_recalled.to(p_recalled.dtype.element_ty), mask=m_rows)
