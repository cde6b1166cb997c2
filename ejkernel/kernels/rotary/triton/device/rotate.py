"""Device code: a program computes one head of a token, and writes it to where attention reads it."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.heads import SMALL, inverse_norm, own_place


@triton.jit
def rotate_and_store(p, CALL: tl.constexpr):
    """Query heads go to an array of their own, key and value heads to the token's place in the cache."""
    QUERY: tl.constexpr = CALL.queries
    KEY: tl.constexpr = CALL.keys
    VALUE: tl.constexpr = CALL.values
    HEADS: tl.constexpr = QUERY.heads + KEY.heads + VALUE.heads
    i_program = tl.program_id(0)
    i_b = (i_program // HEADS).to(tl.int64)
    i_head = i_program % HEADS
    i_at = tl.load(p.position + i_b).to(tl.int64)
    fits = (i_at >= 0) & (i_at < CALL.capacity)
    o_cache = (i_b * CALL.capacity + i_at) * KEY.heads
    # names that differ between branches: Triton gives a name one type, and caches may have dtypes of their own
    if i_head < QUERY.heads:
        p_query = own_place(p.query, i_b, i_head, QUERY)
        p_rotated = p.rotated + (i_b * QUERY.heads + i_head) * QUERY.dim
        _rotate(p, p_query, p.query_scale, p_rotated, i_at, i_at == i_at, p.query_scale is not None, True, CALL)
    elif i_head < QUERY.heads + KEY.heads:
        i_key = i_head - QUERY.heads
        p_key = own_place(p.key, i_b, i_key, KEY)
        p_keys = p.next_keys + (o_cache + i_key) * KEY.dim
        _rotate(p, p_key, p.key_scale, p_keys, i_at, fits, p.query_scale is not None, True, CALL)
    else:
        i_value = i_head - QUERY.heads - KEY.heads
        p_value = own_place(p.value, i_b, i_value, VALUE)
        p_values = p.next_values + (o_cache + i_value) * VALUE.dim
        _rotate(p, p_value, None, p_values, i_at, fits, CALL.value_norm, False, CALL)


@triton.jit
def _rotate(p, p_x, p_scale, p_out, i_at, m_out, NORM: tl.constexpr, ROTATES: tl.constexpr, CALL: tl.constexpr):
    """Rotates the first dims of a head, half of them together with the other half, and copies the rest."""
    PAIRS: tl.constexpr = CALL.pairs
    REST: tl.constexpr = CALL.dim - 2 * PAIRS
    o_pair = tl.arange(0, CALL.pair_block)
    o_rest = tl.arange(0, CALL.rest_block)
    m_pair = o_pair < PAIRS
    m_rest = o_rest < REST
    b_first = tl.load(p_x + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + PAIRS + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    b_rest = tl.load(p_x + 2 * PAIRS + o_rest, mask=m_rest, other=0.0).to(tl.float32)
    if NORM:
        b_squares = tl.sum(b_first * b_first) + tl.sum(b_second * b_second) + tl.sum(b_rest * b_rest)
        b_small = _small_squares(b_first) + _small_squares(b_second) + _small_squares(b_rest)
        b_inverse, b_factor = inverse_norm(b_squares, b_small, CALL.epsilon * CALL.dim)
        b_first = (b_first * b_factor) * b_inverse * CALL.root
        b_second = (b_second * b_factor) * b_inverse * CALL.root
        b_rest = (b_rest * b_factor) * b_inverse * CALL.root
        if p_scale is not None:
            b_first *= tl.load(p_scale + o_pair, mask=m_pair, other=0.0).to(tl.float32)
            b_second *= tl.load(p_scale + PAIRS + o_pair, mask=m_pair, other=0.0).to(tl.float32)
            b_rest *= tl.load(p_scale + 2 * PAIRS + o_rest, mask=m_rest, other=0.0).to(tl.float32)
    if ROTATES and PAIRS > 0:
        b_angle = i_at.to(tl.float32) * tl.load(p.frequencies + o_pair, mask=m_pair, other=0.0).to(tl.float32)
        b_cos = tl.cos(b_angle) * CALL.factor
        b_sin = tl.sin(b_angle) * CALL.factor
        b_turned = b_first * b_cos - b_second * b_sin
        b_second = b_second * b_cos + b_first * b_sin
        b_first = b_turned
    # rounded to the dtype of the computation first, then to that of the cache
    DTYPE: tl.constexpr = p.rotated.dtype.element_ty
    TYPE: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_out + o_pair, b_first.to(DTYPE).to(TYPE), mask=m_pair & m_out)
    tl.store(p_out + PAIRS + o_pair, b_second.to(DTYPE).to(TYPE), mask=m_pair & m_out)
    tl.store(p_out + 2 * PAIRS + o_rest, b_rest.to(DTYPE).to(TYPE), mask=m_rest & m_out)


@triton.jit
def _small_squares(b_x):
    return tl.sum((b_x * SMALL) * (b_x * SMALL))
