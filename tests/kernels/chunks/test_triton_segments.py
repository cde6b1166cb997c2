"""Rows of several sequences (`segment_ids`) on the Triton kernels of both recurrences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment_cases import IDS, Case, arrays_of, assert_matches, check_leaks, one_by_one, results, with_tokens

import ejkernel
from ejkernel import _bind
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.chunks.triton import packing
from ejkernel.kernels.delta_rule import triton as delta_rule
from ejkernel.kernels.delta_rule.triton import configs as delta_rule_configs
from ejkernel.kernels.delta_rule.triton import launcher as delta_rule_launcher
from ejkernel.kernels.linear_recurrence import triton as linear_recurrence
from ejkernel.kernels.linear_recurrence.triton import configs, launcher

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")

from triton_interpreter import GPU, MARKS, kernels

pytestmark = MARKS
TILE = Tile(16)
LINEAR = configs.Config(
    chunk=16,
    group=2,
    limit=40.0,
    fill=0,
    output=TILE,
    gradient=TILE,
    head_gate_gradient=TILE,
    exact=replace(TILE, warps=1),
    step=TILE,
)
_TILES = ("system", "gated", "forward", "forward_only", "local", "backward", "gradients", "step")
DELTA = delta_rule_configs.Config(
    chunk=16, precision="ieee", invert="ieee", heads=2, key_block=16, fill=0, **dict.fromkeys(_TILES, TILE)
)

# one sequence crosses time segments, and some end within the same one
LONG = np.concatenate([np.arange(5), np.repeat([40, -1, 41], [93, 3, 43])])[None].astype(np.int32)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    def dispatch(implementations, call, *arrays, platform=None):
        core = delta_rule if "beta" in call.dims() else linear_recurrence
        assert core.supports(call) is None, core.supports(call)
        return core.run(call, *arrays)

    monkeypatch.setattr(_bind, "dispatch", dispatch)
    if not GPU:
        monkeypatch.setattr(configs, "configure", lambda *_: LINEAR)
        monkeypatch.setattr(delta_rule_configs, "configure", lambda *_: DELTA)
        monkeypatch.setattr(launcher.Launcher, "by_token", property(lambda self: self.call.dtype == jnp.bfloat16))
    with kernels():
        yield


def call_alone(case, arrays, ids):
    return getattr(ejkernel, case.op)(**arrays, segment_ids=ids, reverse=case.reverse)


CASES = [
    Case("linear_attention"),
    Case("linear_attention", dtype="bfloat16", reverse=True, state=False),
    Case("recurrent", poison=np.inf),
    Case("recurrent", "strong", dtype="bfloat16", reverse=True),
    Case("simple_gla", poison=np.inf),
    Case("simple_gla", "resets", reverse=True),
    Case("simple_gla", "growing", state=False),
    Case("simple_gla", dtype="bfloat16"),
    Case("simple_gla", "resets", dtype="bfloat16", poison=-np.inf),
    Case("simple_gla", dtype="float16"),
    Case("recurrent_gla", poison=np.inf),
    Case("recurrent_gla", "resets", state=False),
    Case("recurrent_gla", "strong", reverse=True, poison=-np.inf),
    Case("recurrent_gla", "shipped", poison=np.inf),
    Case("recurrent_gla", "shipped", dtype="bfloat16", reverse=True, state=False),
    Case("recurrent_gla", dtype="bfloat16", reverse=True, state=False),
    Case("recurrent", value_gates=True),
    Case("delta_rule", reverse=True, state=False),
    Case("delta_rule", dtype="bfloat16"),
    Case("gated_delta_rule", poison=np.inf),
    Case("gated_delta_rule", "resets", reverse=True, state=False),
    Case("gated_delta_rule", "tiny", dtype="bfloat16", poison=np.inf),
    Case("kda", poison=-np.inf),
    Case("kda", "growing", reverse=True, state=False),
    Case("kda", dtype="bfloat16"),
    Case("kda", "strong", dtype="bfloat16", reverse=True),
]


# on a GPU, whose chunks are longer, also with the dims of models
DIMS = [16, 64, 128] if GPU else [16]


@pytest.mark.parametrize("case", [replace(case, dim=dim) for case in CASES for dim in DIMS], ids=str)
def test_sequences_one_by_one_without_leaks(case):
    ids = np.repeat(IDS, 5, 1) if GPU else IDS
    arrays, cotangents = arrays_of(case, ids)
    found = results(case, arrays, ids, cotangents)
    expected = one_by_one(case, arrays, ids, cotangents)
    assert_matches(case, found, expected)
    # without gradients kernels are cut otherwise, as nothing is kept
    alone = dict(zip(("output", "final state"), call_alone(case, arrays, ids), strict=True))
    assert_matches(case, alone, {name: expected[name] for name in alone})
    check_leaks(case, arrays, ids, cotangents, found)


@pytest.mark.skipif(GPU, reason="the tiles of this GPU are tested above")
@pytest.mark.parametrize("case", [Case("simple_gla"), Case("simple_gla", "resets", "bfloat16", reverse=True)], ids=str)
def test_one_kernel_for_all_gates(monkeypatch, case):
    """Few value dims, as Mamba-2's heads on Hopper."""
    config = replace(LINEAR, output=Tile(32), stages_if_half_full=1)
    monkeypatch.setattr(configs, "configure", lambda *_: config)
    arrays, cotangents = arrays_of(case, IDS)
    found = results(case, arrays, IDS, cotangents)
    assert_matches(case, found, one_by_one(case, arrays, IDS, cotangents))
    check_leaks(case, arrays, IDS, cotangents, found)


