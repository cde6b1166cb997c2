"""The gated linear recurrence and its family against the float64 loop, value and gradient, whatever implements them."""

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
from linear_attention_cases import CASES, Case

import ejkernel
from ejkernel import lightning_attn, linear_attention, recurrent, recurrent_gla, retention, simple_gla
from ejkernel.kernels.chunks import layout, scores

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 16 tokens in blocks of 2: every border is crossed by short sequences, which compile in less time."""
    monkeypatch.setattr(layout, "LARGEST_CHUNK", 16)
    monkeypatch.setattr(scores, "BASE", 2)


with_gradients = functools.partial(gradients.with_gradients, recurrent)
without_gradients = functools.partial(gradients.without_gradients, recurrent)


def check_against_oracle(arrays, options, tolerance):
    (output, final), grads, (d_output, d_final) = with_gradients(arrays, options)
    expected = oracle.recurrent(**arrays, **options, d_output=d_output, d_final_state=d_final)
    assert_close(output, expected[0], tolerance, "output")
    assert_close(final, expected[1], tolerance, "final state")
    assert grads.keys() == expected[2].keys()
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
        assert_close(grad, expected[2][name], 4 * tolerance, f"gradient of {name}")
        if name.startswith("g"):
            assert not np.asarray(grad)[arrays[name] == -np.inf].any(), (
                f"gradient of {name} where it forgets everything"
            )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case, x64, small_chunks):
    check_against_oracle(case.arrays(), case.options, TOLERANCE["float64"])


FULL_SIZE = ("gamma packed", "one gate a head mixed", "g mixed", "g mixed reverse packed", "all gates mixed")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FULL_SIZE], ids=str)
def test_matches_oracle_in_chunks_of_full_size(case):
    check_against_oracle(case.arrays(np.float32), case.options, TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("gamma packed", "g mixed", "gv", "one token")], ids=str
)
def test_half_precision(case, dtype, small_chunks):
    arrays = {n: x if n == "cu_seqlens" else jnp.asarray(x, dtype) for n, x in case.arrays(np.float32).items()}
    (output, final), _, _ = with_gradients(arrays, case.options)
    assert output.dtype == dtype and final.dtype == jnp.float32
    check_against_oracle(arrays, case.options, TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 200])
def test_any_length(tokens, x64):
    case = Case(
        "length", tokens=tokens, gates={"g": "ordinary"}, narrow=("g",), state="each", batch=1, heads=1, kv_heads=1
    )
    check_against_oracle(case.arrays(), {}, TOLERANCE["float64"])


SMALL = 64 * 64  # states that a CPU goes token by token with


def test_token_by_token(x64):
    """What a CPU does with small states, if no gradients are asked for."""
    with token_by_token(SMALL):
        for case in CASES:
            arrays = case.arrays()
            moving, borders = gradients.split(arrays)
            run = jax.jit(functools.partial(recurrent, **borders, **case.options))
            output, final = run(**moving)
            expected = oracle.recurrent(**arrays, **case.options)
            assert_close(output, expected[0], TOLERANCE["float64"], f"{case}: output")
            assert_close(final, expected[1], TOLERANCE["float64"], f"{case}: final state")


@pytest.mark.parametrize("narrow", [("g",), ()], ids=["head", "key"])
def test_gate_gradient_is_right_in_every_chunk(narrow):
    """Strong decay makes gate gradients tiny next to the terms that they are sums of."""
    case = Case("long", batch=1, tokens=4096, heads=1, kv_heads=1, gates={"g": "strong"}, narrow=narrow, state="each")
    arrays = case.arrays(np.float32)
    _, grads, (d_output, d_final) = with_gradients(arrays, {})
    expected = oracle.recurrent(**arrays, d_output=d_output, d_final_state=d_final)[2]["g"]
    by_chunk = (64, 64, -1)
    for chunk, (actual, wanted) in enumerate(
        zip(np.reshape(grads["g"], by_chunk), expected.reshape(by_chunk), strict=True)
    ):
        assert_close(actual, wanted, 1e-4, f"gradient of g in chunk {chunk}")


def test_large_gates_cost_neighbours_nothing():
    """A gate of -1e4 must not eat the digits of small gates after it."""
    arrays = Case("one huge", batch=1, tokens=64, gates={"g": "ordinary"}, state="each").arrays(np.float32)
    for width in (1, 5):
        arrays["g"] = np.full((1, 64, 2, width), -0.01, np.float32)
        arrays["g"][:, ::7] = -1e4
        check_against_oracle(arrays, {}, 1e-6)


@pytest.mark.parametrize("narrow", [("g",), ()], ids=["head", "key"])
@pytest.mark.parametrize(
    "gate, query_size, key_size",
    [
        (-14.7, 1e5, 1e5),
        (-0.5, 1e5, 1e5),
        (-14.5, 1e25, 1e-25),
        (-1.8, 1.0, 1e-16),
        (-1.8, 1e-16, 1.0),
        (-1.8, 1.0, 1e-30),
    ],
)
def test_huge_or_tiny_queries_and_keys(gate, query_size, key_size, narrow):
    """Nothing between them and the results may leave float32's range."""
    arrays = Case("sizes", batch=1, gates={"g": "none"}, narrow=narrow).arrays(np.float32)
    arrays["g"][:] = gate
    arrays["query"] *= np.float32(query_size)
    arrays["key"] *= np.float32(key_size)
    check_against_oracle(arrays, {}, TOLERANCE["float32"])


