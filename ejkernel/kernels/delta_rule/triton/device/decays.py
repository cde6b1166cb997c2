# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: what one gate a head and token makes of a chunk's rows."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.gates import MOST, in_bits

# no state that a token could be short of is so large that this part of it is not lost in rounding
LEAST_BETA = tl.constexpr(2.0**-60)
# numbers of a chunk's rows: beta, decays since the chunk's start and until its end, sums of gates as by `sum_gates`
WEIGHTS = tl.constexpr(5)


@triton.jit
def sum_gates(p_gate, i_token, i_h, o_t, m_gate, H: tl.constexpr):
    """Sums of a chunk's gates to each row, in bits, whole ones and the rest apart: no gate costs others digits."""
    b_gate = in_bits(tl.load(p_gate + (i_token + o_t) * H + i_h, mask=m_gate, other=0.0).to(tl.float32))
    b_whole = tl.floor(b_gate + 0.5)
    return tl.cumsum(b_whole, 0), tl.cumsum(b_gate - b_whole, 0)


@triton.jit
def decays(b_whole, b_part, o_r, C: tl.constexpr):
    """From the chunk's start to each row, and from there to its end; finite, since 0 times infinity is no number."""
    m_end = o_r == C - 1
    b_whole_end = tl.sum(tl.where(m_end, b_whole, 0.0), 0)
    b_part_end = tl.sum(tl.where(m_end, b_part, 0.0), 0)
    b_since = tl.exp2(tl.minimum(b_whole + b_part, MOST))
    b_until = tl.exp2(tl.minimum((b_whole_end - b_whole) + (b_part_end - b_part), MOST))
    return b_since, b_until


@triton.jit
def pair_decays(b_whole, b_part, o_r):
    """From each column's row to each row that is not before it, 0 elsewhere: `[C, C]`."""
    b_gap = (b_whole[:, None] - b_whole[None, :]) + (b_part[:, None] - b_part[None, :])
    return tl.exp2(tl.where(o_r[:, None] >= o_r[None, :], tl.minimum(b_gap, MOST), float("-inf")))


@triton.jit
def writing(b_beta):
    """Beta, or what nobody can tell from 0: what a token is short of is found again from what it adds."""
    return tl.where(tl.abs(b_beta) < LEAST_BETA, LEAST_BETA, b_beta)
