"""Chunked cumulative sums and the packing helpers, drawn by Hypothesis, against their oracle."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close
from hypothesis import given
from hypothesis import strategies as st
from properties import DTYPES, LONGEST, SEEDS, THOROUGH, examples, lengths, roundings

from ejkernel import xla_utils


@dataclass(frozen=True)
class Shape:
    """All that a sum is compiled for; global if there is no chunk size."""

    tokens: int
    rest: tuple[int, ...]  # of the shape: batch, heads and perhaps a dim
    chunk_size: int | None = None
    reverse: bool = False
    head_first: bool = False
    sequences: int | None = None  # packed
    dtype: str = "float64"

    def __str__(self):
        kind = f"chunks of {self.chunk_size}" if self.chunk_size else "whole"
        words = [self.dtype, kind, "packed" if self.sequences else "rows", "reverse" if self.reverse else "forward"]
        return "-".join(words).replace(" ", "-")

    @property
    def shape(self):
        batch, *others = self.rest
        order = [batch, self.tokens, *others]
        if self.head_first:
            order[1:3] = order[2:0:-1]
        return tuple(order)


SHAPES = [
    Shape(LONGEST, (1, 2, 3), 16, sequences=6),
    Shape(LONGEST, (1, 2), None, reverse=True, sequences=6, dtype="float32"),
    Shape(77, (2, 3), 8, reverse=True, head_first=True),
    Shape(77, (1, 1, 5), None, head_first=True, sequences=3, dtype="bfloat16"),
    Shape(130, (2, 2), 64, dtype="float16"),
]


@st.composite
def shapes(draw):
    packed = draw(st.booleans())
    others = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    return Shape(
        draw(st.integers(0, LONGEST)),
        (1 if packed else draw(st.integers(1, 3)), *others),
        draw(st.sampled_from([None, 1, 2, 8, 64, 512])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(1, 6)) if packed else None,
        draw(st.sampled_from(DTYPES)),
    )


@functools.partial(jax.jit, static_argnums=3)
def run(x, weights, cu, shape):
    """The sum, and the gradient of `Σ weights · sum`."""
    options = {"reverse": shape.reverse, "head_first": shape.head_first, "cu_seqlens": cu}
    local = {"chunk_size": shape.chunk_size} if shape.chunk_size else {}
    function = xla_utils.chunk_local_cumsum if local else xla_utils.chunk_global_cumsum
    value, pull = jax.vjp(lambda x: function(x, **local, **options), x)
    return value, pull(weights)[0]


@pytest.mark.parametrize("shape", [None] if THOROUGH else SHAPES, ids=str)
def test_cumulative_sums_match_oracle(shape):
    drawn = (shapes() if shape is None else st.just(shape)).flatmap(
        lambda shape: st.tuples(st.just(shape), lengths(shape.tokens, shape.sequences or 0), SEEDS)
    )

    @examples(ci=10, thorough=500)
    @given(drawn)
    def matches(drawn):
        shape, spans, seed = drawn
        random = np.random.default_rng(seed)
        x, weights = (random.normal(size=shape.shape).astype(jnp.dtype(shape.dtype)) for _ in range(2))
        cu = np.cumsum((0, *spans)).astype(np.int32) if shape.sequences else None
        with jax.enable_x64(shape.dtype == "float64"):
            value, gradient = run(x, weights, cu, shape)
        how = {
            "chunk_size": shape.chunk_size,
            "reverse": shape.reverse,
            "cu_seqlens": cu,
            "head_first": shape.head_first,
        }
        assert value.dtype == gradient.dtype == shape.dtype
        # a sum of n numbers, each a normal one, is off by about √n roundings of its largest partial sum
        assert_close(value, oracle.cumsum(x, **how), roundings(shape.dtype, 1, 8), "value")
        assert_close(gradient, oracle.cumsum_gradient(weights, **how), roundings(shape.dtype, 1, 8), "gradient")

    matches()


@st.composite
def borders(draw):
    sequences = draw(st.integers(1, 8)) if THOROUGH else 5
    total = draw(st.integers(0, LONGEST)) if THOROUGH else 40
    return np.cumsum((0, *draw(lengths(total, sequences)))), total, draw(st.sampled_from([np.int32, np.int64]))


@functools.partial(jax.jit, static_argnums=(1, 2))
def packing(cu, total, chunk_size):
    """Everything that is said of borders known only when this runs."""
    chunks = total // chunk_size + cu.shape[0] - 1
    return {
        "lens": xla_utils.prepare_lens(cu),
        "tokens": xla_utils.prepare_token_indices(cu, total_tokens=total),
        "sequence": xla_utils.prepare_sequence_ids(cu, total_tokens=total),
        "position": xla_utils.prepare_position_ids(cu, total_tokens=total),
        "chunks": xla_utils.prepare_chunk_indices(cu, chunk_size, total_chunks=chunks),
        "offsets": xla_utils.prepare_chunk_offsets(cu, chunk_size),
    }


@examples(ci=30, thorough=500)
@given(borders(), st.sampled_from([1, 2, 16] if not THOROUGH else [1, 2, 3, 16, 100, 400]))
def test_packing_matches_oracle(drawn, chunk_size):
    cu, total, dtype = drawn
    spans = np.diff(cu)
    tokens = oracle.token_indices(cu, total)
    wanted = {
        "lens": spans,
        "tokens": tokens,
        "sequence": tokens[:, 0],
        "position": tokens[:, 1],
        "chunks": oracle.chunk_indices(cu, chunk_size, total // chunk_size + len(spans)),
        "offsets": np.cumsum([0, *(len(range(0, each, chunk_size)) for each in spans)]),
    }
    with jax.enable_x64(True):
        found = packing(cu.astype(dtype), total, chunk_size)
    for name, x in found.items():
        assert x.dtype == dtype, name
        np.testing.assert_array_equal(x, wanted[name], name)


SEGMENTS = functools.partial(jax.jit, static_argnums=1)(xla_utils.prepare_cu_seqlens_from_segment_ids)


@examples(ci=30, thorough=500)
@given(SEEDS, st.integers(1, 4), st.sampled_from([3, 12, 29] if not THOROUGH else [*range(0, 60)]), st.booleans())
def test_borders_from_segment_ids(seed, kinds, sequences, known):
    """Each token of the flattened rows lies in the run that its borders say, and what has no room is padding."""
    rows, tokens = 3, 10
    ids = np.random.default_rng(seed).integers(kinds, size=(rows, tokens))
    run = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1] - 1) != 0) - 1
    if known and run[-1] < sequences:
        cu = xla_utils.prepare_cu_seqlens_from_segment_ids(ids, sequences)
    else:
        cu = SEGMENTS(ids, sequences)
    assert cu.dtype == np.int32 and cu.shape == (sequences + 1,)
    np.testing.assert_array_equal(oracle.token_indices(np.asarray(cu), rows * tokens)[:, 0], np.minimum(run, sequences))


@examples(ci=20, thorough=500)
@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_ceiling_division(a, b):
    wanted = a // b + (a % b > 0)
    assert xla_utils.cdiv(a, b) == wanted
    assert int(xla_utils.cdiv(np.int32(a), np.int32(b))) == wanted
