"""Matrix products of attention: operands of one dtype, sums in `Call.wide`."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import to_common_dtype


def product(call: Call, subscripts: str, left: Array, right: Array) -> Array:
    """`einsum(subscripts, left, right)`."""
    pair = to_common_dtype(left, right)
    return jnp.einsum(subscripts, *pair, preferred_element_type=call.wide, precision=call.precision)


def grouped_product(call: Call, subscripts: str, rows: Array, columns: Array) -> Array:
    """`einsum` of `rows [B, Hkv, G, S, ·]` and `columns [B, Hkv, ·, ·]`, where `G` and `S` count as one axis of rows.

    One product serves all query heads of a key head, and no array of `S × L` numbers is ever transposed.
    """
    found = product(call, subscripts, flat_rows(rows), columns)
    return found.reshape(*rows.shape[:-1], found.shape[-1])


def flat_rows(x: Array) -> Array:
    """`[B, Hkv, G, S, ·]` as `[B, Hkv, G·S, ·]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def narrow(weights: Array, partner: Array) -> Array:
    """`weights` in the dtype of a half-precision `partner`: their product stays one of half precision, summed wide."""
    return weights.astype(partner.dtype) if partner.dtype.itemsize == 2 else weights


def narrow_gradient(x: Array, partner: Array) -> Array:
    """`narrow` for gradients of scores or weights, which may be beyond the range of float16: there they stay wide."""
    return x if partner.dtype == jnp.float16 else narrow(x, partner)
