"""Rows of several sequences (`segment_ids`) on the Triton kernels of both recurrences, interpreted on the CPU."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import ejkernel
from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.chunks.triton import packing
from ejkernel.kernels.delta_rule import triton as delta_rule
from ejkernel.kernels.delta_rule.triton import configs as delta_rule_configs
from ejkernel.kernels.delta_rule.triton import launcher as delta_rule_launcher
from ejkernel.kernels.linear_recurrence import triton as linear_recurrence
from ejkernel.kernels.linear_recurrence.triton import configs, launcher

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

from triton_interpreter import interpreted

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
_TILES = ("system", "gated", "forward", "forward_only", "effects", "backward", "gradients", "step")
DELTA = delta_rule_configs.Config(
    chunk=16, precision="ieee", invert="ieee", heads=2, key_block=16, fill=0, **dict.fromkeys(_TILES, TILE)
)

# runs of one token, of a chunk and one more; ids that come back; padding before, between, behind and alone
IDS = np.stack(
    [
        np.repeat([3, -1, 3, 5, -2, -1, 8], [17, 2, 1, 1, 12, 1, 16]),
        np.repeat([-1, 0, 7, 0, 2, -1], [3, 16, 1, 9, 18, 3]),
        np.full(50, -1),
    ]
).astype(np.int32)
# one sequence crosses time segments, and some end within the same one
LONG = np.concatenate([np.arange(5), np.repeat([40, -1, 41], [93, 3, 43])])[None].astype(np.int32)
INSIDE = (1, slice(20, 29))  # a sequence that is neither the first nor the last of its row
H, D = 2, 16
HEADS = {"query": 1, "key": 2, "value": 2}
TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1e-2}
DELTAS = ("delta_rule", "gated_delta_rule", "kda")
SINGLE = ("simple_gla", "gated_delta_rule")  # whose gates are of heads


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    def on(kernels):
        def dispatch(implementations, call, *arrays, platform=None):
            assert kernels.supports(call) is None, kernels.supports(call)
            return kernels.run(call, *arrays)

        return dispatch

    for module, kernels in (("linear_attention", linear_recurrence), ("delta_rule", delta_rule)):
        monkeypatch.setattr(sys.modules[f"ejkernel.{module}"], "dispatch", on(kernels))
    monkeypatch.setattr(configs, "configure", lambda *_: LINEAR)
    monkeypatch.setattr(delta_rule_configs, "configure", lambda *_: DELTA)
    monkeypatch.setattr(launcher.Launcher, "by_token", property(lambda self: self.call.dtype == jnp.bfloat16))
    with interpreted():
        yield


@dataclass(frozen=True)
class Case:
    op: str
    gate: str = "mild"
    dtype: str = "float32"
    reverse: bool = False
    state: bool = True
    value_gates: bool = False
    poison: float = np.nan

    def __str__(self):
        told = [self.op, self.gate, self.dtype]
        told += [name for name in ("reverse", "state", "value_gates") if getattr(self, name)]
        return "-".join(told)


def gates(kind, random, shape):
    mild = -0.06 * random.exponential(size=shape)
    if kind == "resets":
        mild = np.where(random.random(shape) < 0.05, -np.inf, mild)
        return np.where(random.random(shape) < 0.05, -1e4, mild)
    if kind == "growing":
        return np.where(random.random(shape) < 0.3, -mild, mild)
    return {"mild": 1, "strong": 150, "tiny": 1e-3}[kind] * mild


def arrays_of(case, ids):
    """The call's arrays, whose queries two heads share, and its cotangents."""
    random = np.random.default_rng(0)
    lead = ids.shape
    found: dict[str, Any] = {name: random.normal(size=(*lead, heads, D)) for name, heads in HEADS.items()}
    if case.op in DELTAS:
        found["key"] /= np.linalg.norm(found["key"], axis=-1, keepdims=True)
        found["beta"] = random.random((*lead, H))
    shape = {"recurrent": (lead[0], H), "linear_attention": None, "delta_rule": None}.get(case.op, (*lead, H, D))
    if shape is not None:
        name = "g_gamma" if case.op == "recurrent" else "g"
        found[name] = gates(case.gate, random, shape[:3] if case.op in SINGLE else shape)
    if case.value_gates:
        found["gv"] = gates(case.gate, random, (*lead, H, D))
    if case.state:
        found["initial_state"] = random.normal(size=(lead[0], H, D, D))
    found = {n: jnp.asarray(x, case.dtype if n in HEADS else "float32") for n, x in found.items()}
    d_output = jnp.asarray(random.normal(size=(*lead, H, D)), case.dtype)
    return found, (d_output, jnp.asarray(random.normal(size=(lead[0], H, D, D)), jnp.float32))


def results(case, arrays, ids, cotangents):
    op = getattr(ejkernel, case.op)
    found, pull = jax.vjp(lambda x: op(**x, segment_ids=ids, reverse=case.reverse), arrays)
    return {"output": found[0], "final state": found[1], **pull(cotangents)[0]}


def one_by_one(case, arrays, ids, cotangents):
    def per_head(query, key, value, g, **others):
        output, final, grads = oracle.recurrent(query, key, value, g=g[..., None], **others)
        return output, final, grads | ({"g": grads["g"][..., 0]} if grads else {})

    truth = oracle.delta_rule if case.op in DELTAS else per_head if case.op == "simple_gla" else oracle.recurrent
    d_output, d_final = (np.asarray(x, np.float64) for x in cotangents)
    output, final, grads = oracle.one_by_one(truth, arrays, ids, d_output, d_final, case.reverse)
    return {"output": output, "final state": final, **grads}


def assert_matches(case, found, expected):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = np.asarray(found[name]).astype(np.float64)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} values are not finite"
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6)
        bound = TOLERANCE[case.dtype] * (3 if name.startswith("g") else 1)
        assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"


def with_tokens(x, where, by):
    """`x` with this number for these tokens, if it has tokens."""
    return jnp.where(where.reshape(*where.shape, *(1,) * (x.ndim - 2)), by, x) if x.shape[:2] == where.shape else x


def check_leaks(case, arrays, ids, cotangents, clean):
    """Neither what padding holds nor what another sequence does changes a bit."""
    padding, inside = ids < 0, np.zeros(ids.shape, bool)
    inside[INSIDE] = True

    def spoilt(x):
        return with_tokens(with_tokens(x, padding, jnp.nan), inside, case.poison)

    dirty = results(case, {n: spoilt(x) for n, x in arrays.items()}, ids, (spoilt(cotangents[0]), cotangents[1]))
    for name, x in clean.items():
        x, y = np.asarray(x), np.asarray(dirty[name])
        if x.shape[:2] == ids.shape:
            np.testing.assert_array_equal(y[~inside], x[~inside], err_msg=name)
            assert not y[padding].any(), name
        else:
            others = slice(None) if name in ("final state", "initial_state") else np.r_[0, 2]
            np.testing.assert_array_equal(y[others], x[others], err_msg=name)


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences_one_by_one_without_leaks(case):
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
    monkeypatch.setattr(configs, "configure", lambda *_: replace(LINEAR, fill=99))
    monkeypatch.setattr(delta_rule_configs, "configure", lambda *_: replace(DELTA, fill=99))
    monkeypatch.setattr(delta_rule_launcher, "FEWEST_CHUNKS", 1)
    arrays, cotangents = arrays_of(case, LONG)
    found = results(case, arrays, LONG, cotangents)
    assert_matches(case, found, one_by_one(case, arrays, LONG, cotangents))


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
