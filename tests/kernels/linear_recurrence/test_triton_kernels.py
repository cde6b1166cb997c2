"""The Triton kernels of the gated linear recurrence, interpreted on the CPU, against float64."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from phased import in_phases
from triton_cases import (
    BEYOND_FLOAT16,
    MIXES,
    NAMES,
    Case,
    assert_dtypes,
    assert_matches,
    burst,
    make,
    make_beyond_float16,
    oracle,
    results,
    unseen,
)

import ejkernel
from ejkernel._dispatch import SlowerImplementationWarning, _warn_once
from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS, xla
from ejkernel.kernels.linear_recurrence import triton as triton_gpu
from ejkernel.kernels.linear_recurrence.triton import across_heads, configs, passes
from ejkernel.kernels.linear_recurrence.triton import gates as gates_of_call
from ejkernel.kernels.linear_recurrence.triton.configs import Config
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher
from ejkernel.kernels.linear_recurrence.triton.plan import Plan

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

from triton_interpreter import interpreted

# Small blocks: several chunks, groups and time segments in a few dozen tokens. A thread of the exact path has an eighth
# of a chunk's rows, as on Hopper.
TILE = Tile(16)
TILES = {"output": TILE, "gradient": TILE, "head_gate_gradient": TILE, "exact": replace(TILE, warps=1), "step": TILE}
SMALL = Config(chunk=16, group=2, limit=40.0, fill=16, **TILES)
TOLERANCE = {
    "float32": {"other": 3e-6, "decay": 1e-5},
    "float16": {"other": 2e-3, "decay": 1e-2},
    "bfloat16": {"other": 4e-3, "decay": 1e-2},
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(configs, "configure", lambda capability, wide, dim: SMALL)
    monkeypatch.setattr(Launcher, "by_token", property(lambda self: self.call.dtype == jnp.bfloat16))
    with interpreted():
        yield


def check(case, tolerance=None):
    check_arrays(case, *make(case), tolerance)


def check_arrays(case, arrays, cotangents, tolerance=None):
    if case.gate == "all -6" and case.dtype == "float32" and tolerance is None:
        # what the last token of a group writes is 400 times what crosses its gate, and cancels but for its rounding
        tolerance = {**TOLERANCE[case.dtype], "decay": 1e-4}
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_matches(actual, oracle(case.call, arrays, cotangents), tolerance or TOLERANCE[case.dtype])


BASE = Case("key", T=71, B=1)
UNEVEN = {"lengths": (3, 0, 33, 20), "T": 60}
CASES = [
    replace(BASE, name="none", decay="none"),
    replace(BASE, name="constant", decay="constant", B=2),
    replace(BASE, name="constant-unscaled", decay="constant", gate="unscaled"),
    replace(BASE, name="head", decay="head"),
    replace(BASE, name="head-resets", decay="head", gate="resets"),
    replace(BASE, name="head-growing", decay="head", gate="mixed"),
    BASE,
    replace(BASE, name="key-unscaled", gate="unscaled"),
    replace(BASE, name="key-strong", gate="strong"),
    replace(BASE, name="key-fierce", gate="fierce"),
    replace(BASE, name="key-resets", gate="resets"),
    replace(BASE, name="key-growing", gate="mixed"),
    replace(BASE, name="no-state", state=False),
    replace(BASE, name="whole-chunks", T=64),
    replace(BASE, name="one-chunk", T=9),
    replace(BASE, name="odd-dims", K=20, V=40),
    replace(BASE, name="shared-heads", H=4, Hkv=2, T=35),
    replace(BASE, name="shared-heads-head", decay="head", H=4, Hkv=1, T=35, K=40),
    replace(BASE, name="shared-queries", decay="head", H=2, shared=(1, 1, 2), T=35),
    replace(BASE, name="shared-by-each", H=4, shared=(2, 4, 1), gate="resets", T=20),
    replace(BASE, name="shared-packed", decay="constant", H=2, shared=(2, 1, 1), lengths=(3, 0, 17), T=20),
    replace(BASE, name="reverse", reverse=True),
    replace(BASE, name="reverse-head", decay="head", reverse=True),
    replace(BASE, name="packed-none", decay="none", **UNEVEN),
    replace(BASE, name="packed-constant", decay="constant", **UNEVEN),
    replace(BASE, name="packed-head", decay="head", **UNEVEN),
    replace(BASE, name="packed-key", **UNEVEN),
    replace(BASE, name="packed-key-resets-reverse", gate="resets", reverse=True, **UNEVEN),
    replace(BASE, name="packed-head-reverse", decay="head", reverse=True, **UNEVEN),
    replace(BASE, name="float16-head", decay="head", dtype="float16"),
    replace(BASE, name="float16-key", gate="unscaled", dtype="float16", T=35),
    replace(BASE, name="bfloat16-none", decay="none", dtype="bfloat16"),
    replace(BASE, name="bfloat16-head", decay="head", dtype="bfloat16"),
    replace(BASE, name="bfloat16-head-resets", decay="head", gate="resets", dtype="bfloat16", T=40, state=False),
    replace(
        BASE,
        name="bfloat16-head-packed",
        decay="head",
        dtype="bfloat16",
        shared=(1, 1, 2),
        V=20,
        reverse=True,
        **UNEVEN,
    ),
    replace(BASE, name="bfloat16-constant", decay="constant", dtype="bfloat16", T=64),
    replace(BASE, name="bfloat16-key", dtype="bfloat16"),
    replace(BASE, name="bfloat16-key-strong", gate="strong", dtype="bfloat16"),
    replace(BASE, name="bfloat16-key-resets", gate="resets", dtype="bfloat16"),
    replace(BASE, name="shipped", gate="shipped"),
    replace(BASE, name="shipped-packed-reverse", gate="shipped", reverse=True, **UNEVEN),
    replace(BASE, name="shipped-odd-dims", gate="shipped", K=20, V=40, T=35, state=False),
    replace(BASE, name="shipped-shared", gate="shipped", H=4, shared=(2, 4, 1), T=35),
    replace(BASE, name="float16-shipped", gate="shipped", dtype="float16", T=35),
    replace(BASE, name="bfloat16-all-6", gate="all -6", dtype="bfloat16"),
    replace(BASE, name="in-turn", gate="in turn", T=135),
    replace(BASE, name="bfloat16-in-turn-packed", gate="in turn", dtype="bfloat16", lengths=(3, 0, 100, 33), T=140),
]


def along(run, case, arrays, names):
    """Results, and their tangents along a direction of the arrays of these names."""
    at = [i for i, name in enumerate(Inputs._fields) if name in names and arrays[i] is not None]
    random = np.random.default_rng(3)
    moved = [random.normal(size=arrays[i].shape).astype(arrays[i].dtype) for i in at]

    def of_moving(*moving):
        whole = dict(zip(at, moving, strict=True))
        return run(case.call, *(whole.get(i, x) for i, x in enumerate(arrays)))

    return jax.jvp(of_moving, [arrays[i] for i in at], moved)


@pytest.mark.parametrize(
    "case, names",
    [
        (replace(BASE, decay="constant", H=4, Hkv=2, T=35), ("query", "key", "value", "initial_state")),
        (replace(BASE, reverse=True, **UNEVEN), ("query", "key", "value", "initial_state")),
        (replace(BASE, decay="head", T=20), ("key",)),
        (replace(BASE, decay="none", T=20), ("initial_state",)),
        (replace(BASE, value_gate="mild", T=20), ("query", "value")),
    ],
)
def test_tangents_of_what_results_are_linear_in(case, names):
    """By the kernels themselves: no warning says that XLA serves them."""
    arrays, _ = make(case)
    found, right = (jax.tree.leaves(along(run, case, arrays, names)) for run in (triton_gpu.run, xla.run))
    for a, b in zip(found, right, strict=True):
        assert_close(a, b, 1e-5)


def test_tangents_of_gates():
    case = replace(BASE, decay="head", T=20)
    arrays, _ = make(case)
    _warn_once.cache_clear()
    with pytest.warns(SlowerImplementationWarning, match="'xla' serves a recurrence's tangents by gates"):
        found = along(triton_gpu.run, case, arrays, ("query", "log_decay"))
    right = along(xla.run, case, arrays, ("query", "log_decay"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case):
    check(case)


MANY_HEADS = replace(BASE, decay="head", dtype="bfloat16", H=4, shared=(1, 1, 4))


@pytest.mark.parametrize(
    "case",
    [
        replace(MANY_HEADS, name="two-groups", H=2, shared=(1, 1, 2), T=135),
        replace(MANY_HEADS, name="resets-reverse", gate="resets", shared=(2, 2, 4), V=20, T=35, reverse=True, B=2),
        replace(MANY_HEADS, name="growing", gate="mixed", state=False, K=20, T=20),
    ],
    ids=str,
)
def test_across_heads(monkeypatch, case):
    """Gradients of shared queries and keys, added up in one program a chunk, also where gates are strong."""
    taken = []
    gradients = across_heads.gradients
    monkeypatch.setattr(across_heads, "gradients", lambda *given: taken.append(1) or gradients(*given))
    monkeypatch.setattr(across_heads, "FEWEST", 2)
    monkeypatch.setattr(configs, "configure", lambda *_: replace(SMALL, fill=1))
    check(case)
    assert taken


@pytest.mark.parametrize(
    "case", [BASE, replace(BASE, name="head", decay="head", T=135, state=False), replace(BASE, decay="none")], ids=str
)
def test_parts_of_a_call(monkeypatch, case):
    """A device's part is cut in time where the whole call is not, and keeps what the whole call keeps."""
    whole = replace(case.call, heads=99)
    arrays, cotangents = make(case)
    plan = Plan.of(whole)
    part = plan.of_part(case.call)
    assert part.segmented(case.call) and not plan.segmented(whole)
    monkeypatch.setattr(Plan, "of", lambda _: part)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_matches(actual, oracle(case.call, arrays, cotangents), TOLERANCE[case.dtype])
    inputs = Inputs(*arrays)
    kept = [jax.eval_shape(functools.partial(passes.forward, True, case.call, each), inputs) for each in (plan, part)]
    assert jax.tree.map(jnp.shape, kept[0]) == jax.tree.map(jnp.shape, kept[1])


