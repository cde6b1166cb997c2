# mypy: ignore-errors
# (device code is typed by Triton)
"""Device code of the exact path, for gates of a key dim too strong for one reference a chunk.

What tokens of a chunk do to each other is computed over dyadic blocks: no exponent of a decay is ever positive there.
"""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.gates import in_bits
from ejkernel.kernels.chunks.triton.places import load_rows


@triton.jit
def split_gate(b_gate):
    """A gate in base 2 as float16 summands: whole eighths, the rest, and what rounding took off the rest."""
    b_gate = in_bits(b_gate)
    b_whole = tl.floor(b_gate * 8.0 + 0.5) * 0.125
    b_rest = b_gate - b_whole
    b_part = b_rest.to(tl.float16)
    return b_whole.to(tl.float16), b_part, (b_rest - b_part.to(tl.float32)).to(tl.float16)


@triton.jit
def sum_gates(m_sum, b_gate, FINE: tl.constexpr):
    """Sums of gates over the rows that `m_sum` selects; only added, so that a strong gate costs no other digits."""
    b_whole, b_part, b_fine = split_gate(b_gate)
    b_pick = tl.where(m_sum, 1.0, 0.0).to(tl.float16)
    b_sum = tl.dot(b_pick, b_part)
    if FINE:
        b_sum = tl.dot(b_pick, b_fine, acc=b_sum)
    return tl.dot(b_pick, b_whole, acc=b_sum)


@triton.jit
def place_sum(o_row, o_k, C: tl.constexpr, KP: tl.constexpr):
    """Where a program keeps the sum of gates of a row and key dim: the halves of each eight dims apart.

    A thread has eight dims of a row, as many as one load of queries brings. With the halves apart, threads side by
    side read what lies side by side.
    """
    return ((o_k >> 2) & 1) * (C * KP // 2) + o_row * (KP // 2) + ((o_k >> 3) << 2) + (o_k & 3)


@triton.jit
def keep_sums(
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    o_r,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
):
    """Stores the sums of a chunk's gates since its start."""
    # nobody reads those of the last chunk any more
    tl.debug_barrier()
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_read, o_k, H, K, K % BK != 0, True)
        b_sum = sum_gates(o_r[None, :] <= o_r[:, None], b_gate, False)
        p_tile = p_sum + place_sum(o_r[:, None], o_k[None, :], C, KP)
        tl.store(tl.multiple_of(tl.max_contiguous(p_tile, (1, 4)), (1, 16)), b_sum)
    # rows of other threads are read from here on
    tl.debug_barrier()


@triton.jit
def load_sums(p_sum, o_row, o_k, C: tl.constexpr, KP: tl.constexpr):
    p_tile = p_sum + place_sum(o_row[None, :], o_k[:, None], C, KP)
    return tl.load(tl.multiple_of(tl.max_contiguous(p_tile, (4, 1)), (16, 1)))


@triton.jit
def sums_to_ends(
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    o_r,
    o_k,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PAD: tl.constexpr,
    C: tl.constexpr,
    FINE: tl.constexpr,
):
    """Sums of gates from a chunk's start to each row, and from there to its end."""
    if FINE:
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_read, o_k, H, K, PAD, True)
        b_since = tl.trans(sum_gates(o_r[None, :] <= o_r[:, None], b_gate, True))
        b_until = tl.trans(sum_gates(o_r[None, :] > o_r[:, None], b_gate, True))
    else:
        b_since = load_sums(p_sum, o_r, o_k, C, KP)
        b_until = load_sums(p_sum, o_r * 0 + (C - 1), o_k, C, KP) - b_since
    return b_since, b_until


@triton.jit
def fold_level(
    b_q,
    b_k,
    b_since,
    p_gate,
    p_sum,
    i_token,
    i_h,
    o_t,
    m_read,
    o_r,
    o_k,
    i_level,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PAD: tl.constexpr,
    C: tl.constexpr,
    FINE: tl.constexpr,
):
    """At one dyadic level: late rows of q and early rows of k, decayed to the border between them, and the decays."""
    m_late = ((o_r >> i_level) & 1) != 0
    i_border = ((o_r >> i_level) | 1) << i_level
    if FINE:
        m_sum = tl.where(
            m_late[:, None],
            (o_r[None, :] >= i_border[:, None]) & (o_r[None, :] <= o_r[:, None]),
            (o_r[None, :] > o_r[:, None]) & (o_r[None, :] < i_border[:, None]),
        )
        b_gate = load_rows(p_gate, i_token, i_h, o_t, m_read, o_k, H, K, PAD, True)
        b_sum = tl.trans(sum_gates(m_sum, b_gate, True))
    else:
        b_sum = (b_since - load_sums(p_sum, i_border - 1, o_k, C, KP)) * tl.where(m_late, 1.0, -1.0)[None, :]
    b_fade = tl.exp2(b_sum)
    return (tl.where(m_late[None, :], b_q, b_k).to(tl.float32) * b_fade).to(b_q.dtype), b_fade
