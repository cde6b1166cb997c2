"""`attention` against its oracle, and as a function JAX can transform."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import CASES, EMPTY, Case, check, check_second_gradients
from conftest import assert_close
from jax.sharding import PartitionSpec

from ejkernel.attention import attention, flash_attention
from ejkernel.kernels._xla.attention import _interface
from ejkernel.kernels._xla.attention import attention as pinned

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-13}
EVERY_DTYPE = {"plain", "mask by group", "everything"}


@pytest.mark.filterwarnings("ignore:attention_mask")
@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_matches_oracle(case, x64):
    """Output, weights, and the gradients of both, in float64."""
    check(
        lambda **arrays: attention(**arrays, **case.options, dtype=None),
        lambda **arrays: oracle.attention(**arrays, **case.options),
        case.arrays(),
        TOLERANCE["float64"],
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", [each for each in CASES if each.name in EVERY_DTYPE], ids=str)
def test_every_dtype(case, dtype):
    arrays = case.arrays(jnp.dtype(dtype))
    expected = oracle.attention(**arrays, **case.options)
    for actual, right in zip(attention(**arrays, **case.options, dtype=None), expected, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, right, TOLERANCE[dtype])


@pytest.mark.parametrize("call", [lambda *arrays: attention(*arrays, dtype=None)[0], flash_attention])
def test_float16_gradients_of_a_scaled_loss(call):
    """All of them fit in float16, but what the weights' gradient would be does not."""
    arrays = Case("", batch=1, queries=9, keys=9, key_dim=16, value_dim=64).arrays(np.float16)
    cotangent = np.float16(6000) * np.random.default_rng(1).normal(size=arrays["value"].shape).astype(np.float16)
    _, expected = oracle.attention_gradients(cotangent, **arrays, softmax_scale=0.25)
    for found, name in zip(jax.vjp(call, *arrays.values())[1](cotangent), arrays, strict=True):
        assert_close(found, expected[name], TOLERANCE["float16"], name)


def test_dtypes_of_results_and_softmax(x64):
    arrays = CASES[0].arrays(np.float32)
    expected = oracle.attention(**arrays)[0]
    for actual in attention(**arrays):
        assert actual.dtype == jnp.bfloat16
    output, weights = attention(**arrays, dtype=np.float64, softmax_dtype=jnp.bfloat16)
    assert output.dtype == weights.dtype == np.float64
    error = np.abs(weights.sum(-1) - 1).max()
    assert 1e-4 < error < 1e-1, "softmax_dtype made no difference"
    assert_close(output, expected, TOLERANCE["bfloat16"])
    mixed = attention(arrays["query"].astype(jnp.bfloat16), arrays["key"], arrays["value"].astype(jnp.float16))
    assert_close(mixed[0], expected, TOLERANCE["bfloat16"])


def test_gradient_of_gradient(x64):
    case = next(each for each in CASES if each.name == "everything")
    check_second_gradients(
        lambda **arrays: attention(**arrays, **case.options, dtype=None)[0],
        case.arrays(),
        ("query", "key", "value", "softmax_aux"),
    )


def test_learned_scale(x64):
    arrays = {**CASES[0].arrays(), "softmax_scale": np.array(0.4)}
    check(functools.partial(attention, dtype=None), oracle.attention, arrays, TOLERANCE["float64"])


@pytest.mark.parametrize("op", [lambda *a, **o: attention(*a, dtype=None, **o)[0], flash_attention])
def test_a_learned_scale_is_as_exact_as_a_number(op):
    """Queries, scaled, would overflow float16."""
    query, key = ((100 * x).astype(np.float16) for x in np.random.default_rng(0).normal(size=(2, 1, 9, 2, 8)))
    value = np.random.default_rng(1).normal(size=key.shape).astype(np.float16)
    found = op(query, key, value, softmax_scale=jnp.float32(600))
    assert found.dtype == np.float16
    assert_close(found, oracle.attention(query, key, value, softmax_scale=600.0)[0], TOLERANCE["float16"])


def test_dead_rows_have_zero_gradients():
    case = next(each for each in CASES if each.name == "sinks by head")
    arrays = case.arrays(np.float32)

    def loss(query):
        return (attention(**{**arrays, "query": query}, dtype=None)[0] ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(arrays["query"])
    assert (gradient[:, case.dead[0]] == 0).all()
    assert (gradient[:, :4] != 0).any()


@pytest.mark.parametrize(
    "options", [{"mask": True}, {"mask": True, "one": True}, {"causal": True}, {"sliding_window": (9, 1)}], ids=str
)
def test_padding_has_no_effect_even_if_it_is_nan(options):
    """Keys that nobody may attend to and queries that may attend nowhere."""
    options = dict(options)
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 1, 6, 2, 4)).astype(np.float32)
    queries, keys = 6, 6
    if options.pop("mask", False):
        queries, keys = 4, 5
        mask = np.zeros((1, 1, 6, 6), bool)
        mask[..., :queries, :keys] = True
        if options.pop("one", False):
            query, mask, queries = query[:, :1], mask[:, :, :1], 1
        options = {"attention_mask": mask}
    else:
        query, keys = query[:, :4], 4 + options.get("sliding_window", (0, 0))[1]

    @jax.jit
    def run(query, key, value):
        results, pull = jax.vjp(lambda *parts: attention(*parts, **options, dtype=None), query, key, value)
        return [*results, *pull(results)]

    clean = run(query, key, value)
    query[:, queries:], key[:, keys:], value[:, keys:] = np.nan, np.inf, np.nan
    for before, after in zip(clean, run(query, key, value), strict=True):
        assert (before == after).all()


