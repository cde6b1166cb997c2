"""Scores as the softmax takes them: rounded once, and within the range of its dtype."""

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call


@jax.custom_jvp
def rounded(scores: Array) -> Array:
    """Scores that are one number for all who read them; those that overflowed are the largest that there is.

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
    """Scores in the softmax's dtype, where only `-inf` stays infinite: all others have a share in their row."""
    largest = float(jnp.finfo(call.softmax_dtype).max)
    if largest < float(jnp.finfo(scores.dtype).max):
        scores = jnp.where(scores == -jnp.inf, scores, jnp.clip(scores, -largest, largest))
    return scores.astype(call.softmax_dtype)
