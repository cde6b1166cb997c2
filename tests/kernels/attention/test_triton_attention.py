"""The Triton kernels of softmax attention, interpreted on the CPU, against the oracle and against XLA."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import CASES, OFFSET, PACKED, SEGMENTED, Case, check
from attention_leaks import check_leaks, gradients_of, tensors
from conftest import assert_close
from jax.sharding import PartitionSpec
from ring_of_one import on_a_ring, one_by_one
from triton_attention_cases import (
    FEW,
    GROUPED,
    LONG,
    differences,
    directions,
    exact,
    expected,
    flash,
    options_of,
    tangents,
    with_gradients,
)

from ejkernel._dispatch import Implementation
from ejkernel.attention import flash_attention
from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.attention import triton, xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton import backward, plan
from ejkernel.kernels.attention.triton import blocks as triton_blocks
from ejkernel.kernels.attention.triton.plan import Config
from ejkernel.parallel import ring_attention

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

from triton_interpreter import interpreted

# the smallest tiles that dots take, so that a few dozen tokens are several blocks, walked in every way there is
TILE = Tile(16, 16)
JOINED = replace(TILE, joined=True)
OTHERS = {"bias": TILE, "decoding": TILE}
SMALL = {
    plan.PACKED: Config(forward=JOINED, query=JOINED, key=JOINED, **OTHERS),
    plan.SHORT: Config(forward=TILE, query=TILE, key=JOINED, **OTHERS),
    plan.LONG: Config(forward=TILE, query=TILE, key=TILE, **OTHERS, apart=True),
    plan.MASKED: Config(forward=JOINED, query=TILE, key=JOINED, **OTHERS),
    plan.BIASED: Config(forward=JOINED, query=JOINED, key=TILE, **OTHERS),
    plan.BIASED_WIDE: Config(forward=TILE, query=JOINED, key=TILE, **OTHERS, apart=True),
}
# one tile would hold all of these, and the one above has already seen what they differ in
SHORT = [each for each in [*CASES, *PACKED, *SEGMENTED, *OFFSET] if each.options.get("cu_seqlens") != [0]]
TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2}
# head dims above 256, by the tiles that a GPU has for them
CONFIGURE = plan.configure
LARGE = [
    Case("causal", batch=1, queries=70, keys=70, key_dim=320, value_dim=512, **GROUPED, options={"causal": True}),
    Case("few", queries=2, keys=40, key_dim=512, value_dim=300, options={"causal": True, "query_offset": 30}),
]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(plan, "configure", lambda *facts: SMALL[facts[-1]])
    monkeypatch.setattr(plan, "FEW_ROWS", 0)
    for module in (plan, backward):
        monkeypatch.setattr(module, "FILL", 16)
    chosen = Implementation("triton", None, triton.supports, triton.run)
    other = Implementation("xla", None, xla.supports, xla.run)
    monkeypatch.setattr(sys.modules["ejkernel.attention"], "FLASH_ATTENTION", (chosen, other))
    with interpreted():
        yield


@pytest.mark.parametrize("case", [*LONG, *SHORT], ids=str)
def test_matches_oracle(case):
    """Output, log-sum-exp and the gradients of both."""
    check(flash(case, return_lse=True), expected(case), case.arrays(np.float32), 3e-6, 2e-5)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_decoding(case, monkeypatch):
    """The keys in parts, and gradients from what the parts left."""
    monkeypatch.setattr(plan, "FEW_ROWS", 64)
    check(flash(case, return_lse=True), expected(case), case.arrays(np.float32), 3e-6, 2e-5)


@pytest.mark.parametrize("case", [*LONG, *SHORT[::4], *FEW], ids=str)
def test_tangents(case, monkeypatch):
    """Of output and log-sum-exp, along a direction of all arrays."""
    monkeypatch.setattr(plan, "FEW_ROWS", 64 if case in FEW else 0)
    arrays = case.arrays(np.float32)
    moved = directions(arrays)
    results, found = tangents(case, arrays, moved)
    for actual, right in zip(results, flash(case, return_lse=True)(**arrays), strict=True):
        np.testing.assert_array_equal(actual, right)
    for actual, right in zip(found, differences(case, arrays, moved), strict=True):
        assert_close(actual, right, 2e-5)


EVERY_ARRAY = next(each for each in LONG if each.name == "segments, everything")


@pytest.mark.parametrize("name", sorted(EVERY_ARRAY.arrays(np.float32).keys() - {"attention_mask"}))
def test_tangents_of_one_array(name, monkeypatch):
    """The others' tangents are no arrays of zeros: the kernel is compiled without them."""
    arrays, seen = EVERY_ARRAY.arrays(np.float32), []
    launch = _launch.launch

    def record(kernel, inputs, *rest, **options):
        seen.extend({n for n in inputs if n.startswith("d_") and inputs[n] is not None} if "d_key" in inputs else ())
        return launch(kernel, inputs, *rest, **options)

    moved = {name: directions(arrays)[name]}
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "launch", record)
        _, found = tangents(EVERY_ARRAY, arrays, moved)
    assert set(seen) == {"d_sinks" if name == "softmax_aux" else f"d_{name}"}
    for actual, right in zip(found, differences(EVERY_ARRAY, arrays, moved), strict=True):
        assert_close(actual, right, 2e-5)


