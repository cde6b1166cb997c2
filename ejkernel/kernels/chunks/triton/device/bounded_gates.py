"""Device code for chunks whose key gates are bounded: none is above 0, and no eight tokens forget more than 80 bits.

Eights begin at multiples of eight; 80 bits are 6.9 nats a token. So decays from the middle of sixteen tokens are in
float32's range either way, and all of their pairs are one product. Sums of gates are short: float32 has the digits for
them, and no more powers are computed than with mild gates.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E
from ejkernel.kernels.chunks.triton.device.rows import is_late, join_rows, sibling_bits, split_rows

# Values of a chunk's flag: not 0 if it is flagged.
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
    # a second sum, as a reduction, since only the results of reductions move between threads
    return b_sum, tl.sum(b_gate, 1, keep_dims=True) * LOG2E


@triton.jit
def place_middles(b_eight, o_r, o_b, LEVELS: tl.constexpr):
    """Where the middles of 16 tokens lie, from sums over each eight of them.

    Returns a fraction of a bit, which is to be added to the sums from the middle: then a whole number of bits lies
    between two middles, and a power of two, which rounds nothing, takes numbers from one to the other. Then the decays
    from the chunk's start to the middle, from there to the chunk's end and, for each level of blocks from 32 tokens on,
    to the border between the block's halves.
    """
    # bits with 21 binary places: a bounded chunk has 640 at most
    b_own = tl.floor(b_eight * 2097152.0 + 0.5).to(tl.int32)
    b_beside = sibling_bits(b_own, 1)
    m_late = is_late(o_r, o_b, 3, 3)
    b_from = tl.where(m_late, b_beside, b_own)
    b_to = tl.where(m_late, b_own, b_beside)
    b_total = b_own + b_beside
    distances = ()
    for i_level in tl.static_range(4, LEVELS):
        m_late = is_late(o_r, o_b, i_level, 3)
        distances += (tl.where(m_late, -b_from, b_to),)
        b_beside = sibling_bits(b_total, 1 << (i_level - 3))
        b_from += tl.where(m_late, b_beside, 0)
        b_to += tl.where(m_late, 0, b_beside)
        b_total += b_beside
    b_whole = b_from >> 21
    meeting = ()
    for i_level in tl.static_range(4, LEVELS):
        b_apart = ((b_from + distances[i_level - 4]) >> 21) - b_whole
        b_bits = tl.where(is_late(o_r, o_b, i_level, 3), -b_apart, b_apart)
        meeting += (tl.exp2(b_bits.to(tl.float32)),)
    b_part = (b_from & 2097151).to(tl.float32) * (1.0 / 2097152.0)
    b_rest = (b_total & 2097151).to(tl.float32) * (1.0 / 2097152.0)
    b_until = tl.exp2(((b_total >> 21) - b_whole).to(tl.float32) + b_rest)
    return b_part, tl.exp2(b_whole.to(tl.float32)), b_until, meeting


@triton.jit
def count_unbounded(b_gate, b_eight):
    """How many of the eights and dims are beyond the bound."""
    # a comparison with NaN is false, where a largest number might not be NaN
    m_within = (b_eight >= -BITS) & (tl.max(b_gate, 1, keep_dims=True) <= 0.0)
    return tl.sum(tl.sum(tl.sum(tl.where(m_within, 0, 1), 2), 1), 0)
