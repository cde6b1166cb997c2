"""Checks by themselves: what they turn arguments into, and what no public call of `test_bad_calls.py` reaches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _checks
from ejkernel._checks import Dims

X = np.ones((2, 6, 4, 8), np.float32)
ROW = X[0]
KEY = jax.random.key(0)
CPU_MESH = jax.sharding.AbstractMesh((2, 3), ("x", "y"))


def dims(**sizes):
    return Dims(**({"B": 2, "S": 6, "H": 4, "L": 5, "Hkv": 2} | sizes))


REFUSED = [
    # whole sentences about shapes, where letters come from different arrays
    (
        lambda: Dims().match("a", X, "T H K", "H"),
        ValueError,
        f"a: got shape {X.shape}; expected [T, H, K] or [H]",
    ),
    (
        lambda: two_arrays("B S H D", "L S 1|H|Hkv 9"),
        ValueError,
        "key: got shape (2, 6, 4, 8); expected [L, S, 1|H|Hkv, 9] with L=5, S=6, H=4, Hkv=2 (S, H as in query)",
    ),
    (
        lambda: two_arrays("A B C D", "A B D 8", L=1),
        ValueError,
        "key: got shape (2, 6, 4, 8); expected [A, B, D, 8] with A=2, B=6, D=8 (A, B, D as in query)",
    ),
    (
        lambda: _checks.carried(Dims(N=3, B=2), "state", X, "H K V"),
        ValueError,
        "state: got shape (2, 6, 4, 8); expected [N, H, K, V] with N=3",
    ),
    # borders
    (lambda: _checks.cu_seqlens([1, 2], argument="cu"), ValueError, "cu: got first value 1; expected 0"),
    (
        lambda: _checks.cu_seqlens(np.array([0, 4, 3], np.uint8)),
        ValueError,
        "cu_seqlens: got a decrease at index 2; expected values that never decrease",
    ),
    (
        lambda: _checks.cu_seqlens([0, 2**31]),
        ValueError,
        "cu_seqlens: got last value 2147483648; expected at most what int32 counts",
    ),
    (
        lambda: _checks.cu_seqlens(np.array([0, 2**64 - 1], np.uint64), 6),
        ValueError,
        "cu_seqlens: got last value 18446744073709551615; expected at most the 6 tokens there are",
    ),
    (
        lambda: jax.jit(lambda: _checks.cu_seqlens([0, 7], 6))(),
        ValueError,
        "cu_seqlens: got last value 7; expected at most the 6 tokens there are",
    ),
    (
        lambda: jax.jit(lambda cu: _checks.static_total("total_rows", None, cu, np.sum))(np.array([0, 2])),
        ValueError,
        "total_rows: got None with a traced cu_seqlens; expected total_rows=, the number of rows known when tracing",
    ),
    # a device's slice of the tokens
    (
        lambda: _checks.packed_borders(ROW, ROW, [0, 13], None, devices=2),
        ValueError,
        "cu_seqlens: got last value 13; expected at most the 12 tokens there are",
    ),
    (
        lambda: _checks.packed_borders(ROW, ROW, [0, 12], [0, 13], devices=2),
        ValueError,
        "cu_seqlens_kv: got last value 13; expected at most the 12 tokens there are",
    ),
    (
        lambda: _checks.divisible_time(7, "x", 2),
        ValueError,
        "query: got 7 tokens; expected a multiple of the 2 devices of axis 'x': pad the tokens",
    ),
    (
        lambda: _checks.even_slices("x", 7, 1, 2),
        ValueError,
        "x: got 7 tokens; expected a multiple of 2, the 2 devices: pad the tokens",
    ),
    (
        lambda: _checks.even_slices("x", 6, 2, 2),
        ValueError,
        "x: got 6 tokens; expected a multiple of 4, twice the 2 devices, as layout='balanced' gives each device two "
        "slices: pad the tokens",
    ),
    (
        lambda: _checks.even_slices("x", 7, 2),
        ValueError,
        "x: got 7 tokens; expected an even number on each device, as layout='balanced' gives each device two slices: "
        "pad the tokens",
    ),
    (
        lambda: _checks.bound_axis("x"),
        ValueError,
        "axis_name: got 'x'; expected an axis of the shard_map around this call; outside of one, give mesh=",
    ),
    (
        lambda: _checks.mesh_axis(CPU_MESH, "z"),
        ValueError,
        "axis_name: got 'z'; expected one of the mesh's axes ('x', 'y')",
    ),
    # values of other types than the public tables have
    *(
        (lambda x=x: _checks.power_of_two("n", x), ValueError, f"n: got {x!r}; expected a power of two")
        for x in (True, 96, -4)
    ),
    (lambda: _checks.integer_dtype("d", "no"), TypeError, "d: got 'no'; expected an integer dtype"),
    (lambda: _checks.axis(1.0, 2), ValueError, "axis: got 1.0; expected an axis of an array of rank 2"),
    *(
        (lambda x=x: _checks.block_sizes(x), ValueError, f"block_sizes: got {x!r}; expected (queries, keys)")
        for x in ((8,), [8, 8, 8])
    ),
    (
        lambda: _checks.sliding_window("12"),
        TypeError,
        "sliding_window: got str; expected an int or a pair of them, known when tracing",
    ),
    (
        lambda: _checks.dropout(True, -0.1, None),
        ValueError,
        "dropout_prob: got -0.1; expected a probability in [0, 1)",
    ),
    (
        lambda: _checks.dropout(False, 0.5, np.zeros(2, np.int32)),
        TypeError,
        "dropout_rng: got dtype int32; expected jax.random.key(seed) or jax.random.PRNGKey(seed)",
    ),
    (
        lambda: _checks.dropout(False, 0.5, np.zeros((2, 2), np.uint32)),
        ValueError,
        "dropout_rng: got shape (2, 2); expected one key, of shape [2]",
    ),
]


def two_arrays(first, second, **sizes):
    both = Dims(**({"L": 5, "Hkv": 2} | sizes))
    both.match("query", X, first)
    both.match("key", X, second)


def linear(**changes):
    options = dict.fromkeys(("g", "g_gamma", "gk", "gv", "initial_state", "borders"))
    return _checks.linear_attention(**({"query": X, "key": X, "value": X} | options | changes))


@pytest.mark.parametrize("call, error, message", REFUSED, ids=[message[:60] for _, _, message in REFUSED])
def test_says_what_would_fit(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "result, expected",
    [
        (lambda: _checks.positive_int("n", 1), 1),
        (lambda: _checks.positive_int("n", np.int64(3)), 3),
        (lambda: [_checks.power_of_two("n", x) for x in (1, 2, np.int32(64))], [1, 2, 64]),
        (lambda: _checks.static_total("t", None, np.array([0, 2, 5]), np.max), 3),
        (lambda: [_checks.static_total("t", t, np.array([0, 0]), np.sum) for t in (0, np.int64(4))], [0, 4]),
        (lambda: _checks.static_total("t", 5, np.array([0, 2, 5]), np.sum), 5),
        (lambda: [_checks.real("r", x) for x in (3, 0.5, np.float32(0.5), np.int8(-1))], [3.0, 0.5, 0.5, -1.0]),
        (lambda: _checks.positive("r", 1e-30), 1e-30),
        (lambda: [_checks.flag("f", x) for x in (True, np.bool_(True), np.bool_(False))], [True, True, False]),
        (lambda: [_checks.axis(x, 3) for x in (0, 2, -1, -3, np.int64(1))], [0, 2, 2, 0, 1]),
        (lambda: _checks.block_sizes([8, np.int32(16)]), (8, 16)),
        (lambda: _checks.sliding_window(None), None),
        (lambda: [_checks.sliding_window(x) for x in (0, (1, 2), [np.int64(3), 0])], [(0, 0), (1, 2), (3, 0)]),
        (lambda: _checks.sliding_window((2**40, 2**30 - 1)), (2**30, 2**30 - 1)),
        (lambda: _checks.sliding_window((2**30 - 1, 2**40)), (2**30 - 1, 2**30)),
        (lambda: _checks.dropout(True, 0.5, None), (0.0, None)),
        (lambda: _checks.dropout(False, 0, None), (0.0, None)),
        (lambda: _checks.dropout(False, 0.5, KEY), (0.5, KEY)),
        (lambda: _checks.heads(X, X[:, :, :2], X), 4),
        (lambda: _checks.heads(ROW[:, :1], ROW[:, :2], ROW), 4),
        (lambda: _checks.mesh_axis(CPU_MESH, "y"), 3),
        (lambda: [_checks.ring_slices(x) for x in ("contiguous", "balanced")], [1, 2]),
        (lambda: [_checks.even_slices("x", 8, *x) for x in ((2, 2), (1, 2), (2,), (1, None))], [2, 4, 4, 8]),
        (lambda: [_checks.query_offset(x, 2) for x in (0, np.int32(0))], [None, None]),
        (lambda: _checks.packed_borders(X, X, None, None), (None, None)),
    ],
)  # fmt: skip
def test_accepts(result, expected):
    found = result()
    assert found == expected
    # a bool is an int, and np.int64(1) is equal to both
    assert jax.tree.map(type, found) == jax.tree.map(type, expected)


@pytest.mark.parametrize("key", [np.zeros(2, np.uint32), np.zeros(4, np.uint32)])
def test_accepts_raw_keys(key):
    probability, found = _checks.dropout(np.bool_(False), 0.25, key)
    assert probability == 0.25
    np.testing.assert_array_equal(found, key)


@pytest.mark.parametrize(
    "offset, expected",
    [(3, [3]), (np.int64(-2), [-2]), (np.array(5), [5]), (jnp.array([6]), [6]), (np.arange(2), [0, 1])],
)
def test_query_offsets(offset, expected):
    found = _checks.query_offset(offset, 2)
    assert found.dtype == jnp.int32
    assert found.tolist() == expected


@pytest.mark.parametrize("cu", [[0, 2, 2, 6], (0, 2, 2, 6), np.array([0, 2, 2, 6]), jnp.array([0, 2, 2, 6])])
def test_borders(cu):
    for total in (None, 6, 7):
        assert _checks.cu_seqlens(cu, total).tolist() == [0, 2, 2, 6]
    for devices, tokens in ((1, 6), (2, 3)):
        query, key = ROW[:tokens], ROW[:tokens]
        found = _checks.packed_borders(query, key, cu, None, devices)
        assert [each.tolist() for each in found] == [[0, 2, 2, 6]] * 2
        found = _checks.packed_borders(query[None], key[None], cu, [0, 1, 1, 1], devices)
        assert [each.tolist() for each in found] == [[0, 2, 2, 6], [0, 1, 1, 1]]
        assert found[0].dtype == found[1].dtype == jnp.int32


def test_no_sequences_are_one_empty_one():
    for cu_kv in (None, [0]):
        found = _checks.packed_borders(ROW, ROW, [0], cu_kv)
        assert [each.tolist() for each in found] == [[0, 0]] * 2
    assert _checks.cu_seqlens([0]).tolist() == [0]


def test_traced_borders_pass_with_any_values():
    """In an array, or one by one in a list; shapes are still checked."""
    check = jax.jit(lambda cu: _checks.packed_borders(ROW, ROW, cu, None)[0])
    assert check(np.array([1, 9])).tolist() == [1, 9]
    with pytest.raises(TypeError, match=r"^cu_seqlens: got list; expected an array"):
        jax.jit(lambda end: _checks.cu_seqlens([0, end]))(3)


def test_letters_are_bound_by_the_first_array_and_alternatives_bind_none():
    sizes = Dims(N=7)
    sizes.match("query", X, "B T", "B T H 8")
    assert sizes.sizes == {"N": 7, "B": 2, "T": 6, "H": 4}
    assert sizes["H"] == 4
    sizes.match("mask", np.ones((2, 1, 9)), "1|B 1|T|H S")
    assert sizes.sizes == {"N": 7, "B": 2, "T": 6, "H": 4, "S": 9}
    # of two patterns of the same rank, the second may be the one that fits
    sizes.match("bias", np.ones((4, 3)), "B A", "H C")
    assert sizes.sizes["C"] == 3 and "A" not in sizes.sizes


def test_attention_arrays():
    """The three that go in come out, in their order."""
    sizes = Dims()
    found = _checks.attention_inputs(sizes, X, 2 * X[:, :5, :2], 3 * X[:, :5, :2, :7])
    assert [float(each.max()) for each in found] == [1, 2, 3]
    assert sizes.sizes == {"B": 2, "S": 6, "H": 4, "D": 8, "L": 5, "Hkv": 2, "Dv": 7}


def test_masks_biases_and_sinks_broadcast():
    for shape in ((1, 1, 1, 1), (2, 4, 6, 5), (1, 2, 6, 1)):
        assert _checks.attention_mask(dims(), np.ones(shape, bool)).shape == shape
        assert _checks.attention_bias(dims(), np.ones(shape)).shape == shape
    for shape, expected in (((3,), (1, 3)), ((1, 3), (1, 3)), ((2, 3), (2, 3)), ((4, 3), (4, 3))):
        assert _checks.sinks(dims(), np.ones(shape)).shape == expected
    assert _checks.gate_per_head(X[..., 0], X[:, :, :1], X, X).shape == (2, 6, 4, 1)
    assert _checks.unbatched("key", ROW).shape == (1, 6, 4, 8)


def test_meshes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    assert _checks.mesh_axis(mesh, "x") == 1
    sizes = []
    everywhere = jax.sharding.PartitionSpec()
    run = jax.shard_map(
        lambda x: sizes.append(_checks.bound_axis("x")) or x, mesh=mesh, in_specs=everywhere, out_specs=everywhere
    )
    jax.eval_shape(run, X)
    assert sizes == [1]
    _checks.divisible_time(8, "x", 2)


def test_masks_count_any_integer_but_0():
    assert _checks.token_mask(np.array([[0, 2, -1]])).tolist() == [[False, True, True]]
    assert _checks.token_mask(np.array([[False, True]])).tolist() == [[False, True]]


def test_linear_attention_arrays():
    found = linear(g=X, gk=X[..., :1], gv=X * 2, g_gamma=X[0, 0, :, 0], initial_state=np.ones((2, 4, 8, 8)))
    assert (found.sequences, found.unbatched, found.cu_seqlens) == (2, False, None)
    assert found.gk.shape == (2, 6, 4, 1) and found.gv.max() == 2 and found.g.max() == 1
    found = linear(query=ROW, key=ROW[:, :2] * 3, value=ROW[:, :2, :5] * 4, borders=[0, 2, 6], g=ROW)
    assert (found.sequences, found.unbatched, found.cu_seqlens.tolist()) == (2, True, [0, 2, 6])
    shapes = (1, 6, 4, 8), (1, 6, 2, 8), (1, 6, 2, 5), (1, 6, 4, 8)
    assert tuple(x.shape for x in (found.query, found.key, found.value, found.g)) == shapes
    assert (found.key.max(), found.value.max(), found.gk, found.gv, found.g_gamma) == (3, 4, None, None, None)
    found = linear(query=X[:1], key=X[:1], value=X[:1], borders=[0, 2, 2, 6], g_gamma=np.ones((3, 4)))
    assert (found.sequences, found.unbatched, found.query.shape) == (3, False, (1, 6, 4, 8))
    for state in (np.ones((4, 8, 8)), np.ones((2, 4, 8, 8))):
        assert linear(initial_state=state).initial_state.shape == state.shape
    for g_gamma in (np.ones(4), np.ones((1, 4)), np.ones((2, 4))):
        assert linear(g_gamma=g_gamma).g_gamma.shape == g_gamma.shape


@pytest.mark.parametrize("dtype, kept", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_states_are_kept_in(dtype, kept, x64):
    assert linear(query=jnp.asarray(X, dtype)).state_dtype == kept


@pytest.mark.parametrize("number", [3, 2.5, np.int8(3), np.float32(2.5), np.array(3), jnp.array(2.5)])
def test_layer_numbers(number):
    for found in (_checks.layer_number(number, 4), jax.jit(_checks.layer_number, static_argnums=1)(number, 4)):
        assert found.shape == () and float(found) == float(number)


def test_layer_input():
    for x, borders in ((ROW, None), (ROW[0], [0, 4]), (ROW[:1], [0, 1, 4])):
        sizes = Dims(width=8)
        found, cu, ids = _checks.layer_input(sizes, x, borders, None)
        assert found.shape == x.shape and ids is None
        if borders is None:
            assert cu is None and sizes["B"] == len(x)
        else:
            assert cu.tolist() == borders and sizes["N"] == len(borders) - 1


def test_time_series_layouts():
    for ranks, x in (((3, 4), X), ((3, 4), ROW), ((3,), ROW), ((4,), X)):
        assert _checks.time_series("g", x, ranks, False).shape == x.shape
    message = "g: got shape (4, 8); expected [B, H, T] or [B, H, T, S]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _checks.time_series("g", X[0, 0], (3, 4), True)
    with pytest.raises(ValueError, match=r"expected \[B, T, H, S\]$"):
        _checks.time_series("g", X[0, 0], (4,), False)


def test_factors_are_numbers_or_arrays():
    assert _checks.factor("s", 2) == 2.0 and isinstance(_checks.factor("s", 2), float)
    for x in (np.array(2.0), np.array([2.0]), jnp.array([[2.0]])):
        assert _checks.factor("s", x).shape == ()
    assert jax.jit(lambda x: _checks.factor("s", x) * 2)(2.0) == 4
