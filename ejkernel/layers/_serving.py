"""Serving with layers: what a server has room for, and which tokens of which sequences a call computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks
from ejkernel.paged_attention import PagedCache, write_pages
from ejkernel.xla_utils.utils import prepare_sequence_ids


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What a server has room for: caches and batches have these sizes, so that its step is compiled once.

    Args:
        tokens: The most new tokens of a call.
        sequences: The most sequences of a call.
        slots: States in the pool of a layer with a memory; `None` if the model has no such layer.
        pages: Pages of a layer that attends to all tokens; `None` if the model has no such layer.
        page: Tokens of a page.
        longest: The most tokens of a sequence; `None` is as many as the pages hold.
        window_pages: Pages of a layer with a window, which needs fewer and has a table of its own; `None` gives it
            `pages`, by the same table as the others.
        checkpoints: How many states of a sequence a call may write, after the tokens that `at` says; `None` is one,
            after its last token.

    Examples:
        >>> ServingLimits(tokens=256, sequences=8, slots=32, pages=512, page=16).places
        512
    """

    tokens: int
    sequences: int
    slots: int | None = None
    pages: int | None = None
    page: int = 64
    longest: int | None = None
    window_pages: int | None = None
    checkpoints: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.name in ("tokens", "sequences", "page"):
                _checks.positive_int(each.name, value)

    @property
    def places(self) -> int:
        """Columns of a table: the pages of the longest sequence."""
        longest = (self.pages or 1) * self.page if self.longest is None else self.longest
        return -(-longest // self.page)

    def pages_of(self, window: int | None) -> int:
        """How many pages a layer with this window has."""
        pages = self.pages if window is None or self.window_pages is None else self.window_pages
        if pages is None:
            _checks.fail("limits", "no pages", "pages=, as this layer keeps keys and values in them")
        return pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """New tokens of `N` sequences, packed, and where each sequence's states and pages lie; `ragged_batch` makes it.

    A pytree of integers, whose values may be traced. It goes where layers take `cu_seqlens`:
    `output, cache = layer(x, cache, batch)`.

    Attributes:
        cu_seqlens: `[N + 1]`, borders of the packed sequences; tokens past the last are padding.
        lengths: `[N]`, how many tokens each sequence had before.
        reads: `[N]`, the slot that each starts from; -1 starts from nothing.
        writes: `[N]`, the slot that gets its state after its last token, -1 for none; with `at` `[N, C]`.
        at: `[N, C]`, after how many of its new tokens a state is written; others than 0 to all of them write nowhere.
        table: `[N, M]`, the pages of each sequence in order, -1 for none.
        window_table: `[N, M]`, the same for layers with a window, if those have pages of their own.
        whole_prompts: Whether all sequences begin in this call; known when tracing.
    """

    cu_seqlens: _checks.AnyArray
    lengths: _checks.AnyArray
    reads: _checks.AnyArray | None = None
    writes: _checks.AnyArray | None = None
    at: _checks.AnyArray | None = None
    table: _checks.AnyArray | None = None
    window_table: _checks.AnyArray | None = None
    whole_prompts: bool = field(default=False, metadata={"static": True})

    def pool(self, states: jax.Array) -> _checks.Pool:
        """`states`, and which slots of it are read and written: what ops take for an initial state."""
        if self.reads is None or self.writes is None:
            _checks.fail("batch", "no slots", "reads= and writes=, as this layer keeps states")
        slots: Any = (self.reads, self.writes, self.at)
        return _checks.Pool(states, *slots)

    def pages(self, window: int | None) -> _checks.AnyArray:
        """The table of a layer with this window."""
        table = self.table if window is None or self.window_table is None else self.window_table
        if table is None:
            _checks.fail("batch", "no table", "pages=, as this layer keeps keys and values in them")
        return table


def rows_of_cache(batch: Any, capacity: Any, window: int | None) -> tuple[int, int]:
    """Rows of a cache of keys and values, and the tokens of each: sequences, or pages of a layer with this window."""
    if not isinstance(batch, ServingLimits):
        return _checks.positive_int("batch", batch), _checks.positive_int("capacity", capacity)
    if capacity is not None:
        _checks.fail("capacity", repr(capacity), "None beside ServingLimits")
    return batch.pages_of(window), batch.page


def checked_pages(
    dims: _checks.Dims, x: jax.Array, cache: Any, batch: RaggedBatch, pattern: str, *, latent: bool = False
) -> tuple[PagedCache, jax.Array]:
    """A layer's pages, whose keys and values have this `pattern`, and how many tokens each sequence had."""
    dims.match("x", x, "T width")
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache: got {type(cache).__name__}; expected what empty_cache or an earlier call returned")
    dims.match("cache.key", _checks.floating("cache.key", cache.key), pattern)
    if not latent:
        dims.match("cache.value", _checks.floating("cache.value", cache.value), pattern)
    elif cache.value is not None:
        _checks.fail("cache.value", "an array", "None, as values are made from latents")
    return cache, _checks.position(dims, "batch.lengths", batch.lengths)


def attended_whole(
    batch: RaggedBatch,
    window: int | None,
    output: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    cache: PagedCache,
) -> tuple[jax.Array, PagedCache]:
    """The output of whole prompts, whose tokens attended to each other, and the pages with their keys and values."""
    pages = write_pages(key, value, cache, batch.pages(window), batch.lengths, batch.cu_seqlens)
    # a sequence that has tokens already sees too few, where nobody could tell before
    sequence = prepare_sequence_ids(jnp.asarray(batch.cu_seqlens), total_tokens=output.shape[0])
    before = jnp.asarray(batch.lengths).at[sequence].get(mode="fill", fill_value=0)
    return jnp.where((before == 0)[:, None, None], output, jnp.asarray(jnp.nan, output.dtype)), pages


def ragged_batch(
    limits: ServingLimits,
    tokens: Sequence[int],
    lengths: Sequence[int] | None = None,
    *,
    reads: Sequence[int] | None = None,
    writes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    at: Sequence[Sequence[int]] | None = None,
    pages: Sequence[Sequence[int]] | None = None,
    window_pages: Sequence[Sequence[int]] | None = None,
    whole_prompts: bool = False,
) -> RaggedBatch:
    """A call's batch from what a scheduler has: lists with an entry for each sequence, shorter ones of any length.

    All values are checked, so mistakes of a scheduler are errors here, before anything is computed.

    Args:
        limits: What there is room for.
        tokens: How many new tokens each sequence has: a prompt, a piece of one, one token, drafts; 0 is none.
        lengths: How many tokens it had before; `None` is none of them any.
        reads: The slot that its states start from; -1, or `None` for all, starts from nothing.
        writes: The slot that gets its states after its last token, -1 for none; beside `at` a list of slots. `None`
            writes nowhere.
        at: For each slot in `writes`, after how many of the new tokens: from 0, what it started from, to all of them.
        pages: Its pages in order, enough for old and new tokens; -1 for those that it has given back.
        window_pages: The same in layers with a window, where `limits` give them pages of their own.
        whole_prompts: All sequences begin here. Layers of softmax attention then attend among the new tokens by
            `flash_attention` instead of reading them back from pages, which is faster, most of all in latent attention.
            The last bits are not those of the same prompt in pieces.

    Returns:
        A `RaggedBatch` of NumPy arrays, as large as `limits` say.

    Examples:
        A prompt of five tokens beside one token of a sequence that has 37:

        >>> limits = ServingLimits(tokens=64, sequences=4, slots=8, pages=16, page=16, longest=64)
        >>> batch = ragged_batch(
        ...     limits, [5, 1], [0, 37], reads=[-1, 3], writes=[6, 3], pages=[[9], [0, 4, 2]]
        ... )
        >>> batch.cu_seqlens.tolist(), batch.writes.tolist()
        ([0, 5, 6, 6, 6], [6, 3, -1, -1])
        >>> batch.table.tolist()
        [[9, -1, -1, -1], [0, 4, 2, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]]
    """
    if not isinstance(limits, ServingLimits):
        raise TypeError(f"limits: got {type(limits).__name__}; expected ServingLimits")
    count = len(_lists("tokens", tokens))
    if count > limits.sequences:
        _checks.fail("tokens", f"{count} sequences", f"at most the {limits.sequences} of limits.sequences")
    column = partial(_column, limits.sequences, count)
    new, before = column("tokens", tokens, 0), column("lengths", lengths, 0)
    if new.sum() > limits.tokens:
        _checks.fail("tokens", f"{new.sum()} of them", f"at most the {limits.tokens} of limits.tokens")
    if _checks.flag("whole_prompts", whole_prompts) and before.any():
        _checks.fail("whole_prompts", f"True beside lengths of {before.max()}", "sequences that begin here")
    borders = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    named = {"reads": reads, "writes": writes, "at": at, "pages": pages, "window_pages": window_pages}
    for name, each in named.items():
        room = getattr(limits, name if "pages" in name else "slots")
        if each is not None and room is None:
            _checks.fail(name, "a list", f"None, as limits have no {name if 'pages' in name else 'slots'}")
    found: dict[str, Any] = {}
    if limits.slots is not None:
        found["reads"] = column("reads", reads, -1)
        found |= _written(limits, new, count, writes, at)
        pool = _checks.Pool(None, found["reads"], found["writes"], found.get("at"))  # type: ignore[arg-type]
        _checks.slot_values(_checks.Dims(slots=limits.slots), pool, borders)
    for name, given, table in (("pages", pages, "table"), ("window_pages", window_pages, "window_table")):
        if (room := getattr(limits, name)) is not None:
            found[table] = _table(name, limits.sequences, count, limits.places, given, "limits.longest")
            sizes = _checks.Dims(P=room, page=limits.page, M=limits.places)
            _checks.page_values(sizes, found[table], before, borders, name)
            if not (whole_prompts and name == "window_pages"):
                _every_new_token(name, limits.page, found[table], before, new)
    return RaggedBatch(borders, before, **found, whole_prompts=whole_prompts)


def _written(limits: ServingLimits, new: np.ndarray, count: int, writes: Any, at: Any) -> dict[str, np.ndarray]:
    """`writes`, and `at` where `limits` have checkpoints."""
    C = limits.checkpoints
    if C is None:
        if at is not None:
            _checks.fail("at", "a list", "None, as limits.checkpoints is None")
        return {"writes": _column(limits.sequences, count, "writes", writes, -1)}
    if at is None:  # one state of each sequence, after all its tokens
        after = np.full((limits.sequences, C), -1, np.int32)
        slots = after.copy()
        slots[:, 0], after[:, 0] = _column(limits.sequences, count, "writes", writes, -1), new
        return {"writes": slots, "at": after}
    given = _lists("writes", writes), _lists("at", at)
    for n, (slots, after) in enumerate(zip(*given, strict=False)):
        if len(_lists("writes", slots)) != len(_lists("at", after)):
            _checks.fail("at", f"{len(after)} of sequence {n}", f"as many as its writes, {len(slots)}")
    names = ("writes", "at")
    return {
        name: _table(name, limits.sequences, count, C, each, "limits.checkpoints")
        for name, each in zip(names, given, strict=True)
    }


def _lists(name: str, given: Any) -> Any:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise TypeError(f"{name}: got {type(given).__name__}; expected a list, with an entry for each sequence")
    return given


def _column(rows: int, count: int, name: str, given: Any, fill: int) -> np.ndarray:
    """A number for each of `count` sequences, and `fill` for the others, `[rows]`; of `None` all are `fill`."""
    if given is None:
        return np.full(rows, fill, np.int32)
    return _table(name, rows, count, 1, [[each] for each in _lists(name, given)], "", fill)[:, 0]


def _table(name: str, rows: int, count: int, columns: int, given: Any, limit: str, fill: int = -1) -> np.ndarray:
    """The lists of `count` sequences, filled up to `[rows, columns]`."""
    table = np.full((rows, columns), fill, np.int32)
    if given is None:
        return table
    if len(_lists(name, given)) != count:
        _checks.fail(name, f"{len(given)} sequences", f"the {count} of tokens")
    for n, each in enumerate(given):
        numbers = np.asarray(_lists(name, each))
        if numbers.size and (numbers.dtype.kind not in "iu" or numbers.ndim != 1):
            raise TypeError(f"{name}: got {each!r} of sequence {n}; expected integers")
        if len(numbers) > columns:
            _checks.fail(name, f"{len(numbers)} of sequence {n}", f"at most {columns}, by {limit}")
        if fill == 0 and (numbers < 0).any():
            _checks.fail(name, f"{numbers[0]} of sequence {n}", "a number of at least 0")
        # numbers that int32 does not hold are none that fit
        table[n, : len(numbers)] = np.clip(numbers, -(2**31), 2**31 - 1)
    return table


def _every_new_token(name: str, page: int, table: np.ndarray, before: np.ndarray, new: np.ndarray) -> None:
    """New tokens have pages."""
    place = np.arange(table.shape[1])
    needed = (place >= (before // page)[:, None]) & (place * page < (before + new)[:, None]) & (new > 0)[:, None]
    lacking = needed & (table < 0)
    past = (new > 0) & (before + new > table.shape[1] * page)
    if past.any():
        n = int(np.argmax(past))
        _checks.fail("tokens", f"{before[n] + new[n]} in sequence {n}", f"at most {table.shape[1] * page}, by limits")
    if lacking.any():
        n, m = np.argwhere(lacking)[0]
        _checks.fail(name, f"no page for tokens from {max(m * page, before[n])} of sequence {n}", "one")
