"""Device code of calls of a few tokens: one sequence, one token and its gate at a time."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E, faded


@triton.jit
def locate_sequence(i_n, p, CALL: tl.constexpr):
    """Where a sequence begins, its tokens, and whether it is real and not the padding behind the last packed one."""
    if CALL.packed:
        i_first = tl.load(p.packing + i_n)
        return i_first.to(tl.int64), tl.load(p.packing + i_n + 1) - i_first, i_n < p.N
    else:
        return i_n.to(tl.int64) * p.T, p.T, i_n >= 0


@triton.jit
def load_id(p, i_token, i_before, is_begun):
    """Of a token in a row with several sequences: its id, whether it is no padding, and whether no state passes to it.

    `i_before` is the id of the token before it; `is_begun` says whether any token before it is no padding.
    """
    i_id = tl.maximum(tl.load(p.ids + i_token), -1)
    return i_id, i_id >= 0, (i_id >= 0) & is_begun & (i_id != i_before)


@triton.jit
def load_token(p, i_token, i_h, o_c, m_c, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """A token's row of an array [B, T, HEADS, D], for head `i_h` of H."""
    return tl.load(p + (i_token * HEADS + i_h // (H // HEADS)) * D + o_c, mask=m_c, other=0.0).to(tl.float32)


@triton.jit
def fade_state(b_state, p, i_here, o_k, m_k, is_real, CALL: tl.constexpr):
    """A state [key dims, value dims] decayed by a token's gate, of the head or of each key dim."""
    if CALL.decay == "head":
        b_gate = tl.load(p.gate + i_here, mask=is_real, other=0.0).to(tl.float32)
        return faded(b_state, b_gate * LOG2E)
    elif CALL.decay == "key":
        b_gate = tl.load(p.gate + i_here * CALL.key_dim + o_k, mask=m_k, other=0.0).to(tl.float32)
        return faded(b_state, (b_gate * LOG2E)[:, None])
    else:
        return b_state