def test_other_gpus_add_up_at_once(monkeypatch):
    """What states at a group's border have in common, where Triton has no code for sums of sums."""
    monkeypatch.setattr(Launcher, "hopper", False)
    check(replace(BASE, decay="head", T=35))


def test_one_gate_is_right_in_each_head():
    """Its gradient adds up errors of every token: within 1.5e-2 of what it sums, large cotangents at the end or not."""
    case = replace(BASE, decay="constant", gate="unscaled", dtype="bfloat16", T=96, H=8, Hkv=8, state=False)
    arrays, cotangents = make(case)
    error = (
        np.asarray(results(triton_gpu.run, case.call, arrays, cotangents)[5]) - oracle(case.call, arrays, cotangents)[5]
    )
    by_token = (*arrays[:3], jnp.repeat(arrays[3][:, None], case.T, 1), *arrays[4:])
    summed = np.abs(oracle(replace(case, decay="head").call, by_token, cotangents)[5]).sum(1)
    assert np.sqrt(np.mean((error / summed) ** 2)) <= 1.5e-2


IN_PHASES = ("key", "one-chunk", "packed-constant", "packed-key-resets-reverse", "bfloat16-head-packed")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in IN_PHASES], ids=str)
def test_in_phases(case):
    arrays, cotangents = make(case)
    actual = results(in_phases(IMPLEMENTATIONS[1]), case.call, arrays, cotangents)
    assert_matches(actual, oracle(case.call, arrays, cotangents), TOLERANCE[case.dtype])


