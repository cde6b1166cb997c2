"""Rows of several sequences by `segment_ids` in `flash_attention`: leaks, visits, draws and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import QUICK, SEGMENTED, Case
from attention_leaks import check_leaks, gradients_of, poisoned, tensors
from conftest import assert_close
from jax.sharding import PartitionSpec

from ejkernel import attention, explain, flash_attention
from ejkernel.kernels.attention.xla import problem as blocks

# an id that comes back, ids out of order, padding between sequences and at the end
IDS = np.array([[4, 4, 4, 1, 1, -1, 9, 9, 9, 4, 4, -2], [0, 0, 0, 0, 0, 0, 0, 5, 5, 5, 5, -1]], np.int32)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "block_sizes": (8, 5)},
        {"logits_soft_cap": 2.0, "sliding_window": (5, 2), "block_sizes": (5, 8)},
    ],
    ids=["causal", "soft cap"],
)
def test_no_bit_of_another_sequence_changes(options):
    sinks = np.ones((4, 1), np.float32)
    run = gradients_of(functools.partial(flash_attention, segment_ids=IDS, softmax_aux=sinks, **options))
    check_leaks(run, tensors(), IDS)


def test_padding_does_not_reach_sinks():
    arrays = tensors()

    def run(sinks, d_output, query, key, value, bias):
        function = functools.partial(flash_attention, query, key, value, bias=bias, segment_ids=IDS, return_lse=True)
        pull = jax.vjp(lambda sinks: function(softmax_aux=sinks), sinks)[1]
        return pull((d_output, d_output[..., 0]))[0]

    run, sinks = jax.jit(run, compiler_options=QUICK), jnp.ones((4, 1))
    clean = run(sinks, **arrays)
    for name in ("query", "key", "value", "d_output"):
        dirty = {each: x.copy() for each, x in arrays.items()}
        dirty[name][IDS < 0] = np.nan
        np.testing.assert_array_equal(run(sinks, **dirty), clean, name)


def test_tangents_do_not_leak():
    arrays = tensors()
    del arrays["d_output"]
    run = jax.jit(
        lambda x, t: jax.jvp(lambda x: flash_attention(**x, segment_ids=IDS, block_sizes=(8, 8)), (x,), (t,))[1],
        compiler_options=QUICK,
    )
    moved = {name: x[::-1] for name, x in arrays.items()}
    clean = np.asarray(run(arrays, moved))
    for name in ("query", "key", "value"):
        for at in (0, 1):
            dirty = [arrays, moved]
            dirty[at] = poisoned(dirty[at], name, IDS, 9, np.nan)
            others = (IDS != 9) & (IDS >= 0)
            np.testing.assert_array_equal(np.asarray(run(*dirty))[others], clean[others], name)


@pytest.mark.parametrize("heads, kv_heads, dtype", [(2, 2, "float32"), (4, 2, "bfloat16"), (8, 8, "float32")])
def test_few_queries_of_several_sequences_do_not_leak(heads, kv_heads, dtype):
    """Decoding with the tokens of two sequences at once."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, n, h, 4)) for n, h in ((2, heads), (9, kv_heads), (9, kv_heads)))
    query, key, value = (np.asarray(jnp.asarray(x, dtype)) for x in (query, key, value))
    ids, ids_kv = np.array([[3, 7]]), np.array([[7, 7, 3, 3, 3, -1, 7, 3, -1]])
    run = jax.jit(functools.partial(flash_attention, segment_ids=ids, segment_ids_kv=ids_kv))
    clean = np.asarray(run(query, key, value))
    for i, which in enumerate((3, 7)):
        for bad in (key, value):
            dirty = bad.copy()
            dirty[(ids_kv == which) | (ids_kv < 0)] = np.nan
            found = np.asarray(run(query, *(dirty if x is bad else x for x in (key, value))))
            np.testing.assert_array_equal(found[:, 1 - i], clean[:, 1 - i])
            assert np.isnan(found[:, i].astype(np.float32)).any()


def test_sequences_agree_with_cu_seqlens():
    """Also on the order of rows: ids that ascend, descend or are all the same."""
    arrays = tensors(rows=1)
    del arrays["bias"], arrays["d_output"]
    lengths = [3, 4, 5]
    expected = flash_attention(**arrays, causal=True, cu_seqlens=np.cumsum([0, *lengths]))
    for ids in ([0, 1, 2], [9, 4, 0]):
        found = flash_attention(**arrays, causal=True, segment_ids=np.repeat(ids, lengths)[None])
        assert_close(found, expected, 1e-6)
    whole = flash_attention(**arrays, causal=True, segment_ids=np.zeros((1, 12), np.uint8))
    assert_close(whole, flash_attention(**arrays, causal=True), 1e-6)


