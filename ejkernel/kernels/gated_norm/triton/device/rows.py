"""Device code: a program loops over blocks of rows that share one scale."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.heads import SMALL, inverse_norm


@triton.jit
def forward(p, CALL: tl.constexpr):
    i_head, i_first, o_d, m_d = _locate(CALL)
    b_scale, b_skip = _load_parameters(p, i_head, o_d, m_d, CALL)
    for i_row in tl.range(i_first, i_first + CALL.span, CALL.block, num_stages=CALL.stages):
        o, m = _places(i_head, i_row, o_d, m_d, CALL)
        b_x, b_share, _ = _load(p, o, m, b_skip, CALL)
        if CALL.gate_first:
            b_unit, _ = _unit(b_x * b_share, CALL)
            b_out = b_unit * b_scale
        else:
            b_unit, _ = _unit(b_x, CALL)
            b_out = b_unit * b_scale * b_share
        tl.store(p.output + o, b_out.to(p.output.dtype.element_ty), mask=m)


@triton.jit
def backward(p, CALL: tl.constexpr):
    """Cotangents of the rows, and the program's part of the cotangents of scale and skip."""
    COLUMNS: tl.constexpr = CALL.columns
    i_head, i_first, o_d, m_d = _locate(CALL)
    b_scale, b_skip = _load_parameters(p, i_head, o_d, m_d, CALL)
    b_d_scale = tl.zeros([COLUMNS], tl.float32)
    b_d_skip = tl.zeros([COLUMNS], tl.float32)
    for i_row in tl.range(i_first, i_first + CALL.span, CALL.block, num_stages=CALL.stages):
        o, m = _places(i_head, i_row, o_d, m_d, CALL)
        b_x, b_share, b_slope = _load(p, o, m, b_skip, CALL)
        b_d = tl.load(p.d_output + o, mask=m, other=0.0).to(tl.float32)
        if CALL.gate_first:
            b_unit, b_inverse = _unit(b_x * b_share, CALL)
            b_d_scale += tl.sum(b_d * b_unit, 0)
            b_d_gated = _d_unit(b_d * b_scale, b_unit, b_inverse, CALL)
            b_d_x = b_d_gated * b_share
            b_d_gate = b_d_gated * b_x * b_slope
        else:
            b_unit, b_inverse = _unit(b_x, CALL)
            b_d_gate = b_d * b_unit * b_scale * b_slope
            b_d_scale += tl.sum(b_d * b_share * b_unit, 0)
            b_d_x = _d_unit(b_d * b_share * b_scale, b_unit, b_inverse, CALL)
        tl.store(p.d_x + o, b_d_x.to(p.d_x.dtype.element_ty), mask=m)
        tl.store(p.d_gate + o, b_d_gate.to(p.d_gate.dtype.element_ty), mask=m)
        if p.value is not None:
            b_value = tl.load(p.value + o, mask=m, other=0.0).to(tl.float32)
            b_d_skip += tl.sum(b_d_x * b_value, 0)
            tl.store(p.d_value + o, (b_d_x * b_skip).to(p.d_value.dtype.element_ty), mask=m)
    o_sums = ((i_first // CALL.span) * CALL.heads + i_head) * CALL.dim + o_d
    tl.store(p.d_scale + o_sums, b_d_scale, mask=m_d)
    if p.value is not None:
        tl.store(p.d_skip + o_sums, b_d_skip, mask=m_d)


@triton.jit
def _locate(CALL: tl.constexpr):
    """The program's head, its first row, and the columns."""
    COLUMNS: tl.constexpr = CALL.columns
    i_program = tl.program_id(0)
    o_d = tl.arange(0, COLUMNS)
    # neighbouring programs read neighbouring heads
    return i_program % CALL.heads, i_program // CALL.heads * CALL.span, o_d, o_d < CALL.dim


@triton.jit
def _load_parameters(p, i_head, o_d, m_d, CALL: tl.constexpr):
    """Scale and skip. Without a skip the scale is returned twice, as Triton needs a value."""
    b_scale = tl.load(p.scale + i_head * CALL.dim + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_skip = b_scale
    if p.value is not None:
        b_skip = tl.load(p.skip + i_head * CALL.dim + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    return b_scale, b_skip


@triton.jit
def _places(i_head, i_row, o_d, m_d, CALL: tl.constexpr):
    """Offsets and mask of a block of rows."""
    BLOCK: tl.constexpr = CALL.block
    o_row = i_row + tl.arange(0, BLOCK)
    o = (o_row.to(tl.int64) * CALL.heads + i_head)[:, None] * CALL.dim + o_d[None, :]
    return o, (o_row < CALL.rows)[:, None] & m_d[None, :]


@triton.jit
def _load(p, o, m, b_skip, CALL: tl.constexpr):
    """`x` with the skipped value added, the activated gate, and the derivative of its activation."""
    b_x = tl.load(p.x + o, mask=m, other=0.0).to(tl.float32)
    if p.value is not None:
        b_x += b_skip * tl.load(p.value + o, mask=m, other=0.0).to(tl.float32)
    b_z = tl.load(p.gate + o, mask=m, other=0.0).to(tl.float32)
    b_share = tl.sigmoid(b_z)
    b_slope = b_share * (1.0 - b_share)
    if CALL.silu:
        b_slope = b_share + b_z * b_slope
        b_share = b_z * b_share
    return b_x, b_share, b_slope


@triton.jit
def _unit(b_x, CALL: tl.constexpr):
    """The rows divided by the root of their mean square, and the factor by which each was multiplied."""
    b_small = b_x * SMALL
    b_inverse, b_factor = inverse_norm(tl.sum(b_x * b_x, 1), tl.sum(b_small * b_small, 1), CALL.epsilon)
    b_inverse = (b_inverse * CALL.root)[:, None]
    b_factor = b_factor[:, None]
    return (b_x * b_factor) * b_inverse, b_inverse * b_factor


@triton.jit
def _d_unit(b_d, b_unit, b_inverse, CALL: tl.constexpr):
    """The cotangent of rows from the cotangent of the normalised rows."""
    b_along = tl.sum(b_unit * b_d, 1) * (1.0 / CALL.dim)
    return b_inverse * (b_d - b_unit * b_along[:, None])