@pytest.mark.parametrize("factors", BEYOND_FLOAT16, ids=str)
def test_float16_overflows_nowhere_in_between(factors):
    case = replace(BASE, decay="head", dtype="float16", T=35, state=False)
    arrays = make_beyond_float16(case, factors)
    expected = oracle(case.call, arrays, make(case)[1])
    for got, wanted in zip(triton_gpu.run(case.call, *arrays), expected[:2], strict=True):
        assert_close(got, wanted, 2e-3)


@pytest.mark.parametrize("tokens", [20, 3])
@pytest.mark.parametrize(
    "gates",
    [("none", None), ("constant", None), ("head", None), ("key", None), ("none", "mild"), ("key", "mild")],
    ids=str,
)
def test_float16_overflows_only_where_the_answer_does(gates, tokens):
    """The query's gradient is beyond float16; what is made of it, as that of a head's gate, is not."""
    decay, value_gate = gates
    case = replace(BASE, decay=decay, value_gate=value_gate, dtype="float16", T=tokens, H=1, Hkv=1)
    (*inputs, state, borders), cotangents = make(case)
    inputs[:3] = ((x * factor).astype(x.dtype) for x, factor in zip(inputs[:3], BEYOND_FLOAT16[1], strict=True))
    arrays = (*inputs, state, borders)
    expected = oracle(case.call, arrays, cotangents)
    assert (np.abs(expected[2]) > 1e5).any()
    names = NAMES[: len(expected)]
    for name, got, wanted in zip(names, results(triton_gpu.run, case.call, arrays, cotangents), expected, strict=True):
        if got is not None:
            fits = np.abs(wanted) < np.finfo(got.dtype).max
            tolerance = TOLERANCE["float16"]["decay" if "decay" in name else "other"]
            assert_close(np.where(fits, got, 0), np.where(fits, wanted, 0), tolerance, name, np.abs(wanted).max())