FIRST = {"lengths": (1, 0, 70, 9), "padding": 3}


@pytest.mark.parametrize("gate", [100.0, 300.0])
@pytest.mark.parametrize(
    "case",
    [
        Case("head", gates={"g": "ordinary"}, narrow=("g",)),
        Case("key", gates={"g": "ordinary"}, options={"reverse": True}),
        Case("value", gates={"gv": "ordinary", "gk": "ordinary"}),
        Case("head packed", gates={"g": "ordinary"}, narrow=("g",), **FIRST, options={"reverse": True}),
        Case("key packed", gates={"gk": "ordinary"}, **FIRST),
        Case("value packed", gates={"gv": "ordinary"}, **FIRST),
        Case("constant packed", gates={"g_gamma": "ordinary"}, lengths=(1, 0, 1)),
        Case("head one token", gates={"g": "ordinary"}, narrow=("g",), tokens=1),
        Case("value one token", gates={"gv": "ordinary"}, tokens=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("state", [None, "zeros"])
def test_what_was_never_written_may_grow_at_any_rate(case, state, gate):
    """The first gate of a sequence multiplies 0, even where its `exp` is beyond float32."""
    arrays = replace(case, state="each" if state else None).arrays(np.float32)
    borders = arrays.get("cu_seqlens", [0, case.tokens])
    first = [(end - 1 if case.options else start) for start, end in itertools.pairwise(borders) if end > start]
    for name in case.gates:
        arrays[name][(slice(None), first) if name != "g_gamma" else ...] = gate
    if state:
        arrays["initial_state"] *= 0
    (output, final), grads, (d_output, d_final) = with_gradients(arrays, case.options)
    expected = oracle.recurrent(**arrays, **case.options, d_output=d_output, d_final_state=d_final)
    for name, x in {"output": output, "final state": final, **grads}.items():
        wanted = {"output": expected[0], "final state": expected[1], **expected[2]}[name]
        if name == "initial_state":
            assert not np.isnan(x).any()
        else:
            assert_close(x, wanted, 1e-5, name)
    without = without_gradients(arrays, case.options)
    assert_close(without[0], expected[0], 1e-5, "output without gradients")


@pytest.mark.parametrize("tokens, dim", [(5, 4), (20, 16), (300, 4)])
def test_what_never_wrote_may_grow_at_any_rate_token_by_token(tokens, dim):
    case = Case("grows", tokens=tokens, key_dim=dim, value_dim=dim, gates={"g": "ordinary", "gv": "ordinary"})
    arrays = case.arrays(np.float32)
    arrays["g"][:, :3], arrays["gv"][:, :2], arrays["key"][:, :2] = 100, 100, 0
    with token_by_token(SMALL):
        output, final = recurrent(**arrays)
    expected = oracle.recurrent(**arrays)
    assert_close(output, expected[0], 1e-6)
    assert_close(final, expected[1], 1e-6)


@pytest.mark.parametrize("gates", [{}, {"g_gamma": "tiny"}, {"g": "ordinary"}, {"gv": "ordinary"}], ids=str)
@pytest.mark.parametrize("narrow", [("g",), ()], ids=["narrow", "wide"])
def test_what_no_token_may_see_may_overflow(gates, narrow):
    """The query of a token times the key of a later one."""
    arrays = Case("masked", gates=gates, narrow=narrow).arrays(np.float32)
    arrays["query"][:, 0], arrays["key"][:, 1] = 1e20, 1e20
    arrays["value"] *= 1e-5
    check_against_oracle(arrays, {}, TOLERANCE["float32"])


@pytest.mark.parametrize("narrow", [("g",), ()], ids=["head", "key"])
def test_states_do_not_drift(narrow):
    """Over many chunks with decays just below 1."""
    case = Case("drift", batch=1, tokens=8192, key_dim=2, value_dim=2, heads=1, kv_heads=1, narrow=narrow)
    arrays = replace(case, gates={"g": "tiny"}).arrays(np.float32)
    arrays["g"] /= 1000
    check_against_oracle(arrays, {}, TOLERANCE["float32"])


@pytest.mark.parametrize("lengths", [None, (100, 8092)], ids=["row", "packed"])
def test_states_do_not_drift_token_by_token(lengths):
    """Decays that are alike are rounded alike: that alone would be an error of 1e-4 here."""
    case = Case("drift", batch=1, tokens=8192, lengths=lengths, key_dim=2, value_dim=2, heads=1, kv_heads=1)
    arrays = case.arrays(np.float32)
    arrays["g"] = np.full((1, 8192, 1, 2), -1.7e-6, np.float32)
    with token_by_token(SMALL):
        alone = recurrent(**arrays)
    for actual, wanted in zip(alone, oracle.recurrent(**arrays), strict=False):
        assert_close(actual, wanted, 2e-5, "without gradients")


@pytest.mark.usefixtures("small_chunks")
class TestEquivalences:
    case = Case("plain", gates={"g": "ordinary", "gv": "tiny"}, state="each", **{"heads": 4, "kv_heads": 2})

    def test_reverse_is_flip_run_flip(self, x64):
        arrays = self.case.arrays()
        flipped = {n: x if n == "initial_state" else np.flip(x, 1) for n, x in arrays.items()}
        output, state = recurrent(**flipped)
        actual = recurrent(**arrays, reverse=True)
        assert_close(actual[0], np.flip(output, 1), 1e-12)
        assert_close(actual[1], state, 1e-12)

    def test_step_by_step(self, x64):
        arrays = Case("short", tokens=9, gates={"g": "ordinary"}, state="each").arrays()
        whole = recurrent(**arrays)
        state, outputs = arrays.pop("initial_state"), []
        for t in range(9):
            output, state = recurrent(**{n: x[:, t : t + 1] for n, x in arrays.items()}, initial_state=state)
            outputs.append(output)
        assert_close(np.concatenate(outputs, 1), whole[0], 1e-12)
        assert_close(state, whole[1], 1e-12)

    def test_grouped_is_repeated(self, x64):
        arrays = self.case.arrays()
        repeated = arrays | {n: np.repeat(arrays[n], 2, 2) for n in ("key", "value")}
        assert_close(recurrent(**arrays)[0], recurrent(**repeated)[0], 1e-12)

    def test_gk_is_g_and_gamma_is_constant_g(self, x64):
        arrays = Case("key", gates={"g": "ordinary"}).arrays()
        g = arrays.pop("g")
        assert_close(recurrent(**arrays, gk=g)[0], recurrent(**arrays, g=g)[0], 1e-12)
        gamma = np.array([-0.1, -2.0])
        constant = np.broadcast_to(gamma[None, None, :, None], g.shape)
        assert_close(recurrent(**arrays, g_gamma=gamma)[0], recurrent(**arrays, g=constant)[0], 1e-12)


HEADS = np.arange(4)
FRONTS = {  # front, its arguments, the gates
    "linear_attention": (linear_attention, {}, {}),
    "retention": (retention, {}, {"g_gamma": np.log(1 - 2.0 ** (-5 - HEADS))}),
    "lightning_attn": (
        lightning_attn,
        {"layer_idx": 3, "num_layers": 12},
        {"g_gamma": -(8 / 4) * (1 - 3 / 12) * HEADS},
    ),
    "simple_gla": (
        simple_gla,
        {"g": -np.linspace(0, 3, 2 * 70 * 4, dtype=np.float32).reshape(2, 70, 4)},
        {"g": -np.linspace(0, 3, 2 * 70 * 4).reshape(2, 70, 4, 1) * np.ones(5)},
    ),
    "recurrent_gla": (
        recurrent_gla,
        {"g": np.full((2, 70, 4, 5), -0.2, np.float32), "g_gamma": np.full(4, -0.1, np.float32)},
        {"g": np.full((2, 70, 4, 5), -0.3)},
    ),
}


@pytest.mark.usefixtures("small_chunks")
class TestFamily:
    """Each front is `recurrent` with its gates written out, through gradients too."""

    arrays = Case("family", heads=4, shared=(2, 1, 4), state="each").arrays(np.float32)

    @pytest.mark.parametrize("name", FRONTS)
    @pytest.mark.parametrize("reverse", [False, True])
    def test_is_recurrent(self, name, reverse):
        front, arguments, gates = FRONTS[name]
        (output, final), vjp = jax.vjp(lambda x: front(**x, **arguments, reverse=reverse), self.arrays)
        cotangents = np.cos(output), np.sin(final)
        expected = oracle.recurrent(
            **self.arrays, **gates, reverse=reverse, d_output=cotangents[0], d_final_state=cotangents[1]
        )
        assert_close(output, expected[0], 1e-5)
        assert_close(final, expected[1], 1e-5)
        for argument, grad in vjp(cotangents)[0].items():
            assert_close(grad, expected[2][argument], 1e-5, argument)

    def test_packed(self):
        arrays = {n: x[0] for n, x in self.arrays.items() if n != "initial_state"}
        output, states = retention(**arrays, cu_seqlens=jnp.array([0, 30, 70]))
        gamma = np.log(1 - 2.0 ** (-5 - HEADS))
        expected = oracle.recurrent(**arrays, g_gamma=gamma, cu_seqlens=[0, 30, 70])
        assert_close(output, expected[0], 1e-5)
        assert_close(states, expected[1], 1e-5)

    def test_split_at_every_position(self, x64):
        """Parts are packed, so that one program serves all."""
        rng, tokens = np.random.default_rng(0), 66
        query, key, value = rng.normal(size=(3, tokens, 2, 4))
        gate = -0.3 * rng.exponential(size=(tokens, 2, 4))
        state = rng.normal(size=(2, 4, 4))[None]
        borders = np.arange(tokens + 1)[:, None] * [0, 1]
        run = jax.jit(lambda x, state, cu_seqlens: recurrent_gla(*x, initial_state=state, cu_seqlens=cu_seqlens))
        arrays = query, key, value, gate
        output, final = run(arrays, state, borders[tokens])
        for position in range(tokens + 1):
            first, between = run(arrays, state, borders[position])
            # what is past the end of the second part is padding
            second, last = run(tuple(np.roll(x, -position, 0) for x in arrays), between, borders[tokens - position])
            found = np.concatenate([first[:position], second[: tokens - position]])
            assert_close(found, output, 1e-12)
            assert_close(last, final, 1e-12)

    def test_layer_may_be_traced(self):
        arrays = {n: x for n, x in self.arrays.items() if n != "initial_state"}
        layers = jax.lax.map(lambda i: lightning_attn(**arrays, layer_idx=i, num_layers=3)[0], jnp.arange(3))
        assert_close(layers[1], lightning_attn(**arrays, layer_idx=1, num_layers=3)[0], 1e-6)

    @pytest.mark.parametrize("layer", [np.int32(5), np.float32(5), jnp.int32(5), 5])
    def test_decays_are_as_exact_as_the_states(self, layer, x64):
        arrays = {n: x.astype(np.float64) for n, x in self.arrays.items()}
        gamma = -(8 / 4) * (1 - 5 / 12) * HEADS
        assert_close(
            lightning_attn(**arrays, layer_idx=layer, num_layers=12)[0],
            oracle.recurrent(**arrays, g_gamma=gamma)[0],
            TOLERANCE["float64"],
        )

    def test_scale_may_be_traced(self):
        arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in self.arrays.items()}
        run = jax.jit(lambda scale: recurrent(**arrays, softmax_scale=scale)[0])
        assert run(0.3).dtype == jnp.bfloat16
        assert_close(run(0.3), recurrent(**arrays, softmax_scale=0.3)[0], 1e-2)
        assert_close(jax.grad(lambda s: run(s).astype(float).sum())(0.3), run(1.0).astype(float).sum(), 2e-2)


@pytest.mark.usefixtures("small_chunks")
class TestTransformations:
    case = Case("small", batch=2, tokens=20, gates={"g": "ordinary"}, state="each", **{"heads": 4, "kv_heads": 2})

    @pytest.fixture(params=["by chunks", "by tokens"])
    def walk(self, request):
        with token_by_token(SMALL if request.param == "by tokens" else 0):
            yield

    def loss(self, arrays):
        output, final = recurrent(**arrays)
        return (output**2).sum() + jnp.sin(final).sum()

    def test_grad_of_grad(self, x64, walk):
        """Against differences of the first gradient, in a direction that moves every argument."""
        arrays = {n: jnp.asarray(x) for n, x in self.case.arrays().items()}
        arrays["gv"] = jnp.full((2, 20, 4, 3), -0.1)
        random = np.random.default_rng(2)
        away = {n: random.normal(size=x.shape) for n, x in arrays.items()}
        grad = jax.jit(jax.grad(self.loss))

        def slope(x):
            return sum((x[n] * away[n]).sum() for n in away)

        second = jax.jit(jax.grad(lambda x: slope(jax.grad(self.loss)(x))))(arrays)
        step = 1e-5
        up, down = ({n: x + s * away[n] for n, x in arrays.items()} for s in (step, -step))
        expected = jax.tree.map(lambda u, d: (u - d) / (2 * step), grad(up), grad(down))
        for n, x in second.items():
            assert_close(x, expected[n], 1e-7, n)

    def test_grad_of_grad_with_resets_is_finite(self, walk):
        arrays = {n: jnp.asarray(x) for n, x in self.case.arrays(np.float32).items()}
        arrays["g"] = arrays["g"].at[:, ::5].set(-jnp.inf)
        for width in (1, 5):
            some = arrays | {"g": arrays["g"][..., :width]}
            second = jax.jit(jax.grad(lambda x: sum((g**2).sum() for g in jax.grad(self.loss)(x).values())))(some)
            assert all(np.isfinite(x).all() for x in second.values())

    def test_vmap(self, walk):
        arrays = self.case.arrays(np.float32)
        stacked = {n: np.stack([x, x[::-1]]) for n, x in arrays.items()}
        output = jax.jit(jax.vmap(lambda x: recurrent(**x)[0]))(stacked)
        assert_close(output[1], recurrent(**arrays)[0][::-1], 1e-6)
        grads = jax.jit(jax.vmap(jax.grad(self.loss)))(stacked)
        for n, x in jax.jit(jax.grad(self.loss))(arrays).items():
            assert_close(grads[n][0], x, 1e-6, n)

    def test_vmap_over_borders(self, walk):
        arrays = {n: x[:1] for n, x in self.case.arrays(np.float32).items() if n != "initial_state"}
        borders = jnp.array([[0, 5, 20], [0, 0, 13]])
        outputs, states = jax.vmap(lambda cu: recurrent(**arrays, cu_seqlens=cu))(borders)
        for cu, output, state in zip(borders, outputs, states, strict=True):
            expected = oracle.recurrent(**arrays, cu_seqlens=cu)
            assert_close(output, expected[0], 1e-5)
            assert_close(state, expected[1], 1e-5)

    def test_checkpoint_and_scan(self):
        arrays = self.case.arrays(np.float32)
        again, kept = (jax.jit(jax.grad(loss))(arrays)["g"] for loss in (jax.checkpoint(self.loss), self.loss))
        assert_close(again, kept, 1e-6)
        state = arrays.pop("initial_state")

        def pieces(state, x):
            output, state = recurrent(**x, initial_state=state)
            return state, output

        quarters = {n: np.moveaxis(x.reshape(2, 4, 5, *x.shape[2:]), 1, 0) for n, x in arrays.items()}
        final, outputs = jax.lax.scan(pieces, state, quarters)
        expected = recurrent(**arrays, initial_state=state)
        assert_close(np.moveaxis(outputs, 0, 1).reshape(expected[0].shape), expected[0], 1e-6)
        assert_close(final, expected[1], 1e-6)

    @pytest.mark.parametrize("packed", [False, True])
    def test_shard_map(self, packed):
        """With arguments that do not vary over the mesh beside ones that do, gradients included."""
        mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        rows, everywhere = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
        arrays = self.case.arrays(np.float32)
        del arrays["initial_state"]
        arrays = {n: x[:1] for n, x in arrays.items()} if packed else arrays
        gamma = jnp.full(4, -0.1)
        borders = jnp.array([0, 7, 20]) if packed else None

        def run(x, gamma):
            return recurrent(**x, g_gamma=gamma, cu_seqlens=borders)

        sharded = jax.shard_map(run, mesh=mesh, in_specs=(rows, everywhere), out_specs=(rows, rows))
        assert_close(jax.jit(sharded)(arrays, gamma)[0], run(arrays, gamma)[0], 1e-6)
        expected = jax.jit(jax.grad(lambda *a: run(*a)[0].sum(), argnums=(0, 1)))(arrays, gamma)
        actual = jax.jit(jax.grad(lambda *a: sharded(*a)[0].sum(), argnums=(0, 1)))(arrays, gamma)
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5), actual, expected)

    def test_export(self):
        arrays = self.case.arrays(np.float32)
        exported = jax.export.export(jax.jit(lambda x: recurrent(**x)), platforms=["cpu", "cuda", "tpu"])(arrays)
        assert_close(exported.call(arrays)[0], recurrent(**arrays)[0], 1e-6)


