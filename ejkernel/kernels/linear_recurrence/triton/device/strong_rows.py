"""Device code: a chunk's queries, keys and gates, loaded with its rows in registers, as `rows` describes."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E, MOST


@triton.jit
def place_rows(i_token, i_head, o_t, o_k, HEADS: tl.constexpr, D: tl.constexpr):
    """Where rows of one head lie."""
    return (i_token * HEADS + i_head) * D + (o_t[:, None] * (HEADS * D) + o_k[None, :])


@triton.jit
def mask_rows(i_row, n_read, o_k, K: tl.constexpr, PAD: tl.constexpr, WHOLE: tl.constexpr = False):
    """Which of some rows can be read: WHOLE, all of them, which spares a register for each."""
    m_tile = (i_row < n_read)[:, :, None]
    if WHOLE:
        m_tile = tl.full(m_tile.shape, 1, tl.int1)
    if PAD:
        m_tile = m_tile & (o_k < K)[None, None, :]
    return m_tile


@triton.jit
def spread_rows(p_tile, o_r, STRIDE: tl.constexpr, DIMS: tl.constexpr):
    """Pointers to all rows of blocks from those to the first; a thread takes so many dims whatever their size."""
    # the same for all threads, what is added last becomes part of the instructions
    return tl.max_contiguous(p_tile[:, None, :] + (o_r * STRIDE)[None, :, None], (1, 1, DIMS))


@triton.jit
def load_tokens(
    p, i_token, i_h, i_first, n_read, i_gate, o_r, o_b, o_k,
    PAD: tl.constexpr, DIMS: tl.constexpr, SIGN: tl.constexpr, CALL: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Queries, keys and gates, in nats; `i_first` is the first of the tokens in its sequence.

    Gates count from row `i_gate` on.
    """
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    K: tl.constexpr = CALL.key_dim
    R: tl.constexpr = 1 << CALL.log_rows
    o_t = o_b * (R * SIGN)
    p_q = p.query + place_rows(i_token, i_h // (H // HQ), o_t, o_k, HQ, K)
    p_k = p.key + place_rows(i_token, i_h // (H // HK), o_t, o_k, HK, K)
    p_gate = p.gate + place_rows(i_token, i_h, o_t, o_k, H, K)
    m_tile = mask_rows(i_first + o_b[:, None] * R + o_r[None, :], n_read, o_k, K, PAD, WHOLE)
    m_gate = m_tile
    if CALL.listed:
        m_gate = m_gate & (i_first + o_b[:, None] * R + o_r[None, :] >= i_gate)[:, :, None]
    elif not CALL.start:
        # the first gate meets no state, and must not make an infinite one of it
        m_gate = m_gate & ((o_r[None, :] > 0) | (i_first + o_b[:, None] > 0))[:, :, None]
    b_gate = tl.load(spread_rows(p_gate, o_r, SIGN * H * K, DIMS), mask=m_gate, other=0.0).to(tl.float32)
    b_q = tl.load(spread_rows(p_q, o_r, SIGN * HQ * K, DIMS), mask=m_tile, other=0.0)
    b_k = tl.load(spread_rows(p_k, o_r, SIGN * HK * K, DIMS), mask=m_tile, other=0.0)
    if CALL.wide:
        b_q = b_q.to(tl.float32)
        b_k = b_k.to(tl.float32)
    return b_q, b_k, b_gate


@triton.jit
def load_chunk(
    p, i_token, i_h, i_first, n_read, i_gate, o_r, o_b, o_k,
    PAD: tl.constexpr, DIMS: tl.constexpr, SIGN: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Queries and keys, and each token's own decays; the rest as `load_tokens`."""
    b_q, b_k, b_gate = load_tokens(p, i_token, i_h, i_first, n_read, i_gate, o_r, o_b, o_k, PAD, DIMS, SIGN, CALL)
    return b_q, b_k, tl.exp2(tl.minimum(b_gate * LOG2E, MOST))
