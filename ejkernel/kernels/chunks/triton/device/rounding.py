"""Device code: operands rounded to TF32, which a dot would truncate."""

import triton
import triton.language as tl


@triton.jit
def nearest(b, PRECISION: tl.constexpr):
    """Rounded to nearest in TF32, if dots are one pass of it: the hardware would truncate."""
    if PRECISION == "tf32":
        # half of the last digit that stays is added; a NaN stays one
        b_power = (b.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        b = ((b + b_power * 2.0**-11).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return b
