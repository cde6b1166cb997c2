"""The Flax layers: they compute what is published, also step by step, packed, scanned over and in other dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from attention_cases import QUICK  # noqa: E402
from conftest import assert_close  # noqa: E402
from layer_cases import PUBLISHED, VARIANTS, WIDTH  # noqa: E402

import ejkernel  # noqa: E402
from ejkernel import layers  # noqa: E402
from ejkernel.layers._parameters import RMSNorm  # noqa: E402
from ejkernel.layers._rotary import rotary  # noqa: E402

TOKENS, PROMPT = 9, 5
LENGTHS = (4, 0, 4)
ROW = jax.ShapeDtypeStruct((1, 1, WIDTH), jnp.float32)


def grows(layer):
    """Whether what it carries grows with the tokens."""
    return isinstance(layer, layers.MultiHeadAttention | layers.MultiHeadLatentAttention)


@pytest.fixture(params=PUBLISHED, scope="module")
def published(request):
    return PUBLISHED[request.param]


@pytest.fixture(scope="module")
def layer(published):
    return published.make()


@pytest.fixture(scope="module")
def call(layer):
    """The layer under jit, its parameters an argument: others of its kind share the compiled programs."""
    graph = nnx.graphdef(layer)
    return jax.jit(lambda parameters, *arguments: nnx.merge(graph, parameters)(*arguments))


@pytest.fixture(scope="module")
def run(layer, call):
    """The layer under jit with its own parameters."""
    parameters = nnx.state(layer)
    return lambda *arguments: call(parameters, *arguments)


@pytest.fixture(scope="module")
def run_segments(layer):
    """The layer under jit on rows of several sequences."""
    graph, parameters = nnx.split(layer)
    call = jax.jit(
        lambda parameters, x, ids, state: nnx.merge(graph, parameters)(x, state, segment_ids=ids),
        compiler_options=QUICK,
    )
    return lambda x, ids, state: call(parameters, x, ids, state)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (2, TOKENS, WIDTH))


def test_prefill_and_steps_are_one_pass(layer, run, x):
    expected, _ = run(x)
    first, state = run(x[:, :PROMPT], layer.empty_cache(len(x), TOKENS))
    pieces = [first]
    for t in range(PROMPT, TOKENS):
        piece, state = run(x[:, t : t + 1], state)
        pieces.append(piece)
    assert_close(jnp.concatenate(pieces, 1), expected, 1e-5)


def test_computes_what_is_published(published, run, x):
    output, _ = run(x)
    for row in range(len(x)):
        assert_close(output[row], published.expected(published.weights(), x[row]), 1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_released_models(name, x):
    """Options that one family or another needs: a prompt, then steps."""
    variant = VARIANTS[name]
    layer = variant.make()
    call = nnx.jit(lambda layer, x, state: layer(x, state))
    state, pieces = layer.empty_cache(len(x), TOKENS), []
    for start, stop in ((0, PROMPT), *((t, t + 1) for t in range(PROMPT, TOKENS))):
        piece, state = call(layer, x[:, start:stop], state)
        pieces.append(piece)
    output = jnp.concatenate(pieces, 1)
    for row in range(len(x)):
        assert_close(output[row], variant.expected(variant.weights(), x[row]), 1e-5)


@pytest.mark.parametrize("name", [*PUBLISHED, "mamba of Falcon-H1"])
def test_a_single_row_is_compiled_step_by_step(name, x):
    """GPUs may compute it as two rows, and JAX traces that wherever the step is compiled."""
    layer = (PUBLISHED | VARIANTS)[name].make()
    call = nnx.jit(lambda layer, x, state: layer(x, state))
    expected, _ = call(layer, x[:1], layer.empty_cache(1, TOKENS))
    _, state = call(layer, x[:1, :-1], layer.empty_cache(1, TOKENS))
    output, _ = call(layer, x[:1, -1:], state)
    assert_close(output, expected[:, -1:], 1e-5)


def test_weights_that_do_not_fit_are_all_listed(published):
    weights = {f"layer.{name}": each for name, each in published.weights().items()}
    missing, turned, whole, *_ = weights
    shapes = {name: weights[name].shape for name in (missing, turned)}
    del weights[missing]
    weights |= {turned: weights[turned].T[None], whole: weights[whole].astype(int), "layer.more": 0, "others.more": 0}
    with pytest.raises(ValueError) as caught:
        getattr(published.layer, published.load)(weights, WIDTH, **published.options, prefix="layer.")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("weights: got 4 names that do not fit; expected those of ")
    assert sorted(rest) == sorted(
        [
            f"  {missing}: missing; expected shape {shapes[missing]}",
            f"  {turned}: got shape {(1, *shapes[turned][::-1])}; expected {shapes[turned]}",
            f"  {whole}: got dtype int64; expected bfloat16, float16, float32, float64",
            "  layer.more: unknown",
        ]
    )


def test_dtypes(published, layer, run, x):
    """The input's is kept, or the layer's taken; what is carried keeps its own."""
    output, state = run(x.astype(jnp.bfloat16))
    assert output.dtype == jnp.bfloat16
    assert_close(output, run(x)[0], 0.05)
    half = published.make(dtype=jnp.float16, param_dtype=jnp.bfloat16)
    parameters = nnx.to_flat_state(nnx.state(half, nnx.Param))
    assert all(
        each.get_value().dtype == (jnp.bfloat16 if path[-1] in ("kernel", "bias") else jnp.float32)
        for path, each in parameters
    )
    if grows(layer):
        state = half.empty_cache(len(x), TOKENS)
        assert state[0].dtype == jnp.float16
    found, after = jax.eval_shape(lambda x, state: half(x, state), x, state)
    assert found.dtype == jnp.float16
    found, again = jax.eval_shape(lambda x, state: half(x, state), x[:, :1], after)
    assert found.dtype == jnp.float16
    assert jax.tree.map(lambda a: (a.shape, a.dtype), again) == jax.tree.map(lambda a: (a.shape, a.dtype), after)


def test_a_loop_carries_an_empty_cache_of_another_dtype(layer, x):
    """`jax.lax.scan` refuses a carry whose dtype changes."""
    tokens = jnp.moveaxis(x.astype(jnp.bfloat16), 1, 0)[:, :, None]

    def step(cache, token):
        output, cache = layer(token, cache)
        return cache, output

    cache = layer.empty_cache(len(x), TOKENS)
    after, output = jax.eval_shape(lambda cache, tokens: jax.lax.scan(step, cache, tokens), cache, tokens)
    assert output.dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), cache)


@pytest.mark.parametrize("power", [0, 60, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_vectors_of_any_size(power, dtype):
    """Their size cancels, where it is far above epsilon, and divides gradients; squares overflow from 2**64 on."""
    norm = RMSNorm(24, 1e-6, jnp.float32)
    x = 64 * jax.random.normal(jax.random.key(0), (3, 24)).astype(dtype)
    exact = np.asarray(x, np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    output, pull = jax.vjp(norm, x * jnp.asarray(2.0**power, dtype))
    assert_close(output, expected, 1e-6)
    (gradient,) = pull(jnp.cos(output))
    along = np.cos(expected) - expected * (np.cos(expected) * expected).mean(-1, keepdims=True)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert_close(np.asarray(gradient, np.float64) * 2.0**power, along * expected / exact, tolerance)


def test_scanned_over_layers(published, layer, call, x):
    """With `nnx.scan`, `nnx.remat` and states that are given away: two layers are one after the other."""
    pair = [layer, published.make(seed=1)]
    graph = nnx.graphdef(layer)
    state = layer.empty_cache(len(x), TOKENS)
    expected, wanted = x[:, :PROMPT], []
    for each in pair:
        expected, after = call(nnx.state(each), expected, state)
        wanted.append(after)
    stacked = nnx.merge(graph, jax.tree.map(lambda *each: jnp.stack(each), *map(nnx.state, pair)))

    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
    @nnx.remat
    def through(x, layer, state):
        return layer(x, state)

    scanned = nnx.jit(lambda x, layer, states: through(x, layer, states), donate_argnums=2)
    states = jax.tree.map(lambda a: jnp.stack([a, a]), state)
    output, after = scanned(x[:, :PROMPT], stacked, states)
    assert_close(output, expected, 1e-5)
    for found, *both in zip(*map(jax.tree.leaves, (after, *wanted)), strict=True):
        assert_close(found, np.stack(both), 1e-5, "state")
    assert all(each.is_deleted() for each in jax.tree.leaves(states))


def test_stacked_layers_keep_what_is_named(x):
    """Scanned over they are one after the other; each policy by name spares the backward pass some products."""
    graph, parameters = nnx.split(layers.stacked(lambda rngs, number: CONVOLVED["gdn"](rngs=rngs), 3, nnx.Rngs(0)))
    specs = nnx.get_partition_spec(parameters)
    assert specs["query_key_value_gate"]["kernel"].get_value() == jax.P(None, None, "model")
    assert specs["out"]["kernel"].get_value() == jax.P(None, "model", None)
    spread = nnx.split(layers.stacked(lambda rngs, number: CONVOLVED["kda"](rngs=rngs), 2, nnx.Rngs(0), axis="stage"))[
        1
    ]
    assert nnx.get_partition_spec(spread)["query"]["kernel"].get_value() == jax.P("stage", None, "model")

    def through(x, one):
        return nnx.merge(graph, one)(x)[0], None

    def loss(parameters, policy):
        kept = jax.checkpoint(through, policy=policy, prevent_cse=False)
        return (jax.lax.scan(kept, x, parameters)[0] ** 2).sum()

    def products(policy):
        compiled = jax.jit(jax.grad(lambda parameters: loss(parameters, policy))).lower(parameters).compile()
        return compiled.as_text().count("dot(")

    names = jax.checkpoint_policies.save_only_these_names
    nothing = jax.checkpoint_policies.nothing_saveable
    counts = [products(each) for each in (nothing, names("ejkernel_op"), names("ejkernel_op", "ejkernel_projected"))]
    assert counts[0] > counts[1] > counts[2], counts
    expected, step = x, jax.jit(through)
    for number in range(3):
        expected, _ = step(expected, jax.tree.map(lambda each, n=number: each[n], parameters))
    found, _ = jax.jit(lambda x, parameters: jax.lax.scan(through, x, parameters))(x, parameters)
    assert_close(found, expected, 1e-5)


def test_layers_that_are_made_already_are_stacked(published, call, x):
    """Of a published model: the same as one after the other, and the partitioning has an axis more, here alone."""
    made = [published.make(seed) for seed in range(3)]
    stack = layers.stacked(made, axis="stage")
    graph, parameters = nnx.split(stack)
    kernel = nnx.get_partition_spec(parameters)["out"]["kernel"].get_value()
    assert kernel == jax.P("stage", "model", None)
    assert nnx.get_partition_spec(nnx.state(made[0]))["out"]["kernel"].get_value() == jax.P("model", None)
    found, _ = jax.lax.scan(lambda x, one: (nnx.merge(graph, one)(x)[0], None), x, parameters)
    for each in made:
        x, _ = call(nnx.state(each), x)
    assert_close(found, x, 1e-4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, 0, nnx.Rngs(0)), {}, ValueError, "count: got 0; expected an int of at least 1"),
        ((None, 2, 0), {}, TypeError, "rngs: got int; expected nnx.Rngs"),
        ((None, 2, nnx.Rngs(0)), {"axis": 1}, TypeError, "axis: got int; expected a name or None"),
        (([],), {}, TypeError, "make: got an empty one; expected a function or a list of modules"),
        ((3,), {}, TypeError, "make: got int; expected a function or a list of modules"),
        (([16], 2), {}, TypeError, "count: got int; expected None, as the modules are made already"),
        (([16, 16, 24],), {}, ValueError, "make: got a module 2 that is not as module 0; expected modules of the same"),
    ],
)
def test_stacks_that_cannot_be(arguments, options, error, message):
    """A number stands for the layer of that width, `None` for a function that makes one."""

    def made(width):
        return layers.Retention(width, heads=2, rngs=nnx.Rngs(0))

    first, *rest = arguments
    if isinstance(first, list):
        first = [made(width) for width in first]
    elif first is None:
        first = lambda rngs, number: made(16)  # noqa: E731
    with pytest.raises(error, match=message):
        layers.stacked(first, *rest, **options)


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


# Rows of several sequences, and what goes on with them. Padding lies behind, before and between; the first row goes on
# with its last sequence, the second with nothing but padding.
FIRST = np.array([[3, 3, 3, 3, 1, 1, 1, -1, -1], [-1, 0, 0, -1, 5, 5, 5, 5, 5]])
SECOND = np.array([[-2, 9, 9, 9, -1, 4, 4, 4, 4], [-1] * 9])


def test_rows_of_several_sequences(published, layer, run_segments, x):
    """Each is computed by itself, padding is 0 whatever it holds, and states are those after the last token."""
    assert x.shape[:2] == FIRST.shape
    more, weights = x[:, ::-1], published.weights()
    has_cache = grows(layer)
    state = None
    if not has_cache:
        state = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(layer, x)[1])
    output, state = run_segments(jnp.where((FIRST < 0)[..., None], jnp.nan, x), FIRST, state)
    assert not np.asarray(output)[FIRST < 0].any()
    for row, start, end in ((0, 0, 4), (0, 4, 7), (1, 1, 3), (1, 4, 9)):
        assert_close(output[row, start:end], published.expected(weights, x[row, start:end]), 1e-5)
    if has_cache:
        with pytest.raises(ValueError, match=r"^cache: got one together with segment_ids; expected one of them"):
            layer(x, layer.empty_cache(2, TOKENS), segment_ids=FIRST)
        return
    output, after = run_segments(jnp.where((SECOND < 0)[..., None], jnp.nan, more), SECOND, state)
    whole = published.expected(weights, np.concatenate([x[0, 4:7], more[0, 1:4]]))
    assert_close(output[0, 1:4], whole[3:], 1e-5)
    assert_close(output[0, 5:], published.expected(weights, more[0, 5:]), 1e-5)
    assert not np.asarray(output[1]).any()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), after, state)
    if after.position is not None:
        assert after.position.tolist() == [4, 5]


def test_padding_has_no_effect(layer, x):
    """Whatever is in it and comes back to it, what comes out and all gradients are the same."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    cu_seqlens = jnp.cumsum(jnp.array([0, *LENGTHS]))
    stream, weights = x[0, :8], x[1, :8]

    def run(parameters, stream):
        return nnx.merge(graph, parameters, rest)(stream, None, cu_seqlens)[0]

    @jax.jit
    def value_and_gradients(stream, weights):
        value, pull = jax.vjp(run, parameters, stream)
        return value, *pull(weights)

    def padded(filler):
        return value_and_gradients(*(jnp.concatenate([a, jnp.full((2, WIDTH), filler)]) for a in (stream, weights)))

    wanted = padded(0.0)
    for filler in (jnp.nan, jnp.inf):
        value, of_parameters, of_stream = found = padded(filler)
        for one, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert_close(one, expected, 1e-6)
        assert not value[8:].any() and not of_stream[8:].any()
        assert all(each.any() for each in jax.tree.leaves(of_parameters))


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)], ids=["no tokens", "no rows"])
def test_nothing_to_do(layer, run, shape):
    if not grows(layer):
        carried = jax.tree.map(lambda a: jnp.ones((shape[0], *a.shape[1:]), a.dtype), jax.eval_shape(run, ROW)[1])
    else:
        carried = layer.empty_cache(shape[0], TOKENS) if shape[0] else None
    output, after = run(jnp.ones((*shape, WIDTH)), carried)
    assert output.shape == (*shape, WIDTH)
    jax.tree.map(np.testing.assert_array_equal, after, carried)