@pytest.mark.parametrize("decoded", [False, True])
def test_tangents_with_dropout(decoded, monkeypatch):
    monkeypatch.setattr(plan, "FEW_ROWS", 64 if decoded else 0)
    case = Case("", queries=3 if decoded else 40, keys=50, **GROUPED, bias_heads=1, options={"causal": not decoded})
    arrays = case.arrays(np.float32)
    drop = {"deterministic": False, "dropout_prob": 0.4, "dropout_rng": jax.random.key(7)}
    mine, right = (
        tangents(case, arrays, directions(arrays), **drop, platform=platform) for platform in ("triton", "xla")
    )
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", [LONG[1], LONG[-1]], ids=str)
def test_tangents_in_half_precision(case, dtype):
    arrays = {n: x.astype(dtype) if x.dtype != bool else x for n, x in case.arrays(np.float32).items()}
    moved = directions(arrays)
    _, found = tangents(case, arrays, moved)
    for actual, right in zip(found, differences(case, arrays, moved), strict=True):
        assert_close(actual, right, TOLERANCE[dtype])


def test_tangents_of_scores_beyond_float16():
    """The output's fit into float16 where the scores' do not."""
    random = np.random.default_rng(0)
    arrays = dict(zip(("query", "key", "value"), random.uniform(-1, 1, size=(3, 1, 40, 2, 16)), strict=True))
    sizes = {"query": 2.0**-4, "key": 2.0**4, "value": 2.0**-10}
    arrays = {name: np.float16(sizes[name] * x) for name, x in arrays.items()}
    moved = {"query": np.float16(2.0**15 * random.uniform(-1, 1, size=arrays["query"].shape))}
    case = Case("", options={"causal": True})
    _, found = tangents(case, arrays, moved)
    wide = [{name: x.astype(np.float32) for name, x in each.items()} for each in (arrays, moved)]
    right = tangents(case, *wide, platform="xla")[1]
    assert np.abs(right[1]).max() > 2 * float(np.finfo(np.float16).max)
    for actual, each in zip(found, right, strict=True):
        assert_close(actual, each, TOLERANCE["float16"])


@pytest.mark.parametrize("kind", ["packed", "segments", "mask"])
def test_tangents_do_not_leak(kind):
    """A NaN in one sequence, in padding or where a mask hides it, changes no bit of others' tangents."""
    arrays = Case("", batch=1, queries=64, keys=64, **GROUPED).arrays(np.float32)
    ids = np.repeat([0, 1, 2, -1], [20, 21, 19, 4])[None]
    mask = np.broadcast_to((ids[..., None] != 1) & (ids[:, None] != 1), (1, 64, 64))[:, None]  # nobody sees those of 1
    others = {
        "packed": {"cu_seqlens": np.array([0, 20, 41, 60], np.int32), "causal": True},
        "segments": {"segment_ids": ids, "causal": True},
        "mask": {"attention_mask": mask},
    }[kind]
    moved = directions(arrays)

    def run(arrays, moved):
        return jax.jvp(lambda x: flash_attention(**x, **others, return_lse=True), (arrays,), (moved,))[1]

    clean = run(arrays, moved)
    for each in (*arrays.values(), *moved.values()):
        each[:, 25] = np.nan
        if kind != "mask":
            each[:, 60:] = np.nan
    dirty = run(arrays, moved)
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(after)[ids != 1], np.asarray(before)[ids != 1])
        assert not np.asarray(after)[ids == (1 if kind == "mask" else -1)].any()
    assert np.isnan(np.asarray(dirty[0])[ids == 1]).any() == (kind != "mask")


