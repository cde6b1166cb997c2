"""The delta rule and its gated forms against the float64 loop, value and gradient, whatever implements them."""

import functools
import itertools
from dataclasses import replace

import gradients
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close, token_by_token
from delta_rule_cases import CASES, Case

import ejkernel
from ejkernel import delta_rule, gated_delta_rule, kda
from ejkernel.kernels import _xla
from ejkernel.kernels.chunks import layout, scores, triangular

# the contract's for float32: outputs 1e-5, gradients 1e-4
TOLERANCE = {"float64": (1e-12, 1e-11), "float32": (1e-5, 1e-4), "bfloat16": (2e-2, 4e-2), "float16": (4e-3, 8e-3)}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 16 tokens in blocks of 2: every border is crossed by short sequences, which compile in less time."""
    monkeypatch.setattr(layout, "LARGEST_CHUNK", 16)
    monkeypatch.setattr(scores, "BASE", 2)
    monkeypatch.setattr(triangular, "BASE", 2)


def with_gradients(case, arrays):
    return gradients.with_gradients(getattr(ejkernel, case.op), arrays, case.options)


def check_against_oracle(case, arrays, tolerance):
    (output, final), grads, (d_output, d_final) = with_gradients(case, arrays)
    expected = oracle.delta_rule(**arrays, **case.options, d_output=d_output, d_final_state=d_final)
    assert_close(output, expected[0], tolerance[0], "output")
    assert_close(final, expected[1], tolerance[0], "final state")
    assert grads.keys() == expected[2].keys()
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
        assert_close(grad, expected[2][name], tolerance[1], f"gradient of {name}")
    if "g" in grads:
        assert not np.asarray(grads["g"])[np.isneginf(np.asarray(arrays["g"], np.float64))].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case, x64, small_chunks):
    check_against_oracle(case, case.arrays(), TOLERANCE["float64"])


FULL_SIZE = ("no gate nearly equal keys", "head mixed", "head packed", "key mixed", "key packed shared")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FULL_SIZE], ids=str)
def test_matches_oracle_in_chunks_of_full_size(case):
    case = replace(case, beta="ordinary")
    check_against_oracle(case, case.arrays(np.float32), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("no gate", "head packed", "key mixed", "one token")], ids=str
)
def test_half_precision(case, dtype, small_chunks):
    arrays = {n: x if n == "cu_seqlens" else jnp.asarray(x, dtype) for n, x in case.arrays(np.float32).items()}
    (output, final), _, _ = with_gradients(case, arrays)
    assert output.dtype == dtype and final.dtype == jnp.float32
    check_against_oracle(case, arrays, TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 9, 63, 64, 65, 128, 129, 200])
def test_any_length(tokens, x64):
    case = Case("length", tokens=tokens, gate="ordinary", state="each", batch=1, heads=1, own_heads=(1, 1, 1))
    check_against_oracle(case, case.arrays(), TOLERANCE["float64"])


def test_token_by_token(x64):
    """What a CPU does with small states, if no gradients are asked for."""
    with token_by_token(states=64 * 64):
        for case in CASES:
            arrays = case.arrays()
            moving, borders = gradients.split(arrays)
            run = jax.jit(functools.partial(getattr(ejkernel, case.op), **borders, **case.options))
            expected = oracle.delta_rule(**arrays, **case.options)
            for a, e in zip(run(**moving), expected, strict=False):
                assert_close(a, e, 1e-12, str(case))


@pytest.mark.usefixtures("small_chunks")
class TestWhatHoldsOfAnyCall:
    # of a size of its own: other calls are traced, and kept, with larger chunks
    CASE = Case("call", tokens=70, key_dim=6, gate="ordinary", per_key=True, state="each")

    def test_any_split_is_the_whole(self, x64):
        arrays = self.CASE.arrays()
        whole = kda(**arrays)
        for cut in (1, 30, 64, 69):
            head = {n: x if n == "initial_state" else x[:, :cut] for n, x in arrays.items()}
            tail = {n: x if n == "initial_state" else x[:, cut:] for n, x in arrays.items()}
            first, state = kda(**head)
            second, state = kda(**{**tail, "initial_state": state})
            assert_close(np.concatenate([first, second], 1), whole[0], 1e-12)
            assert_close(state, whole[1], 1e-12)

    def test_reverse_is_the_flipped_call(self, x64):
        arrays = self.CASE.arrays()
        flipped = {n: x if n == "initial_state" else x[:, ::-1] for n, x in arrays.items()}
        output, state = kda(**flipped)
        actual = kda(**arrays, reverse=True)
        assert_close(actual[0], output[:, ::-1], 1e-12)
        assert_close(actual[1], state, 1e-12)

    def test_gates_of_equal_dims_are_one_a_head(self, x64):
        arrays = replace(self.CASE, per_key=False).arrays()
        wide = arrays | {"g": np.broadcast_to(arrays["g"][..., None], (*arrays["g"].shape, 6))}
        for a, b in zip(kda(**wide), gated_delta_rule(**arrays), strict=True):
            assert_close(a, b, 1e-12)
        none = {n: x for n, x in arrays.items() if n != "g"}
        for a, b in zip(gated_delta_rule(**none, g=0 * arrays["g"]), delta_rule(**none), strict=True):
            assert_close(a, b, 1e-12)

    @pytest.mark.parametrize("op", [gated_delta_rule, kda])
    def test_split_at_every_position(self, op, x64):
        """Parts are packed, so that one program serves all."""
        rng, tokens = np.random.default_rng(0), 66
        query, key, value = rng.normal(size=(3, tokens, 2, 4))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        gate = -0.3 * rng.exponential(size=(tokens, 2, 4) if op is kda else (tokens, 2))
        arrays = query, key, value, gate, rng.random((tokens, 2))
        state, borders = rng.normal(size=(1, 2, 4, 4)), np.arange(tokens + 1)[:, None] * [0, 1]
        run = jax.jit(lambda x, state, cu_seqlens: op(*x, initial_state=state, cu_seqlens=cu_seqlens))
        output, final = run(arrays, state, borders[tokens])
        for position in range(tokens + 1):
            first, between = run(arrays, state, borders[position])
            # what is past the end of the second part is padding
            second, last = run(tuple(np.roll(x, -position, 0) for x in arrays), between, borders[tokens - position])
            assert_close(np.concatenate([first[:position], second[: tokens - position]]), output, 1e-12)
            assert_close(last, final, 1e-12)

    def test_normalize(self, x64):
        arrays = self.CASE.arrays()
        arrays |= {"key": 3 * arrays["key"], "query": arrays["query"] - 7}
        plain = {n: arrays[n] / np.sqrt((arrays[n] ** 2).sum(-1, keepdims=True) + 1e-6) for n in ("query", "key")}
        for a, b in zip(kda(**arrays, normalize=True), oracle.delta_rule(**arrays | plain), strict=False):
            assert_close(a, b, 1e-12)
        zero = arrays | {"key": 0 * arrays["key"]}
        grads = jax.grad(lambda x: kda(**x, normalize=True)[0].sum())(zero)
        assert all(np.isfinite(x).all() for x in grads.values())

    @pytest.mark.parametrize(
        "dtype, powers", [("float32", (50, 65, 100)), ("bfloat16", (65, 100)), ("float64", (300, 520, 1000))]
    )
    def test_normalize_vectors_of_any_size(self, x64, dtype, powers):
        """Their size cancels, where it is far above epsilon, and divides gradients; squares overflow from 2**64 on."""
        arrays = {n: jnp.asarray(x, dtype) for n, x in replace(self.CASE, tokens=5).arrays().items()}
        tolerance = TOLERANCE[dtype]

        def run(power):
            size = jnp.asarray(2.0**power, dtype)
            moving = {n: arrays[n] * size for n in ("query", "key")}
            output, pull = jax.vjp(lambda x: kda(**arrays | x, normalize=True)[0], moving)
            gradients = pull(jnp.cos(output.astype(float)).astype(dtype))[0]
            return output, {n: x.astype(float) * 2.0**power for n, x in gradients.items()}

        expected, gradients = run(20)
        for power in powers:
            output, found = run(power)
            assert_close(output, expected, tolerance[0])
            for name, x in gradients.items():
                assert_close(found[name], x, tolerance[1], name)

    def test_second_derivatives_of_normalized_vectors(self, x64):
        arrays = replace(self.CASE, tokens=5, batch=1).arrays()
        along = np.random.default_rng(3).normal(size=arrays["key"].shape)

        def curvature(dtype, power):
            x = {n: jnp.asarray(each, dtype) for n, each in arrays.items()}
            key, direction = x.pop("key") * jnp.asarray(2.0**power, dtype), jnp.asarray(along, dtype)
            slope = jax.grad(lambda key: kda(**x, key=key, normalize=True)[0].sum())
            return jax.grad(lambda key: (slope(key) * direction).sum())(key).astype(float) * 4.0**power

        expected = curvature("float64", 20)
        for dtype, power in (("float32", 20), ("float32", 50), ("float64", 400)):
            assert_close(curvature(dtype, power), expected, TOLERANCE[dtype][1])

    @pytest.mark.parametrize("spoilt", [np.inf, np.nan])
    def test_normalize_leaks_nowhere(self, spoilt):
        arrays = replace(self.CASE, lengths=(3, 2, 4)).arrays(np.float32)

        def run(key):
            output, pull = jax.vjp(lambda q, k: kda(**arrays | {"query": q, "key": k}, normalize=True)[0], key, key)
            return output, *pull(jnp.cos(output))

        key = jnp.asarray(arrays["key"])
        for clean, dirty in zip(run(key), run(key.at[0, 3, 0, 1].set(spoilt)), strict=True):
            np.testing.assert_array_equal(clean[:, :3], dirty[:, :3])
            np.testing.assert_array_equal(clean[:, 5:], dirty[:, 5:])

    def test_padding_has_no_gradient_through_norms_or_a_learned_scale(self, x64):
        arrays = replace(self.CASE, lengths=(3, 0, 12), padding=5).arrays()
        moving, borders = gradients.split(arrays)
        for name, each in moving.items():
            if name != "initial_state":
                each[:, -5:] = np.nan

        def loss(moving, scale):
            output, final = kda(**moving, **borders, softmax_scale=scale, normalize=True)
            return output.sum() + final.sum()

        found, of_scale = jax.grad(loss, (0, 1))(moving, jnp.asarray(0.3))
        assert np.isfinite(of_scale)
        for name, each in found.items():
            assert np.isfinite(each).all() and (name == "initial_state" or not each[:, -5:].any()), name

    def test_a_learned_scale_has_a_gradient(self, x64):
        arrays = self.CASE.arrays()
        grad = jax.grad(lambda scale: (kda(**arrays, softmax_scale=scale)[0] ** 2).sum())(jnp.asarray(0.3))
        unscaled = oracle.delta_rule(**arrays, softmax_scale=1.0)[0]
        assert_close(grad, 2 * 0.3 * (unscaled**2).sum(), 1e-12)

    def test_gradient_of_the_gradient(self, x64, small_chunks):
        """By finite differences of the gradient along a direction."""
        arrays = replace(self.CASE, tokens=21, batch=1).arrays()
        random = np.random.default_rng(3)
        direction = {n: random.normal(size=x.shape) for n, x in arrays.items()}

        @jax.jit
        def slope(x):
            grads = jax.grad(lambda x: sum((y**2).sum() for y in kda(**x)))(x)
            return sum((grads[n] * direction[n]).sum() for n in grads)

        second = jax.jit(jax.grad(slope))(arrays)
        step = 1e-5
        for name in arrays:
            move = random.normal(size=arrays[name].shape)
            ends = [slope(arrays | {name: arrays[name] + sign * step * move}) for sign in (1, -1)]
            assert_close((second[name] * move).sum(), (ends[0] - ends[1]) / (2 * step), 1e-6, name)

    def test_transformations(self):
        arrays = self.CASE.arrays(np.float32)
        expected = kda(**arrays)
        stacked = {n: jnp.stack([x, x[::-1]]) for n, x in arrays.items()}
        mapped = jax.jit(jax.vmap(lambda x: kda(**x)))(stacked)
        assert_close(mapped[0][1], expected[0][::-1], 1e-6)
        loss = jax.checkpoint(lambda x: (kda(**x)[0] ** 2).sum())
        plain = jax.jit(jax.grad(lambda x: (kda(**x)[0] ** 2).sum()))(arrays)
        for name, grad in jax.jit(jax.grad(loss))(arrays).items():
            assert_close(grad, plain[name], 1e-6, name)
        exported = jax.export.export(jax.jit(lambda x: kda(**x)), platforms=["cpu", "cuda", "tpu"])(arrays)
        assert_close(exported.call(arrays)[0], expected[0], 1e-6)

    def test_new_borders_do_not_compile_anew(self):
        arrays = {n: x[:1] for n, x in replace(self.CASE, state=None).arrays(np.float32).items()}
        step = jax.jit(lambda cu: kda(**arrays, cu_seqlens=cu))
        for borders in ([0, 30, 70], [0, 0, 5], [0, 69, 70]):
            output, _ = step(np.array(borders))
            assert_close(output, oracle.delta_rule(**arrays, cu_seqlens=borders)[0], 1e-5)
        assert step._cache_size() == 1


def test_one_by_one_is_one_pass():
    arrays = Case("decode", gate="ordinary", state="each").arrays(np.float32)
    state = arrays.pop("initial_state")
    whole = gated_delta_rule(**arrays, initial_state=state)
    step = jax.jit(lambda x, state: gated_delta_rule(**x, initial_state=state))
    for t in range(arrays["query"].shape[1]):
        output, state = step({n: x[:, t : t + 1] for n, x in arrays.items()}, state)
        assert_close(output[:, 0], whole[0][:, t], 1e-5)
    assert_close(state, whole[1], 1e-5)


# reflections forget nothing, roundings neither, so those of 640 tokens add up
@pytest.mark.parametrize("beta, tolerance", [("replaces", TOLERANCE["float32"]), ("reflects", (1e-4, 1e-3))])
def test_equal_keys_stay_exact_in_float32(beta, tolerance):
    """Where a power series of the system's matrix would grow before it cancels."""
    case = Case("equal", batch=1, tokens=640, key_dim=32, value_dim=8, beta=beta, keys="nearly equal", state="each")
    check_against_oracle(case, case.arrays(np.float32), tolerance)


