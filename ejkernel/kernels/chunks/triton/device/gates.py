"""Device code: gates as bits of decay, and numbers that decay by them."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2**-200 is 0 in float32.
LEAST = tl.constexpr(-200.0)
# 2**128 overflows in float32, and 2**190 makes any number overflow that matters.
MOST = tl.constexpr(127.99)
BEYOND = tl.constexpr(190.0)
LARGEST = tl.constexpr(3e38)


@triton.jit
def in_bits(b_gate):
    """A gate in bits, clipped where it forgets, or overflows, everything anyway."""
    return tl.minimum(tl.maximum(b_gate * LOG2E, LEAST), -LEAST)


@triton.jit
def largest(b, FLAT: tl.constexpr):
    """The largest number of a tile; FLAT in one step, since rows first does not compile for Blackwell (Triton 3.6)."""
    if FLAT:
        return tl.max(b)
    else:
        return tl.max(tl.max(b, 1), 0)


@triton.jit
def scaled(b, b_factor):
    """Multiplied in float32, and rounded as `b` is."""
    return (b.to(tl.float32) * b_factor).to(b.dtype)


@triton.jit
def faded(b, b_bits):
    """`b 2**bits`, also where the power alone would overflow: 0 stays 0."""
    m_beyond = b_bits > MOST
    b_power = tl.exp2(tl.minimum(b_bits, BEYOND) - tl.where(m_beyond, 64.0, 0.0))
    return b * b_power * tl.where(m_beyond, 2.0**64, 1.0)
