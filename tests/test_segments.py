"""Rows of several sequences by `segment_ids`: every recurrence against the same sequences computed one by one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close, token_by_token

import ejkernel

B, T, H, K, V = 5, 150, 2, 4, 3
# runs of one token, of a chunk and one more or less; ids that come back; padding before, between, behind and alone
IDS = np.stack(
    [
        np.repeat([3, -1, 3, 5, -2, -1], [65, 3, 1, 1, 64, 16]),
        np.repeat([-1, 0, 7, 0, 2, -1, 2], [5, 64, 1, 31, 32, 2, 15]),
        np.full(T, -1),
        np.repeat([1, 2, 4], [T - 2, 1, 1]),
        np.concatenate([np.arange(40), np.repeat([40, 41], [33, T - 73])]),
    ]
).astype(np.int32)


class Op(NamedTuple):
    """An op, which gates and states it has, and its definition with the gates written out."""

    front: Any
    gates: dict[str, tuple[int, ...]]
    truth: Any
    decay: Any = None  # the `g_gamma` that the op makes itself
    options: tuple[tuple[str, Any], ...] = ()


def per_head(query, key, value, g, **others):
    """`simple_gla` as `recurrent` defines it."""
    output, final, grads = oracle.recurrent(query, key, value, g=g[..., None], **others)
    return output, final, grads | ({"g": grads["g"][..., 0]} if grads else {})


TOKEN, HEAD, BETA = (B, T, H, K), (B, T, H), {"beta": (B, T, H)}
OPS = {
    "recurrent": Op(ejkernel.recurrent, {"g": TOKEN, "gv": (B, T, H, V), "g_gamma": (B, H)}, oracle.recurrent),
    "recurrent gamma": Op(ejkernel.recurrent, {"g_gamma": (H,)}, oracle.recurrent),
    "recurrent_gla": Op(ejkernel.recurrent_gla, {"g": TOKEN, "g_gamma": (1, H)}, oracle.recurrent),
    "simple_gla": Op(ejkernel.simple_gla, {"g": HEAD}, per_head),
    "retention": Op(ejkernel.retention, {}, oracle.recurrent, np.log1p(-(2.0 ** (-5 - np.arange(H))))),
    "lightning_attn": Op(
        ejkernel.lightning_attn,
        {},
        oracle.recurrent,
        -(8 / H) * (1 - 1 / 3) * np.arange(H),
        (("layer_idx", 1), ("num_layers", 3)),
    ),
    "linear_attention": Op(ejkernel.linear_attention, {}, oracle.recurrent),
    "delta_rule": Op(ejkernel.delta_rule, BETA, oracle.delta_rule),
    "gated_delta_rule": Op(ejkernel.gated_delta_rule, {"g": HEAD, **BETA}, oracle.delta_rule),
    "kda": Op(ejkernel.kda, {"g": TOKEN, **BETA}, oracle.delta_rule),
}


@functools.cache
def arrays_of(name, state):
    random = np.random.default_rng(0)
    found = {"query": random.normal(size=(B, T, 1, K)), "key": random.normal(size=(B, T, H, K)) / 2}
    found["value"] = random.normal(size=(B, T, H, V))
    for gate, shape in OPS[name].gates.items():
        found[gate] = random.random(shape) if gate == "beta" else -np.abs(random.normal(size=shape)) / 2
    if state:
        found["initial_state"] = random.normal(size=(B, H, K, V))
    return found


@functools.cache
def compiled(name, reverse):
    op = OPS[name]

    @jax.jit
    def run(arrays, ids, cotangents):
        def call(arrays):
            return op.front(**arrays, **dict(op.options), segment_ids=ids, reverse=reverse, platform="xla")

        results, pull = jax.vjp(call, arrays)
        return results, pull(cotangents)[0]

    return run


def cotangents():
    random = np.random.default_rng(1)
    return random.normal(size=(B, T, H, V)), random.normal(size=(B, H, K, V))


BACK = ("recurrent", "recurrent gamma", "gated_delta_rule")


@pytest.mark.parametrize("name, reverse", [*((name, False) for name in OPS), *((name, True) for name in BACK)])
def test_sequences_one_by_one(name, reverse, x64):
    op, arrays = OPS[name], arrays_of(name, state=not reverse or name == "recurrent")
    d_output, d_final = cotangents()
    written_out = arrays if op.decay is None else arrays | {"g_gamma": op.decay}
    output, final, grads = oracle.one_by_one(op.truth, written_out, IDS, d_output, d_final, reverse)
    found, d_arrays = compiled(name, reverse)(arrays, IDS, (d_output, d_final))
    assert_close(found[0], output, 1e-12, "output")
    assert_close(found[1], final, 1e-12, "final state")
    for each in arrays:
        assert_close(d_arrays[each], grads[each], 1e-11, each)
    assert not np.asarray(found[0])[IDS < 0].any()
    for each in ("query", "key", "value"):
        assert not np.asarray(d_arrays[each])[IDS < 0].any()


@pytest.mark.parametrize(
    "name, reverse", [("recurrent", False), ("recurrent gamma", True), ("gated_delta_rule", False)]
)
def test_token_by_token(name, reverse, x64):
    """As small states go on a CPU without gradients."""
    arrays = arrays_of(name, state=True)
    output, final, _ = oracle.one_by_one(OPS[name].truth, arrays, IDS, reverse=reverse)
    with token_by_token(states=64 * 64):
        run = jax.jit(lambda arrays: OPS[name].front(**arrays, segment_ids=IDS, reverse=reverse, platform="xla"))
        found = run(arrays)
        assert_close(found[0], output, 1e-12, "output")
        assert_close(found[1], final, 1e-12, "final state")
        spoilt = run(poisoned(arrays, IDS < 0))
    np.testing.assert_array_equal(spoilt[0], found[0])
    np.testing.assert_array_equal(spoilt[1], found[1])


def poisoned(arrays, where):
    """`arrays` with NaN for these tokens."""
    spoilt = dict(arrays)
    for name, x in arrays.items():
        if x.shape[:2] == (B, T):
            spoilt[name] = np.where(where.reshape(B, T, *(1,) * (x.ndim - 2)), np.nan, x)
    return spoilt


@pytest.mark.parametrize("name, reverse", [*((name, False) for name in OPS), *((name, True) for name in BACK)])
def test_no_bit_of_another_sequence_changes(name, reverse, x64):
    arrays, run = arrays_of(name, state=not reverse or name == "recurrent"), compiled(name, reverse)
    inside = np.zeros((B, T), bool)
    inside[1, 70:101] = True  # neither the first nor the last of its row
    (output, final), grads = run(arrays, IDS, cotangents())
    for where in (inside, IDS < 0):
        (found, end), found_grads = run(poisoned(arrays, where), IDS, cotangents())
        np.testing.assert_array_equal(np.asarray(found)[~where], np.asarray(output)[~where])
        np.testing.assert_array_equal(end, final)
        for each, grad in grads.items():
            if grad.shape[:2] == (B, T):
                found_grad = np.asarray(found_grads[each])
                np.testing.assert_array_equal(found_grad[~where], np.asarray(grad)[~where], each)
                assert where is inside or not found_grad[where].any()
            elif each == "initial_state" or where is not inside:
                np.testing.assert_array_equal(found_grads[each], grad, each)


def test_padding_has_no_gradient_through_what_comes_before_the_core(x64):
    arrays = poisoned(arrays_of("gated_delta_rule", True), IDS < 0)
    options = {"segment_ids": IDS, "normalize": True}

    def loss(arrays, scale):
        output, final = ejkernel.gated_delta_rule(**arrays, softmax_scale=scale, **options)
        return output.sum() + final.sum()

    for grad in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(arrays, jnp.asarray(0.3))):
        assert np.isfinite(grad).all()


def short(name, tokens):
    """A call's arrays with fewer tokens, and ids of theirs."""
    ids = np.array([[1] * 7 + [2] + [-1] * 2 + [2] * (tokens - 10), [-1] * 2 + [0] * 5 + [1] * (tokens - 7)])
    arrays = {name: x[:2, :tokens] if x.shape[:2] == (B, T) else x[:2] for name, x in arrays_of(name, True).items()}
    return arrays, ids


