"""The Flax layers: decoding step by step and packing give what one pass over separate sequences gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from conftest import assert_close  # noqa: E402

import ejkernel  # noqa: E402
from ejkernel import layers  # noqa: E402

WIDTH, HEADS, TOKENS, PROMPT = 16, 2, 9, 5
LENGTHS = (4, 0, 4)
LAYERS = {
    "gla": lambda: layers.GatedLinearAttention(WIDTH, HEADS, key_width=8, gate_rank=4, rngs=nnx.Rngs(0)),
    "retention": lambda: layers.Retention(WIDTH, HEADS, value_width=32, rngs=nnx.Rngs(0)),
    "lightning": lambda: layers.LightningAttention(WIDTH, HEADS, layer_idx=1, num_layers=3, rngs=nnx.Rngs(0)),
    "softmax": lambda: layers.MultiHeadAttention(WIDTH, 2 * HEADS, kv_heads=HEADS, rngs=nnx.Rngs(0)),
}


@pytest.fixture(params=LAYERS, scope="module")
def layer(request):
    return LAYERS[request.param]()


@pytest.fixture(scope="module")
def run(layer):
    """The layer under jit, its parameters an argument so that gradients can be taken of it."""
    graph, parameters = nnx.split(layer)
    call = jax.jit(lambda parameters, *arguments: nnx.merge(graph, parameters)(*arguments))
    return lambda *arguments: call(parameters, *arguments)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (2, TOKENS, WIDTH))


def test_prefill_and_steps_are_one_pass(layer, run, x):
    expected, _ = run(x)
    state = layer.empty_cache(len(x), TOKENS) if isinstance(layer, layers.MultiHeadAttention) else None
    first, state = run(x[:, :PROMPT], state)
    pieces = [first]
    for t in range(PROMPT, TOKENS):
        piece, state = run(x[:, t : t + 1], state)
        pieces.append(piece)
    assert_close(jnp.concatenate(pieces, 1), expected, 1e-5)


def test_packed_is_separate(run, x):
    stream = jnp.concatenate([x[0, :8], jnp.full((2, WIDTH), jnp.nan)])  # the last two are padding
    cu_seqlens = jnp.cumsum(jnp.array([0, *LENGTHS]))
    packed, states = run(stream, None, cu_seqlens)
    start = 0
    for number, length in enumerate(LENGTHS):
        if length:
            alone, state = run(x[:1, start : start + length])
            assert_close(packed[start : start + length], alone[0], 1e-5, f"sequence {number}")
            for some, one in zip(jax.tree.leaves(states), jax.tree.leaves(state), strict=True):
                assert_close(some[number], one[0], 1e-5, f"state {number}")
        start += length


def test_padding_has_no_effect(layer, x):
    """Whatever is in it and comes back to it: what comes out and all gradients are those of the stream without it."""
    graph, parameters = nnx.split(layer)
    cu_seqlens = jnp.cumsum(jnp.array([0, *LENGTHS]))
    stream, weights = x[0, :8], x[1, :8]

    def run(parameters, stream):
        return nnx.merge(graph, parameters)(stream, None, cu_seqlens)[0]

    @jax.jit
    def value_and_gradients(stream, weights):
        value, pull = jax.vjp(run, parameters, stream)
        return value, *pull(weights)

    wanted = value_and_gradients(stream, weights)
    for filler in (jnp.nan, jnp.inf):
        padding = jnp.full((2, WIDTH), filler)
        value, of_parameters, of_stream = value_and_gradients(
            *(jnp.concatenate([a, padding]) for a in (stream, weights))
        )
        for found, expected in zip(
            jax.tree.leaves((value[:8], of_parameters, of_stream[:8])), jax.tree.leaves(wanted), strict=True
        ):
            assert_close(found, expected, 1e-6)
        assert not value[8:].any() and not of_stream[8:].any()


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)], ids=["no tokens", "no rows"])
def test_nothing_to_do(layer, shape):
    state = None
    if isinstance(layer, layers.MultiHeadAttention):
        if shape[0]:
            state = layer.empty_cache(shape[0], TOKENS)
    else:
        state = jax.tree.map(jnp.ones_like, layer(jnp.ones((shape[0], 1, WIDTH)))[1])
    for carried in (None, state):
        output, after = layer(jnp.ones((*shape, WIDTH)), carried)
        assert output.shape == (*shape, WIDTH)
        if carried is not None:
            jax.tree.map(np.testing.assert_array_equal, after, carried)


@pytest.mark.parametrize("tokens, borders", [(0, [0]), (0, [0, 0, 0]), (3, [0]), (3, [0, 0, 0])])
def test_nothing_packed(layer, tokens, borders):
    """No sequences, or empty ones, which keep their states; all tokens are padding."""
    state = None
    if not isinstance(layer, layers.MultiHeadAttention):
        state = jax.tree.map(jnp.ones_like, layer(jnp.ones((len(borders) - 1, 1, WIDTH)))[1])
    for x in (jnp.ones((tokens, WIDTH)), jnp.ones((1, tokens, WIDTH))):
        output, after = layer(x, state, borders)
        np.testing.assert_array_equal(output, jnp.zeros(x.shape))
        jax.tree.map(np.testing.assert_array_equal, after, state)


def test_packed_sequences_continue(layer, run, x):
    if isinstance(layer, layers.MultiHeadAttention):
        pytest.skip("a packed stream has no cache")
    expected, states = run(x[0, :8], None, jnp.array([0, 3, 3, 8]))
    first, carried = run(jnp.concatenate([x[0, :1], x[0, 3:6]]), None, jnp.array([0, 1, 1, 4]))
    second, carried = run(jnp.concatenate([x[0, 1:3], x[0, 6:8]]), carried, jnp.array([0, 2, 2, 4]))
    both = jnp.concatenate([first[:1], second[:2], first[1:], second[2:]])
    assert_close(both, expected, 1e-5)
    for some, one in zip(jax.tree.leaves(carried), jax.tree.leaves(states), strict=True):
        assert_close(some, one, 1e-5, "state")


def test_gradients_match_differences(layer, x, x64):
    graph, parameters = nnx.split(layer)
    flat, tree = jax.tree.flatten(parameters)
    flat = [each.astype(jnp.float64) for each in flat]
    x = jnp.asarray(x[:1, :6], jnp.float64)

    @jax.jit
    def loss(flat):
        return (nnx.merge(graph, jax.tree.unflatten(tree, flat))(x)[0] ** 2).sum()

    gradients = jax.jit(jax.grad(loss))(flat)
    for number, (parameter, gradient) in enumerate(zip(flat, gradients, strict=True)):
        direction = jax.random.normal(jax.random.key(number), parameter.shape, jnp.float64)
        ends = [loss([*flat[:number], parameter + step * direction, *flat[number + 1 :]]) for step in (1e-5, -1e-5)]
        assert_close((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-5, 1e-6, f"parameter {number}")


def test_heads_are_partitioned(layer):
    specs = nnx.get_partition_spec(nnx.state(layer))
    assert specs["query"]["kernel"].get_value() == jax.sharding.PartitionSpec(None, "model")
    assert specs["out"]["kernel"].get_value() == jax.sharding.PartitionSpec("model", None)


def test_rows_of_a_cache_may_stand_at_different_positions(x):
    layer = LAYERS["softmax"]()
    expected, _ = layer(x)
    _, cache = layer(x[:, :4], layer.empty_cache(2, TOKENS))
    cache = cache._replace(position=jnp.array([4, 2]))
    token = jnp.stack([x[0, 4:5], x[1, 2:3]])
    output, cache = layer(token, cache)
    assert_close(output[:, 0], jnp.stack([expected[0, 4], expected[1, 2]]), 1e-5)
    assert cache.position.tolist() == [5, 3]


def test_tokens_past_a_full_cache_are_nan():
    layer = LAYERS["softmax"]()
    cache = layer.empty_cache(1, 2)
    _, cache = layer(jnp.ones((1, 2, WIDTH)), cache)
    output, _ = layer(jnp.ones((1, 1, WIDTH)), cache)
    assert np.isnan(output).all()


def test_explains_a_layer_that_ran(layer, x):
    jitted = nnx.jit(lambda layer, x: layer(x)[0])
    jitted(layer, x)
    layer(x)
    for found in (ejkernel.explain(layer, x), ejkernel.explain(jitted, layer, x)):
        assert found.chosen["default"] == "xla"
