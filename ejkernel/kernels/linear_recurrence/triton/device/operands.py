# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code: what a walk multiplies, weighed and rounded."""

import triton
import triton.language as tl


@triton.jit
def load_weights(p_weight, i_chunk, o_r, C: tl.constexpr):
    """A chunk's rows: weights towards its end and towards its start, and sums of gates, whole and fractional."""
    # a tile of all four is large enough for the compiler to fetch it ahead of its chunk, as one of them is not
    o_pair = tl.arange(0, 2)
    p_tile = p_weight + i_chunk * (4 * C) + o_r[:, None, None] * 4 + o_pair[None, :, None] * 2 + o_pair[None, None, :]
    b_weight, b_sum = tl.split(tl.load(p_tile))
    b_near, b_far = tl.split(b_weight)
    b_whole, b_part = tl.split(b_sum)
    return b_near, b_far, b_whole, b_part


@triton.jit
def in_range(b, AXIS: tl.constexpr, LEAST_PEAK: tl.constexpr):
    """Powers of two that bring what lies along AXIS to float16's range, its largest value between 1 and 2, and back."""
    b_peak = tl.maximum(tl.minimum(tl.max(tl.abs(b), AXIS), 2.0**100), LEAST_PEAK)
    b_power = b_peak.to(tl.int32, bitcast=True) & 0x7F800000
    return (0x7F000000 - b_power).to(tl.float32, bitcast=True), b_power.to(tl.float32, bitcast=True)
