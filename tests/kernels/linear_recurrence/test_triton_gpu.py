"""The Triton kernels of the gated linear recurrence on an NVIDIA GPU, against float64: `pytest -m gpu`."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle as recurrence_oracle
import pytest
from conftest import assert_close
from linear_attention_cases import CASES as FRONT_CASES
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
from ejkernel.kernels import _launch
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS, xla
from ejkernel.kernels.linear_recurrence import triton as triton_gpu
from ejkernel.kernels.linear_recurrence.triton import across_heads, configs
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher

pytestmark = pytest.mark.gpu
if _launch.capability() is None:
    pytest.skip("no NVIDIA GPU", allow_module_level=True)
elif reason := _launch.unavailable():
    pytest.skip(reason, allow_module_level=True)

FRONTS = (
    "gamma packed",
    "one gate a head mixed",
    "g",
    "g mixed",
    "g mixed reverse packed",
    "g packed empty",
    "one token reset",
    "one token no state",
)
GRADIENTS = {"other": 1e-2}
TOLERANCE = {"bfloat16": GRADIENTS, "float16": GRADIENTS, "float32": {"other": 1e-5}}
BASE = Case("key", T=333, B=2, H=4, Hkv=4, K=128, V=128, scale=128**-0.5, dtype="bfloat16")
UNEVEN = {"lengths": (1, 0, 130, 64, 63, 60), "T": 333}


def check(case, run=triton_gpu.run):
    arrays, cotangents = make(case)
    if case.decay == "head" and case.dtype == "bfloat16":
        # what the last tokens write is part of ⟨S, dS⟩ at the end, not of their gates' gradient: it cancels but for its
        # rounding: held to 1e-2 where dS is as large there as what the outputs bring a state
        cotangents = cotangents[0], cotangents[1] * case.scale
    actual = results(run, case.call, arrays, cotangents)
    expected = oracle(case.call, arrays, cotangents)
    tolerance = TOLERANCE[case.dtype]
    if case.decay == "constant" and case.dtype == "bfloat16":
        # one number a head is a sum over tokens of either sign: held to the size of what is summed, not of what is left
        size = np.linalg.norm(sizes_of_token_gradients(case, arrays, cotangents))
        error = np.linalg.norm(np.asarray(actual[5], np.float64) - expected[5])
        assert error <= 1e-2 * size, f"decay: error {error / size:.2e} of the terms"
        tolerance = {**tolerance, "decay": np.inf}
    if case.dtype == "float32" and case.gate == "shipped":
        tolerance = {**tolerance, "decay": 3e-5}
    assert_matches(actual, expected, tolerance)
    if case.dtype != "float32":
        # beside the answer's own rounding, that of states and scores; with key gates also of folded query and key: four
        # equal errors, which make twice one
        rounded = np.asarray(jnp.asarray(expected[0]).astype(case.dtype)).astype(np.float64)
        least = np.linalg.norm(rounded - expected[0])
        error = np.linalg.norm(np.asarray(actual[0]).astype(np.float64) - expected[0])
        # with both kinds of gates, of the folded value too; key dims above 256 are walked in parts that are added
        # where little but a token's own score is left of most outputs, they are rounded as coarsely as their terms
        others = case.K > 256 or case.gate == "shipped"
        most = 2.5 if case.value_gate and case.decay == "key" else 2.1 if others else 2
        assert error <= most * least, f"output: {error / least:.2f} times the error of rounding"


def sizes_of_token_gradients(case, arrays, cotangents):
    """Σ|dg| over each sequence's tokens, were each token's gate its own: `[N, H]`."""
    borders = np.cumsum([0, *(case.lengths or [case.T] * case.B)])
    owner = np.repeat(np.arange(len(borders)), [*np.diff(borders), max(0, case.call.batch * case.T - borders[-1])])
    padded = jnp.pad(arrays[3], ((0, 1), (0, 0)))
    gate = padded[owner].reshape(case.call.batch, case.T, case.H)
    tokens = oracle(replace(case, decay="head").call, (*arrays[:3], gate, *arrays[4:]), cotangents)[5]
    tokens = np.abs(tokens).reshape(-1, case.H)
    return np.stack([tokens[i:j].sum(0) for i, j in itertools.pairwise(borders)])


SHAPES = [
    {"name": "plain"},
    {"name": "whole-chunks", "T": 320},
    {"name": "no-state", "state": False},
    {"name": "shared-heads", "Hkv": 1},
    {"name": "shared-queries", "shared": (1, 1, 4), "V": 64},
    {"name": "shared-queries-whole", "shared": (1, 1, 4), "V": 64, "T": 320},
    {"name": "shared-by-each", "shared": (2, 1, 4)},
    {"name": "odd-dims", "K": 72, "V": 40},
    {"name": "reverse", "reverse": True},
    {"name": "packed", **UNEVEN},
    {"name": "packed-reverse-shared", **UNEVEN, "reverse": True, "Hkv": 2, "K": 64},
]
GATES = [
    ("none", "mild"),
    ("constant", "mild"),
    ("constant", "unscaled"),
    ("head", "unscaled"),
    ("head", "resets"),
    ("key", "mild"),
    ("key", "resets"),
    ("key", "shipped"),
    ("key", "in turn"),
]


@pytest.mark.parametrize("decay, gate", [("none", "mild"), ("constant", "mild"), ("head", "resets"), ("key", "resets")])
@pytest.mark.parametrize("shape", [{"T": 1100, "B": 1}, {"reverse": True}, UNEVEN], ids=("segments", "whole", "packed"))
def test_in_phases(decay, gate, shape):
    """Time in segments, and not."""
    check(replace(BASE, decay=decay, gate=gate, **shape), in_phases(IMPLEMENTATIONS[1]))


@pytest.mark.parametrize("decay, gate", GATES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: x["name"])
def test_contract(shape, decay, gate):
    check(replace(BASE, decay=decay, gate=gate, **shape))


@pytest.mark.parametrize("shape", [*SHAPES, {"name": "wide", "V": 512, "T": 320}], ids=lambda x: x["name"])
def test_row_dots_by_token(monkeypatch, shape):
    """Also of what the kernel whose rows are tokens is not yet used for."""
    monkeypatch.setattr(Launcher, "by_token", property(lambda self: self.config.head_gate_gradient is not None))
    check(replace(BASE, decay="head", gate="resets", **shape))


@pytest.mark.parametrize("gate", ["mild", "unscaled", "resets", "mixed"])
def test_across_heads(monkeypatch, gate):
    """Two groups of a call as small as none that gradients are added up in one program a chunk for."""
    configure = configs.configure
    monkeypatch.setattr(configs, "configure", lambda *given: replace(configure(*given), fill=1))
    monkeypatch.setattr(across_heads, "FEWEST", 2)
    check(replace(BASE, decay="head", gate=gate, shared=(1, 1, 4), V=64, T=1152, reverse=gate == "mixed"))


@pytest.mark.parametrize("gate", ["unscaled", "strong", "fierce", "mixed", "shipped", "all -6", "in turn"])
def test_any_gate(gate):
    check(replace(BASE, gate=gate))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("decay, gate", [*GATES, ("head", "strong"), ("key", "strong")])
def test_dtypes(dtype, decay, gate):
    check(replace(BASE, decay=decay, gate=gate, dtype=dtype, B=1))


@pytest.mark.parametrize("dtypes, dtype", MIXES[:3], ids=str)
@pytest.mark.parametrize("decay", ["constant", "head", "key"])
def test_dtypes_mix(decay, dtypes, dtype):
    case = replace(BASE, decay=decay, dtypes=dtypes, dtype=dtype, B=1, T=100, H=2, Hkv=2, K=64, V=64)
    arrays, cotangents = make(case)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_dtypes(case, arrays, actual)
    assert_matches(actual, oracle(case.call, arrays, cotangents), GRADIENTS)


SMALL = [
    *(("key", (dim, dim)) for dim in (1, 8, 16, 24, 32, 64)),
    *(("key", dims) for dims in ((128, 8), (8, 128), (64, 128), (128, 64), (512, 1), (200, 17))),
    *((decay, (dim, dim)) for decay in ("none", "constant", "head") for dim in (1, 24, 64)),
    *(("head", dims) for dims in ((64, 128), (128, 64), (100, 3), (1, 512))),
]


@pytest.mark.parametrize("decay, dims", SMALL, ids=str)
def test_small_dims(decay, dims):
    case = replace(BASE, decay=decay, B=1, H=2, Hkv=2, T=200, K=dims[0], V=dims[1], scale=dims[0] ** -0.5)
    arrays, cotangents = make(case)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    # a state of one number averages no errors
    assert_matches(actual, oracle(case.call, arrays, cotangents), {"other": 2e-2, "decay": 3e-2})


WIDE = [(256, 512), (512, 128), (512, 512), (300, 520)]


@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize(
    "decay, gate", [("none", "mild"), ("head", "unscaled"), ("key", "mild"), ("key", "resets"), ("key", "shipped")]
)
def test_wide_dims(decay, gate, dims):
    check(replace(BASE, decay=decay, gate=gate, B=1, T=150, H=2, Hkv=2, K=dims[0], V=dims[1], scale=dims[0] ** -0.5))


VALUE_GATES = [
    {"decay": "none", "value_gate": "unscaled"},
    {"decay": "none", "value_gate": "resets", **UNEVEN, "reverse": True},
    {"decay": "head", "value_gate": "mild", "K": 64, "shared": (1, 2, 4)},
    {"decay": "none", "value_gate": "mild", "dtype": "float32", "T": 150},
    {"decay": "none", "value_gate": "strong", "dtype": "float16", "T": 150},
    {"value_gate": "mild"},
    {"value_gate": "mild", "gate": "unscaled", "T": 320, "state": False},
    {"value_gate": "unscaled", **UNEVEN, "reverse": True, "K": 64, "V": 256},
    {"value_gate": "mild", "K": 512, "V": 300, "T": 150, "B": 1},
    {"value_gate": "mild", "dtype": "float32", "T": 150},
    {"value_gate": "mild", "dtype": "float16", "T": 150},
    {"value_gate": "resets", "T": 100},
    {"value_gate": "resets", "T": 2},
]


@pytest.mark.parametrize("case", VALUE_GATES, ids=str)
def test_value_gates(case):
    check(replace(BASE, **case))


@pytest.mark.parametrize("seed", range(3))
def test_one_gate_for_many_tokens(seed):
    """The gradient of a head's one gate in float32 is a sum of thousands of either sign."""
    shape = {"B": 1, "T": 4096, "H": 1, "Hkv": 1, "K": 8, "V": 8, "scale": 8**-0.5}
    case = replace(BASE, decay="constant", dtype="float32", **shape)
    arrays, cotangents = make(case, seed)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    expected = oracle(case.call, arrays, cotangents)
    assert_matches(actual, expected, {"other": 1e-5})
    size = sizes_of_token_gradients(case, arrays, cotangents).sum()
    error = np.abs(np.asarray(actual[5], np.float64) - expected[5]).max()
    assert error <= 3e-7 * size, f"{error / size:.1e} of the terms"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("shape", [{"T": 100}, {**UNEVEN, "reverse": True}], ids=lambda x: str(x["T"]))
