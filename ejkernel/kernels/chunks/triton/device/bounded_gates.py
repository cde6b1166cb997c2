"""Device code for chunks whose key gates are bounded: none is above 0, and no eight tokens forget more than 80 bits.

Eight tokens begin where a multiple of eight does, and 80 bits are 6.9 nats a token. So sixteen tokens keep the range of
float32 either side of their middle, and all of their pairs are one product. Sums of gates are short: float32 has
the digits for them, and no power of two is taken more often than with mild gates.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E
from ejkernel.kernels.chunks.triton.device.rows import is_late, join_rows, sibling, split_rows

# Kinds of chunks, as flags say them. All that tests for a flag tests for another number than 0.
MILD = tl.constexpr(0)
STRONG = tl.constexpr(1)
BOUNDED = tl.constexpr(2)
# Bits that eight tokens may forget.
BITS = tl.constexpr(80.0)


@triton.jit
def sum_from_middle(b_gate, o_r, o_b):
    """Bits of decay from the middle of each 16 tokens through each of them, and of each eight tokens [eights, 1, dims].

    Gates come as [eights, 8 rows, dims], in nats. Sums before the middle have the other sign.
    """
    gates = split_rows(b_gate, 3)
    b_since = gates[0] * LOG2E
    b_until = tl.zeros_like(b_since)
    since = (b_since,)
    backwards = (b_until,)
    for r in tl.static_range(1, 8):
        b_since += gates[r] * LOG2E
        b_until -= gates[8 - r] * LOG2E
        since += (b_since,)
        backwards += (b_until,)
    until = ()
    for r in tl.static_range(8):
        until += (backwards[7 - r],)
    b_sum = tl.where(is_late(o_r, o_b, 3, 3), join_rows(since, o_r), join_rows(until, o_r))
    # a sum of its own, since of a reduction nothing is moved but what it gives
    return b_sum, tl.sum(b_gate, 1, keep_dims=True) * LOG2E


@triton.jit
def meet_in_middle(b_eight, o_r, o_b):
    """Decays from the start of 16 tokens to their middle, from there to their end, and through them all."""
    b_own = tl.exp2(b_eight)
    b_beside = sibling(b_own, 1)
    m_late = is_late(o_r, o_b, 3, 3)
    return tl.where(m_late, b_beside, b_own), tl.where(m_late, b_own, b_beside), b_own * b_beside


@triton.jit
def count_unbounded(b_gate, b_eight):
    """How many of the eights and dims are beyond the bound."""
    # a comparison with NaN is false, where a largest number might not be NaN
    m_within = (b_eight >= -BITS) & (tl.max(b_gate, 1, keep_dims=True) <= 0.0)
    return tl.sum(tl.sum(tl.sum(tl.where(m_within, 0, 1), 2), 1), 0)