# the kernels that multiply are three; what goes in is cast before any of them
MIXED = [("head", mix) for mix in MIXES] + [(decay, mix) for decay in ("none", "constant", "key") for mix in MIXES[:2]]


@pytest.mark.parametrize("decay, mix", MIXED, ids=str)
def test_dtypes_mix(decay, mix):
    dtypes, dtype = mix
    case = replace(BASE, decay=decay, dtypes=dtypes, dtype=dtype, T=20, H=1, Hkv=1)
    arrays, cotangents = make(case)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_dtypes(case, arrays, actual)
    # as coarse as the coarsest of what goes in, comes out or is handed back
    coarsest = "bfloat16" if "bfloat16" in (*dtypes, dtype) else "float16"
    assert_matches(actual, oracle(case.call, arrays, cotangents), TOLERANCE[coarsest])


@pytest.mark.parametrize("scaled", [False, True])
def test_fronts_lower_for_a_cpu_beside_it(scaled):
    """Where Triton counts as available, both implementations are traced, and must agree on every dtype."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 16)), jnp.bfloat16)
    key = x if scaled else x.astype(jnp.float32)
    scale = jnp.float32(0.3) if scaled else None

    def fronts(x, key, gate):
        yield ejkernel.retention(x, key, x, softmax_scale=scale)
        yield ejkernel.linear_attention(x, key, x, softmax_scale=scale)
        yield ejkernel.simple_gla(x, key, x, -jnp.abs(gate[..., 0]), softmax_scale=scale)
        yield ejkernel.recurrent_gla(x, key, x, -jnp.abs(gate), softmax_scale=scale)

    def loss(*arrays):
        return sum(output.astype(jnp.float32).sum() + state.sum() for output, state in fronts(*arrays))

    for got, given in zip(jax.grad(loss, (0, 1, 2))(x, key, x), (x, key, x), strict=True):
        assert got.dtype == given.dtype
        assert np.isfinite(np.asarray(got, np.float32)).all()


EXTREMES = [
    replace(BASE, name="head", decay="head", T=20),
    replace(BASE, name="head-float16", decay="head", dtype="float16", T=20),
    replace(BASE, name="head-packed-reverse", decay="head", reverse=True, **UNEVEN),
    replace(BASE, name="key-packed", **UNEVEN),
    replace(BASE, name="key-bfloat16-reverse", reverse=True, dtype="bfloat16", T=20),
    replace(BASE, name="head-step", decay="head", T=3),
    replace(BASE, name="key-step", T=3),
]


@pytest.mark.parametrize("case", EXTREMES, ids=str)
def test_nothing_stays_nothing_however_it_grows(case):
    arrays, cotangents = burst(case)
    expected = oracle(case.call, arrays, cotangents)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_matches(actual, expected, TOLERANCE[case.dtype])
    if case.decay == "head":
        # no state, written out; the gradient of what would grow is infinite
        call = case.call
        state = jnp.zeros((call.sequences, call.heads, call.key_dim, call.value_dim))
        actual = results(triton_gpu.run, call, (*arrays[:5], state, arrays[6]), cotangents)
        assert_matches(actual[:6], expected[:6], TOLERANCE[case.dtype])


@pytest.mark.parametrize("decay", ["none", "constant", "head", "key"])
def test_later_tokens_are_not_seen(decay):
    case = replace(BASE, decay=decay, T=32, H=1, Hkv=1)
    arrays, cotangents = unseen(case)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_matches(actual, oracle(case.call, arrays, cotangents), TOLERANCE["float32"])


@pytest.mark.parametrize("decay", ["constant", "head", "key"])
def test_gates_that_forget_all_have_no_gradient(decay):
    case = replace(BASE, decay=decay, gate="resets", B=2, T=32)
    arrays, cotangents = make(case)
    if decay == "constant":
        arrays = (*arrays[:3], arrays[3].at[0].set(-jnp.inf), *arrays[4:])
    gradient = np.asarray(results(triton_gpu.run, case.call, arrays, cotangents)[5])
    forgets = np.isneginf(np.asarray(arrays[3]))
    assert forgets.any() and not forgets.all()
    assert (gradient[forgets] == 0).all() and (gradient[np.asarray(arrays[3]) > -1] != 0).all()


@pytest.mark.parametrize("lengths", [None, (33, 0, 31)])
def test_first_gates_of_bounded_chunks_have_no_gradient(lengths):
    """Without initial states they meet nothing, and chunks stay bounded whatever they are."""
    case = replace(BASE, gate="all -6", lengths=lengths, T=64, H=1, Hkv=1, state=False)
    arrays, cotangents = make(case)
    first = np.array([0, 33] if lengths else [0])
    gradient = results(
        triton_gpu.run, case.call, (*arrays[:3], arrays[3].at[:, first].set(-jnp.inf), *arrays[4:]), cotangents
    )[5]
    assert not np.asarray(gradient)[:, first].any() and np.asarray(gradient).any()


STEPS = [
    replace(BASE, name="step-none", decay="none", B=2, T=1),
    replace(BASE, name="step-constant", decay="constant", B=2, T=1),
    replace(BASE, name="step-head", decay="head", B=2, T=1, H=4),
    replace(BASE, name="step-shared", decay="head", B=2, T=1, H=4, shared=(2, 1, 4)),
    replace(BASE, name="step-key", B=2, T=1, K=20, V=40),
    replace(BASE, name="step-few-reverse", B=2, T=5, reverse=True, gate="resets"),
    replace(BASE, name="step-no-state", decay="none", T=1, state=False),
    replace(BASE, name="step-packed", lengths=(1, 0, 3, 1, 1), T=8),
    replace(BASE, name="step-bfloat16", T=1, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_few_tokens(case):
    check(case)


VALUE_GATES = [
    replace(BASE, name="plain", decay="none", value_gate="unscaled", K=20, V=40, T=35, H=1, Hkv=1),
    replace(BASE, name="resets-shared", decay="none", value_gate="resets", H=4, shared=(1, 2, 4), T=20),
    replace(BASE, name="head-reverse", decay="head", value_gate="mild", reverse=True, T=35, state=False),
    replace(BASE, name="constant-packed", decay="constant", value_gate="strong", lengths=(3, 0, 17), T=24),
    replace(BASE, name="bfloat16", decay="none", value_gate="mild", dtype="bfloat16", T=32),
    replace(BASE, name="both", value_gate="unscaled", K=20, V=40, T=35, H=1, Hkv=1),
    replace(
        BASE, name="both-packed-reverse", value_gate="mild", dtype="bfloat16", reverse=True, lengths=(3, 0, 35), T=40
    ),
    replace(BASE, name="both-strong", gate="strong", value_gate="resets", T=20, state=False),
    replace(BASE, name="both-step", value_gate="mild", T=2, B=2),
    replace(BASE, name="step", decay="head", value_gate="resets", B=2, T=2, H=4, shared=(4, 1, 2)),
]


@pytest.mark.parametrize("case", VALUE_GATES, ids=str)
def test_value_gates(case):
    bound = TOLERANCE[case.dtype]
    # the gradient of a gate a head is a sum over all value dims, of either sign
    check(case, {**bound, "decay": 3 * bound["decay"], "value decay": bound["decay"]})


WIDE = [
    replace(BASE, name="constant", decay="constant", K=20, V=24, T=20, H=1, Hkv=1, state=False),
    replace(BASE, name="head", decay="head", dtype="bfloat16", K=20, V=24, H=2, shared=(1, 2, 1), T=35),
    replace(BASE, name="key", gate="resets", dtype="bfloat16", K=20, V=24, T=35, H=1, Hkv=1),
]


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, name="mild", decay="head", V=16),
        replace(BASE, name="resets", decay="head", gate="resets", V=16, dtype="bfloat16", T=40, state=False),
        replace(BASE, name="growing reverse", decay="head", gate="mixed", V=12, reverse=True),
        replace(BASE, name="packed shared", decay="head", V=16, H=4, shared=(1, 2, 4), dtype="bfloat16", **UNEVEN),
    ],
    ids=str,
)
def test_few_value_dims_have_one_kernel_for_all_gates(monkeypatch, case):
    """As the tile of Mamba-2's heads on Hopper, half of whose rows they fill."""
    monkeypatch.setattr(
        configs, "configure", lambda *_: replace(SMALL, output=Tile(32, stages=3), stages_if_half_full=2)
    )
    walks = []
    launch = Launcher.launch

    def watched(self, kernel, *given, **constants):
        if constants.get("walk") is not None and constants["walk"].role in ("output", "dvalue"):
            walks.append(constants["walk"])
        return launch(self, kernel, *given, **constants)

    monkeypatch.setattr(Launcher, "launch", watched)
    check(case)
    assert {walk.role for walk in walks} == {"output", "dvalue"}
    assert all(walk.strong and walk.alone for walk in walks)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_dims_in_parts(monkeypatch, case):
    """More dims than a program carries, the last part of them not full."""
    tile = replace(SMALL.output, columns=16)
    # the walk that meets states is cut otherwise than the one that stores them
    meeting = {"key_gate_query_gradient": replace(tile, rows=32)}
    parts = replace(SMALL, output=tile, gradient=tile, head_gate_gradient=tile, segments=tile, unfold=16, **meeting)
    monkeypatch.setattr(configs, "configure", lambda *_: parts)
    check(case)


