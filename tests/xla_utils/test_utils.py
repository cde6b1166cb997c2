"""Packed sequences against their oracle, with borders known only when the compiled function runs."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from ejkernel import xla_utils
from ejkernel.xla_utils import utils
from ejkernel.xla_utils.utils import (
    cdiv,
    identity_dtype_convert,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_cu_seqlens_from_segment_ids,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
)

LENGTHS = {
    "usual": [3, 2, 4],
    "empty inside": [2, 0, 1],
    "empty at both ends": [0, 0, 5, 0],
    "all empty": [0, 0],
    "no sequence": [],
    "one token": [1],
}


def borders(lengths, dtype=np.int32):
    return jnp.asarray(np.cumsum([0, *lengths]), dtype)


def check(actual, expected, dtype):
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, np.asarray(expected).reshape(actual.shape))
    assert actual.shape[0] == len(expected)


@pytest.mark.parametrize("name", LENGTHS)
def test_matches_oracle(name, x64):
    lengths, dtype = LENGTHS[name], "int64" if name == "empty inside" else "int32"
    cu = borders(lengths, dtype)
    known = np.asarray(cu)
    check(prepare_lens(cu), lengths, dtype)
    for total in (None, known[-1] + 3):
        tokens = oracle.token_indices(known, total)
        check(prepare_token_indices(cu, total_tokens=total), tokens, dtype)
        check(prepare_sequence_ids(cu, total_tokens=total), tokens[:, 0], dtype)
        check(prepare_position_ids(cu, total_tokens=total), tokens[:, 1], dtype)
    for size in (2, 64):
        chunks = oracle.chunk_indices(known, size)
        check(prepare_chunk_indices(cu, size), chunks, dtype)
        counts = np.bincount(chunks[:, 0], minlength=len(lengths))
        check(prepare_chunk_offsets(cu, size), np.cumsum([0, *counts]), dtype)
        enough = known[-1] // size + len(lengths)
        check(prepare_chunk_indices(cu, size, total_chunks=enough), oracle.chunk_indices(known, size, enough), dtype)


def test_contract_examples():
    cu = jnp.array([0, 3, 5, 9])
    assert prepare_lens(cu).tolist() == prepare_lens([0, 3, 5, 9]).tolist() == [3, 2, 4]
    assert prepare_position_ids(cu).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert prepare_sequence_ids(cu).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert prepare_chunk_indices(cu, 2).tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
    assert prepare_chunk_offsets(cu, 2).tolist() == [0, 2, 3, 5]
    assert prepare_sequence_ids(np.array([0, 2, 2, 3])).tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    "function, oracle_of",
    [
        (
            lambda cu: prepare_token_indices(cu, total_tokens=10),
            lambda cu: oracle.token_indices(cu, 10),
        ),
        (
            lambda cu: prepare_chunk_indices(cu, 2, total_chunks=8),
            lambda cu: oracle.chunk_indices(cu, 2, 8),
        ),
        (prepare_lens, np.diff),
    ],
    ids=["tokens", "chunks", "lengths"],
)
def test_traced_borders(function, oracle_of):
    traces = []

    def traced(cu):
        traces.append(cu)
        return function(cu)

    compiled = jax.jit(traced)
    cases = np.array([[0, 3, 5, 9], [0, 0, 0, 10], [0, 4, 4, 4]], np.int32)
    for cu in cases:
        np.testing.assert_array_equal(compiled(cu), oracle_of(cu))
    assert len(traces) == 1
    np.testing.assert_array_equal(jax.vmap(function)(cases), [oracle_of(cu) for cu in cases])


def test_known_borders_inside_jit():
    """Borders that a compiled function closes over are known, and need no keyword."""
    cu = jnp.array([0, 3, 3, 5])
    for known in (cu, np.asarray(cu)):
        tokens, chunks = jax.jit(lambda known=known: (prepare_token_indices(known), prepare_chunk_indices(known, 2)))()
        np.testing.assert_array_equal(tokens, oracle.token_indices(np.asarray(cu)))
        np.testing.assert_array_equal(chunks, oracle.chunk_indices(np.asarray(cu), 2))


def test_cdiv():
    for a, b in [(9, 4), (8, 4), (0, 3), (1, 7), (2**31 - 1, 2)]:
        assert cdiv(a, b) == -(a // -b)
        assert isinstance(cdiv(a, b), int)
        assert int(cdiv(jnp.int32(a), b)) == -(a // -b)
    np.testing.assert_array_equal(cdiv(jnp.array([0, 1, 4, 5]), jnp.array([4, 4, 4, 4])), [0, 1, 1, 2])
    for dtype in (np.uint8, np.uint32):
        numbers = np.array([0, 1, 4, 5, 255], dtype)
        for a, b in ((numbers, 4), (jnp.asarray(numbers), 4), (numbers, dtype(4)), (jnp.asarray(numbers), dtype(4))):
            found = cdiv(a, b)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, [0, 1, 1, 2, 64])
    assert cdiv(np.uint32(9), 4) == cdiv(9, jnp.uint32(4)) == 3


def test_masks(x64):
    mask = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0]], bool)
    check(prepare_lens_from_mask(mask), [2, 0, 1], jnp.int32)
    check(prepare_lens_from_mask(mask.astype(np.int64) * 5), [2, 0, 1], jnp.int32)
    check(prepare_cu_seqlens_from_mask(mask), [0, 2, 2, 3], jnp.int32)
    check(prepare_cu_seqlens_from_mask(mask, jnp.int64), [0, 2, 2, 3], jnp.int64)
    check(prepare_cu_seqlens_from_mask(np.zeros((0, 3), bool)), [0], jnp.int32)
    check(jax.jit(prepare_cu_seqlens_from_mask)(mask), [0, 2, 2, 3], jnp.int32)


def runs(ids):
    """The borders, one more than there are runs of equal ids within rows, by looking at every token."""
    starts = [
        row * len(of_row) + token
        for row, of_row in enumerate(ids)
        for token in range(len(of_row))
        if token == 0 or of_row[token] != of_row[token - 1]
    ]
    return [*starts, ids.size]


IDS = {
    "contract": [[1, 1, 2], [3, 3, 3]],
    "row begins with the id that the last one ended with": [[1, 2], [2, 2], [2, 1]],
    "ids come back": [[5, 5, -1, 5, 0, 0]],
    "one token each": [[3], [3], [3]],
    "no tokens": np.zeros((2, 0), int),
    "no rows": np.zeros((0, 3), int),
}


@pytest.mark.parametrize("name", IDS)
def test_borders_from_segment_ids(name):
    ids = np.asarray(IDS[name])
    expected = runs(ids)
    compiled = jax.jit(prepare_cu_seqlens_from_segment_ids, static_argnums=1)
    for room in range(len(expected) + 2):
        known = len(expected) - 1 <= room
        wanted = [*expected[: room + 1], *[ids.size] * (room + 1 - len(expected))]
        check(compiled(ids, room), wanted, jnp.int32)
        if known:
            check(prepare_cu_seqlens_from_segment_ids(ids, room), wanted, jnp.int32)
        else:
            for how in (ids, jnp.asarray(ids)):
                with pytest.raises(
                    ValueError, match=f"^sequences: got {room}; expected at least the {len(expected) - 1} "
                ):
                    jax.jit(lambda how=how, room=room: prepare_cu_seqlens_from_segment_ids(how, room))()


def test_segment_ids_of_any_integers():
    """Also those that JAX would see as equal without 64 bits, and at the ends of unsigned dtypes."""
    wide = np.array([[1, 2**32 + 1, 1, 2**40]])
    check(prepare_cu_seqlens_from_segment_ids(wide, 4), [0, 1, 2, 3, 4], jnp.int32)
    ends = np.array([[255, 255, 0], [0, 255, 255]], np.uint8)
    for found in (ends, jnp.asarray(ends)):
        check(prepare_cu_seqlens_from_segment_ids(found, 5), [0, 2, 3, 4, 6, 6], jnp.int32)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cotangent_arrives_in_dtype(dtype, own, jit):
    seen = []

    @jax.custom_vjp
    def upstream(x):
        return x

    def upstream_backward(_, cotangent):
        seen.append(cotangent.dtype)
        return (cotangent.astype(own),)

    upstream.defvjp(lambda x: (x, None), upstream_backward)
    convert = identity_dtype_convert(dtype)
    x = jnp.asarray([1.0, 1.1, -3.3], own)
    weights = jnp.asarray([0.3, 1.7, 2.9], own)

    def through(f):
        value, back = jax.vjp(f, x)
        return value, back(weights)[0]

    transform = jax.jit if jit else lambda f: f
    value, gradient = transform(lambda: through(convert))()
    np.testing.assert_array_equal(value, x)
    assert value.dtype == own
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, weights.astype(dtype))
    _, gradient = transform(lambda: through(lambda x: convert(upstream(x))))()
    assert seen == [dtype]
    assert gradient.dtype == own
    np.testing.assert_array_equal(gradient, weights.astype(dtype).astype(own))


def test_convert_repairs_a_wrong_cotangent():
    """The usual use: a gradient rule that returns float32 for a bfloat16 argument, with JAX's own arithmetic above."""

    @jax.custom_vjp
    def careless(x):
        return x

    careless.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent.astype(jnp.float32),))
    convert = identity_dtype_convert(jnp.bfloat16)
    x = jnp.arange(3, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(convert(x), x)
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: careless(convert(x * x)).astype(jnp.float32))))(x)
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [0, 2, 4]