def test_rows_of_no_tokens(layer, run_segments):
    output, _ = run_segments(jnp.ones((2, 0, WIDTH)), jnp.zeros((2, 0), jnp.int32), None)
    assert output.shape == (2, 0, WIDTH)


@pytest.mark.parametrize("tokens, borders", [((0,), [0]), ((1, 3), [0, 0, 0])], ids=["no sequences", "empty ones"])
def test_nothing_packed(layer, run, tokens, borders):
    """No sequences, or empty ones, which keep their states; all tokens are padding."""
    carried = None
    if not grows(layer):
        rows = len(borders) - 1
        carried = jax.tree.map(lambda a: jnp.ones((rows, *a.shape[1:]), a.dtype), jax.eval_shape(run, ROW)[1])
    x = jnp.ones((*tokens, WIDTH))
    output, after = run(x, carried, jnp.array(borders))
    np.testing.assert_array_equal(output, jnp.zeros(x.shape))
    jax.tree.map(np.testing.assert_array_equal, after, carried)


def test_packed_sequences_continue(layer, run, x):
    if grows(layer):
        pytest.skip("a packed stream has no cache")
    expected, states = run(x[0, :8], None, jnp.array([0, 3, 3, 8]))
    rest = x[1, :4]  # padding, so that the stream is as long as the other
    first, carried = run(jnp.concatenate([x[0, :1], x[0, 3:6], rest]), None, jnp.array([0, 1, 1, 4]))
    second, carried = run(jnp.concatenate([x[0, 1:3], x[0, 6:8], rest]), carried, jnp.array([0, 2, 2, 4]))
    both = jnp.concatenate([first[:1], second[:2], first[1:4], second[2:4]])
    assert_close(both, expected, 1e-5)
    for some, one in zip(jax.tree.leaves(carried), jax.tree.leaves(states), strict=True):
        assert_close(some, one, 1e-5, "state")


