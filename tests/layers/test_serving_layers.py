"""Layers that serve ragged batches: published numbers, the same bits in every batch, windows, prompts, in place."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from conftest import assert_close  # noqa: E402
from layer_cases import PUBLISHED, VARIANTS, WIDTH  # noqa: E402

from ejkernel import PagedCache, layers  # noqa: E402

LIMITS = layers.ServingLimits(
    tokens=16, sequences=3, slots=9, pages=12, page=2, longest=12, window_pages=12, checkpoints=3
)
LAYERS = {**PUBLISHED, **VARIANTS}
LENGTHS = {"a": 9, "b": 3, "c": 6}


def poisoned(cache):
    """Full of NaN, which nobody may see."""
    return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), cache)


class Sequence:
    """A sequence that is served: its inputs, its slot, its pages and what came out."""

    def __init__(self, x, pages):
        self.x, self.pages = x, list(pages)
        self.slot, self.length, self.outputs = -1, 0, []


class Server:
    """One jitted step of a layer, and calls of it by what each sequence has."""

    def __init__(self, layer):
        graph, parameters = nnx.split(layer)
        self.compilations = 0

        def step(parameters, x, cache, batch):
            self.compilations += 1
            return nnx.merge(graph, parameters)(x, cache, batch)

        self.step = jax.jit(lambda *arrays: step(parameters, *arrays))
        self.empty = poisoned(layer.empty_cache(LIMITS))
        self.cache = self.empty

    def run(self, *parts):
        """`parts`: a sequence, how many of its next tokens, slots for states, wrong drafts behind the tokens."""
        rows, tokens, at = [], [], []
        for each, count, slots, wrong in parts:
            rows += [*each.x[each.length : each.length + count], *wrong]
            tokens.append(count + len(wrong))
            at.append(list(range(count, count + len(slots))))
        sequences = [each for each, *_ in parts]
        pages = [each.pages[: -(-(each.length + n) // LIMITS.page)] for each, n in zip(sequences, tokens, strict=True)]
        batch = layers.ragged_batch(
            LIMITS,
            tokens,
            [each.length for each in sequences],
            reads=[each.slot for each in sequences],
            writes=[slots for _, _, slots, _ in parts],
            at=at,
            pages=pages,
            window_pages=pages,
        )
        x = np.full((LIMITS.tokens, WIDTH), np.nan, np.float32)
        x[: len(rows)] = rows
        output, self.cache = self.step(x, self.cache, batch)
        assert not np.asarray(output)[len(rows) :].any()
        for (each, count, slots, _), begin in zip(parts, batch.cu_seqlens, strict=False):
            each.outputs.append(np.asarray(output)[begin : begin + count])
            each.length += count
            each.slot = slots[0] if count and slots else each.slot


@pytest.mark.parametrize("name", LAYERS)
def test_a_ragged_batch_gives_what_is_published_and_what_each_gets_alone(name):
    """Pieces of prompts, single tokens and drafts beside each other; NaN in unused slots and pages has no effect."""
    published, rng = LAYERS[name], np.random.default_rng(0)
    server = Server(published.make())
    inputs = {each: rng.normal(size=(length, WIDTH)).astype(np.float32) for each, length in LENGTHS.items()}
    order = iter(rng.permutation(LIMITS.pages))
    a, b, c = (Sequence(x, itertools.islice(order, -(-len(x) // LIMITS.page) + 1)) for x in inputs.values())
    wrong = rng.normal(size=(2, WIDTH)).astype(np.float32)
    server.run((a, 4, [7], []), (b, 3, [2], []))
    # one right token of the first with two wrong drafts behind it, whose states go elsewhere; nothing of the second
    server.run((b, 0, [], []), (a, 1, [4, 0, 8], wrong), (c, 3, [1], []))
    server.run((c, 1, [5], []), (a, 3, [3], []))
    server.run((a, 1, [], []), (c, 2, [6], []))
    assert server.compilations == 1
    for each, x in zip((a, b, c), inputs.values(), strict=True):
        found = np.concatenate(each.outputs)
        assert_close(found, published.expected(published.weights(), x), 1e-5)
        server.cache, alone = server.empty, Sequence(x, range(8))
        server.run((alone, len(x), [], []))
        np.testing.assert_array_equal(found, alone.outputs[0])


@pytest.mark.parametrize("released", [True, False], ids=["pages given back", "pages kept"])
def test_windows_need_no_more_pages_than_they_span(released):
    """Pages before the window go to the next tokens, so three pages of two serve a window of three for ever."""
    published, rng = PUBLISHED["softmax"], np.random.default_rng(1)
    layer, window = published.make(), published.options["window"]
    limits = layers.ServingLimits(tokens=2, sequences=1, page=2, longest=24, window_pages=3 if released else 12)
    cache = poisoned(layer.empty_cache(limits))
    assert cache.key.shape[:2] == (limits.window_pages, limits.page)
    step = nnx.jit(lambda layer, x, cache, batch: layer(x, cache, batch))
    x = rng.normal(size=(24, WIDTH)).astype(np.float32)
    free, pages, found = list(range(limits.window_pages)), [], []
    for length in (0, 2, 4, 6, *range(8, 24)):
        count = 2 if length < 8 else 1
        for place in range(max(length - window + 1, 0) // limits.page if released else 0):
            if pages[place] >= 0:
                free.append(pages[place])
                pages[place] = -1
        while len(pages) * limits.page < length + count:
            pages.append(free.pop())
        batch = layers.ragged_batch(limits, [count], [length], window_pages=[pages])
        output, cache = step(layer, np.resize(x[length : length + count], (2, WIDTH)), cache, batch)
        found.append(np.asarray(output)[:count])
    assert_close(np.concatenate(found), published.expected(published.weights(), x), 1e-5)


@pytest.mark.parametrize("name", ["softmax", "latent", "retention"])
def test_whole_prompts_then_tokens(name):
    """By flash attention among the new tokens; a sequence that has tokens already is NaN, and nobody else."""
    published, rng = LAYERS[name], np.random.default_rng(2)
    layer, limits = published.make(), layers.ServingLimits(tokens=12, sequences=3, slots=3, pages=9, page=4, longest=12)
    step = nnx.jit(lambda layer, x, cache, batch: layer(x, cache, batch))
    x = rng.normal(size=(12, WIDTH)).astype(np.float32)
    first, second = x[:7], x[7:]
    arguments = {"writes": [1, 2], "pages": [[5, 0], [3, 8]]}
    batch = layers.ragged_batch(limits, [6, 4], **arguments, whole_prompts=True)
    given = np.concatenate([first[:6], second[:4], x[:2] * np.nan])
    prompts, cache = step(layer, given, poisoned(layer.empty_cache(limits)), batch)
    assert not np.asarray(prompts)[10:].any()
    batch = layers.ragged_batch(limits, [1, 1], [6, 4], reads=[1, 2], **arguments)
    more, _ = step(layer, np.concatenate([first[6:], second[4:], x[:10] * np.nan]), cache, batch)
    for whole, parts in ((first, (prompts[:6], more[:1])), (second, (prompts[6:10], more[1:2]))):
        assert_close(np.concatenate(parts), published.expected(published.weights(), whole), 1e-5)
    if name != "retention":
        batch = layers.ragged_batch(limits, [6, 4], **arguments, whole_prompts=True)
        lengths = np.array([0, 3, 0], np.int32)
        wrong, _ = step(layer, given, cache, layers.RaggedBatch(**vars(batch) | {"lengths": lengths}))
        np.testing.assert_array_equal(wrong[:6], prompts[:6])
        assert np.isnan(wrong[6:10]).all() and not np.asarray(wrong)[10:].any()


def test_whole_prompts_leave_no_more_pages_than_a_window_spans():
    """Tokens before the window are not written, and need no page."""
    published, rng = PUBLISHED["softmax"], np.random.default_rng(4)
    layer = published.make()
    limits = layers.ServingLimits(tokens=10, sequences=1, page=2, longest=12, window_pages=2)
    step = nnx.jit(lambda layer, x, cache, batch: layer(x, cache, batch))
    x = rng.normal(size=(11, WIDTH)).astype(np.float32)
    batch = layers.ragged_batch(limits, [10], window_pages=[[-1, -1, -1, -1, 1]], whole_prompts=True)
    prompt, cache = step(layer, x[:10], poisoned(layer.empty_cache(limits)), batch)
    batch = layers.ragged_batch(limits, [1], [10], window_pages=[[-1, -1, -1, -1, 1, 0]])
    token, _ = step(layer, np.resize(x[10:], (10, WIDTH)), cache, batch)
    found = np.concatenate([prompt, token[:1]])
    assert_close(found, published.expected(published.weights(), x), 1e-5)


@pytest.mark.parametrize("name", ["gdn", "softmax", "latent"])
def test_bad_slots_and_pages_that_nobody_can_see_spoil_their_own_sequence_alone(name):
    """Traced: a slot that is none is as -1, tokens without a page and lengths past the table are NaN."""
    published, rng = LAYERS[name], np.random.default_rng(3)
    layer, x = published.make(), rng.normal(size=(12, WIDTH)).astype(np.float32)
    limits = layers.ServingLimits(tokens=12, sequences=2, slots=3, pages=4, page=4, longest=8)
    step = nnx.jit(lambda layer, x, cache, batch: layer(x, cache, batch))
    batch = layers.ragged_batch(limits, [4, 5], writes=[0, 2], pages=[[1], [2, 3]])
    good, after = step(layer, x, poisoned(layer.empty_cache(limits)), batch)
    changes = {"reads": np.array([-1, 99]), "writes": np.array([0, -7])}
    if name != "gdn":
        changes = {"table": np.array([[1, -1], [2, 77]]), "lengths": np.array([0, 2])}
    bad = layers.RaggedBatch(**vars(batch) | {key: x.astype(np.int32) for key, x in changes.items()})
    found, left = step(layer, x, poisoned(layer.empty_cache(limits)), bad)
    np.testing.assert_array_equal(found[:4], good[:4])
    if name == "gdn":
        np.testing.assert_array_equal(found, good)
        np.testing.assert_array_equal(left.memory[0], after.memory[0])
        assert np.isnan(left.memory[1:]).all()
    else:
        assert np.isnan(found[6:9]).all() and not np.asarray(found)[9:].any()
        np.testing.assert_array_equal(left.key[1], after.key[1])


@pytest.mark.parametrize("name", ["gdn", "softmax", "latent"])
def test_donated_caches_are_updated_in_place(name):
    """Aliases for all of a cache, and neither a copy nor a temporary of its size."""
    layer = LAYERS[name].make()
    limits = layers.ServingLimits(tokens=8, sequences=4, slots=640, pages=640, page=32, longest=64, checkpoints=2)
    graph, parameters = nnx.split(layer)
    cache = jax.eval_shape(lambda: layer.empty_cache(limits))
    batch = layers.ragged_batch(limits, [])
    step = jax.jit(lambda cache, parameters, x, batch: nnx.merge(graph, parameters)(x, cache, batch), donate_argnums=0)
    compiled = step.lower(cache, parameters, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), batch).compile()
    text, parts = compiled.as_text(), jax.tree.leaves(cache)
    assert text.count("may-alias") + text.count("must-alias") == len(parts)
    for each in parts:
        shape = f"f32[{','.join(map(str, each.shape))}]"
        assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < min(each.size * 4 for each in parts)


def test_what_a_cache_holds():
    """It has the limits' sizes: `PagedCache` for softmax attention, pools for a memory."""
    limits = layers.ServingLimits(tokens=4, sequences=2, slots=5, pages=6, page=8, window_pages=3)
    names = ("gdn", "retention", "softmax", "softmax of Gemma 4", "latent")
    found = {name: LAYERS[name].make().empty_cache(limits, dtype=jnp.bfloat16) for name in names}
    for name, cache in found.items():
        if isinstance(cache, PagedCache):
            pages = limits.window_pages if "window" in LAYERS[name].options else limits.pages
            assert {each.shape[:2] for each in jax.tree.leaves(cache)} == {(pages, limits.page)}, name
            assert {each.dtype for each in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}
        else:
            assert {len(each) for each in jax.tree.leaves(cache)} == {limits.slots}, name
            assert cache.memory.dtype == jnp.float32 and cache.position is None
            assert cache.recent is None or cache.recent.dtype == jnp.bfloat16
    assert found["latent"].value is None and found["softmax"].value is not None
