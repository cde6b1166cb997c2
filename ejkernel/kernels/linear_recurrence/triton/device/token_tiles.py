"""Device code: a chunk's queries, keys and key gates as tiles [blocks, R tokens, key dims], as `rows` describes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import LOG2E, MOST
from ejkernel.kernels.chunks.triton.device.places import load_rows, token_of
from ejkernel.kernels.linear_recurrence.triton.device.key_gates import first_gate


class Tokens(NamedTuple):
    """The tokens of one chunk and head."""

    i_h: Any
    i_token: Any  # where the first one lies in memory
    i_row: Any  # its number in its sequence
    n_read: Any  # the row before which those end that can be read
    i_gate: Any  # the first row whose gate counts


@triton.jit
def tokens_of(chunk, span, i_h, CALL: tl.constexpr):
    """The tokens of a chunk in the span that `locate` returned."""
    i_gate = first_gate(chunk, CALL)
    i_token = token_of(span.i_first, span.n_rows, chunk.i_row, CALL.flip)
    return Tokens(i_h, i_token, chunk.i_row, chunk.n_read, i_gate)


@triton.jit
def first_rows(p, tokens, o_k, HEADS: tl.constexpr, PARTS: tl.constexpr, CALL: tl.constexpr):
    """Pointers to the first row of each block, in an array [B, T, HEADS, PARTS, K] and its first part."""
    R: tl.constexpr = 1 << CALL.log_rows
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    i_token = tokens.i_token * PARTS
    i_head = tokens.i_h // (CALL.heads // HEADS) * PARTS
    o_t = tl.arange(0, CALL.chunk // R) * (R * SIGN * PARTS)
    i_row = (i_token * HEADS + i_head) * CALL.key_dim
    return p + (i_row + (o_t[:, None] * (HEADS * CALL.key_dim) + o_k[None, :]))


@triton.jit
def all_rows(p_first, STRIDE: tl.constexpr, DIMS: tl.constexpr, CALL: tl.constexpr):
    """Pointers to all rows of blocks, from those to the first, for threads that have DIMS dims of each row."""
    o_r = tl.arange(0, 1 << CALL.log_rows)
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    # the same for all threads, what is added last becomes part of the instructions
    return tl.max_contiguous(p_first[:, None, :] + (o_r * (SIGN * STRIDE * CALL.key_dim))[None, :, None], (1, 1, DIMS))


@triton.jit
def pointers(p, tokens, o_k, DIMS: tl.constexpr, CALL: tl.constexpr, PARTS: tl.constexpr = 1):
    """Pointers to a head's rows, in an array [B, T, H, PARTS, K] and its first part."""
    H: tl.constexpr = CALL.heads
    return all_rows(first_rows(p, tokens, o_k, H, PARTS, CALL), H * PARTS, DIMS, CALL)