@pytest.mark.parametrize(
    "case",
    [
        Case("recurrent"),
        Case("simple_gla", "resets"),
        Case("recurrent_gla", reverse=True),
        Case("delta_rule", reverse=True),
        Case("gated_delta_rule", "tiny", state=False),
        Case("kda"),
    ],
    ids=str,
)
def test_time_segments(monkeypatch, case):
    """Rows that are cut in parts which run side by side, though nothing bounds how many sequences these hold."""
    ids = np.repeat(LONG, 8, 1) if GPU else LONG
    if not GPU:
        monkeypatch.setattr(configs, "configure", lambda *_: replace(LINEAR, fill=99))
        monkeypatch.setattr(delta_rule_configs, "configure", lambda *_: replace(DELTA, fill=99))
    monkeypatch.setattr(delta_rule_launcher, "FEWEST_CHUNKS", 1)
    arrays, cotangents = arrays_of(case, ids)
    found = results(case, arrays, ids, cotangents)
    assert_matches(case, found, one_by_one(case, arrays, ids, cotangents))


@pytest.mark.parametrize("case", [Case("recurrent", value_gates=True), Case("kda", "growing", reverse=True)], ids=str)
@pytest.mark.parametrize("ids", [[[5], [-1]], [[1, 1, 2], [-1, 0, -1]]], ids=str)
def test_few_tokens(case, ids):
    """Which are walked one by one; padding holds NaN."""
    ids = np.array(ids)
    arrays, cotangents = arrays_of(case, ids)
    expected = one_by_one(case, arrays, ids, cotangents)
    spoilt = {n: with_tokens(x, ids < 0, jnp.nan) for n, x in arrays.items()}
    found = results(case, spoilt, ids, cotangents)
    assert_matches(case, found, expected)


@pytest.mark.parametrize("mapped", [True, False])
def test_mapped_calls_are_rows(mapped):
    arrays, _ = arrays_of(Case("gated_delta_rule"), IDS[:2])
    several = {name: jnp.stack([x, x[::-1] / 2]) for name, x in arrays.items()}
    ids = np.stack([IDS[:2], IDS[1::-1]]) if mapped else IDS[:2]
    found = jax.vmap(lambda x, ids: ejkernel.gated_delta_rule(**x, segment_ids=ids), (0, 0 if mapped else None))(
        several, ids
    )
    for i in range(2):
        alone = ejkernel.gated_delta_rule(
            **{name: x[i] for name, x in several.items()}, segment_ids=ids[i] if mapped else ids
        )
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, alone)


def test_unsigned_ids_are_never_padding():
    ids = np.array([[2**32 - 1] * 9 + [5] * 9], np.uint32)
    arrays, _ = arrays_of(Case("linear_attention"), ids)
    found = ejkernel.linear_attention(**arrays, segment_ids=ids)
    expected = ejkernel.linear_attention(**arrays, segment_ids=np.array([[0] * 9 + [1] * 9]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def listed(ids, chunk):
    """Of one row: `(first token, no padding, first of its sequence, nothing passes)` of each chunk."""
    ids = np.maximum(ids, -1)
    real = np.flatnonzero(ids >= 0)
    begins = [0, *np.flatnonzero(np.diff(ids)) + 1]
    chunks = []
    for low, high in zip(begins, [*begins[1:], len(ids)], strict=True):
        cut = len(real) > 0 and real[0] < low <= real[-1]
        chunks += [(i, ids[i] >= 0, i == low, cut and i == low) for i in range(low, high, chunk)]
    return chunks


@pytest.mark.parametrize("reverse", [False, True])
def test_lists_of_chunks(monkeypatch, reverse):
    monkeypatch.setattr(packing, "_BLOCK", 16)
    for ids in (IDS, LONG, np.zeros((1, 48), np.int32), np.array([[1]])):
        found = packing.Packing.of_segments(jnp.asarray(ids), 16, reverse)
        for row, chunks, before in zip(ids, np.asarray(found.chunks), np.asarray(found.before), strict=True):
            expected = listed(row[::-1] if reverse else row, 16)
            entries = [i << 3 | real | first << 1 | cut << 2 for i, real, first, cut in expected]
            end = len(row) << 3
            assert chunks[: len(entries) + 2].tolist() == [*entries, end, end][: len(row) + 2]
            sizes = range(0, len(row) + 16, 16)[: -(-len(row) // 16) + 1]
            assert before.tolist() == [sum(i < size for i, *_ in expected) for size in sizes]
