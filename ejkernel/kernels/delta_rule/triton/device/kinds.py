"""Device code for one gate a key dim: kinds of chunks by how strong gates are, and what is left of states in each."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import MOST
from ejkernel.kernels.chunks.triton.device.places import leaves_state, takes_state

# Gates that can be inverted from a chunk's middle; any; and those that can from the middle of each 16 tokens.
MILD = tl.constexpr(0)
STRONG = tl.constexpr(1)
BOUNDED = tl.constexpr(2)


@triton.jit
def store_factors(p_factor, chunk, i_chunk, o_k, b_enter, b_through, b_leave, CALL: tl.constexpr):
    """Bits of what is left of a state where queries and keys meet it, of that until it is written to, and from then on.

    Finite, since 0 times infinity is no number.
    """
    K: tl.constexpr = CALL.key_dim
    p_tile = p_factor + i_chunk * ((4 if CALL.listed else 3) * K) + o_k
    if CALL.listed:
        tl.store(p_tile + 3 * K, tl.full(o_k.shape, 1.0, tl.float32), mask=o_k < K)
        m_enter = (o_k < K) & takes_state(chunk)
        tl.store(p_tile, tl.exp2(tl.minimum(b_enter, MOST)), mask=m_enter)
        tl.store(p_tile + K, tl.exp2(tl.minimum(b_through, MOST)), mask=m_enter)
        tl.store(p_tile + 2 * K, tl.exp2(tl.minimum(b_leave, MOST)), mask=(o_k < K) & leaves_state(chunk))
    else:
        tl.store(p_tile, tl.exp2(tl.minimum(b_enter, MOST)), mask=o_k < K)
        tl.store(p_tile + K, tl.exp2(tl.minimum(b_through, MOST)), mask=o_k < K)
        tl.store(p_tile + 2 * K, tl.exp2(tl.minimum(b_leave, MOST)), mask=o_k < K)