def test_tangents_of_rows_whose_bias_swamps_the_scores():
    case = Case("", queries=20, keys=20)
    arrays = {**case.arrays(np.float32), "bias": np.full((1, 1, 20, 20), 0, np.float32)}
    moved = {name: x for name, x in directions(arrays).items() if name != "bias"}
    plain = tangents(case, arrays, moved)[1]
    arrays["bias"][:, :, 3:9] = -1e9
    low = tangents(case, arrays, moved)[1]
    # equal scores weigh all keys alike, whatever the query
    even = np.einsum("bihd,bjhd->bihj", moved["query"], arrays["key"]) + np.einsum(
        "bihd,bjhd->bihj", arrays["query"], moved["key"]
    )
    even = (even - even.mean(-1, keepdims=True)) / 2  # by the scale
    right = np.einsum("bihj,bjhd->bihd", even, arrays["value"]) / 20 + moved["value"].mean(1, keepdims=True)
    assert_close(low[0][:, 3:9], right[:, 3:9], 1e-4)
    np.testing.assert_array_equal(low[0][:, 9:], plain[0][:, 9:])


def test_tangents_compose():
    """`linearize` and its transpose, which is the backward pass, `vmap`, `checkpoint`, and products of Hessians."""
    case = Case("", batch=2, queries=20, keys=20, **GROUPED, sink_shape=(2,), bias_heads=1, options={"causal": True})
    arrays = {name: jnp.asarray(each) for name, each in case.arrays(np.float32).items()}
    moved = {name: jnp.asarray(each) for name, each in directions(arrays).items()}

    def products(platform):
        run = lambda x: flash(case, platform=platform)(**x)  # noqa: E731
        loss = lambda x: (run(x) ** 2).sum()  # noqa: E731
        output, linear = jax.linearize(run, arrays)
        rows = {name: 0 if name in ("query", "key", "value") else None for name in arrays}
        row = lambda x: run({n: x[n] if rows[n] is None else x[n][None] for n in x} | {"bias": x["bias"][:1]})  # noqa: E731
        return (
            linear(moved),
            jax.linear_transpose(linear, arrays)(output),
            jax.vmap(lambda x, t: jax.jvp(row, (x,), (t,))[1], (rows, rows))(arrays, moved),
            jax.jvp(jax.checkpoint(loss), (arrays,), (moved,)),
            jax.jvp(jax.grad(loss), (arrays,), (moved,))[1],
        )

    mine, right = (jax.jit(products, static_argnums=0)(platform) for platform in ("triton", "xla"))
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, 1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_sequences_of_a_row_do_not_leak(biased):
    """A NaN or inf in one, or in padding, changes no bit of another; sequences share tiles, and one comes back."""
    ids = np.repeat([4, 1, -1, 4, 9], [6, 18, 2, 4, 4])[None]
    arrays = tensors(rows=1, tokens=34, heads=2, kv_heads=1)
    if not biased:
        del arrays["bias"]
    options = {"causal": True, "softmax_aux": np.ones((2, 1), np.float32), "segment_ids": ids}
    if not biased:
        options["logits_soft_cap"] = 3.0
    run = gradients_of(lambda **arrays: flash_attention(**arrays, **options))
    check_leaks(run, arrays, ids, [np.nan], [4, 1])


def test_decoding_several_sequences_does_not_leak(monkeypatch):
    monkeypatch.setattr(plan, "FEW_ROWS", 64)
    case = next(each for each in FEW if each.name == "segments")
    arrays, ids = case.arrays(np.float32), case.options["segment_ids"]
    clean = np.asarray(flash(case)(**arrays))
    for name in ("key", "value"):
        dirty = arrays[name].copy()
        dirty[case.options["segment_ids_kv"] == 3] = dirty[case.options["segment_ids_kv"] < 0] = np.nan
        found = np.asarray(flash(case)(**arrays | {name: dirty}))
        np.testing.assert_array_equal(found[ids != 3], clean[ids != 3])
        assert np.isnan(found[ids == 3]).any()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_ids_that_int32_does_not_hold(dtype, x64):
    case = Case("", batch=1, queries=24, keys=24)
    arrays = case.arrays(np.float32)
    ids = np.repeat(np.array([np.iinfo(dtype).max, 5, 2**31 + 5], dtype), 8)[None]
    right = oracle.flash_attention(**arrays, segment_ids=np.repeat([0, 1, 2], 8)[None])[0]
    assert_close(flash(case)(**arrays, segment_ids=ids), right, 3e-6)