def test_nothing_stays_nothing_however_it_grows(shape, decay, dtype):
    """A gate of +100 at the first token, where there is no state yet."""
    case = replace(BASE, decay=decay, dtype=dtype, **{"B": 1, "H": 2, "Hkv": 2, "K": 64, "V": 64, **shape})
    arrays, cotangents = burst(case)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_matches(actual[:5], oracle(case.call, arrays, cotangents)[:5], TOLERANCE[dtype])
    assert np.isfinite(np.asarray(actual[5], np.float32)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("decay", ["none", "constant", "head", "key"])
def test_later_tokens_are_not_seen(decay, dtype):
    case = replace(BASE, decay=decay, dtype=dtype, B=1, T=128, H=2, Hkv=2, K=64, V=64)
    arrays, cotangents = unseen(case)
    actual = results(triton_gpu.run, case.call, arrays, cotangents)
    assert_matches(actual[:5], oracle(case.call, arrays, cotangents)[:5], TOLERANCE[dtype])


@pytest.mark.parametrize("decay", ["constant", "head", "key"])
def test_gates_that_forget_all_have_no_gradient(decay):
    case = replace(BASE, decay=decay, gate="resets", T=128)
    arrays, cotangents = make(case)
    if decay == "constant":
        arrays = (*arrays[:3], arrays[3].at[0].set(-jnp.inf), *arrays[4:])
    gradient = np.asarray(results(triton_gpu.run, case.call, arrays, cotangents)[5])
    forgets = np.isneginf(np.asarray(arrays[3]))
    assert forgets.any() and (gradient[forgets] == 0).all() and gradient.any()


@pytest.mark.parametrize("factors", BEYOND_FLOAT16, ids=str)
@pytest.mark.parametrize("decay, gate", [each for each in GATES if each[1] != "unscaled"])
def test_float16_overflows_nowhere_in_between(decay, gate, factors):
    case = replace(BASE, decay=decay, gate=gate, dtype="float16", B=1, state=False)
    arrays = make_beyond_float16(case, factors)
    expected = oracle(case.call, arrays, make(case)[1])
    for got, wanted in zip(triton_gpu.run(case.call, *arrays), expected[:2], strict=True):
        assert_close(got, wanted, 2e-3)


@pytest.mark.parametrize("decay, bounded", [("head", False), ("key", False), ("key", True)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("memory", [configs.LARGE, configs.MEDIUM, configs.SMALL])
def test_every_configuration(monkeypatch, memory, dim, wide, decay, bounded):
    """Those for other chips run here too, only not at their best."""
    monkeypatch.setattr(configs, "MEMORY", {_launch.capability(): memory})
    gate = "shipped" if bounded else "unscaled" if wide else "strong"
    case = replace(BASE, B=1, H=2, Hkv=2, T=150, K=dim, V=dim, decay=decay, gate=gate)
    check(replace(case, dtype="float32" if wide else "bfloat16"))


@pytest.mark.parametrize("tokens, dim", [(2100, 64), (2048, 128)])
@pytest.mark.parametrize("decay", ["head", "key"])
def test_time_in_segments(decay, tokens, dim):
    check(replace(BASE, B=1, H=2, Hkv=2, T=tokens, K=dim, V=dim, decay=decay))


@pytest.mark.parametrize("case", [{"T": 1}, {"T": 5}, {"lengths": (1, 2, 0, 1), "T": 5}], ids=str)
@pytest.mark.parametrize("decay", ["none", "constant", "head", "key"])
def test_few_tokens(decay, case):
    check(replace(BASE, decay=decay, **case))


def test_step_updates_a_donated_state_in_place():
    case = replace(BASE, T=1, B=8)
    arrays, _ = make(case)
    step = jax.jit(lambda state: triton_gpu.run(case.call, *arrays[:5], state, None)[1], donate_argnums=0)
    state = arrays[5] + 0
    address = state.unsafe_buffer_pointer()
    assert step(state).unsafe_buffer_pointer() == address


def test_same_bits_every_time():
    first, second = (results(triton_gpu.run, BASE.call, *make(BASE)) for _ in range(2))
    for name, a, b in zip(NAMES[: len(first)], first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def test_sequences_do_not_touch():
    case = replace(BASE, lengths=(100, 101, 99), T=310)
    arrays, cotangents = make(case)
    clean = results(triton_gpu.run, case.call, arrays, cotangents)
    poisoned = [x if x is None else x.at[0, 125].set(jnp.nan) for x in arrays[:4]]
    spoilt = results(triton_gpu.run, case.call, (*poisoned, *arrays[4:]), cotangents)
    others = np.r_[0:100, 201:310]
    for name, a, b in zip(NAMES[: len(clean)], clean, spoilt, strict=True):
        rows = (slice(None), others) if a.shape[1] == 310 else np.array([0, 2])
        np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows], err_msg=name)


def test_long_context():
    """A million tokens: offsets past 32 bits, a grid past 65535, and the same answer as in two halves."""
    case = replace(BASE, B=1, T=1 << 20, H=8, Hkv=8, K=128, V=128, decay="head", state=False)
    call, keys = case.call, jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, call.tokens, 8, 128), jnp.bfloat16) for key in keys[:3])
    g = jax.nn.log_sigmoid(jax.random.normal(keys[3], (1, call.tokens, 8)))
    output, last = triton_gpu.run(call, q, k, v, g, None, None, None)
    half = replace(call, tokens=call.tokens // 2)
    _, state = triton_gpu.run(half, *(x[:, : half.tokens] for x in (q, k, v, g)), None, None, None)
    tail, end = triton_gpu.run(half, *(x[:, half.tokens :] for x in (q, k, v, g)), None, state, None)
    assert jnp.isfinite(output).all()
    np.testing.assert_allclose(end, last, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(*(np.asarray(x[0, -100:], np.float32) for x in (tail, output)), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(packed):
    case = replace(BASE, B=1, T=100, lengths=(60, 40) if packed else None)
    cases = [make(case, seed) for seed in range(2)]
    stacked, cotangents = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    mapped = jax.vmap(functools.partial(results, triton_gpu.run, case.call))(stacked, cotangents)
    for i, (arrays, cotangent) in enumerate(cases):
        one = results(triton_gpu.run, case.call, arrays, cotangent)
        for name, a, b in zip(NAMES[: len(one)], one, mapped, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b[i]), err_msg=name)


def test_gradient_of_gradient():
    case = replace(BASE, B=1, T=40, H=1, Hkv=1, K=16, V=16, dtype="float32")
    arrays, (doutput, dlast) = make(case)

    def twice(run):
        def value(*inputs):
            output, last = run(case.call, *inputs, None, *arrays[5:])
            return (output * doutput).sum() + (last * dlast).sum()

        gradient = jax.grad(value, argnums=(0, 1, 2, 3))
        return jax.jit(jax.grad(lambda *x: sum((each**2).sum() for each in gradient(*x)), argnums=(0, 1, 2, 3)))

    for a, b in zip(twice(triton_gpu.run)(*arrays[:4]), twice(xla.run)(*arrays[:4]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("case", [c for c in FRONT_CASES if c.name in FRONTS], ids=str)
def test_fronts_choose_it(case):
    """Through the public front, from shapes to gradients: what users get."""
    arrays = case.arrays(np.float32)
    borders = {name: x for name, x in arrays.items() if name == "cu_seqlens"}
    inputs = {name: x for name, x in arrays.items() if name not in borders}
    assert ejkernel.explain(ejkernel.recurrent, **arrays, **case.options).chosen["cuda"] == "triton"
    (output, final), pull = jax.vjp(jax.jit(lambda x: ejkernel.recurrent(**x, **borders, **case.options)), inputs)
    cotangents = np.cos(output), np.sin(final)
    expected = recurrence_oracle.recurrent(
        **arrays, **case.options, d_output=cotangents[0], d_final_state=cotangents[1]
    )
    assert_close(output, expected[0], 1e-5, "output")
    assert_close(final, expected[1], 1e-5, "final state")
    for name, grad in pull(cotangents)[0].items():
        assert_close(grad, expected[2][name], 4e-5, name)


def test_front_transformations():
    query, key, value, gate = jax.random.normal(jax.random.key(0), (4, 2, 70, 2, 16))
    g = jax.nn.log_sigmoid(gate)

    def loss(query, platform=None):
        output, state = ejkernel.recurrent_gla(query, key, value, g, platform=platform)
        return (output**2).sum() + state.sum()

    def slope(query, platform=None):
        return (jax.grad(loss)(query, platform) ** 2).sum()

    assert_close(jax.grad(slope)(query), jax.grad(slope)(query, "xla"), 1e-4, "gradient of a gradient")
    stacked = jnp.stack([query, query[::-1]])
    assert_close(jax.vmap(loss)(stacked)[0], loss(query), 1e-5, "vmap")
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(
        lambda *x: ejkernel.recurrent_gla(*x)[0], mesh=mesh, in_specs=(jax.P("rows"),) * 4, out_specs=jax.P("rows")
    )
    assert_close(spread(query, key, value, g), ejkernel.recurrent_gla(query, key, value, g)[0], 1e-6, "shard_map")