def test_memory_and_compile_time_do_not_hold_a_state_a_token():
    def compiled(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)
        beta = jax.ShapeDtypeStruct((1, tokens, 2), jnp.float32)
        gradient = jax.grad(lambda x, b: sum(y.sum() for y in delta_rule(x, x, x, b)), argnums=(0, 1))
        return jax.jit(gradient).lower(x, beta).compile()

    short, long = compiled(1024), compiled(4096)
    assert long.as_text().count("\n") < 1.1 * short.as_text().count("\n")
    assert long.memory_analysis().temp_size_in_bytes < 4096 * 2 * 64 * 64 * 4 / 4


def test_pinned_paths():
    for name, front in (("delta_rule", delta_rule), ("gated_delta_rule", gated_delta_rule), ("kda", kda)):
        pinned = getattr(_xla, name)
        assert pinned is getattr(__import__(f"ejkernel.kernels._xla.{name}._interface", fromlist=[name]), name)
        assert pinned.__doc__ == front.__doc__
        with pytest.raises(TypeError, match="always runs 'xla'"):
            pinned(platform="xla")


X = np.ones((2, 6, 4, 8), np.float32)
BETA = X[..., 0]
WRONG = {
    "query: got 4 heads; expected a divisor of beta's 3 heads": lambda: delta_rule(X, X, X, BETA[..., :3]),
    "beta: got shape (2, 6, 4, 8); expected": lambda: delta_rule(X, X, X, X),
    "query: got 3 heads; expected a divisor of beta's 4 heads": lambda: delta_rule(X[:, :, :3], X, X, BETA),
    "key: got shape (2, 6, 4, 7); expected": lambda: delta_rule(X, X[..., :7], X, BETA),
    "value: got shape (2, 5, 4, 8); expected": lambda: delta_rule(X, X, X[:, :5], BETA),
    "g: got shape (2, 6, 4, 8); expected": lambda: gated_delta_rule(X, X, X, X, BETA),
    "g: got shape (2, 6, 4); expected": lambda: kda(X, X, X, BETA, BETA),
    "g: got shape (2, 6, 4, 1); expected": lambda: kda(X, X, X, X[..., :1], BETA),
    "initial_state: got shape (3, 4, 8, 8); expected": lambda: delta_rule(X, X, X, BETA, None, np.ones((3, 4, 8, 8))),
    "cu_seqlens: got a batch of 2; expected": lambda: delta_rule(X, X, X, BETA, cu_seqlens=[0, 6]),
    "cu_seqlens: got last value 7; expected": lambda: delta_rule(X[:1], X[:1], X[:1], BETA[:1], cu_seqlens=[0, 7]),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls_say_what_fits(message):
    with pytest.raises(ValueError) as error:
        WRONG[message]()
    assert message in str(error.value)


@pytest.mark.parametrize("arguments", list(itertools.permutations(["int", "float", "float", "float"]))[:8:2], ids=str)
def test_wrong_dtypes_are_type_errors(arguments):
    arrays = [X.astype(np.int32) if each == "int" else X for each in arguments[:3]]
    with pytest.raises(TypeError, match=r"expected a floating-point dtype|expected bfloat16"):
        delta_rule(*arrays, BETA.astype(np.int32) if arguments[3] == "int" else BETA)