@pytest.mark.parametrize("name", ["recurrent_gla", "gated_delta_rule"])
def test_second_derivatives_and_tangents(name, x64):
    arrays, ids = short(name, 20)
    random = np.random.default_rng(2)
    one, other = ({each: random.normal(size=x.shape) for each, x in arrays.items()} for _ in range(2))

    def loss(arrays):
        output, final = OPS[name].front(**arrays, segment_ids=ids)
        return jnp.sin(output).sum() + jnp.sin(final).sum()

    def inner(a, b):
        return sum((a[each] * b[each]).sum() for each in a)

    @jax.jit
    def run(arrays):
        grad = jax.grad(loss)
        forward_over_reverse = inner(other, jax.jvp(grad, (arrays,), (one,))[1])
        reverse_over_reverse = inner(jax.grad(lambda x: inner(other, grad(x)))(arrays), one)
        return jax.jvp(loss, (arrays,), (one,))[1], inner(grad(arrays), one), forward_over_reverse, reverse_over_reverse

    gradient = jax.jit(jax.grad(loss))
    tangent, by_gradient, *second = run(arrays)
    assert_close(tangent, by_gradient, 1e-12)
    step = 1e-5
    ahead, behind = (gradient({each: x + sign * step * one[each] for each, x in arrays.items()}) for sign in (1, -1))
    differences = inner(other, jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind))
    for each in second:
        assert_close(each, differences, 1e-7)


