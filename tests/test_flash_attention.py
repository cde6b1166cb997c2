"""`flash_attention` against the oracle and `attention`, its memory, and what it must not compute."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import (
    BLOCKWISE,
    CASES,
    EMPTY,
    FEW,
    OFFSET,
    PACKED,
    QUICK,
    SEGMENTED,
    Case,
    check,
    check_second_gradients,
    results_and_gradients,
)
from conftest import assert_close
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from ejkernel.attention import attention, flash_attention
from ejkernel.kernels import _differentiable
from ejkernel.kernels._xla.flash_attention import _interface
from ejkernel.kernels._xla.flash_attention import flash_attention as pinned

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 3e-6, "float64": 1e-13}
# small enough for every case to have several blocks, of both kinds, the last of them short
BLOCKS = (3, 2)
EVERYTHING = next(each for each in CASES if each.name == "everything")
PACKED_EVERYTHING = next(each for each in PACKED if each.name == "packed, everything")
SEGMENTS_EVERYTHING = next(each for each in SEGMENTED if each.name == "segments, everything")


def options_of(case):
    """The options, with borders as arrays."""
    borders = {name: np.array(each, np.int32) for name, each in case.options.items() if name.startswith("cu_")}
    return {**case.options, **borders}


def flash(case, **more):
    """`flash_attention` for the options of `case` as a function of arrays by name."""
    more = {"dtype": None, "block_sizes": BLOCKS, **more}
    return lambda **arrays: flash_attention(**arrays, **options_of(case), **more)


@pytest.mark.parametrize("case", [*BLOCKWISE, *PACKED, *SEGMENTED, *OFFSET, *EMPTY], ids=str)
def test_matches_oracle(case, x64):
    """Output, log-sum-exp, and the gradients of both, in float64."""
    check(
        flash(case, return_lse=True),
        lambda **arrays: oracle.flash_attention(**arrays, **case.options),
        case.arrays(),
        TOLERANCE["float64"],
    )


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries_match_oracle(case, x64):
    """The same, with the blocks left to the library."""
    check(
        flash(case, return_lse=True, block_sizes=None),
        lambda **arrays: oracle.flash_attention(**arrays, **case.options),
        case.arrays(),
        TOLERANCE["float64"],
    )


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (4, 4), (32, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_query_against_a_long_cache(dtype, heads, kv_heads):
    """However much of it is filled or in the window, and whatever lies in the rest."""
    case = Case("", batch=1, queries=1, keys=4100, heads=heads, kv_heads=kv_heads, key_dim=3, value_dim=2)
    arrays = case.arrays(jnp.dtype(dtype))
    run = jax.jit(lambda offset, **arrays: flash_attention(**arrays, query_offset=offset, **options))
    options = {"causal": True, "sliding_window": (2000, 0)}
    for offset in (0, 1024, 3000, 4099):
        poisoned = {name: x.copy() for name, x in arrays.items()}
        for name in ("key", "value"):
            poisoned[name][:, offset + 1 :] = poisoned[name][:, : max(offset - 2000, 0)] = np.nan
        expected = oracle.flash_attention(**arrays, query_offset=offset, **options)[0]
        assert_close(run(offset, **poisoned), expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "case, dtype", [(EVERYTHING, "float16"), (EVERYTHING, "bfloat16"), (PACKED_EVERYTHING, "bfloat16")]
)
def test_half_precision(case, dtype):
    """Output and gradients as near to those in float32 as the dtype allows."""
    arrays = case.arrays(jnp.dtype(dtype))
    cotangent = (
        np.random.default_rng(0).normal(size=(*arrays["query"].shape[:3], case.value_dim)).astype(jnp.dtype(dtype))
    )
    mine = results_and_gradients(flash(case), arrays, cotangent)
    exact = {name: each if each.dtype == bool else each.astype(np.float32) for name, each in arrays.items()}
    right = results_and_gradients(flash(case), exact, cotangent.astype(np.float32))
    assert_close(right[0], oracle.flash_attention(**exact, **case.options)[0], TOLERANCE["float32"])
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert one.dtype == dtype
        assert_close(one, other, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", queries=300, keys=700, heads=4, kv_heads=2, options={"causal": True}),
        Case("window", queries=1100, keys=1100, options={"sliding_window": (40, 10)}, sink_shape=(1,)),
    ],
    ids=str,
)
def test_own_block_sizes(case):
    """The sizes that the library picks, and lengths that they do not divide."""
    arrays = case.arrays(np.float32)
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape)
    mine = results_and_gradients(flash(case, block_sizes=None), arrays, cotangent)
    right = results_and_gradients(
        lambda **arrays: attention(**arrays, **case.options, dtype=None)[0], arrays, cotangent
    )
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, 2e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (2, 2, 5, 1), (2, 4, 1, 1)], ids=str)
def test_bias_broadcast_over_queries_or_keys(shape, x64):
    # without sinks a bias that is the same for all keys has no gradient
    arrays = Case("", keys=7, heads=4, kv_heads=2, sink_shape=(2,)).arrays()
    arrays["bias"] = np.random.default_rng(3).normal(size=shape)
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape)
    mine = results_and_gradients(flash(CASES[0]), arrays, cotangent)
    right = results_and_gradients(lambda **arrays: attention(**arrays, dtype=None)[0], arrays, cotangent)
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, TOLERANCE["float64"])


def test_packed_rank_3_takes_a_mask_and_a_bias_of_rank_4(x64):
    """`[1, heads, S, L]` of the whole stream; both apply."""
    case = PACKED_EVERYTHING
    arrays = case.arrays()
    stream = {name: x[0] if name in ("query", "key", "value") else x for name, x in arrays.items()}
    expected, _ = oracle.flash_attention(**arrays, **case.options)
    assert_close(flash(case)(**stream), expected[0], TOLERANCE["float64"])


ATTENTIONS = [lambda *arrays, **options: attention(*arrays, dtype=None, **options)[0], flash_attention]
FLOAT32 = np.finfo(np.float32)


@pytest.mark.parametrize("call", ATTENTIONS, ids=["attention", "flash_attention"])
@pytest.mark.parametrize(
    "size, options, uniform",
    [
        (1.0, {"logits_soft_cap": float(FLOAT32.max)}, False),
        (1.0, {"logits_soft_cap": 1e300}, False),
        (1.0, {"logits_soft_cap": 1e-300}, True),
        # what is too large to be told apart has equal shares, also where a bias is to mask a whole row
        (1e20, {}, True),
        (300.0, {"softmax_dtype": np.float16}, True),
        (1.0, {"softmax_dtype": np.float16, "bias": FLOAT32.min}, True),
        (1.0, {"softmax_dtype": jnp.bfloat16, "bias": FLOAT32.min}, True),
    ],
    ids=["largest cap", "no cap", "all capped", "infinite", "beyond float16", "bias beyond float16", "beyond bfloat16"],
)
def test_what_a_dtype_has_no_number_for(call, size, options, uniform):
    """Finite scores and caps as large or small as they may be: weights sum up to 1, and gradients are numbers."""
    query, key, value = Case("", batch=1).arrays(np.float32).values()
    query, key = (np.full_like(x, size) if size > 1 else x for x in (query, key))
    if "bias" in options:
        options = {**options, "bias": np.full((1, 1, 5, 5), options["bias"])}
    cotangent = np.random.default_rng(0).normal(size=value.shape).astype(np.float32)
    output, pull = jax.vjp(functools.partial(call, **options), query, key, value)
    expected, plain = jax.vjp(call, 0 * query if uniform else query, key, value)
    assert_close(output, expected, 1e-2 if "softmax_dtype" in options else 1e-6)
    *others, d_value = pull(cotangent)
    *right, d_value_right = plain(cotangent)
    assert_close(d_value, d_value_right, 1e-2 if "softmax_dtype" in options else 1e-6)
    assert all(np.isfinite(x).all() for x in others)
    if not uniform:
        for found, expected in zip(others, right, strict=True):
            assert_close(found, expected, 1e-6)


def test_output_dtype_does_not_coarsen_gradients():
    arrays = CASES[0].arrays(np.float32)
    assert flash_attention(**arrays).dtype == np.float32
    assert flash_attention(**arrays, dtype=jnp.bfloat16).dtype == jnp.bfloat16

    def gradients(dtype):
        weight = jnp.arange(5.0)[None, :, None, None]
        return jax.grad(lambda q: (flash_attention(**{**arrays, "query": q}, dtype=dtype) * weight).sum())

    assert_close(gradients(jnp.bfloat16)(arrays["query"]), gradients(None)(arrays["query"]), 1e-6)


@pytest.mark.parametrize("case", [EVERYTHING, PACKED_EVERYTHING, SEGMENTS_EVERYTHING], ids=str)
def test_gradient_of_gradient(case, x64):
    arrays = case.arrays()
    arrays["bias"] = np.maximum(arrays["bias"], -5)
    check_second_gradients(flash(case), arrays, ("query", "key", "value", "bias", "softmax_aux"))


def test_dropout_drops_what_attention_drops(x64):
    """The same weights whatever the blocks and the kind of key, and gradients that know which."""
    arrays = Case("", queries=4).arrays()
    drop = {"deterministic": False, "dropout_prob": 0.4, "dtype": None}
    kept = np.asarray(attention(**arrays, **drop, dropout_rng=jax.random.key(7))[1] != 0)
    assert 0.4 < kept.mean() < 0.8

    def expected(**arrays):
        return (oracle.attention(**arrays, kept=kept, dropout_prob=0.4)[0],)

    for key, blocks in ((jax.random.key(7), BLOCKS), (jax.random.PRNGKey(7), (4, 5)), (jax.random.key(7), None)):
        function = flash(CASES[0], **drop, dropout_rng=key, block_sizes=blocks)
        check(lambda function=function, **arrays: (function(**arrays),), expected, arrays, TOLERANCE["float64"])


def test_padding_by_mask_has_no_effect_even_if_it_is_nan():
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 1, 6, 2, 4)).astype(np.float32)
    mask = np.zeros((1, 1, 6, 6), bool)
    mask[..., :4, :5] = True

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(query, key, value, d_output):
        output, pull = jax.vjp(lambda *a: flash_attention(*a, mask, dtype=None, block_sizes=BLOCKS), query, key, value)
        return [output, *pull(d_output)]

    d_output = random.normal(size=query.shape).astype(np.float32)
    clean = run(query, key, value, d_output)
    query[:, 4:], d_output[:, 4:], key[:, 5:], value[:, 5:] = np.nan, np.nan, np.inf, np.nan
    for before, after in zip(clean, run(query, key, value, d_output), strict=True):
        assert (before == after).all()


@pytest.mark.parametrize("block_sizes", [None, (16, 16)])
def test_keys_past_a_rows_own_last_one_have_no_effect_even_if_they_are_nan(block_sizes):
    """Rows of a cache are filled to different lengths; another row still sees keys there."""
    rng = np.random.default_rng(0)
    query, *cache = rng.normal(size=(2, 40, 2, 8)), *rng.normal(size=(2, 2, 64, 2, 8))
    offset = np.array([3, 20])

    def results(query, *cache):
        run = functools.partial(flash_attention, causal=True, query_offset=offset, block_sizes=block_sizes)
        output, pull = jax.vjp(run, query, *cache)
        return output, pull(output)

    spoilt = [x.copy() for x in cache]
    for x, row in itertools.product(spoilt, range(2)):
        x[row, offset[row] + 40 :] = np.nan
    jax.tree.map(np.testing.assert_array_equal, results(query, *spoilt), results(query, *cache))


def test_new_borders_do_not_recompile():
    query, key, value = np.random.default_rng(0).normal(size=(3, 12, 2, 4)).astype(np.float32)
    traced = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(cu):
        traced.append(cu)
        return flash_attention(query, key, value, cu_seqlens=cu, causal=True, dtype=None, block_sizes=BLOCKS)

    for borders in ([0, 3, 12], [0, 12, 12], [0, 0, 7]):
        cu = np.array(borders, np.int64)
        expected, _ = oracle.flash_attention(query[None], key[None], value[None], cu_seqlens=cu, causal=True)
        assert_close(run(jnp.asarray(borders)), expected[0], TOLERANCE["float32"])
    assert len(traced) == 1


def test_transformations():
    """`vmap` (of borders too), `checkpoint`, `scan` and `shard_map` change nothing."""
    case = Case("", batch=3, queries=7, keys=7, heads=4, kv_heads=2, sink_shape=(2,), options={"causal": True})
    arrays = {name: jnp.asarray(each) for name, each in case.arrays(np.float32).items()}
    offset = jnp.arange(3)
    rows = {name: 0 if name != "softmax_aux" else None for name in arrays}

    def whole(arrays, offset):
        return flash(case)(**arrays, query_offset=offset)

    def gradients(function):
        loss = jax.value_and_grad(lambda arrays, offset: (function(arrays, offset) ** 2).sum())
        return jax.jit(loss, compiler_options=QUICK)

    def one_row(arrays, offset):
        given = {name: each[None] if rows[name] == 0 else each for name, each in arrays.items()}
        return whole(given, offset)[0]

    def packed_row(arrays, offset):
        return flash(case)(**arrays, query_offset=offset, cu_seqlens=jnp.array([0, 7]) + 0 * offset)

    def scanned(arrays, offset):
        moving = {name: each for name, each in arrays.items() if rows[name] == 0}
        step = lambda _, xs: (None, jax.checkpoint(one_row)({**arrays, **xs[0]}, xs[1]))  # noqa: E731
        return jax.lax.scan(step, None, (moving, offset))[1]

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: PartitionSpec("rows") if rows[name] == 0 else PartitionSpec() for name in arrays}
    sharded = jax.shard_map(whole, mesh=mesh, in_specs=(specs, PartitionSpec("rows")), out_specs=PartitionSpec("rows"))
    expected = gradients(whole)(arrays, offset)
    every = (jax.vmap(one_row, (rows, 0)), jax.vmap(packed_row, (rows, 0)), scanned, sharded)
    for function in every:
        for one, other in zip(
            jax.tree.leaves(expected), jax.tree.leaves(gradients(function)(arrays, offset)), strict=True
        ):
            assert_close(other, one, 1e-5)


def temporaries(tokens, **options):
    """Bytes beside arguments and results, forward and backward, with one head of 64."""
    shape = jax.ShapeDtypeStruct((1, tokens, 1, 64), np.float32)

    def run(query, key, value):
        return jax.grad(lambda *a: (flash_attention(*a, dtype=None, **options) ** 2).sum(), (0, 1, 2))(
            query, key, value
        )

    return jax.jit(run).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


LINEAR_MEMORY = {
    "causal": lambda tokens: {"causal": True},
    "packed": lambda tokens: {"cu_seqlens": np.array([0, 1000, 5000])},
    "segments": lambda tokens: {"segment_ids": np.arange(tokens)[None] // 1000},
}


@pytest.mark.parametrize("name", LINEAR_MEMORY)
def test_memory_is_linear(name):
    short, long = (temporaries(tokens, **LINEAR_MEMORY[name](tokens)) for tokens in (8192, 32768))
    assert short < 8192 * 8192 * 4 / 8, f"{short} bytes: an eighth of the scores or more"
    assert long < 4.5 * short, f"{short} bytes grew to {long} with four times the tokens"


def loop_lengths(jaxpr):
    """Of every loop in a program, those inside others and inside an op's passes too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"]
        inner = list(jaxprs_in_params(equation.params))
        if equation.primitive.name == "ejkernel_forward":
            inner.append(equation.params["closed"].jaxpr.jaxpr)
        if equation.primitive.name == "ejkernel_transpose":
            backward = functools.partial(_differentiable._run_transpose, **equation.params)
            inner.append(jax.make_jaxpr(backward)(*(each.aval for each in equation.invars)).jaxpr)
        for each in inner:
            yield from loop_lengths(each)


