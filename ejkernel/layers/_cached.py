"""The base class of softmax attention layers: their caches, how they are called, and how they serve."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers._models import Published
from ejkernel.layers._serving import RaggedBatch, ServingLimits, checked_pages, nan_unless_new, rows_of_cache
from ejkernel.layers._tokens import Sequences, layer_input, positions, without_padding
from ejkernel.paged_attention import PagedCache, write_pages


class CachedAttention(Published):
    """Softmax attention with a cache. Subclasses create the parameters and override the last methods below.

    `cache_type` is a named tuple of arrays `[B, capacity, …]` and the position. `patterns` names the other axes of each
    array, and `page_pattern` all axes of the keys in pages; `sizes` has their sizes by name.
    """

    cache_type: type
    patterns: tuple[str, ...]
    page_pattern: str
    window: int | None = None
    width: int
    dtype: DTypeLike | None

    @property
    def sizes(self) -> dict[str, int]:
        raise NotImplementedError

    def empty_cache(
        self, batch: int | ServingLimits, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> Any:
        """An empty cache for `capacity` tokens of each of `batch` sequences; or pages, for serving.

        Args:
            batch: How many sequences, or `ServingLimits`, which say how many pages the `PagedCache` has.
            capacity: How many tokens of each sequence; not together with `ServingLimits`.
            dtype: The dtype of the cache; `None` is the layer's `dtype` or else float32.
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
        """Attends from the tokens of `x` to each other and to the cache; returns the output and the extended cache.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            cache: From `empty_cache` or an earlier call; `None`, as in training, stores nothing. Tokens past its
                capacity, or at negative positions if these are traced, are not stored, and their output is NaN.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`; not together with a cache. Tokens past the last
                border are padding: output 0, no gradient, no effect. Or a `RaggedBatch`, for serving: `x` is then
                `[T, width]` and the cache a `PagedCache`.
            segment_ids: Integers `[B, T]`, instead of `cu_seqlens`: which sequence of its row each token belongs to;
                not together with a cache. Tokens of one id attend to each other, and their positions are counted from
                where the id begins. A negative id is padding: output 0, no gradient, no effect.
        """
        dims = _checks.Dims(width=self.width, **self.sizes)
        x, sequences, batch = layer_input(dims, x, cu_seqlens, segment_ids, self.dtype)
        if batch is not None:
            output, pages = self._serve(dims, x, sequences, cache, batch)
            return without_padding(output, sequences), pages
        if cache is None:
            projected = self._projected(x, positions(x, None, sequences))
            output = self._finish(x, projected, self._attend(projected, **sequences.keywords))
            return without_padding(output, sequences), None
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

    def _serve(
        self, dims: _checks.Dims, x: jax.Array, sequences: Sequences, cache: Any, batch: RaggedBatch
    ) -> tuple[jax.Array, PagedCache]:
        """The output of a batch that is served, and the pages with its tokens."""
        cache, lengths = checked_pages(dims, x, cache, batch, self.page_pattern)
        projected = self._projected(x, positions(x, lengths, sequences))
        pages = batch.pages(self.window)
        if batch.whole_prompts:
            output = self._attend(projected, **sequences.keywords)
            output = nan_unless_new(batch, output)
            cache = write_pages(*self._key_value_of_pages(projected), cache, pages, batch.lengths, batch.cu_seqlens)
        else:
            output, cache = self._attend_to_pages(projected, cache, pages, lengths, batch.cu_seqlens)
        return self._finish(x, projected, output), cache

    def _empty_pages(self, rows: tuple[int, int], dtype: DTypeLike) -> PagedCache:
        """Pages of zeros; `rows` are the number of pages, and of tokens in each."""
        raise NotImplementedError

    def _projected(self, x: jax.Array, at: jax.Array) -> Any:
        """Queries of tokens at the positions `at`, and what their keys, values and output gates are computed from."""
        raise NotImplementedError

    def _attend(self, projected: Any, **options: Any) -> jax.Array:
        """The output heads of projected tokens, which attend to each other alone."""
        raise NotImplementedError

    def _finish(self, x: jax.Array, projected: Any, output: jax.Array) -> jax.Array:
        """The layer's output from that of the heads: gated and projected."""
        raise NotImplementedError

    def _extend(
        self, x: jax.Array, cache: Any, at: jax.Array, fits: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The output of tokens at the positions `at`, and the cache's arrays with those of them that fit."""
        raise NotImplementedError

    def _key_value_of_pages(self, projected: Any) -> tuple[jax.Array, jax.Array | None]:
        """What pages store of projected tokens."""
        raise NotImplementedError

    def _attend_to_pages(self, projected: Any, cache: PagedCache, *where: Any) -> tuple[jax.Array, PagedCache]:
        """The output heads of projected tokens, and the pages with these; `where` are table, lengths and borders."""
        raise NotImplementedError