BEYOND = {"sliding_window": (9, 0), "query_offset": np.array([60, 42])}
TWO_STREAMS = {"cu_seqlens": [0, 1, 2, 3], "cu_seqlens_kv": [0, 20, 20, 33], "query_offset": np.array([19, 0, 90])}
HIDDEN = [
    Case("queries beyond the keys", queries=3, keys=40, **GROUPED, options=BEYOND, sink_shape=(4, 2)),
    Case("masked", queries=3, keys=40, **GROUPED, mask_heads=4, dead=(0, 1, 2), sink_shape=(3,)),
    Case("before the keys", queries=3, keys=40, options={"causal": True, "query_offset": np.array([-10, -2])}),
    Case("no keys, padding", batch=1, queries=5, keys=40, **GROUPED, options=TWO_STREAMS, sink_shape=(4, 1)),
]


@pytest.mark.parametrize("case", HIDDEN, ids=str)
def test_few_queries_that_see_nothing(case, monkeypatch):
    """Of a row with sinks they have the log-sum-exp; the others' is -inf."""
    monkeypatch.setattr(plan, "FEW_ROWS", 64)
    check(flash(case, return_lse=True), expected(case), case.arrays(np.float32), 3e-6, 2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", [LONG[1], LONG[-1], FEW[2], *LARGE], ids=str)
def test_half_precision(case, dtype, monkeypatch):
    """Output and gradients as near to those in float32 as the dtype allows."""
    monkeypatch.setattr(plan, "FEW_ROWS", 64 if case in (*FEW, LARGE[1]) else 0)
    if case in LARGE:
        monkeypatch.setattr(plan, "configure", CONFIGURE)
    arrays = {
        name: each.astype(dtype) if each.dtype != bool else each for name, each in case.arrays(np.float32).items()
    }
    cotangent = np.random.default_rng(0).normal(size=(*arrays["query"].shape[:3], case.value_dim)).astype(np.float32)
    mine = with_gradients(flash(case, dtype=np.float32), arrays, cotangent)
    exact = {name: each.astype(np.float32) if each.dtype != bool else each for name, each in arrays.items()}
    right = with_gradients(flash(case, platform="xla"), exact, cotangent)
    assert_close(right[0], expected(case)(**exact)[0], 3e-6)
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("size", [2.0**8, 2.0**-14])
def test_gradients_of_scores_beyond_float16(size):
    """Those of query and key fit into float16 where what they are made of does not, or is too small for it."""
    random = np.random.default_rng(0)
    query, key, value, cotangent = random.uniform(-1, 1, size=(4, 1, 40, 2, 16))
    arrays = [np.float16(x) for x in (0.01 * query, 0.01 * key, 32 * size * value, size * cotangent)]
    *moving, cotangent = arrays

    def gradients(dtype, **options):
        given = [jnp.asarray(x, dtype) for x in moving]
        pull = jax.vjp(lambda *arrays: flash_attention(*arrays, causal=True, **options), *given)[1]
        return pull(jnp.asarray(cotangent, dtype))

    exact = gradients(jnp.float32, platform="xla")
    for actual, wanted in zip(gradients(jnp.float16), exact, strict=True):
        bound = 4e-3 * np.abs(wanted).max() + 6e-8  # the least that float16 holds
        assert np.abs(actual.astype(np.float32) - wanted).max() <= bound


@pytest.mark.parametrize("shape", [(1, 1, 1, 48), (2, 2, 20, 1), (2, 4, 1, 1), (1, 4, 20, 48)], ids=str)
def test_mask_and_bias_of_every_form(shape):
    """Rows that begin where wide loads can, as they are; the others' are padded."""
    # without sinks a bias that is the same for all keys has no gradient
    case = Case("", queries=20, keys=48, heads=4, kv_heads=2, sink_shape=(2,), options={"sliding_window": (30, 9)})
    random = np.random.default_rng(3)
    pairs = {"bias": random.normal(size=shape).astype(np.float32), "attention_mask": random.random(shape) < 0.8}
    check(flash(case, return_lse=True), expected(case), case.arrays(np.float32) | pairs, 3e-6, 2e-5)


@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min)])
def test_bias_that_swamps_the_scores(low):
    """Rows whose every bias is very low: their weights are what the scores leave of them, and sum up to 1."""
    case = Case("", queries=20, keys=20)
    arrays = {**case.arrays(np.float32), "bias": np.full((1, 1, 20, 20), 0, np.float32)}
    arrays["bias"][:, :, 3:9] = low
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(np.float32)
    output, gradients = with_gradients(flash(case), arrays, cotangent)
    assert_close(output[:, 3:9], np.broadcast_to(arrays["value"].mean(1, keepdims=True), output[:, 3:9].shape), 1e-5)
    # each value gets a twentieth of the cotangents of those rows
    alone = np.zeros_like(cotangent)
    alone[:, 3:9] = cotangent[:, 3:9]
    _, gradients = with_gradients(flash(case), arrays, alone)
    assert_close(gradients["value"], np.broadcast_to(alone.mean(1, keepdims=True), cotangent.shape), 1e-5)