class TestCost:
    def compiled(self, tokens, narrow=()):
        case = Case("cost", batch=1, tokens=tokens, key_dim=64, value_dim=64, gates={"g": "ordinary"}, narrow=narrow)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arrays(np.float32))
        return jax.jit(jax.grad(lambda x: sum(y.sum() for y in recurrent(**x)))).lower(shapes).compile()

    @pytest.mark.parametrize("narrow", [("g",), ()], ids=["head", "key"])
    def test_never_holds_a_state_for_every_token(self, narrow):
        states = 16384 * 2 * 64 * 64 * 4
        assert self.compiled(16384, narrow).memory_analysis().temp_size_in_bytes <= states / 8

    def test_new_borders_do_not_recompile(self, caplog):
        arrays = Case("packed", gates={"g_gamma": "ordinary"}, gamma_shape="H", lengths=(20, 21)).arrays(np.float32)
        del arrays["cu_seqlens"]

        def compilations(borders):
            caplog.clear()
            with jax.log_compiles():
                output, _ = recurrent(**arrays, cu_seqlens=np.array(borders))
            assert_close(output, oracle.recurrent(**arrays, cu_seqlens=borders)[0], 1e-5)
            return [record for record in caplog.records if "Compiling" in record.getMessage()]

        assert compilations([0, 3, 41])
        for borders in ([0, 0, 41], [0, 41, 41], [0, 1, 2]):
            assert not compilations(borders)

    def test_decoding_updates_a_donated_state_in_place(self):
        case = Case("decode", tokens=1, gates={"g": "ordinary"}, state="each", key_dim=64, value_dim=64)
        arrays = {n: jnp.asarray(x) for n, x in case.arrays(np.float32).items()}
        state = arrays.pop("initial_state")
        step = jax.jit(lambda state, x: recurrent(**x, initial_state=state), donate_argnums=0)
        compiled = step.lower(state, arrays).compile()
        assert "while" not in compiled.as_text()
        analysis = compiled.memory_analysis()
        assert analysis.alias_size_in_bytes >= state.nbytes
        assert analysis.temp_size_in_bytes < state.nbytes


def test_pinned_paths():
    from ejkernel.kernels import _xla
    from ejkernel.kernels._xla.gla import recurrent_gla as gla
    from ejkernel.kernels._xla.recurrent._interface import recurrent as pinned

    assert _xla.recurrent is pinned and _xla.recurrent_gla is gla
    x = jnp.ones((1, 4, 1, 2))
    np.testing.assert_array_equal(pinned(x, x, x)[0], ejkernel.recurrent(x, x, x, platform="xla")[0])
    for name in ("lightning_attn", "linear_attention", "recurrent", "recurrent_gla", "retention", "simple_gla"):
        assert callable(getattr(_xla, name))
    with pytest.raises(TypeError, match="always runs 'xla'"):
        pinned(x, x, x, platform="xla")