@triton.jit
def readable(tokens, o_k, WHOLE: tl.constexpr, CALL: tl.constexpr):
    """Mask of the rows that can be read: WHOLE, all of them, which spares a register for each."""
    R: tl.constexpr = 1 << CALL.log_rows
    o_b = tl.arange(0, CALL.chunk // R)
    o_r = tl.arange(0, R)
    m_tile = (tokens.i_row + o_b[:, None] * R + o_r[None, :] < tokens.n_read)[:, :, None]
    if WHOLE:
        m_tile = tl.full(m_tile.shape, 1, tl.int1)
    if CALL.key_dim % CALL.key_block != 0:
        m_tile = m_tile & (o_k < CALL.key_dim)[None, None, :]
    return m_tile


@triton.jit
def load_tokens(p, tokens, o_k, DIMS: tl.constexpr, WHOLE: tl.constexpr, CALL: tl.constexpr):
    """Queries, keys and gates in nats; gates are 0 before the first one that counts."""
    H: tl.constexpr = CALL.heads
    HQ: tl.constexpr = CALL.query_heads
    HK: tl.constexpr = CALL.key_heads
    R: tl.constexpr = 1 << CALL.log_rows
    o_b = tl.arange(0, CALL.chunk // R)
    o_r = tl.arange(0, R)
    p_q = first_rows(p.query, tokens, o_k, HQ, 1, CALL)
    p_k = first_rows(p.key, tokens, o_k, HK, 1, CALL)
    p_gate = first_rows(p.gate, tokens, o_k, H, 1, CALL)
    m_tile = readable(tokens, o_k, WHOLE, CALL)
    m_gate = m_tile
    if CALL.listed or CALL.pooled:
        m_gate = m_gate & (tokens.i_row + o_b[:, None] * R + o_r[None, :] >= tokens.i_gate)[:, :, None]
    elif not CALL.start:
        # the first gate decays a state of 0, and must not make it infinite
        m_gate = m_gate & ((o_r[None, :] > 0) | (tokens.i_row + o_b[:, None] > 0))[:, :, None]
    b_gate = tl.load(all_rows(p_gate, H, DIMS, CALL), mask=m_gate, other=0.0).to(tl.float32)
    b_q = tl.load(all_rows(p_q, HQ, DIMS, CALL), mask=m_tile, other=0.0)
    b_k = tl.load(all_rows(p_k, HK, DIMS, CALL), mask=m_tile, other=0.0)
    if CALL.wide:
        b_q = b_q.to(tl.float32)
        b_k = b_k.to(tl.float32)
    return b_q, b_k, b_gate


@triton.jit
def load_with_decays(p, tokens, o_k, DIMS: tl.constexpr, CALL: tl.constexpr):
    """Queries, keys and each token's decay."""
    b_q, b_k, b_gate = load_tokens(p, tokens, o_k, DIMS, False, CALL)
    return b_q, b_k, tl.exp2(tl.minimum(b_gate * LOG2E, MOST))


@triton.jit
def load_sum(p, tokens, o_k, m_tile, DIMS: tl.constexpr, CALL: tl.constexpr):
    """A head's rows in float32, the sum of the parts that an array [B, T, H, PARTS, K] has of them."""
    PARTS: tl.constexpr = CALL.parts
    p_tile = pointers(p, tokens, o_k, DIMS, CALL, PARTS)
    b = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    for i_part in tl.static_range(1, PARTS):
        b += tl.load(p_tile + i_part * CALL.key_dim, mask=m_tile, other=0.0).to(tl.float32)
    return b


@triton.jit
def score_gradients(p, chunk, tokens, WHOLE: tl.constexpr, TRANSPOSED: tl.constexpr, CALL: tl.constexpr):
    """Unscaled gradients of a chunk's scores, [query, key] and, if TRANSPOSED, [key, query]."""
    H: tl.constexpr = CALL.heads
    HV: tl.constexpr = CALL.value_heads
    HO: tl.constexpr = CALL.output_heads
    V: tl.constexpr = CALL.value_dim
    BV: tl.constexpr = CALL.value_block
    C: tl.constexpr = CALL.chunk
    WIDE: tl.constexpr = CALL.wide
    PAD: tl.constexpr = V % BV != 0
    SIGN: tl.constexpr = -1 if CALL.flip else 1
    i_token = tokens.i_token
    i_h = tokens.i_h
    o_t = tl.arange(0, C)
    m_read = chunk.i_row + o_t < chunk.n_read
    b_dscore = tl.zeros([C, C], tl.float32)
    b_transposed = tl.zeros([C, C], tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_dout = load_rows(p.d_output, i_token, i_h // (H // HO), o_t * SIGN, m_read, o_v, HO, V, PAD, WIDE, WHOLE)
        b_v = load_rows(p.value, i_token, i_h // (H // HV), o_t * SIGN, m_read, o_v, HV, V, PAD, WIDE, WHOLE)
        b_dscore = tl.dot(b_dout, tl.trans(b_v), acc=b_dscore, input_precision=CALL.precision)
        if TRANSPOSED:
            # a second product is cheaper than to transpose the first
            b_transposed = tl.dot(b_v, tl.trans(b_dout), acc=b_transposed, input_precision=CALL.precision)
    return b_dscore, b_transposed