def test_gradients_match_differences(layer, x, x64):
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    flat, tree = jax.tree.flatten(parameters)
    # in NumPy, or JAX would compile what is done with every shape
    flat, x = [np.asarray(each, np.float64) for each in flat], np.asarray(x[:1, :6], np.float64)

    @jax.jit
    def loss(flat):
        return (nnx.merge(graph, jax.tree.unflatten(tree, flat), rest)(x)[0] ** 2).sum()

    gradients = jax.jit(jax.grad(loss))(flat)
    for number, (parameter, gradient) in enumerate(zip(flat, map(np.asarray, gradients), strict=True)):
        direction = np.random.default_rng(number).normal(size=parameter.shape)
        ends = [loss([*flat[:number], parameter + step * direction, *flat[number + 1 :]]) for step in (1e-6, -1e-6)]
        # norms of small outputs bend so much that a derivative near 0 is lost in the difference
        slope = (ends[0] - ends[1]) / 2e-6
        assert_close((gradient * direction).sum(), slope, 1e-6, f"parameter {number}", max(abs(slope), ends[0] / 100))


def test_forward_mode_of_a_training_step(layer, x, x64):
    """Along a direction of parameters and input: a loss' slope and the Hessian's product are differences."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    flat, tree = jax.tree.flatten(parameters)
    random = np.random.default_rng(1)
    point = [np.asarray(each, np.float64) for each in (*flat, x)]
    moved = [random.standard_normal(each.shape) for each in point]

    def loss(point):
        output, _ = nnx.merge(graph, jax.tree.unflatten(tree, point[:-1]), rest)(point[-1])
        return (jnp.sin(output) * jnp.arange(output.size).reshape(output.shape)).sum() / output.size

    both = jax.value_and_grad(loss)
    run = jax.jit(both, compiler_options=QUICK)
    along = jax.jit(lambda x, t: jax.jvp(both, (x,), (t,)), compiler_options=QUICK)
    found, tangents = along(point, moved)
    step = 1e-6
    above, below = (run([each + sign * step * way for each, way in zip(point, moved, strict=True)]) for sign in (1, -1))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run(point)), strict=True):
        assert_close(a, b, 1e-12)
    size = max(abs(np.asarray(each)).max() for each in jax.tree.leaves(tangents))
    for number, (tangent, a, b) in enumerate(zip(*map(jax.tree.leaves, (tangents, above, below)), strict=True)):
        assert_close(tangent, (np.asarray(a) - np.asarray(b)) / (2 * step), 1e-6, f"{number}", scale=size)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64], ids=lambda each: each.__name__)
def test_nothing_is_left_to_promotion(published, dtype, x64):
    """Under JAX's strict settings: made, a pass with gradients, a prompt and a step, packed sequences, segment ids.

    float32 parameters, except that a float64 input has float64 ones; borders are int64 there.
    """
    cu_seqlens, steps = jnp.array([0, 3, 3, 8]), jnp.array([0, 1, 1, 2])
    ids = jnp.array([[0] * 4 + [2] * 5, [-1] * 2 + [3] * 7])
    x = jnp.ones((2, TOKENS, WIDTH), dtype)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        layer = nnx.eval_shape(lambda: published.make(param_dtype=dtype if dtype == jnp.float64 else jnp.float32))
        graph, variables = nnx.split(layer)

        def calls(variables, x):
            layer, state = nnx.merge(graph, variables), None
            if grows(layer):
                state = layer.empty_cache(len(x), TOKENS, dtype)
            output, _ = layer(x)
            _, state = layer(x[:, :PROMPT], state)
            step, state = layer(x[:, PROMPT : PROMPT + 1], state)
            packed, states = layer(x[0], None, cu_seqlens)
            more, states = layer(x[:1, :2], states, steps)
            rows, _ = layer(x, segment_ids=ids)
            return output, step, packed, more, rows

        def loss(variables, x):
            outputs = calls(variables, x)
            return sum(each.astype(jnp.float32).sum() for each in outputs), outputs

        _, outputs = jax.eval_shape(jax.grad(loss, (0, 1), has_aux=True), variables, x)
    assert {each.dtype for each in outputs} == {jnp.dtype(dtype)}


def test_float64_is_exact(published, x, x64):
    """Parameters and inputs in float64: what is published to rounding, at once and step by step."""
    graph, variables = nnx.split(published.make(param_dtype=jnp.float64))
    layer, x = nnx.merge(graph, variables), np.asarray(x, np.float64)
    run = jax.jit(lambda *arguments: nnx.merge(graph, variables)(*arguments))
    output, _ = run(x)
    state, pieces = layer.empty_cache(len(x), TOKENS, jnp.float64), []
    for t in range(TOKENS):
        piece, state = run(x[:, t : t + 1], state)
        pieces.append(piece)
    for found in (output, jnp.concatenate(pieces, 1)):
        assert found.dtype == jnp.float64
        for row in range(len(x)):
            assert_close(found[row], published.expected(published.weights(), x[row]), 1e-12)


CONVOLVED = {
    "gla": lambda **options: layers.GatedLinearAttention(WIDTH, 4, **options),
    "gla, grouped": lambda **options: layers.GatedLinearAttention(WIDTH, 4, kv_heads=2, **options),
    "retention": lambda **options: layers.Retention(WIDTH, 4, **options),
    "gdn": lambda **options: layers.GatedDeltaNet(WIDTH, key_heads=2, value_heads=4, key_dim=4, value_dim=4, **options),
    "kda": lambda **options: layers.KimiDeltaAttention(WIDTH, 2, head_dim=4, **options),
    "mamba": lambda **options: layers.Mamba2(WIDTH, 4, head_dim=4, state_dim=4, **options),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CONVOLVED)
def test_every_parameter_learns_from_the_start(name, size, x):
    """Also those of convolutions over few tokens."""
    layer = CONVOLVED[name](convolution=size, rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(layer)
    gradients = jax.jit(jax.grad(lambda parameters: (nnx.merge(graph, parameters)(x)[0] ** 2).sum()))(parameters)
    for path, each in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(each).all() and each.any(), jax.tree_util.keystr(path)


def test_heads_are_partitioned(layer, published):
    specs = nnx.get_partition_spec(nnx.state(layer))
    assert specs[published.query]["kernel"].get_value() == jax.sharding.PartitionSpec(None, "model")
    assert specs["out"]["kernel"].get_value() == jax.sharding.PartitionSpec("model", None)


def test_rows_of_a_cache_may_stand_at_different_positions(x):
    """And tokens past a full one are NaN."""
    layer = PUBLISHED["softmax"].make()
    call = nnx.jit(lambda layer, x, cache: layer(x, cache))
    expected, _ = call(layer, x, None)
    _, cache = call(layer, x[:, :4], layer.empty_cache(2, 5))
    cache = cache._replace(position=jnp.array([4, 2]))
    token = jnp.stack([x[0, 4:5], x[1, 2:3]])
    output, cache = call(layer, token, cache)
    assert_close(output[:, 0], jnp.stack([expected[0, 4], expected[1, 2]]), 1e-5)
    assert cache.position.tolist() == [5, 3]
    output, _ = call(layer, token, cache)
    assert np.isnan(output[0]).all() and np.isfinite(output[1]).all()


def test_tokens_at_negative_positions_are_not_stored(x):
    """Where they are known only at run time, so that nothing can refuse them: no row from the end is overwritten."""
    layer = PUBLISHED["softmax"].make()
    call = nnx.jit(lambda layer, x, cache: layer(x, cache))
    _, cache = call(layer, x[:, :4], layer.empty_cache(2, 5))
    output, after = call(layer, x[:, 4:6], cache._replace(position=jnp.array([-3, -1])))
    for found, before in zip(after[:2], cache[:2], strict=True):
        np.testing.assert_array_equal(found[0], before[0])
        np.testing.assert_array_equal(found[1, 1:], before[1, 1:])
    assert np.isnan(output[0]).all() and np.isnan(output[1, 0]).all()
    expected, _ = call(layer, x[1:, 5:6], layer.empty_cache(1, 5))
    assert_close(output[1, 1], expected[0, 0], 1e-5)


def test_explains_a_layer_that_ran(x):
    layer = PUBLISHED["retention"].make()
    jitted = nnx.jit(lambda layer, x: layer(x)[0])
    jitted(layer, x)
    layer(x)
    for found in (ejkernel.explain(layer, x), ejkernel.explain(jitted, layer, x)):
        assert found.chosen["default"] == "xla"


def test_scaled_rotation():
    """Frequencies for longer contexts, as their papers have them: by wavelength, and by the number of a pair."""
    base = 10000.0 ** (-np.arange(8) / 8)
    wave = 2 * np.pi / base
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    between = (1024 / wave - 1) / 3
    expected = np.where(wave > 1024, base / 8, np.where(wave < 256, base, (1 - between) * base / 8 + between * base))
    found = rotary(16, 10000.0, llama3)
    np.testing.assert_allclose(found.frequencies, expected, 1e-12)
    assert found.factor == 1.0 and len({*np.round(expected / base, 6)}) > 2

    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "truncate": False}
    fast, slow = (8 * np.log(1024 / (turns * 2 * np.pi)) / np.log(10000) for turns in (32, 1))
    kept = 1 - np.clip((np.arange(8) - fast) / (slow - fast), 0, 1)
    found = rotary(16, 10000.0, yarn)
    np.testing.assert_allclose(found.frequencies, base * (kept + (1 - kept) / 8), 1e-12)
    np.testing.assert_allclose(found.factor, 0.1 * np.log(8) + 1)
    np.testing.assert_allclose(rotary(16, 10000.0, {"type": "linear", "factor": 2.0}).frequencies, base / 2)
    with pytest.raises(ValueError, match="rope_scaling: got rope_type 'longrope'; expected one of default, linear"):
        rotary(16, 10000.0, {"rope_type": "longrope"})
    with pytest.raises(ValueError, match="rope_scaling: got no 'factor'; expected it, as yarn needs it"):
        rotary(16, 10000.0, {"rope_type": "yarn", "original_max_position_embeddings": 8})


def test_scales_stored_less_1_are_added_exactly():
    """Published weights are bfloat16, whose neighbours of 1 are 1/128 apart."""
    published = PUBLISHED["softmax"]
    weights = {name: each.astype(jnp.bfloat16) for name, each in published.weights().items()}
    layer = published.layer.from_qwen3_next(weights, WIDTH, **published.options)
    np.testing.assert_array_equal(layer.query_norm.scale[...], 1 + weights["q_norm.weight"].astype(np.float32))


def test_parts_of_a_parameter_may_differ_in_dtype():
    published = PUBLISHED["kda"]
    weights = published.weights()
    kinds = {"q": jnp.bfloat16, "k": np.float16, "v": np.float32}
    parts = {f"{n}_conv1d.weight": weights[f"{n}_conv1d.weight"].astype(kind) for n, kind in kinds.items()}
    layer = published.layer.from_fla(weights | parts, WIDTH, **published.options)
    expected = np.concatenate([each.astype(np.float32) for each in parts.values()])[:, 0].T
    np.testing.assert_array_equal(layer.convolution.kernel[...], expected)
