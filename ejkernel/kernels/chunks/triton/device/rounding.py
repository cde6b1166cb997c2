"""Device code: what operands are rounded to before a dot cuts them off."""

import triton
import triton.language as tl


@triton.jit
def nearest(b, PRECISION: tl.constexpr):
    """Rounded to what a dot of one TF32 pass takes of a number; the dot itself would cut the rest off."""
    if PRECISION == "tf32":
        # half of the last digit that stays is added; a NaN stays one
        b_power = (b.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        b = ((b + b_power * 2.0**-11).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return b