@pytest.mark.parametrize(
    "decoded, key", [(False, jax.random.key(7)), (True, jax.random.PRNGKey(7))], ids=["typed", "raw"]
)
def test_dropout_drops_what_xla_drops(key, decoded, monkeypatch):
    monkeypatch.setattr(plan, "FEW_ROWS", 64 if decoded else 0)
    case = Case("", queries=3 if decoded else 40, keys=50, **GROUPED, bias_heads=1, options={"causal": not decoded})
    arrays = case.arrays(np.float32)
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(np.float32)
    drop = {"deterministic": False, "dropout_prob": 0.4, "dropout_rng": key}
    mine, right = (
        with_gradients(flash(case, **drop, platform=platform), arrays, cotangent) for platform in ("triton", "xla")
    )
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("queries", [3, 20])
def test_dropout_of_a_devices_part_of_a_call(queries, monkeypatch):
    """Output and gradients drop the weights that the whole call would; the key says where the heads of the part are."""
    monkeypatch.setattr(plan, "FEW_ROWS", 64 if queries == 3 else 0)
    random = np.random.default_rng(0)
    shapes = {"query": (2, queries, 2, 8), "key": (2, 24, 1, 8), "value": (2, 24, 1, 8), "bias": (1, 2, queries, 24)}
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    sizes = {"batch": 2, "queries": queries, "keys": 24, "heads": 2, "kv_heads": 1, "key_dim": 8, "value_dim": 8}
    names = ("query_dtype", "key_dtype", "value_dtype", "dtype", "softmax_dtype", "bias_dtype")
    dtypes = dict.fromkeys(names, np.dtype(np.float32))
    call = Call(**sizes, **dtypes, scale=0.3, dropout=0.5, bias_shape=shapes["bias"])
    # a row of the whole call has 8 heads, and these begin at the fifth
    words = jnp.array([3, 5, 4, 8], jnp.uint32)

    def results(implementation):
        def run(query, key, value, bias):
            rest = [None] * (len(Inputs._fields) - 7)
            return implementation.run(call, query, key, value, None, bias, None, words, *rest)

        output, pull = jax.vjp(run, *arrays.values())
        return output, *pull(output)

    for mine, right in zip(results(triton), results(xla), strict=True):
        assert_close(mine, right, 1e-5)


def test_dropout_in_half_precision():
    case = Case("", queries=40, keys=50, **GROUPED, options={"causal": True})
    drop = {"deterministic": False, "dropout_prob": 0.4, "dropout_rng": jax.random.key(7)}
    arrays = case.arrays(jnp.bfloat16)
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(jnp.bfloat16)
    mine, right = (
        with_gradients(flash(case, **drop, platform=platform), arrays, cotangent) for platform in ("triton", "xla")
    )
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert_close(one, other, TOLERANCE["bfloat16"])


def test_sequences_do_not_touch():
    """A NaN in one packed sequence changes no bit of another, forward and backward; padding has no effect at all."""
    case = Case("", batch=1, queries=64, keys=64, **GROUPED, options={"cu_seqlens": [0, 20, 41, 60], "causal": True})
    arrays = case.arrays(np.float32)
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(np.float32)
    clean = with_gradients(flash(case), arrays, cotangent)
    for each in (*arrays.values(), cotangent):
        each[:, 25] = each[:, 60:] = np.nan
    spoilt = with_gradients(flash(case), arrays, cotangent)
    others = np.r_[0:20, 41:64]
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(spoilt), strict=True):
        np.testing.assert_array_equal(one[:, others], other[:, others])
        assert (other[:, 60:] == 0).all()


