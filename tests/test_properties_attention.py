"""Softmax attention, both ops, drawn by Hypothesis, against the float64 loop and differences of it."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import Case, check, results_and_gradients
from conftest import assert_close
from hypothesis import given
from hypothesis import strategies as st
from properties import LONGEST, SEEDS, THOROUGH, examples, lengths, roundings

import ejkernel


@dataclass(frozen=True)
class Shape:
    """All that a call is compiled for; its options are part of the case."""

    case: Case
    front: str = "flash_attention"
    dtype: str = "float64"
    sequences: int | None = None  # packed
    own_borders: bool = False  # of the keys
    unbatched: bool = False
    offset: str | None = None  # "one" for all or "each"
    block_sizes: tuple[int, int] | None = None

    def __str__(self):
        return f"{self.front}-{self.dtype}-{self.case.name}".replace(" ", "-")

    def call(self):
        """The op as a function of its arrays by name, always the same object for the same shape."""
        options = dict(self.case.options)
        if self.front == "flash_attention":
            options |= {"return_lse": True, "block_sizes": self.block_sizes}
        return _call(self.front, tuple(sorted(options.items())))

    def expected(self, **arrays):
        """What the oracle says, in the shape of the results."""
        if self.front == "attention":
            return oracle.attention(**arrays, **self.case.options)
        arrays = {name: x[None] if self.unbatched and name in QKV else x for name, x in arrays.items()}
        results = oracle.flash_attention(**arrays, **self.case.options)
        return tuple(x[0] for x in results) if self.unbatched else results


QKV = ("query", "key", "value")


@functools.cache
def _call(front, options):
    def call(**arrays):
        return getattr(ejkernel, front)(**arrays, **dict(options), dtype=None)

    return call


GROUPED = {"heads": 4, "kv_heads": 2}
SIZES = {"queries": 7, "keys": 9, "key_dim": 3, "value_dim": 5, **GROUPED}
STREAM = {"batch": 1, "queries": 40, "keys": 40, "key_dim": 3, "value_dim": 5, **GROUPED}
EVERYTHING = {"causal": True, "sliding_window": (6, 2), "logits_soft_cap": 2.0, "softmax_scale": -0.7}
BLOCKS, SMALL = {"block_sizes": (8, 4)}, {"block_sizes": (3, 2)}
SHAPES = [
    Shape(Case("mask", **SIZES, mask_heads=2, sink_shape=(2, 3), options=EVERYTHING), "attention"),
    Shape(Case("bias", **SIZES, bias_heads=4, options={"sliding_window": (2, 1)}), "attention"),
    Shape(
        Case("mask", **SIZES, mask_heads=4, sink_shape=(4, 1), options=EVERYTHING), offset="each", block_sizes=(3, 2)
    ),
    Shape(Case("bias", **SIZES, bias_heads=1, broadcast=True, options={"causal": True}), offset="one"),
    Shape(Case("stream", **STREAM, sink_shape=(2,), options={"causal": True}), sequences=5, unbatched=True, **BLOCKS),
    Shape(
        Case("two streams", **STREAM | {"keys": 60}, mask_heads=1, bias_heads=2, options=EVERYTHING),
        sequences=4,
        own_borders=True,
        offset="each",
        **BLOCKS,
    ),
    Shape(
        Case("long stream", batch=1, queries=300, keys=300, heads=1, kv_heads=1, options={"causal": True}),
        sequences=6,
        unbatched=True,
    ),
    Shape(Case("mask", **SIZES, mask_heads=1, options={"causal": True}), dtype="float32", **SMALL),
    Shape(Case("stream", **STREAM, options={"sliding_window": (9, 1)}), dtype="bfloat16", sequences=5, unbatched=True),
    Shape(Case("bias", **SIZES, bias_heads=2, options={"logits_soft_cap": 2.0}), "attention", "float16"),
]


@st.composite
def shapes(draw):
    front = draw(st.sampled_from(["attention", "flash_attention"]))
    flash = front == "flash_attention"
    packed = flash and draw(st.booleans())
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    window = st.one_of(st.none(), st.integers(0, 40), st.tuples(st.integers(0, 40), st.integers(0, 40)))
    options = {
        "causal": draw(st.booleans()),
        "sliding_window": draw(window),
        "logits_soft_cap": draw(st.sampled_from([None, 0.5, 2.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.3, -0.7])),
    }
    own = packed and draw(st.booleans())
    queries = draw(st.integers(0, LONGEST if draw(st.booleans()) else 20))
    keys = queries if packed and not own else draw(st.integers(0, LONGEST if draw(st.booleans()) else 20))
    of_pairs = draw(st.sampled_from(["mask", "bias", "none"] + ["mask and bias"] * flash))
    pair_heads = draw(st.sampled_from(sorted({1, heads, kv_heads})))
    sink_heads = draw(st.sampled_from([(), (heads,), (kv_heads,)]))
    case = Case(
        "drawn",
        batch=1 if packed else draw(st.integers(1, 3)),
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        options=options,
        mask_heads=pair_heads if "mask" in of_pairs else 0,
        bias_heads=pair_heads if "bias" in of_pairs else 0,
        broadcast=draw(st.booleans()),
        sink_shape=draw(st.sampled_from([None, (*sink_heads, draw(st.integers(1, 3)))])),
    )
    return Shape(
        case,
        front,
        draw(st.sampled_from(["float64", "float64", "float32", "bfloat16", "float16"])),
        draw(st.integers(1, 6)) if packed else None,
        own,
        packed and draw(st.booleans()),
        draw(st.sampled_from([None, "one", "each"])) if flash else None,
        draw(st.one_of(st.none(), st.tuples(st.integers(1, 64), st.integers(1, 64)))) if flash else None,
    )


@st.composite
def calls(draw, shape):
    """`shape` and arrays for it, in float64 but rounded to its dtype: values, dead rows, borders, offsets."""
    shape = draw(shape)
    case = shape.case
    dead = draw(st.sets(st.integers(0, max(case.queries - 1, 0)), max_size=3)) if case.queries else ()
    arrays = replace(case, dead=tuple(dead)).arrays(np.float64, draw(SEEDS))
    arrays = {n: x if x.dtype == bool else x.astype(jnp.dtype(shape.dtype)).astype(float) for n, x in arrays.items()}
    if shape.unbatched:
        arrays |= {name: arrays[name][0] for name in QKV}
    rows = case.batch
    if shape.sequences is not None:
        rows = shape.sequences
        for name, tokens in (("cu_seqlens", case.queries), ("cu_seqlens_kv", case.keys)):
            if name == "cu_seqlens" or shape.own_borders:
                arrays[name] = np.cumsum((0, *draw(lengths(tokens, rows)))).astype(np.int32)
    if shape.offset:
        offsets = st.integers(-5, case.keys + 5)
        each = draw(st.lists(offsets, min_size=rows, max_size=rows) if shape.offset == "each" else offsets)
        arrays["query_offset"] = np.array(each, np.int32)
    return shape, arrays


@pytest.mark.parametrize("shape", [None] if THOROUGH else SHAPES, ids=str)
def test_matches_oracle(shape):
    few = shape is not None and shape.case.queries == LONGEST

    @examples(ci=2 if few else 12, thorough=500)
    @given(calls(shapes() if shape is None else st.just(shape)))
    def matches(drawn):
        shape, arrays = drawn
        run = shape.call()
        with jax.enable_x64(True):
            # results and gradients in float64, whatever the dtype, against the oracle and its differences
            check(run, shape.expected, arrays, roundings("float64", 1, 64), directions=1)
        if shape.dtype != "float64":
            check_rounding(shape, run, arrays)

    matches()


def check_rounding(shape, run, arrays):
    """Results and gradients in a narrower dtype against those in float64, which `check` has found right."""
    dtype = jnp.dtype(shape.dtype)
    narrow = {n: x.astype(dtype) if x.dtype == np.float64 else x for n, x in arrays.items()}
    random = np.random.default_rng(0)
    cotangents = tuple(
        np.where(np.isfinite(x), random.normal(size=x.shape), 0).astype(dtype).astype(float)
        for x in shape.expected(**arrays)
    )
    with jax.enable_x64(True):
        right = results_and_gradients(run, arrays, cotangents)
    found = results_and_gradients(run, narrow, cotangents)
    for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert x.dtype in (dtype, np.float32)
        real = np.isfinite(wanted)
        assert (np.isfinite(x) == real).all()
        # weights are rounded before they meet the values, and again in each gradient
        assert_close(np.where(real, x, 0), np.where(real, wanted, 0), roundings(dtype, 4, 32))


@st.composite
def large_logits(draw):
    """Arrays whose logits are as large as one likes, small integers times powers of 2 and the scale, and borders.

    Some rows are "masked" by a huge negative bias for all keys alike, as many models do it.
    """
    random = np.random.default_rng(draw(SEEDS))
    exponent = draw(st.integers(-3, 100))
    tokens = 12

    def integers(*shape):
        return random.integers(-2, 3, shape).astype(np.float32)

    unit = np.float32(2.0**exponent)
    arrays = {
        "query": integers(1, tokens, 2, 3) * unit,
        "key": integers(1, tokens, 2, 3),
        "value": random.normal(size=(1, tokens, 2, 5)).astype(np.float32),
    }
    if draw(st.booleans()):
        low = -unit * np.float32(2.0 ** draw(st.integers(1, 16)))
        arrays["bias"] = np.where(random.random((1, 1, tokens, 1)) < 0.4, low, 0) + np.zeros(tokens, np.float32)
    if draw(st.booleans()):
        arrays["softmax_aux"] = integers(2, 2) * unit * np.float32(2.0 ** draw(st.integers(0, 4)))
    return arrays, np.cumsum((0, *draw(lengths(tokens, 3)))).astype(np.int32)


# of many digits: a product with it is rounded, and a fused one is not
SCALE = 0.3


@functools.cache
def _packed_or_not(front, causal, packed):
    def call(cu_seqlens, **arrays):
        options = {"softmax_scale": SCALE, "causal": causal, "dtype": None}
        if front == "attention":
            return ejkernel.attention(**arrays, **options)[0]
        borders = {"cu_seqlens": cu_seqlens} if packed else {}
        return ejkernel.flash_attention(**arrays, **options, **borders, block_sizes=(3, 4))

    return call


@pytest.mark.parametrize("front, packed", [("attention", False), ("flash_attention", False), ("flash_attention", True)])
@pytest.mark.parametrize("causal", [False, True])
def test_shares_are_exact_whatever_the_size_of_logits(front, packed, causal):
    """Output and gradients are those of weights that sum to 1, for logits of up to 1e35."""

    @examples(ci=15, thorough=300)
    @given(large_logits())
    def matches(drawn):
        arrays, borders = drawn
        cotangent = np.random.default_rng(0).normal(size=arrays["value"].shape).astype(np.float32)
        call = _packed_or_not(front, causal, packed)
        output, found = results_and_gradients(call, arrays | {"cu_seqlens": borders}, cotangent)
        pieces = borders if packed else None
        options = {"causal": causal, "cu_seqlens": pieces, "softmax_scale": SCALE}
        expected, right = oracle.attention_gradients(cotangent, **arrays, **options)
        assert_close(output, expected, 1e-5, scale=1.0)
        for name, gradient in right.items():
            # weights of 0 and 1 leave no gradient but what rounding leaves of its terms
            partner = {"query": "key", "key": "query"}.get(name)
            terms = 1.0 if partner is None else max(np.abs(arrays[partner]).max(), 1.0)
            assert_close(found[name], gradient, 3e-5, name, scale=terms)

    matches()