def test_many_sequences_take_no_more_blocks_than_few():
    """Of queries, forward and backward; of keys, a block visits those in its queries' sight."""
    shape = jax.ShapeDtypeStruct((2048, 2, 16), np.float32)

    def longest(borders):
        def run(*arrays):
            return jax.grad(lambda *a: flash_attention(*a, causal=True, cu_seqlens=borders).sum(), (0, 1, 2))(*arrays)

        return max(loop_lengths(jax.make_jaxpr(run)(shape, shape, shape).jaxpr))

    few = longest(np.arange(0, 2049, 256))
    assert longest(np.arange(2049)) <= few
    assert longest(np.r_[np.zeros(1000, int), np.arange(1049)]) <= few


PACKINGS = [
    ([0, 3, 3, 4, 9, 12], None),
    ([0, 1, 2, 3, 4, 5], None),
    ([0, 3, 3, 8, 11], [0, 4, 6, 6, 12]),
]


@pytest.mark.parametrize("borders, key_borders", PACKINGS)
@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_packed_sequences_share_blocks_and_nothing_else(borders, key_borders, spoilt):
    """One that is NaN changes no bit of another, nor does padding, whichever array it is in; and is NaN itself."""
    random = np.random.default_rng(0)
    query, key, value, d_output = random.normal(size=(4, 12, 2, 4)).astype(np.float32)
    cu, cu_kv = np.array(borders), np.array(key_borders or borders)
    sinks = random.normal(size=(2, 1)).astype(np.float32)
    options = {"softmax_aux": sinks, "causal": True, "block_sizes": (8, 8)}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(query, key, value, d_output):
        def attend(*arrays):
            return flash_attention(*arrays, **options, cu_seqlens=cu, cu_seqlens_kv=cu_kv)

        output, pull = jax.vjp(attend, query, key, value)
        return [output, *pull(d_output)]

    arrays, of_keys = [query, key, value, d_output], [False, True, True, False]
    clean = run(*arrays)
    for sequence, which in itertools.product(range(len(cu) - 1), range(4)):
        dirty = [each.copy() for each in arrays]
        own = cu_kv if of_keys[which] else cu
        dirty[which][own[sequence] : own[sequence + 1], 0, 1] = dirty[which][own[-1] :] = spoilt
        found = run(*dirty)
        for before, after, own in zip(clean, found, (cu, cu, cu_kv, cu_kv), strict=True):
            others = np.r_[0 : own[sequence], own[sequence + 1] : 12]
            np.testing.assert_array_equal(np.asarray(before)[others], np.asarray(after)[others])
        (first, last), first_key = cu[sequence : sequence + 2], cu_kv[sequence]
        if np.isnan(spoilt) and first < last and first_key < cu_kv[sequence + 1]:
            # what the last query sees, or who sees the first key
            assert np.isnan(found[3][first_key, 0] if which == 3 else found[0][last - 1, 0]).any()