def test_padding_leaves_sinks_alone():
    case = Case("", batch=1, queries=40, keys=40, sink_shape=(2,), options={"cu_seqlens": [0, 20, 30], "causal": True})
    arrays = case.arrays(np.float32)
    cotangent = np.ones(arrays["query"].shape, np.float32), np.ones(arrays["query"].shape[:3], np.float32)
    clean = with_gradients(flash(case, return_lse=True), arrays, cotangent)[1]["softmax_aux"]
    for each in (*(arrays[name] for name in ("query", "key", "value")), *cotangent):
        each[:, 30:] = np.nan
    spoilt = with_gradients(flash(case, return_lse=True), arrays, cotangent)[1]["softmax_aux"]
    np.testing.assert_array_equal(clean, spoilt)
    assert np.isfinite(clean).all()


@pytest.mark.parametrize("queries", [40, 3], ids=["blocks", "decoding"])
def test_what_no_mask_lets_be_seen_has_no_effect_even_if_it_is_nan(queries, monkeypatch):
    monkeypatch.setattr(plan, "FEW_ROWS", 64 if queries == 3 else 0)
    query, key, value, d_output = np.random.default_rng(0).normal(size=(4, 1, 40, 2, 4)).astype(np.float32)
    query, d_output, last = query[:, :queries].copy(), d_output[:, :queries].copy(), queries * 3 // 4
    mask = np.zeros((1, 1, queries, 40), bool)
    mask[..., :last, :35] = True
    case = Case("")

    def run():
        arrays = {"query": query, "key": key, "value": value, "attention_mask": mask}
        return jax.tree.leaves(with_gradients(flash(case), arrays, d_output))

    clean = run()
    query[:, last:], d_output[:, last:], key[:, 35:], value[:, 35:] = np.nan, np.nan, np.inf, np.nan
    for before, after in zip(clean, run(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_keys_past_the_last_query_have_no_effect_even_if_they_are_nan():
    """A cache that is not full holds whatever it held before."""
    case = Case("", queries=20, keys=60, options={"causal": True, "query_offset": np.array([3, 30])})
    arrays = case.arrays(np.float32)
    cotangent = np.ones(arrays["query"].shape, np.float32)
    clean = with_gradients(flash(case), arrays, cotangent)
    for name in ("key", "value"):
        arrays[name][0, 23:] = arrays[name][1, 50:] = np.nan
    for one, other in zip(*map(jax.tree.leaves, (clean, with_gradients(flash(case), arrays, cotangent))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_mixed_dtypes():
    """Products are as exact as the widest of their operands."""
    arrays = CASES[0].arrays(np.float32)
    rounded = {**arrays, "key": arrays["key"].astype(jnp.bfloat16)}
    exact = {**arrays, "key": rounded["key"].astype(np.float32)}
    mine, gradients = with_gradients(flash(CASES[0]), rounded, np.ones(arrays["query"].shape, np.float32))
    assert_close(mine, expected(CASES[0])(**exact)[0], 1e-6)
    assert {name: each.dtype for name, each in gradients.items()} == {name: x.dtype for name, x in rounded.items()}


def test_learned_scale():
    """An array for the scale makes the query float32; nothing is rounded to the keys' dtype on the way."""
    arrays = CASES[0].arrays(jnp.bfloat16)
    scale, cotangent = 0.375, np.ones(arrays["query"].shape, np.float32)
    exact = {name: each.astype(np.float32) for name, each in arrays.items()}

    def scaled(softmax_scale, **arrays):
        return flash(CASES[0], dtype=np.float32)(**arrays, softmax_scale=softmax_scale)

    output, gradients = with_gradients(scaled, {**arrays, "softmax_scale": np.float32(scale)}, cotangent)
    right = oracle.flash_attention(**exact, **{**CASES[0].options, "softmax_scale": scale})
    assert_close(output, right[0], 1e-6)
    step = 1e-4
    above, below = (
        oracle.flash_attention(**exact, **{**CASES[0].options, "softmax_scale": scale + each})[0].sum()
        for each in (step, -step)
    )
    assert_close(gradients["softmax_scale"], (above - below) / (2 * step), 1e-5)
    assert {gradients[name].dtype for name in arrays} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_settings(dtype):
    """No dtype and no rank is promoted behind the caller's back."""
    case = next(each for each in PACKED if each.name == "packed, everything")
    arrays = case.arrays(jnp.dtype(dtype))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        output, lse = flash(case, return_lse=True)(**arrays)
        with_gradients(flash(case, return_lse=True), arrays, (output, lse))


def test_gradient_of_gradient():
    case = Case("", batch=1, queries=5, keys=6, **GROUPED, bias_heads=1, sink_shape=(2,), options={"causal": True})
    arrays = case.arrays(np.float32)
    arrays["bias"] = np.maximum(arrays["bias"], -5)

    def second(platform):
        def product(moving):
            gradients = jax.grad(lambda moving: (flash(case, platform=platform)(**moving) ** 2).sum())(moving)
            return sum((each**2).sum() for each in jax.tree.leaves(gradients))

        return jax.jit(jax.grad(product))(arrays)

    for one, other in zip(jax.tree.leaves(second("triton")), jax.tree.leaves(second("xla")), strict=True):
        assert_close(one, other, 1e-4)


def test_transformations():
    """`vmap` (of borders, biases and sinks too), `checkpoint`, `scan` and `shard_map` change nothing."""
    case = Case("", batch=2, queries=20, keys=20, **GROUPED, sink_shape=(2,), bias_heads=1, options={"causal": True})
    arrays = {name: jnp.asarray(each) for name, each in case.arrays(np.float32).items()}
    offset = jnp.arange(2)

    def whole(arrays, offset):
        return flash(case)(**arrays, query_offset=offset)

    def gradients(function):
        return jax.jit(jax.value_and_grad(lambda arrays, offset: (function(arrays, offset) ** 2).sum()))

    rows = {name: None if name == "softmax_aux" else 0 for name in arrays}

    def one_row(arrays, offset):
        return whole({name: each if rows[name] is None else each[None] for name, each in arrays.items()}, offset)[0]

    def packed_row(arrays, offset):
        arrays = {name: each[None] if name == "bias" else each for name, each in arrays.items()}
        return flash(case)(**arrays, query_offset=offset, cu_seqlens=jnp.array([0, 20]) + 0 * offset)

    def by_row(row, **axes):
        return lambda arrays, offset: jax.vmap(row, ({**rows, **axes}, 0))(arrays, offset)

    def sinks_by_row(arrays, offset):
        copies = jnp.broadcast_to(arrays["softmax_aux"], (2, *arrays["softmax_aux"].shape))
        return by_row(one_row, softmax_aux=0)({**arrays, "softmax_aux": copies}, offset)

    def scanned(arrays, offset):
        moving = {name: each for name, each in arrays.items() if rows[name] == 0}
        step = lambda _, xs: (None, jax.checkpoint(one_row)({**arrays, **xs[0]}, xs[1]))  # noqa: E731
        return jax.lax.scan(step, None, (moving, offset))[1]

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: PartitionSpec() if rows[name] is None else PartitionSpec("rows") for name in arrays}
    sharded = jax.shard_map(
        whole,
        mesh=mesh,
        in_specs=(specs, PartitionSpec("rows")),
        out_specs=PartitionSpec("rows"),
        # callbacks do not say over which axes their results vary
        check_vma=False,
    )
    right = gradients(whole)(arrays, offset)
    for function in (by_row(one_row), by_row(packed_row), sinks_by_row, scanned, sharded):
        for one, other in zip(
            jax.tree.leaves(right), jax.tree.leaves(gradients(function)(arrays, offset)), strict=True
        ):
            assert_close(other, one, 1e-5)


def test_vmap_with_a_shared_mask_or_bias():
    """What all rows share is neither copied nor does its gradient mix rows."""
    case = Case("", batch=2, queries=20, keys=20, mask_heads=1, broadcast=True)
    arrays = case.arrays(np.float32)
    stacked = {name: np.stack([each, each[:, ::-1]]) for name, each in arrays.items() if name != "attention_mask"}
    bias = np.random.default_rng(1).normal(size=(1, 1, 20, 20)).astype(np.float32)

    def loss(arrays, bias):
        return (flash_attention(**arrays, bias=bias, attention_mask=None, dtype=None) ** 2).sum()

    def masked(arrays):
        return flash_attention(**arrays, attention_mask=arrays_mask, dtype=None)

    arrays_mask = arrays["attention_mask"]
    found = jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None))(stacked, bias)
    outputs = jax.vmap(masked)(stacked)
    for row in range(2):
        one = {name: each[row] for name, each in stacked.items()}
        right = jax.value_and_grad(loss, (0, 1))(one, bias)
        assert_close(outputs[row], masked(one), 1e-6)
        for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(found), strict=True):
            assert_close(b[row], a, 1e-5)