def test_dropout_draws_by_place(x64):
    arrays = tensors(dtype=np.float64)
    del arrays["bias"], arrays["d_output"]
    drop = {"deterministic": False, "dropout_prob": 0.4, "dropout_rng": jax.random.key(7)}
    kept = np.asarray(attention(**arrays, **drop, dtype=None)[1] != 0)
    mask = ((IDS[:, :, None] == IDS[:, None]) & (IDS >= 0)[..., None])[:, None]
    expected, _ = oracle.attention(**arrays, attention_mask=mask, kept=kept, dropout_prob=0.4)
    assert_close(flash_attention(**arrays, **drop, segment_ids=IDS, block_sizes=(5, 4)), expected, 1e-13)


def test_transformations():
    """Traced ids, `vmap` (also of ids alone), `scan` with `checkpoint` and `shard_map` change nothing."""
    arrays = {name: jnp.asarray(x) for name, x in tensors().items() if name in ("query", "key", "value")}

    def whole(arrays, ids):
        return flash_attention(**arrays, segment_ids=ids, causal=True, block_sizes=(5, 4))

    def one_row(arrays, ids):
        return whole(jax.tree.map(lambda x: x[None], arrays), ids[None])[0]

    def scanned(arrays, ids):
        return jax.lax.scan(lambda _, xs: (None, jax.checkpoint(one_row)(*xs)), None, (arrays, ids))[1]

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("rows")
    sharded = jax.shard_map(whole, mesh=mesh, in_specs=(spec, spec), out_specs=spec)

    def gradients(function):
        loss = jax.value_and_grad(lambda arrays, ids: (function(arrays, ids) ** 2).sum())
        return jax.jit(loss, compiler_options=QUICK)(arrays, jnp.asarray(IDS))

    expected = gradients(whole)
    for function in (jax.vmap(one_row), scanned, sharded):
        jax.tree.map(lambda one, other: assert_close(other, one, 1e-5), expected, gradients(function))
    row = {name: x[:1] for name, x in arrays.items()}
    found = jax.vmap(lambda ids: whole(row, ids[None]))(jnp.asarray(IDS))
    for i in range(2):
        assert_close(found[i], whole(row, IDS[i : i + 1]), 1e-6)


def test_keys_of_other_sequences_are_not_visited(monkeypatch):
    """A block of queries visits the blocks of keys between the first and the last with an id like theirs."""
    visits = []
    original = blocks.over_keys

    def counting(p, rows, visit, carry, every_block=False):
        def counted(columns, carry):
            jax.debug.callback(lambda at: visits.append(int(at)), columns.start)
            return visit(columns, carry)

        return original(p, rows, counted, carry, every_block)

    monkeypatch.setattr("ejkernel.kernels.attention.xla.blocks.over_keys", counting)
    x = jnp.ones((2, 64, 1, 4))
    ids = np.stack([np.repeat([3, 1, 2, -1], 16), np.repeat([0, 5, 4, 6], 16)])
    jax.block_until_ready(flash_attention(x, x, x, segment_ids=ids, block_sizes=(8, 8)))
    jax.effects_barrier()
    assert len(visits) == 8 * 2  # each block of queries its own 16 keys


def test_explained():
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    found = explain(flash_attention, x, x, x, causal=True, segment_ids=np.zeros((2, 128), np.int32), device="h100")
    assert found.chosen == {"cuda": "triton"}
    assert found.refused["cudnn"] == "it has no segment_ids"


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_ids_that_int32_does_not_hold(dtype, x64):
    """Large ones are told apart, and unsigned ones are never padding."""
    case = Case("", batch=1, queries=6, keys=6)
    arrays = case.arrays()
    high = np.iinfo(dtype).max
    ids = np.array([[high, high, high - 1, 5, 5, 5 + 2**31]], dtype)
    expected, _ = oracle.flash_attention(**arrays, segment_ids=np.array([[1, 1, 2, 3, 3, 4]]))
    assert_close(jax.jit(functools.partial(flash_attention, **arrays))(segment_ids=ids), expected, 1e-13)


def test_cases_have_what_the_contract_names():
    assert any((case.options["segment_ids"] < 0).all(1).any() for case in SEGMENTED)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("by", ["segment_ids", "cu_seqlens", "attention_mask"])
def test_padding_has_no_effect_on_the_gradient_of_the_scale(by, bad):
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4)).astype(np.float32)
    says = {
        "segment_ids": np.array([[0, 0, 1, 1, -1, -1]]),
        "cu_seqlens": np.array([0, 2, 4]),
        "attention_mask": (np.arange(6) < 4)[None, None, :, None] & (np.arange(6) < 4),
    }
    padded = [jnp.asarray(x).at[:, 4:].set(bad) for x in (query, key, value)]

    def derivatives(arrays):
        def run(scale):
            return flash_attention(*arrays, softmax_scale=scale, **{by: says[by]})[:, :4].sum()

        return jax.grad(run)(jnp.float32(0.3)), jax.jvp(run, (jnp.float32(0.3),), (jnp.float32(1),))[1]

    for result, expected in zip(derivatives(padded), derivatives([query, key, value]), strict=True):
        assert result == expected