def test_memory_does_not_grow_with_tokens_times_sequences():
    few, many = (temporaries(16384, cu_seqlens=np.arange(0, 16385, 16384 // n)) for n in (4, 4096))
    assert many < 2 * few, f"{few} bytes grew to {many} with a thousand times the sequences"


def test_contract_paths_take_the_contract_arguments():
    mine = list(inspect.signature(_interface.flash_attention).parameters.values())
    contract = list(inspect.signature(attention).parameters.values())[:-1]
    assert [each.name for each in mine[: len(contract)]] == [each.name for each in contract]
    assert all(each.kind == inspect.Parameter.KEYWORD_ONLY for each in mine[len(contract) :])
    assert pinned is _interface.flash_attention


def test_gradients_of_scores_beyond_float16(x64):
    """Those of query and key fit into float16 where what they are made of does not."""
    random = np.random.default_rng(0)
    query, key, value, cotangent = random.uniform(-1, 1, size=(4, 1, 9, 2, 8))
    arrays = [0.01 * query, 0.01 * key, 2.0**13 * value]

    def gradients(dtype):
        moving = [jnp.asarray(x, jnp.float16).astype(dtype) for x in arrays]
        pull = jax.vjp(functools.partial(flash_attention, causal=True), *moving)[1]
        return pull(jnp.asarray(2.0**8 * cotangent, jnp.float16).astype(dtype))

    for actual, exact in zip(gradients(jnp.float16), gradients(jnp.float64), strict=True):
        assert_close(actual, exact, 2e-3, "gradient")
