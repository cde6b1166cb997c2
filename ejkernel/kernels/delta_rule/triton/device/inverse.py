# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: inverses of unit lower triangular matrices, by forward substitution in blocks."""

import triton
import triton.language as tl


@triton.jit
def by_rows(b_below, C: tl.constexpr):
    """`(I + below)⁻¹` of the blocks of 16 rows on the diagonal, all of them row after row, as one matrix."""
    BLOCKS: tl.constexpr = C // 16
    o_block = tl.arange(0, BLOCKS)
    o_r = tl.arange(0, 16)
    m_diagonal = o_block[:, None, None, None] == o_block[None, None, :, None]
    b_blocks = tl.sum(tl.where(m_diagonal, tl.reshape(b_below, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    # columns first, so that a row of coefficients lies along the rows that it multiplies
    b_blocks = tl.permute(b_blocks, (0, 2, 1))
    b_found = tl.where(o_r[None, :, None] == o_r[None, None, :], 1.0, 0.0) + tl.zeros([BLOCKS, 16, 16], tl.float32)
    for i in range(1, 16):
        b_row = tl.sum(tl.where(o_r[None, None, :] == i, b_blocks, 0.0), 2)
        b_taken = tl.sum(b_row[:, :, None] * b_found, 1)
        b_found = tl.where(o_r[None, :, None] == i, b_found - b_taken[:, None, :], b_found)
    b_found = tl.where(m_diagonal, b_found[:, :, None, :], 0.0)
    return tl.reshape(b_found, [C, C])


@triton.jit
def inverse(b_below, C: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + below)⁻¹` for strictly lower triangular `below [C, C]`, `C` at least 16 and a power of two."""
    o_r = tl.arange(0, C)
    b_found = by_rows(b_below, C)
    if C > 16:
        # of two blocks side by side and what is below the first: [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]
        for i_level in tl.static_range(4, 4 + (C >= 32) + (C >= 64)):
            o_block = o_r >> i_level
            m_corner = ((o_block & 1) != 0)[:, None] & (o_block[None, :] == o_block[:, None] - 1)
            b_corner = tl.dot(tl.where(m_corner, b_below, 0.0), b_found, input_precision=PRECISION)
            b_found -= tl.dot(b_found, b_corner, input_precision=PRECISION)
    return b_found
