"""Device code for one gate a key dim: how strong a chunk's gates are, and the decays of states that follow from it.

Strong gates are kept by the contract: results are exact for any gate, resets too. Bounded gates are kept by more than
10 % for the gates of a released model, Kimi-K3; `docs/delta_rule.md` has the times.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import MOST
from ejkernel.kernels.chunks.triton.device.places import leaves_state, takes_state

# Decays can be inverted from the chunk's middle to its ends.
MILD = tl.constexpr(0)
# No decay may be inverted.
STRONG = tl.constexpr(1)
# Decays can be inverted from the middle of each 16 tokens to their ends.
BOUNDED = tl.constexpr(2)


@triton.jit
def store_state_decays(p_decay, rows, o_k, b_enter, b_through, b_leave, CALL: tl.constexpr):
    """Stores a state's decays by key dim, from sums of gates in bits.

    They take the state from the chunk's start to the reference of `query_since` and `key_since`, from there to that of
    `key_until`, and from there to the chunk's end. All are finite, since 0 times infinity is NaN.
    """
    K: tl.constexpr = CALL.key_dim
    p_tile = p_decay + rows.i_chunk * ((4 if CALL.listed else 3) * K) + o_k
    m_enter = o_k < K
    m_leave = o_k < K
    if CALL.listed:
        tl.store(p_tile + 3 * K, tl.full(o_k.shape, 1.0, tl.float32), mask=o_k < K)
        m_enter = m_enter & takes_state(rows.chunk)
        m_leave = m_leave & leaves_state(rows.chunk)
    tl.store(p_tile, tl.exp2(tl.minimum(b_enter, MOST)), mask=m_enter)
    tl.store(p_tile + K, tl.exp2(tl.minimum(b_through, MOST)), mask=m_enter)
    tl.store(p_tile + 2 * K, tl.exp2(tl.minimum(b_leave, MOST)), mask=m_leave)
