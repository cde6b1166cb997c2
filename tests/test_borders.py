"""Borders of packed sequences, however they come: any integer dtype is read alike, bad ones are refused when known."""

import contextlib
import inspect
import itertools
import random

import jax
import numpy as np
import pytest
from borders import CHUNK, TAKERS, TOKENS
from properties import THOROUGH

import ejkernel
from ejkernel import parallel, xla_utils

SIGNED, UNSIGNED = ["int8", "int16", "int64"], ["uint8", "uint16", "uint32", "uint64"]
DTYPES = SIGNED + UNSIGNED


def program(call, borders):
    """What a call with these borders computes: the program, and the arrays it is given."""
    closed = jax.make_jaxpr(lambda: call(borders))()
    return str(closed.jaxpr), [np.asarray(each) for each in closed.consts]


@pytest.mark.parametrize("name", TAKERS)
def test_any_integer_dtype_is_read_alike(name):
    """The same program on the same arrays as with int32, also where there are more tokens than the dtype counts."""
    at = [*TAKERS].index(name)
    drawn = np.random.default_rng(at)
    # every dtype somewhere, and everything with a signed and an unsigned one
    dtypes = DTYPES if THOROUGH else [SIGNED[at % len(SIGNED)], UNSIGNED[at % len(UNSIGNED)]]
    for _ in range(10 if THOROUGH else 1):
        cu = np.sort([0, *drawn.integers(0, 128, 2)])
        text, arrays = program(TAKERS[name].call, cu.astype(np.int32))
        for dtype in dtypes:
            found_text, found_arrays = program(TAKERS[name].call, cu.astype(dtype))
            assert found_text == text
            for found, expected in zip(found_arrays, arrays, strict=True):
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_integer_dtype_gives_the_same_numbers(dtype, x64):
    """Through all helpers, with known and with traced borders; the results count in int32 or int64."""
    cu = np.array([0, 40, 40, 127])

    def everything(cu):
        return {
            "lens": xla_utils.prepare_lens(cu),
            "tokens": xla_utils.prepare_token_indices(cu, total_tokens=TOKENS),
            "sequence": xla_utils.prepare_sequence_ids(cu, total_tokens=TOKENS),
            "position": xla_utils.prepare_position_ids(cu, total_tokens=TOKENS),
            "chunks": xla_utils.prepare_chunk_indices(cu, CHUNK, total_chunks=TOKENS),
            "offsets": xla_utils.prepare_chunk_offsets(cu, CHUNK),
            "sum": xla_utils.chunk_local_cumsum(np.ones((1, TOKENS, 1), np.float32), CHUNK, cu_seqlens=cu),
        }

    with jax.enable_x64(x64):
        expected = everything(cu.astype(np.int32))
        for found in (everything(cu.astype(dtype)), jax.jit(everything)(cu.astype(dtype))):
            for name, x in found.items():
                np.testing.assert_array_equal(x, expected[name], name)
                if name != "sum":
                    assert x.dtype == ("int64" if x64 and "64" in dtype else "int32")
        known = xla_utils.prepare_chunk_indices(cu.astype(dtype), CHUNK)
        np.testing.assert_array_equal(known, xla_utils.prepare_chunk_indices(cu, CHUNK))


def test_traced_unsigned_borders_of_an_op():
    x = np.random.default_rng(0).normal(size=(3, TOKENS, 2, 4)).astype(np.float32)
    cu = np.array([0, 100, 300])
    run = jax.jit(lambda cu: ejkernel.retention(*x, cu_seqlens=cu))
    for found, expected in zip(run(cu.astype(np.uint32)), run(cu.astype(np.int32)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_everything_that_takes_borders_is_here():
    for prefix, module in (("", ejkernel), ("", xla_utils), ("parallel.", parallel)):
        functions = [each for each in module.__all__ if inspect.isfunction(getattr(module, each))]
        takes = [
            each
            for each in functions
            if {"cu_seqlens", "options"} & {*inspect.signature(getattr(module, each)).parameters}
        ]
        assert takes and {prefix + each for each in takes} <= set(TAKERS)


# the borders, what is said of them, and whether one can tell without knowing how many tokens there are
BAD = [
    ([1, 3, 5], "got first value 1; expected 0", True),
    ([-2, 3, 5], "got first value -2; expected 0", True),
    ([0, 7, 4], "got a decrease at index 2; expected values that never decrease", True),
    ([0, 3, 3, 2, 9], "got a decrease at index 3", True),
    ([0, 5, TOKENS + 1], f"got last value {TOKENS + 1}; expected at most the {TOKENS} tokens", False),
    ([0, 5, 2**32 + 5], f"got last value {2**32 + 5}; expected at most ", True),
    ([0, 2**32 + 5, 7], "got a decrease at index 2", True),
]
HOW = {
    "list": list,
    "tuple": tuple,
    "int32": lambda cu: np.array(cu, np.int32),
    "int64": lambda cu: np.array(cu, np.int64),
    "uint32": lambda cu: np.array(cu, np.uint32),
    "uint64": lambda cu: np.array(cu, np.uint64),
    "jax": lambda cu: jax.numpy.asarray(np.array(cu, np.int32)),
    "jax uint32": lambda cu: jax.numpy.asarray(np.array(cu, np.uint32)),
}
WHERE = {
    "plain": lambda call: call(),
    "jit": lambda call: jax.jit(call)(),
    "shard_map": lambda call: jax.jit(jax.shard_map(call, mesh=OUTER, in_specs=(), out_specs=jax.P()))(),
    "scan": lambda call: jax.lax.scan(lambda carry, _: (carry, call()), 0.0, length=2),
    "vmap": lambda call: jax.vmap(lambda _: call())(np.zeros(2)),
}
OUTER = jax.make_mesh((1,), ("outer",), axis_types=(jax.sharding.AxisType.Auto,))


def in_every_form():
    """The bad borders, where a form has such numbers."""
    for (borders, *known), form in itertools.product(BAD, HOW.values()):
        with contextlib.suppress(OverflowError):
            yield form(borders), *known


@pytest.mark.parametrize("name", TAKERS)
def test_bad_borders_are_refused_wherever_they_are_known(name):
    argument = "cu_seqlens_kv" if "_kv" in name else "cu_seqlens"
    bad = [(cu, message) for cu, message, always in in_every_form() if always or TAKERS[name].counts]
    drawn = random.Random(name)  # others for every name
    for where, call in WHERE.items():
        if where == "shard_map" and "sliced" in name:
            continue  # which is in one already
        for cu, message in bad if THOROUGH else [drawn.choice(bad)]:
            with pytest.raises(ValueError, match=f"^{argument}: {message}"):
                call(lambda cu=cu: TAKERS[name].call(cu))
