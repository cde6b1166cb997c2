"""Device code of single tokens: where a head's numbers begin, and the inverse of its norm."""

import triton
import triton.language as tl

SMALL = tl.constexpr(2.0**-96)
MOST = tl.constexpr(2.0**120)


@triton.jit
def own_place(p_x, i_b, i_head, VIEW: tl.constexpr):
    """Where the numbers of a head begin in `[rows, groups, width]`, as a `View` says."""
    EACH: tl.constexpr = VIEW.heads // VIEW.groups
    o_group = (i_b * VIEW.groups + i_head // EACH) * VIEW.width
    return p_x + o_group + VIEW.offset + (i_head % EACH) * VIEW.dim


@triton.jit
def inverse_norm(b_squares, b_small_squares, EPSILON: tl.constexpr):
    """The inverse norm of a vector times the second result, from its sum of squares and that of it times SMALL."""
    m_fits = b_squares < MOST
    b_inverse = tl.rsqrt(tl.where(m_fits, b_squares + EPSILON, b_small_squares))
    return b_inverse, tl.where(m_fits, 1.0, SMALL)