CALL = {name: jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.bfloat16) for name in ("query", "key", "value")}


def shapes(dtype=jnp.bfloat16, dim=16):
    return dict.fromkeys(CALL, jax.ShapeDtypeStruct((2, 64, 4, dim), dtype))


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (shapes(jnp.float64), "float64"),
        (shapes(dim=520), "a head dim above 512"),
        (shapes(jnp.float32, dim=264), "float32 with a head dim above 256"),
        ({"softmax_dtype": jnp.bfloat16}, "softmax_dtype bfloat16"),
        (dict.fromkeys(CALL, jax.ShapeDtypeStruct((2, 0, 4, 16), jnp.bfloat16)), "without elements"),
    ],
)
def test_supports_says_why(arguments, reason, x64):
    from ejkernel import explain

    assert reason in explain(flash_attention, **{**CALL, **arguments}).refused["triton"]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize(
    "wide, walk",
    [
        *((False, each) for each in (plan.LONG, plan.SHORT, plan.PACKED)),
        *((False, each) for each in (plan.MASKED, plan.BIASED, plan.BIASED_WIDE)),
        (True, plan.LONG),
    ],
)
def test_configurations_are_whole(monkeypatch, capability, dim, wide, walk):
    monkeypatch.undo()
    if wide and dim > 256:
        pytest.skip("XLA's")
    config = plan.configure(capability, wide, 2 * dim, walk)
    for tile in (config.forward, config.query, config.key, config.bias, config.decoding):
        assert all(each & (each - 1) == 0 for each in (tile.rows, tile.columns, tile.warps))
        assert min(tile.rows, tile.columns) >= 16