def test_exported():
    public = {name for name in vars(utils) if name.startswith("prepare_")} | {"cdiv", "identity_dtype_convert"}
    assert len(public) == 11
    assert public | {"chunk_global_cumsum", "chunk_local_cumsum"} == set(xla_utils.__all__)
    for name in xla_utils.__all__:
        assert callable(getattr(xla_utils, name))


@pytest.mark.parametrize(
    "argument, call",
    [
        ("cu_seqlens", lambda: prepare_lens([1, 2])),
        ("out_dtype", lambda: prepare_cu_seqlens_from_mask(np.ones((1, 2), bool), np.float32)),
        ("total_tokens", lambda: prepare_token_indices([0, 4], total_tokens=3)),
        ("total_tokens", lambda: prepare_sequence_ids([0, 4], total_tokens=3)),
        ("chunk_size", lambda: prepare_chunk_offsets([0, 4], 0)),
        ("chunk_size", lambda: prepare_chunk_indices([0, 4], 0)),
        ("total_chunks", lambda: prepare_chunk_indices([0, 4], 2, total_chunks=1)),
        ("dtype", lambda: identity_dtype_convert(np.int32)),
    ],
)
def test_errors_name_the_argument(argument, call):
    with pytest.raises((TypeError, ValueError), match=f"^{argument}: got "):
        call()