def test_mapped_calls_are_rows(x64):
    arrays, ids = short("recurrent gamma", 20)
    many = {name: np.stack([x, x[::-1] / 2]) for name, x in arrays.items() if name != "g_gamma"}
    ids, gamma = np.stack([ids, ids[::-1]]), arrays["g_gamma"]

    def loss(arrays, gamma, ids):
        output, final = ejkernel.recurrent(**arrays, g_gamma=gamma, segment_ids=ids)
        return jnp.sin(output).sum() + jnp.sin(final).sum()

    run = jax.value_and_grad(loss, (0, 1))
    single = jax.jit(run)
    for mapped, ids_of in ((0, lambda i: ids[i]), (None, lambda i: ids[0])):
        found = jax.jit(jax.vmap(run, (0, None, mapped)))(many, gamma, ids if mapped == 0 else ids[0])
        for i in range(2):
            alone = single({name: x[i] for name, x in many.items()}, gamma, ids_of(i))
            jax.tree.map(lambda x, y, i=i: assert_close(x[i], y, 1e-12), found, alone)


@pytest.mark.parametrize("name", ["recurrent", "kda"])
def test_one_token(name, x64):
    arrays = {each: x[:, :1] if x.shape[:2] == (B, T) else x for each, x in arrays_of(name, True).items()}
    padding = np.array([[0], [-1], [3], [-7], [0]])
    arrays = {
        each: np.where((padding < 0).reshape(-1, *(1,) * (x.ndim - 1)), np.nan, x) if x.shape[:2] == (B, 1) else x
        for each, x in arrays.items()
    }
    real = padding[:, 0] >= 0

    def loss(arrays):
        results = OPS[name].front(**arrays, segment_ids=padding)
        return sum(x.sum() for x in results), results

    grads, (output, final) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    alone = OPS[name].front(**{each: x[real] for each, x in arrays.items()})
    assert_close(output[real], alone[0], 1e-14)
    assert_close(final[real], alone[1], 1e-14)
    assert not np.asarray(output)[~real].any()
    np.testing.assert_array_equal(np.asarray(final)[~real], arrays["initial_state"][~real])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_unsigned_ids_are_never_padding():
    ids = np.array([[2**32 - 1] * 3 + [5] * 3], np.uint32)
    x = np.random.default_rng(0).normal(size=(1, 6, 1, 4)).astype(np.float32)
    output, _ = ejkernel.linear_attention(x, x, x, segment_ids=ids)
    expected, _ = ejkernel.linear_attention(x, x, x, segment_ids=np.array([[0, 0, 0, 1, 1, 1]]))
    np.testing.assert_array_equal(output, expected)


def test_memory_is_that_of_chunks():
    """Of forward and backward: linear in the tokens, and far from a state a token."""
    K, H = 64, 2

    def bytes_of(tokens):
        x, g = (jax.ShapeDtypeStruct((1, tokens, H, *dims), np.float32) for dims in ((K,), ()))
        ids = jax.ShapeDtypeStruct((1, tokens), np.int32)

        def loss(arrays, ids):
            return sum(y.sum() for y in ejkernel.simple_gla(*arrays, segment_ids=ids))

        return jax.jit(jax.grad(loss)).lower((x, x, x, g), ids).compile().memory_analysis().temp_size_in_bytes

    small, large = bytes_of(1024), bytes_of(4096)
    assert large < 4.2 * small
    assert large < 4 * 4096 * H * K * K / 8


@pytest.mark.parametrize("device, serves", [("h100", "triton"), ("v5e", "pallas")])
def test_what_serves_rows_of_several_sequences(device, serves):
    x = jax.ShapeDtypeStruct((2, 64, 2, 64), np.float32)
    gate, ids = jax.ShapeDtypeStruct((2, 64, 2), np.float32), jax.ShapeDtypeStruct((2, 64), np.int32)
    for op, gates in ((ejkernel.linear_attention, ()), (ejkernel.gated_delta_rule, (gate, gate))):
        found = ejkernel.explain(op, x, x, x, *gates, segment_ids=ids, device=device)
        assert set(found.chosen.values()) == {serves}


def test_gates_of_both_sides_are_left_to_xla():
    """On Triton one sequence's strong gates would change how the others are computed."""
    x = jax.ShapeDtypeStruct((2, 64, 2, 64), np.float32)
    ids = jax.ShapeDtypeStruct((2, 64), np.int32)
    found = ejkernel.explain(ejkernel.recurrent, x, x, x, g=x, gv=x, segment_ids=ids, device="h100")
    assert set(found.chosen.values()) == {"xla"}
    assert found.refused["triton"] == "rows of several sequences (segment_ids) whose key dims and value dims decay"