@pytest.mark.parametrize("gate", ["strong", "shipped", "in turn"])
@pytest.mark.parametrize("wide", [False, True])
def test_largest_blocks(monkeypatch, wide, gate):
    """The chunk of 64 tokens that Hopper uses, on a length that fills none."""
    config = replace(SMALL, chunk=64, group=4, output=Tile(32, warps=8))
    monkeypatch.setattr(configs, "configure", lambda *_: config)
    check(Case("large", T=75, B=1, gate=gate, dtype="float32" if wide else "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounded_gates_beside_large_numbers(monkeypatch, dtype):
    """Up to what docs/numerics.md promises: inverted decays of 70 bits times 2^44."""
    monkeypatch.setattr(configs, "configure", lambda *_: replace(SMALL, chunk=32))
    case = replace(BASE, gate="all -6", dtype=dtype, T=40)
    (query, key, value, *rest), (d_output, d_last) = make(case)
    cotangents = d_output * 2**22, d_last * 2**22
    # a gate's gradient is what is left of terms that cancel, as in `check_arrays`
    tolerance = {"other": TOLERANCE[dtype]["other"], "decay": 2e-4 if dtype == "float32" else 1e-2}
    check_arrays(case, (query, key, value * 2**22, *rest), cotangents, tolerance)


def test_bounded_gates_where_all_else_is_far(monkeypatch):
    """Gates of -6, and one token alone reads another 15 before it: 130 bits are left of that, and not 0."""
    monkeypatch.setattr(configs, "configure", lambda *_: replace(SMALL, chunk=64, group=4, output=Tile(32, warps=8)))
    case = Case("far", T=64, B=1, H=1, Hkv=1, gate="all -6", state=False)
    (query, key, value, *rest), (d_output, d_last) = make(case)
    alone = jnp.arange(64)[None, :, None, None]
    for reader, read in ((31, 17), (40, 26), (20, 17)):
        arrays = jnp.where(alone == reader, query, 0), jnp.where(alone == read, key, 0), value, *rest
        cotangents = d_output, 0 * d_last
        # sums of gates are as long as what is left of these products is small
        check_arrays(case, arrays, cotangents, {"other": 1e-5, "decay": 1e-4})


def flags(case, config):
    """Kinds of a call's chunks and heads as kernels find them, and which are expected, by float64."""
    arrays, _ = make(case)
    launcher = Launcher.of(case.call, Plan.of(case.call), None)
    found = gates_of_call.fold_key_gates(launcher, arrays[0], arrays[1], arrays[3], start=True)[2].flag
    bits = np.asarray(arrays[3], np.float64) / np.log(2)
    bits = np.pad(bits, ((0, 0), (0, -case.T % config.chunk), (0, 0), (0, 0)))
    chunks = bits.reshape(case.B, -1, config.chunk, case.H, case.K)
    halves = np.abs(chunks.reshape(*chunks.shape[:2], 2, -1, case.H, case.K).sum(3))
    mild = (halves <= config.limit).all((2, 4))
    eights = chunks.reshape(*chunks.shape[:2], -1, 8, case.H, case.K).sum(3)
    bounded = (eights >= -80).all((2, 4)) & (chunks <= 0).all((2, 4))
    return np.asarray(found).reshape(mild.shape), np.where(mild, 0, np.where(bounded, 2, 1))


@pytest.mark.parametrize("gate", ["mild", "shipped", "all -6", "in turn", "strong", "resets"])
def test_kinds_of_chunks(gate):
    found, expected = flags(Case("kinds", T=135, B=1, gate=gate), SMALL)
    np.testing.assert_array_equal(found, expected)
    if gate in ("shipped", "all -6"):
        assert (found == 2).any()


@pytest.mark.parametrize("value, kind", [(0.01, 1), (np.nan, 1), (-np.inf, 1), (-90.0, 1), (-20.0, 2)])
@pytest.mark.parametrize("row", [3, 11])
def test_one_gate_beyond_the_bound(monkeypatch, row, value, kind):
    case = Case("one", T=32, B=1, gate="all -6")
    arrays, cotangents = make(case)
    gate = arrays[3].at[0, :16].set(-4.0).at[0, row, 1, 5].set(value)
    launcher = Launcher.of(case.call, Plan.of(case.call), None)
    _, _, folded = gates_of_call.fold_key_gates(launcher, arrays[0], arrays[1], gate, start=True)
    np.testing.assert_array_equal(np.asarray(folded.flag), [[2, kind], [2, 2]])
    if np.isfinite(value):
        check_arrays(case, (*arrays[:3], gate, *arrays[4:]), cotangents)


def test_sequences_do_not_touch():
    """A NaN in one packed sequence changes no bit of another, forward and backward."""
    case = replace(BASE, lengths=(20, 21, 19), T=64)
    arrays, cotangents = make(case)
    clean = results(triton_gpu.run, case.call, arrays, cotangents)
    poisoned = [x if x is None else x.at[0, 25].set(jnp.nan) for x in arrays[:4]]
    spoilt = results(triton_gpu.run, case.call, (*poisoned, *arrays[4:]), cotangents)
    others = np.r_[0:20, 41:64]
    for name, a, b in zip(NAMES[: len(clean)], clean, spoilt, strict=True):
        rows = (slice(None), others) if a.shape[1] == 64 else np.array([0, 2])
        np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows], err_msg=name)


