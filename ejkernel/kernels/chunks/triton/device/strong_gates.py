"""Device code: sums of key gates that are too strong for one reference a chunk."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import in_bits


@triton.jit
def split_gate(b_gate):
    """A gate in bits as three float16 terms: whole eighths, the remainder, and the remainder's rounding error."""
    b_gate = in_bits(b_gate)
    b_whole = tl.floor(b_gate * 8.0 + 0.5) * 0.125
    b_rest = b_gate - b_whole
    b_part = b_rest.to(tl.float16)
    return b_whole.to(tl.float16), b_part, (b_rest - b_part.to(tl.float32)).to(tl.float16)


@triton.jit
def sum_gates(m_sum, b_gate, FINE: tl.constexpr):
    """Sums of gates over the rows that `m_sum` selects, never subtracted: a strong gate costs no other digits."""
    b_whole, b_part, b_fine = split_gate(b_gate)
    b_pick = tl.where(m_sum, 1.0, 0.0).to(tl.float16)
    b_sum = tl.dot(b_pick, b_part)
    if FINE:
        b_sum = tl.dot(b_pick, b_fine, acc=b_sum)
    return tl.dot(b_pick, b_whole, acc=b_sum)
