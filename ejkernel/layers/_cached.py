"""The base of softmax attention layers: their caches, and how they are called."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers._models import Published
from ejkernel.layers._serving import RaggedBatch, ServingLimits, rows_of_cache
from ejkernel.layers._tokens import Sequences, layer_input, positions, without_padding
from ejkernel.paged_attention import PagedCache


class CachedAttention(Published):
    """Softmax attention with a cache: subclasses make the parameters, and compute with them in the methods below.

    `cache_type` is a named tuple of arrays `[B, capacity, …]` and the position. `patterns` has the other dims of each
    array, by the names that `sizes` has.
    """

    cache_type: type
    patterns: tuple[str, ...]
    window: int | None = None
    width: int
    dtype: DTypeLike | None

    @property
    def sizes(self) -> dict[str, int]:
        raise NotImplementedError

    def empty_cache(
        self, batch: int | ServingLimits, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> Any:
        """Room for `capacity` tokens of each of `batch` sequences; or pages, for serving.

        Args:
            batch: How many sequences, or `ServingLimits`, which say how many pages the `PagedCache` has.
            capacity: Tokens of each; not given beside `ServingLimits`.
            dtype: Of the cache; `None` is the layer's `dtype` or else float32.
        """
        if dtype is None:
            dtype = jnp.float32 if self.dtype is None else self.dtype
        dtype, rows = _checks.floating_dtype("dtype", dtype), rows_of_cache(batch, capacity, self.window)
        if capacity is None:
            return self._empty_pages(rows, dtype)
        shapes = [(*rows, *(self.sizes[name] for name in pattern.split())) for pattern in self.patterns]
        return self.cache_type(*(jnp.zeros(shape, dtype) for shape in shapes), jnp.zeros(rows[0], jnp.int32))

    def __call__(
        self,
        x: jax.Array,
        cache: Any = None,
        cu_seqlens: _checks.Borders | RaggedBatch | None = None,
        *,
        segment_ids: _checks.AnyArray | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attends from the tokens of `x` to themselves and to those in the cache, and returns the longer cache too.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            cache: From `empty_cache` or an earlier call; `None`, as in training, keeps nothing. Tokens past its
                capacity, or at negative positions where those are traced, are not stored and come out as NaN.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`; excludes a cache. Tokens past the last one are
                padding: output 0, no gradient, no effect. Or a `RaggedBatch`, for serving: `x` is `[T, width]` and the
                cache a `PagedCache` then.
            segment_ids: To which sequence of its row each token belongs, integers `[B, T]`, instead of `cu_seqlens`;
                excludes a cache. Tokens of one id attend to each other, and their positions are counted from where the
                id begins. A negative id is padding: output 0, no gradient, no effect.
        """
        dims = _checks.Dims(width=self.width, **self.sizes)
        x, sequences, batch = layer_input(dims, x, cu_seqlens, segment_ids, self.dtype)
        if batch is not None:
            output, pages = self._serve(dims, x, sequences, cache, batch)
            return without_padding(output, sequences), pages
        if cache is None:
            return without_padding(self._attend_without_cache(x, sequences), sequences), None
        if together := next((name for name, each in sequences.keywords.items() if each is not None), None):
            _checks.fail("cache", f"one together with {together}", "one of them")
        if not isinstance(cache, self.cache_type):
            raise TypeError(f"cache: got {type(cache).__name__}; expected what empty_cache or an earlier call returned")
        cache = self._checked_cache(dims, cache)
        if x.shape[1] > cache.capacity:
            _checks.fail("x", f"{x.shape[1]} tokens", f"at most the {cache.capacity} that the cache has room for")
        at = positions(x, cache.position, sequences)  # [B, T]
        fits = (at >= 0) & (at < cache.capacity)
        output, arrays = self._extend(x, cache, at, fits)
        output = jnp.where(fits[..., None], output, jnp.asarray(jnp.nan, output.dtype))
        return output, self.cache_type(*arrays, cache.position + x.shape[1])

    def _checked_cache(self, dims: _checks.Dims, cache: Any) -> Any:
        *arrays, position = cache
        carried = [
            _checks.carried(dims, f"cache.{name}", each, f"capacity {pattern}")
            for name, each, pattern in zip(cache._fields, arrays, self.patterns, strict=False)
        ]
        return self.cache_type(*carried, _checks.position(dims, "cache.position", position))

    def _empty_pages(self, rows: tuple[int, int], dtype: DTypeLike) -> PagedCache:
        """Pages of zeros; `rows` is how many, and the tokens of each."""
        raise NotImplementedError

    def _attend_without_cache(self, x: jax.Array, sequences: Sequences) -> jax.Array:
        """The output of tokens that attend to each other alone."""
        raise NotImplementedError

    def _extend(
        self, x: jax.Array, cache: Any, at: jax.Array, fits: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The output of tokens at the positions `at`, and the cache's arrays with them, where they fit."""
        raise NotImplementedError

    def _serve(
        self, dims: _checks.Dims, x: jax.Array, sequences: Sequences, cache: Any, batch: RaggedBatch
    ) -> tuple[jax.Array, PagedCache]:
        """The output of a served batch, and the pages with its tokens."""
        raise NotImplementedError