def test_compile_key_does_not_depend_on_length(monkeypatch):
    """What is constant in a kernel is the same for any number of tokens, sequences and packing of a kind."""
    seen = []

    def record(kernel, inputs, outputs, *, constants, programs, tile, in_place=None):
        given = {name: each for name, each in {**inputs, **outputs}.items() if each is not None}
        kinds = {name: type(x) if isinstance(x, int) else x.dtype for name, x in given.items()}
        seen.append((kernel.__name__, str(kinds), tile, constants))
        return _launch.named(outputs, {name: jnp.zeros(x.shape, x.dtype) for name, x in outputs.items() if x})

    # undone before the interpreter is, which would leave it behind otherwise
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "launch", record)
        keys = []
        for tokens, borders in ((70, [0, 20, 40]), (90, [0, 1, 80]), (47, [0, 20, 20, 47])):
            seen.clear()
            case = replace(
                LONG[0], batch=1, queries=tokens, keys=tokens, options={"cu_seqlens": borders, "causal": True}
            )
            arrays = case.arrays(np.float32)
            with_gradients(flash(case), arrays, arrays["query"])
            keys.append(list(seen))
        assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("packed, layout", [(False, "balanced"), (True, "contiguous")])
def test_ring(packed, layout, monkeypatch):
    """A ring of devices, which merges what blocks of keys give, gives the same by these kernels."""
    case = Case("", batch=1, queries=40, keys=40, **GROUPED, sink_shape=(4, 1), options={"causal": True})
    if packed:
        case = replace(case, options={**case.options, "cu_seqlens": [0, 10, 10, 33]})
    arrays = case.arrays(np.float32)
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(np.float32)
    monkeypatch.setattr(ring_attention, "BLOCKS", one_by_one(triton_blocks))
    output, gradients = on_a_ring(arrays, cotangent, layout, **options_of(case))
    right = exact(case, arrays, cotangent, np.zeros(cotangent.shape[:3]))
    assert_close(output, right[0], 3e-6)
    for name, each in right[2].items():
        assert_close(gradients[name], each, 2e-5, name)
