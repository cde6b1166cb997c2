"""Device code for one gate a key dim: gradients through pairs of tokens, and through gates. Tiles are [dims, rows]."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.gates import scaled
from ejkernel.kernels.chunks.triton.device.strong_gates import split_gate
from ejkernel.kernels.delta_rule.triton.device.inverse import to_bfloat16


@triton.jit
def add_up(b_gate, m_sum, FINE: tl.constexpr):
    """`sum_gates` for gates `[key dims, rows]`: sums of whole eighths and of the rest, apart.

    Column `i` of `m_sum` selects the rows that row `i`'s sum is over.
    """
    b_whole, b_part, b_fine = split_gate(b_gate)
    b_pick = tl.where(m_sum, 1.0, 0.0).to(tl.float16)
    b_rest = tl.dot(b_part, b_pick)
    if FINE:
        b_rest = tl.dot(b_fine, b_pick, acc=b_rest)
    return tl.dot(b_whole, b_pick), b_rest


@triton.jit
def add_flows(b, m_sum, b_sum, PRECISION: tl.constexpr, HALF: tl.constexpr):
    """Adds sums of `b` over the rows that columns of `m_sum` select; two products with operands of dtype HALF."""
    b_pick = tl.where(m_sum, 1.0, 0.0)
    if HALF == tl.float32:
        return tl.dot(b, b_pick, acc=b_sum, input_precision=PRECISION)
    b_high = to_bfloat16(b)
    b_sum = tl.dot((b - b_high).to(HALF), b_pick.to(HALF), acc=b_sum)
    return tl.dot(b_high.to(HALF), b_pick.to(HALF), acc=b_sum)


@triton.jit
def add_pairs(b_dq, b_dk, b_flow, b_q, b_k, b_dscore, b_dsystem, b_late, b_early, PRECISION: tl.constexpr):
    """Adds gradients through pairs of tokens, whose decay is split at a reference: `late` since it, `early` until it.

    `b_flow` gets `q dq + k dk` of the late token less that of the early one, from rounded operands: summed over all
    rows from one on, pairs after it cancel, with their rounding errors.
    """
    b_query = scaled(b_q, b_late)
    b_late_key = scaled(b_k, b_late)
    b_early_key = scaled(b_k, b_early)
    b_grad = tl.dot(b_early_key, tl.trans(b_dscore), input_precision=PRECISION)
    b_flow += b_query.to(tl.float32) * b_grad
    b_dq += b_grad * b_late
    b_grad = tl.dot(b_early_key, tl.trans(b_dsystem), input_precision=PRECISION)
    b_flow += b_late_key.to(tl.float32) * b_grad
    b_dk += b_grad * b_late
    b_grad = tl.dot(b_query, b_dscore, input_precision=PRECISION)
    b_grad = tl.dot(b_late_key, b_dsystem, acc=b_grad, input_precision=PRECISION)
    b_flow -= b_early_key.to(tl.float32) * b_grad
    b_dk += b_grad * b_early
    return b_dq, b_dk, b_flow


@triton.jit
def store_moving(p, o_rows, m_rows, b_dq, b_dk, b_dgate):
    """Stores the gradients of queries, keys and gates."""
    tl.store(p.d_query + o_rows, b_dq.to(p.d_query.dtype.element_ty), mask=m_rows)
    tl.store(p.d_key + o_rows, b_dk.to(p.d_key.dtype.element_ty), mask=m_rows)
    tl.store(p.d_gate + o_rows, b_dgate.to(p.d_gate.dtype.element_ty), mask=m_rows)