def test_padding_has_no_effect():
    case = replace(BASE, lengths=(20, 11), T=48)
    arrays, cotangents = make(case)
    arrays = tuple(x if x is None else x.at[0, 31:].set(jnp.nan) for x in arrays[:4]) + arrays[4:]
    cotangents = (cotangents[0].at[0, 31:].set(jnp.nan), cotangents[1])
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert all(np.isfinite(np.asarray(x)).all() for x in actual)
    for i in (0, 2, 3, 4, 5):
        assert (np.asarray(actual[i])[0, 31:] == 0).all(), NAMES[i]


def loss(run, case, arrays, cotangents):
    def value(*inputs):
        output, last = run(case.call, *inputs, arrays[6])
        return (output * cotangents[0]).sum() + (last * cotangents[1]).sum()

    return value


@pytest.mark.parametrize("decay", ["head", "key"])
def test_gradient_of_gradient(decay):
    case = Case("twice", decay=decay, B=1, T=11, H=1, Hkv=1)
    arrays, cotangents = make(case)

    def twice(run):
        gradient = jax.grad(loss(run, case, arrays, cotangents), argnums=(0, 1, 2, 3))
        size = jax.grad(lambda *x: sum((each**2).sum() for each in gradient(*x, *arrays[4:6])), argnums=(0, 1, 2, 3))
        return jax.jit(size)(*arrays[:4])

    for a, b in zip(twice(triton_gpu.run), twice(xla.run), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(packed):
    case = Case("vmap", B=1, T=20, lengths=(12, 6) if packed else None)
    cases = [make(case, seed) for seed in range(3)]
    stacked, cotangents = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    mapped = jax.vmap(functools.partial(results, triton_gpu.run, case.call))(stacked, cotangents)
    for i, (arrays, cotangent) in enumerate(cases):
        one = results(triton_gpu.run, case.call, arrays, cotangent)
        for name, a, b in zip(NAMES[: len(one)], one, mapped, strict=True):
            np.testing.assert_allclose(a, b[i], rtol=1e-5, atol=1e-5, err_msg=name)


def test_jit_checkpoint_and_gates_left_alone():
    """Gates that are not differentiated cost nothing and change nothing."""
    case = Case("jit", decay="constant", B=1, T=20)
    arrays, cotangents = make(case)
    value = loss(triton_gpu.run, case, arrays, cotangents)
    expected = oracle(case.call, arrays, cotangents)
    actual = jax.jit(jax.grad(jax.checkpoint(value), argnums=(0, 1, 2)))(*arrays[:6])
    for a, b in zip(actual, expected[2:5], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_supports_says_why():
    call = BASE.call
    assert triton_gpu.supports(call) is None
    assert "decays" in triton_gpu.supports(replace(call, value_dim=513, value_decay=True))
    assert "512" in triton_gpu.supports(replace(call, key_dim=513))
    assert triton_gpu.supports(replace(call, key_dim=512, value_dim=1000)) is None
    assert "float64" in triton_gpu.supports(replace(call, dtype=np.dtype(np.float64)))
    assert "elements" in triton_gpu.supports(replace(call, tokens=0))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("wide", [False, True])
def test_configurations_are_whole(monkeypatch, capability, dim, wide):
    monkeypatch.undo()
    config = configs.configure(capability, wide, dim)
    meeting = config.key_gate_query_gradient or config.gradient
    for number in (
        config.chunk,
        config.group,
        *(each.rows for each in (config.output, config.gradient, meeting, config.exact)),
    ):
        assert number & (number - 1) == 0
    assert config.chunk >= 16
    # gradients of query and key come in the same parts
    assert meeting.columns == config.gradient.columns


def test_compile_key_does_not_depend_on_length(monkeypatch):
    """What is constant in a kernel is the same for any number of tokens, sequences and packing of a kind."""
    seen = []
    real = _launch.launch

    def record(kernel, inputs, outputs, *, constants, tile, **rest):
        given = {name: each for name, each in {**inputs, **outputs}.items() if each is not None}
        kinds = {name: type(x) if isinstance(x, int) else x.dtype for name, x in given.items()}
        seen.append((kernel.__name__, str(kinds), tile, constants))
        return real(kernel, inputs, outputs, constants=constants, tile=tile, **rest | {"programs": 0})

    keys = []
    # undone before the interpreter is, which would leave it behind otherwise
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "launch", record)
        for tokens, lengths in ((40, (20, 20)), (50, (10, 40)), (47, (47, 0))):
            seen.clear()
            case = replace(BASE, T=tokens, lengths=lengths)
            arrays, cotangents = make(case)
            jax.jit(lambda a, c, case=case: results(triton_gpu.run, case.call, a, c)).lower(arrays, cotangents)
            keys.append(list(seen))
    assert keys[0] == keys[1] == keys[2]
