"""Device code: inverses of unit lower triangular matrices, by forward substitution in blocks."""

import triton
import triton.language as tl


@triton.jit
def off_diagonal(o_r, i_level):
    """The lower left quarter of each pair of diagonal blocks of `2**i_level` rows, as a mask."""
    o_block = o_r >> i_level
    return ((o_block & 1) != 0)[:, None] & (o_block[None, :] == o_block[:, None] - 1)


@triton.jit
def to_bfloat16(b):
    """Rounded to the nearest bfloat16, as float32; `b` minus this is NaN where `b` is."""
    return ((b.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def product(b_left, b_right, PRECISION: tl.constexpr):
    """A dot on float32 operands; three passes of bfloat16 are spelled out, which takes far fewer conversions."""
    if PRECISION == "bf16x3":
        b_high_left = to_bfloat16(b_left)
        b_high_right = to_bfloat16(b_right)
        b_low_left = (b_left - b_high_left).to(tl.bfloat16)
        b_low_right = (b_right - b_high_right).to(tl.bfloat16)
        b_high_left = b_high_left.to(tl.bfloat16)
        b_high_right = b_high_right.to(tl.bfloat16)
        b = tl.dot(b_low_left, b_high_right)
        b = tl.dot(b_high_left, b_low_right, acc=b)
        b = tl.dot(b_high_left, b_high_right, acc=b)
    else:
        b = tl.dot(b_left, b_right, input_precision=PRECISION)
    return b


@triton.jit
def scores(b_left, b_right, m_pair, PRECISION: tl.constexpr):
    """Products of the pairs of rows that `m_pair` selects, 0 elsewhere; a pair that is not selected may overflow."""
    return tl.where(m_pair, tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION), 0.0)


@triton.jit
def small_block_inverses(b_system, C: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of the diagonal blocks of 16 rows of `I + M`, as one matrix."""
    BLOCKS: tl.constexpr = C // 16
    o_block = tl.arange(0, BLOCKS)
    o_r = tl.arange(0, 16)
    m_diagonal = o_block[:, None, None, None] == o_block[None, None, :, None]
    b_blocks = tl.sum(tl.where(m_diagonal, tl.reshape(b_system, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    b_unit = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0)
    b_inverse = b_unit[None, :, :] - tl.where(off_diagonal(o_r, 0)[None, :, :], b_blocks, 0.0)
    for i_level in tl.static_range(1, 4):
        b_off = tl.where(off_diagonal(o_r, i_level)[None, :, :], b_blocks, 0.0)
        b_off = product(b_off, b_inverse, PRECISION)
        b_inverse -= product(b_inverse, b_off, PRECISION)
    return tl.reshape(tl.where(m_diagonal, b_inverse[:, :, None, :], 0.0), [C, C])


@triton.jit
def inverse(b_system, C: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + M)⁻¹` for strictly lower triangular `M [C, C]`, `C` at least 16 and a power of two.

    Diagonal blocks are joined in pairs, level by level: [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]].
    """
    o_r = tl.arange(0, C)
    # for blocks this small, the three passes of TF32 take more registers than they save
    b_inverse = small_block_inverses(b_system, C, "ieee" if PRECISION == "tf32x3" else PRECISION)
    for i_level in tl.static_range(4, 4 + (C >= 32) + (C >= 64)):
        b_off = tl.where(off_diagonal(o_r, i_level), b_system, 0.0)
        b_off = product(b_off, b_inverse, PRECISION)
        b_inverse -= product(b_inverse, b_off, PRECISION)
    return b_inverse


@triton.jit
def in_order_of_operands(b, R: tl.constexpr, C: tl.constexpr):
    """Columns 0 2 4 6 1 3 5 7 of each eight: threads then hold a dot's result in the order of a TF32 operand."""
    return tl.reshape(tl.permute(tl.reshape(b, [R, C // 8, 4, 2]), [0, 1, 3, 2]), [R, C])