def test_head_groups_share_keys():
    arrays = next(each for each in CASES if each.name == "grouped").arrays(np.float32)
    repeated = {**arrays, **{name: np.repeat(arrays[name], 2, 2) for name in ("key", "value")}}
    assert_close(attention(**arrays, dtype=None)[0], attention(**repeated, dtype=None)[0], 1e-6)


def test_mask_is_causal():
    arrays = CASES[0].arrays(np.float32)
    mask = np.tril(np.ones((1, 1, 5, 5), bool))
    for one, other in zip(attention(**arrays, causal=True), attention(**arrays, attention_mask=mask), strict=True):
        assert (one == other).all()


def test_masks_and_biases_broadcast_over_queries_and_keys():
    arrays = CASES[0].arrays(np.float32)
    mask = np.array([True, True, False, True, True])
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    full = attention(**arrays, attention_mask=np.broadcast_to(mask, (2, 1, 5, 5)))
    for each in ({"attention_mask": mask[None, None, None]}, {"bias": bias[None, None, None]}):
        assert all((one == other).all() for one, other in zip(full, attention(**arrays, **each), strict=True))


def test_init_bias_is_called_only_without_mask_and_bias():
    arrays = CASES[0].arrays(np.float32)
    bias = np.random.default_rng(0).normal(size=(2, 1, 5, 5)).astype(np.float32)
    called = attention(**arrays, init_bias=lambda: bias)
    given = attention(**arrays, bias=bias)
    assert (called[1] == given[1]).all()

    def refuse():
        raise AssertionError("init_bias was called")

    attention(**arrays, bias=bias, init_bias=refuse)
    attention(**arrays, attention_mask=np.ones((1, 1, 5, 5), bool), init_bias=refuse)


@pytest.mark.parametrize("op", [attention, pinned])
def test_mask_beside_a_bias_is_ignored_aloud(op):
    """On every call, pointing at the caller."""
    case = next(each for each in CASES if each.name == "bias and mask")
    arrays = case.arrays(np.float32)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"attention_mask: ignored.* bias .*flash_attention") as found:
            weights = op(**arrays)[1]
        assert [each.filename for each in found] == [__file__]
    del arrays["attention_mask"]
    assert (weights == op(**arrays)[1]).all()


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_dropout(make_key):
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 2, 32, 2, 4)).astype(np.float32)
    options = {"dtype": None, "dropout_prob": 0.25, "deterministic": False}
    output, weights = attention(query, key, value, dropout_rng=make_key(0), **options)
    whole = attention(query, key, value, dtype=None)[1]
    kept = np.asarray(weights != 0)
    expected = oracle.attention(query, key, value, kept=kept, dropout_prob=0.25)
    assert_close(output, expected[0], 2e-6)
    assert_close(weights, expected[1], 2e-6)
    assert abs(kept.mean() - 0.75) < 0.02
    # every weight has a draw of its own: no axis shares one
    for axis in range(4):
        assert (kept != np.roll(kept, 1, axis)).any((0, 1, 2, 3))
        assert 0.3 < (kept != np.roll(kept, 1, axis)).mean() < 0.45
    again = attention(query, key, value, dropout_rng=make_key(0), **options)[1]
    other = attention(query, key, value, dropout_rng=make_key(1), **options)[1]
    assert (weights == again).all() and (weights != other).any()
    still = attention(query, key, value, dropout_rng=make_key(0), **{**options, "deterministic": True})[1]
    assert (still == whole).all()


def test_transformations():
    """`vmap`, `checkpoint`, `scan` and `shard_map` change nothing."""
    case = next(each for each in CASES if each.name == "everything")
    arrays = {name: jnp.asarray(each) for name, each in case.arrays(np.float32).items() if name != "bias"}

    def whole(arrays):
        return attention(**arrays, **case.options, dtype=None)[0]

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda arrays: (function(arrays) ** 2).sum()))

    def each_row(arrays):
        split = {name: each[:, None] if name != "softmax_aux" else each for name, each in arrays.items()}
        axes = {name: 0 if name != "softmax_aux" else None for name in arrays}
        return jax.vmap(whole, (axes,))(split)

    def scanned(arrays):
        rows = {name: each[:, None] for name, each in arrays.items() if name != "softmax_aux"}
        return jax.lax.scan(lambda _, row: (None, whole({**row, "softmax_aux": arrays["softmax_aux"]})), None, rows)[1]

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = {name: PartitionSpec("rows") if name != "softmax_aux" else PartitionSpec() for name in arrays}
    sharded = jax.shard_map(whole, mesh=mesh, in_specs=(spec,), out_specs=PartitionSpec("rows"))

    expected = loss(whole)(arrays)
    for function in (each_row, jax.checkpoint(whole), scanned, sharded):
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(loss(function)(arrays)), strict=True):
            assert_close(other, one, 1e-5)


def test_unused_weights_cost_nothing():
    query, key, value = jnp.zeros((3, 1, 64, 2, 8))

    def size(pick):
        compiled = jax.jit(lambda *a: pick(attention(*a, dtype=None))).lower(query, key, value).compile()
        return compiled.memory_analysis().output_size_in_bytes

    assert size(lambda both: both[0]) == query.nbytes
    assert size(lambda both: both) >= query.nbytes + 2 * 64 * 64 * 4


def test_contract_paths_take_the_contract_arguments():
    names = (
        "query key value attention_mask bias init_bias deterministic dropout_rng softmax_aux softmax_scale"
        " logits_soft_cap dtype softmax_dtype dropout_prob causal sliding_window"
    )
    assert list(inspect.signature(_interface.attention).parameters) == names.split()
    assert pinned is _interface.attention
    arrays = CASES[0].arrays(np.float32)
    assert (pinned(**arrays)[0] == attention(**arrays, platform="xla")[0]).all()
