"""Device code: gates as powers of two, and what they make of numbers."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2**-200 is 0 in float32.
LEAST = tl.constexpr(-200.0)
# 2**128 is the first power that float32 does not have, and 2**190 takes any number that matters beyond.
MOST = tl.constexpr(127.99)
BEYOND = tl.constexpr(190.0)
LARGEST = tl.constexpr(3e38)


@triton.jit
def in_bits(b_gate):
    """A gate in base 2, no further from 0 than what forgets all, or makes too much of all."""
    return tl.minimum(tl.maximum(b_gate * LOG2E, LEAST), -LEAST)


@triton.jit
def largest(b, FLAT: tl.constexpr):
    """Of a tile; FLAT, of all numbers at once and not of rows first, which Triton 3.6 has no code for on Blackwell."""
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
    """`b 2**bits`, also where the power alone would overflow: nothing stays nothing however much it would grow."""
    m_beyond = b_bits > MOST
    b_power = tl.exp2(tl.minimum(b_bits, BEYOND) - tl.where(m_beyond, 64.0, 0.0))
    return b * b_power * tl.where(m_beyond, 2.0**64, 1.0)
