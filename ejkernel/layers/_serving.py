"""Serving: the sizes of a server's caches and batches, and the batch of one call."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks
from ejkernel.paged_attention import PagedCache
from ejkernel.xla_utils.utils import prepare_sequence_ids


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """The sizes of a server's caches and batches, which are fixed so that its step is compiled once.

    Args:
        tokens: The maximum number of new tokens in a call.
        sequences: The maximum number of sequences in a call.
        slots: The number of states in the pool of a recurrent layer; `None` if the model has no such layer.
        pages: The number of pages of an attention layer; `None` if the model has no such layer.
        page: The number of tokens in a page.
        longest: The maximum number of tokens in a sequence; `None` is as many as the pages hold.
        window_pages: The number of pages of an attention layer with a window, which needs fewer; it then has a page
            table of its own. `None` is `pages`, with the same table as other layers.
        checkpoints: How many states of a sequence a call may write, after the tokens that `at` names; `None` is one,
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
        """The number of columns of a page table: the pages of the longest sequence."""
        longest = (self.pages or 1) * self.page if self.longest is None else self.longest
        return -(-longest // self.page)

    def pages_of(self, window: int | None) -> int:
        """The number of pages of a layer with this window."""
        pages = self.pages if window is None or self.window_pages is None else self.window_pages
        if pages is None:
            _checks.fail("limits", "no pages", "pages=, as this layer keeps keys and values in them")
        return pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """New tokens of `N` packed sequences, and the slots and pages of each sequence; `ragged_batch` creates it.

    A pytree of integers, whose values may be traced. Layers take it as `cu_seqlens`:
    `output, cache = layer(x, cache, batch)`.

    Attributes:
        cu_seqlens: `[N + 1]`, borders of the packed sequences; tokens past the last border are padding.
        lengths: `[N]`, how many tokens each sequence had before.
        reads: `[N]`, the slot of each sequence's initial state; -1 starts from zeros.
        writes: `[N]`, the slot for the state after the last token, -1 for none; with `at` `[N, C]`.
        at: `[N, C]`, after how many of its new tokens, from 0 to all, a state is written; other numbers write nowhere.
        table: `[N, M]`, the pages of each sequence in order, -1 for none.
        window_table: `[N, M]`, the same for layers with a window, if those have pages of their own.
        whole_prompts: Whether all sequences begin in this call; static.
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
        """The pool `states` with the slots to read and write, which ops take as an initial state."""
        if self.reads is None or self.writes is None:
            _checks.fail("batch", "no slots", "reads= and writes=, as this layer keeps states")
        slots: Any = (self.reads, self.writes, self.at)
        return _checks.Pool(states, *slots)

    def pages(self, window: int | None) -> _checks.AnyArray:
        """The page table of a layer with this window."""
        table = self.table if window is None or self.window_table is None else self.window_table
        if table is None:
            _checks.fail("batch", "no table", "pages=, as this layer keeps keys and values in them")
        return table


def rows_of_cache(batch: Any, capacity: Any, window: int | None) -> tuple[int, int]:
    """The number of sequences in a cache and the tokens of each, or the same of pages, for a layer with this window."""
    if not isinstance(batch, ServingLimits):
        return _checks.positive_int("batch", batch), _checks.positive_int("capacity", capacity)
    if capacity is not None:
        _checks.fail("capacity", repr(capacity), "None beside ServingLimits")
    return batch.pages_of(window), batch.page


def checked_pages(
    dims: _checks.Dims, x: jax.Array, cache: Any, batch: RaggedBatch, pattern: str
) -> tuple[PagedCache, jax.Array]:
    """A layer's pages, whose axes `pattern` names, and how many tokens each sequence had; both checked."""
    dims.match("x", x, "T width")
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache: got {type(cache).__name__}; expected what empty_cache or an earlier call returned")
    dims.match("cache.key", _checks.floating("cache.key", cache.key), pattern)
    if "latent" not in pattern.split():
        dims.match("cache.value", _checks.floating("cache.value", cache.value), pattern)
    elif cache.value is not None:
        _checks.fail("cache.value", "an array", "None, as values are made from latents")
    return cache, _checks.position(dims, "batch.lengths", batch.lengths)


def nan_unless_new(batch: RaggedBatch, output: jax.Array) -> jax.Array:
    """The output `[T, H, V]` of whole prompts; NaN for sequences that have earlier tokens, which it lacks."""
    sequence = prepare_sequence_ids(jnp.asarray(batch.cu_seqlens), total_tokens=output.shape[0])
    before = jnp.asarray(batch.lengths).at[sequence].get(mode="fill", fill_value=0)
    return jnp.where((before == 0)[:, None, None], output, jnp.asarray(jnp.nan, output.dtype))


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
    """Creates a call's batch from a scheduler's lists, each of which has an entry for each sequence.

    All values are checked, so a scheduler's mistakes are errors here, before anything is computed.

    Args:
        limits: The sizes of the server's caches and batches.
        tokens: How many new tokens each sequence has: a prompt, a piece of one, one token, drafts; 0 is none.
        lengths: How many tokens each sequence had before; `None` is 0 for all.
        reads: The slot of each sequence's initial states; -1, or `None` for all, starts from zeros.
        writes: The slot for each sequence's states after its last token, -1 for none; with `at` a list of slots. `None`
            writes nowhere.
        at: For each slot in `writes`, after how many of the new tokens the state is written: from 0, the initial state,
            to all of them.
        pages: Each sequence's pages in order, enough for old and new tokens; -1 for pages that it has freed.
        window_pages: The same for layers with a window, if `limits` give them pages of their own.
        whole_prompts: Whether all sequences begin in this call. Attention layers then use `flash_attention` among the
            new tokens instead of reading them back from pages. That is faster, most of all in latent attention, but the
            last bits differ from those of the same prompt in pieces.

    Returns:
        A `RaggedBatch` of NumPy arrays, of the sizes in `limits`.

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
    arrays: dict[str, Any] = {}
    if limits.slots is not None:
        arrays["reads"] = column("reads", reads, -1)
        arrays |= _written(limits, new, count, writes, at)
        pool = _checks.Pool(None, arrays["reads"], arrays["writes"], arrays.get("at"))  # type: ignore[arg-type]
        _checks.slot_values(_checks.Dims(slots=limits.slots), pool, borders)
    for name, given, table in (("pages", pages, "table"), ("window_pages", window_pages, "window_table")):
        if (room := getattr(limits, name)) is not None:
            arrays[table] = _table(name, limits.sequences, count, limits.places, given, "limits.longest")
            sizes = _checks.Dims(P=room, page=limits.page, M=limits.places)
            _checks.page_values(sizes, arrays[table], before, borders, name)
            if not (whole_prompts and name == "window_pages"):
                _check_new_tokens(name, limits.page, arrays[table], before, new)
    return RaggedBatch(borders, before, **arrays, whole_prompts=whole_prompts)


def _written(limits: ServingLimits, new: np.ndarray, count: int, writes: Any, at: Any) -> dict[str, np.ndarray]:
    """`writes`, and `at` if `limits` have checkpoints."""
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
    lists = {"writes": _lists("writes", writes), "at": _lists("at", at)}
    for n, (slots, after) in enumerate(zip(*lists.values(), strict=False)):
        if len(_lists("writes", slots)) != len(_lists("at", after)):
            _checks.fail("at", f"{len(after)} of sequence {n}", f"as many as its writes, {len(slots)}")
    return {name: _table(name, limits.sequences, count, C, each, "limits.checkpoints") for name, each in lists.items()}


def _lists(name: str, given: Any) -> Any:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise TypeError(f"{name}: got {type(given).__name__}; expected a list, with an entry for each sequence")
    return given


def _column(rows: int, count: int, name: str, given: Any, fill: int) -> np.ndarray:
    """`given` for `count` sequences, padded with `fill` to `[rows]`; `None` is `fill` for all."""
    if given is None:
        return np.full(rows, fill, np.int32)
    return _table(name, rows, count, 1, [[each] for each in _lists(name, given)], "", fill)[:, 0]


def _table(name: str, rows: int, count: int, columns: int, given: Any, limit: str, fill: int = -1) -> np.ndarray:
    """The lists `given` for `count` sequences, padded with `fill` to `[rows, columns]`."""
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
        # numbers outside of int32 are refused later, and must not wrap around before
        table[n, : len(numbers)] = np.clip(numbers, -(2**31), 2**31 - 1)
    return table


def _check_new_tokens(name: str, page: int, table: np.ndarray, before: np.ndarray, new: np.ndarray) -> None:
    """Refuses a table without pages for all new tokens."""
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
