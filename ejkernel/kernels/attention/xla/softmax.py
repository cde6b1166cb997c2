"""Scores as the softmax takes them, and one step of the online softmax."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.attention.call import Call


@jax.custom_jvp
def rounded(scores: Array) -> Array:
    """Scores with one value for every reader; a score that overflowed becomes the largest finite number.

    A compiler may fuse a product with what is subtracted from it, and leave out the product's rounding. A row's largest
    score less itself would be that rounding then, not 0, and of scores beyond 1e9 `exp` of it is 0 or infinite. It does
    not see through the selection here.
    """
    largest = jnp.finfo(scores.dtype).max
    return jnp.where(scores > largest, largest, scores)


@rounded.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # without the selection
    return rounded(*primals), tangents[0]


def for_softmax(call: Call, scores: Array) -> Array:
    """Scores in the softmax's dtype, where only `-inf` stays infinite: any other score keeps a share of its row."""
    largest = float(jnp.finfo(call.softmax_dtype).max)
    if largest < float(jnp.finfo(scores.dtype).max):
        scores = jnp.where(scores == -jnp.inf, scores, jnp.clip(scores, -largest, largest))
    return scores.astype(call.softmax_dtype)


def online(top: Array, scores: Array) -> tuple[Array, Array, Array]:
    """The running maximum `top [..., 1]` after these scores, their weights, and the factor for all earlier sums.

    A weight is `exp(score - new maximum)`. Derivatives take the maximum for a constant.
    """
    new_top = jnp.maximum(top, lax.stop_gradient(scores).max(-1, keepdims=True))
    base = jnp.where(new_top == -jnp.inf, 0, new_top)
    return new_top, jnp.exp(scores - base), jnp.exp(top - base)
