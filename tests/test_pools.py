"""Recurrences that read and write slots of a pool: their numbers, which slots change, and that bits do not."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from linear_attention_cases import GATES as STRENGTHS

import ejkernel
from ejkernel._pools import PooledCall
from ejkernel.kernels.chunks import pools
from ejkernel.kernels.delta_rule.xla.recurrence import RECURRENCE as DELTA
from ejkernel.kernels.linear_recurrence.xla.recurrence import RECURRENCE as LINEAR

rng = np.random.default_rng(1)
H, K, V = 4, 8, 6
GATES = {
    "linear_attention": {},
    "retention": {},
    "lightning_attn": {},
    "simple_gla": {"g": (H,)},
    "recurrent_gla": {"g": (H, K)},
    "recurrent": {"g": (H, 1), "gv": (H, V)},
    "delta_rule": {"beta": (H,)},
    "gated_delta_rule": {"g": (H,), "beta": (H,)},
    "kda": {"g": (H, K), "beta": (H,)},
}
# as users run it; the tests are compiled without, and bits may depend on it
OPTIMISED = (("xla_backend_optimization_level", 3),)
OPTIONS = {"lightning_attn": {"layer_idx": 1, "num_layers": 3}, "gated_delta_rule": {"normalize": True}}


def tokens(name, length):
    """The arrays of a stream of tokens, by name; heads are shared."""
    heads = {"query": 2, "key": 2, "value": H}
    arrays = {each: rng.normal(size=(length, count, V if each == "value" else K)) for each, count in heads.items()}
    for gate, shape in GATES[name].items():
        x = rng.normal(size=(length, *shape))
        arrays[gate] = 1 / (1 + np.exp(-x)) if gate == "beta" else -np.log1p(np.exp(-x))
    if "beta" in arrays:
        arrays["key"] /= np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
    return {each: x.astype(np.float32) for each, x in arrays.items()}


# an op, the strength of its gates, and its tokens' dtype: all ways of a kernel through a chunk
PROMPTS = [
    ("linear_attention", None, np.float32),
    ("lightning_attn", None, jnp.float16),
    ("simple_gla", "ordinary", jnp.bfloat16),
    ("simple_gla", "mixed", np.float32),
    ("recurrent_gla", "ordinary", jnp.bfloat16),
    ("recurrent_gla", "shipped", jnp.bfloat16),
    ("recurrent_gla", "in turn", jnp.bfloat16),
    ("recurrent_gla", "mixed", np.float32),
    ("delta_rule", None, np.float32),
    ("gated_delta_rule", "resets", jnp.bfloat16),
    ("gated_delta_rule", "mixed", np.float32),
    ("kda", "ordinary", jnp.bfloat16),
    ("kda", "shipped", jnp.bfloat16),
    ("kda", "in turn", jnp.bfloat16),
    ("kda", "mixed", np.float32),
    ("recurrent", "strong", jnp.float16),
]


def prompt(name, strength, dtype, length, dims):
    """The arrays of a prompt, two heads on one query and key; betas are 0 now and then."""
    sizes = {H: 2, K: dims[0], V: dims[1]}
    shapes = {"query": (1, K), "key": (1, K), "value": (H, V), **GATES[name]}
    shapes = {each: (length, *(sizes.get(size, size) for size in shape)) for each, shape in shapes.items()}
    arrays = {each: rng.normal(size=shape) for each, shape in shapes.items()}
    for gate in arrays.keys() & {"g", "gv"}:
        arrays[gate] = STRENGTHS[strength](rng, (1, *shapes[gate]))[0]
    if "beta" in arrays:
        arrays["key"] /= np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
        arrays["beta"] = rng.random(shapes["beta"]) * (rng.random(shapes["beta"]) < 0.9)
    halves = "query", "key", "value"
    return {each: x.astype(dtype if each in halves else np.float32) for each, x in arrays.items()}


def exact(name, arrays, start):
    """Output and final state of one sequence in float64."""
    arrays = {each: np.asarray(x, np.float64)[None] for each, x in arrays.items()}
    if name == "lightning_attn":
        heads = arrays["value"].shape[2]
        arrays["g_gamma"] = -(8 / heads) * (1 - 1 / 3) * np.arange(heads)
    if name == "simple_gla":
        arrays["g"] = arrays["g"][..., None]
    if name == "gated_delta_rule":
        for each in ("query", "key"):
            arrays[each] /= np.sqrt((arrays[each] ** 2).sum(-1, keepdims=True) + 1e-6)
    op = oracle.delta_rule if "beta" in arrays else oracle.recurrent
    output, state = op(**arrays, initial_state=start[None].astype(np.float64))[:2]
    return output[0], state[0]


def assert_near(found, expected, dtype):
    found = np.asarray(found).astype(np.float64)
    error = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
    assert error <= (1e-5 if dtype == np.float32 else 8e-3), error


def run_pieces(run, pieces, states, padding=0):
    """The outputs of pieces of sequences in one call, and the pool.

    A piece has its arrays, the slot it starts from, and a list of slots and after how many tokens they are written.
    """
    width = max(len(writes) for *_, writes in pieces)
    slots = np.array([[*writes, *[(-1, -1)] * (width - len(writes))] for *_, writes in pieces], np.int32)
    end = {each: np.full_like(x, np.nan, shape=(padding, *x.shape[1:])) for each, x in pieces[0][0].items()}
    borders = np.cumsum([0] + [len(arrays["query"]) for arrays, *_ in pieces]).astype(np.int32)
    output, states = run(
        **{each: np.concatenate([arrays[each] for arrays, *_ in pieces] + [end[each]]) for each in end},
        cu_seqlens=borders,
        states=states,
        reads=np.array([read for _, read, _ in pieces], np.int32),
        writes=slots[..., 0],
        at=slots[..., 1],
    )
    output = np.asarray(output)
    assert not output[borders[-1] :].any()
    return [output[low:high] for low, high in itertools.pairwise(borders)], states


def check_prompts(run, name, strength, dtype, dims=(K, V)):
    """Prompts of many lengths in one call, with states inside, against float64; nothing else changes."""
    states = np.full((24, 2, *dims), np.nan, np.float32)
    states[:4] = rng.normal(size=states[:4].shape)
    # the second and the third swap slots; the fifth has no slot, the last none that exists
    lengths, reads = (16, 17, 64, 144, 145, 0, 257, 3), (0, 1, 2, -1, 3, 3, 0, 99)
    writes = [
        [(4, 16), (5, 0), (6, 3)],
        [(2, 17), (7, 16)],
        [(1, 64), (8, 63)],
        [(9, 144), (10, 128), (11, 130)],
        [(12, 145), (13, 1), (14, 0)],
        [(15, 0), (16, 1)],
        [(17, 257), (18, 129), (19, 256), (-1, 40), (20, 250)],
        [(21, 3), (99, 2)],
    ]
    arrays = [prompt(name, strength, dtype, length, dims) for length in lengths]
    pieces = list(zip(arrays, reads, writes, strict=True))
    outputs, after = run_pieces(run, pieces, states, padding=5)
    after, written = np.asarray(after), set()
    for (given, read, slots), output in zip(pieces, outputs, strict=True):
        start = states[read] if 0 <= read < 24 else np.zeros_like(states[0])
        if len(output):
            assert_near(output, exact(name, given, start)[0], dtype)
        for slot, at in slots:
            if at <= len(output) and 0 <= slot < 24:
                state = exact(name, {each: x[:at] for each, x in given.items()}, start)[1] if at else start
                assert_near(after[slot], state, dtype)
                written.add(slot)
    rest = [slot for slot in range(24) if slot not in written]
    np.testing.assert_array_equal(after[rest], states[rest])


def check_bits_of_prompts(run, name, strength, dtype, length, dims=(K, V)):
    """A prompt has the same bits whole and alone, and cut at multiples of 128 beside others, in other slots."""
    given, start = prompt(name, strength, dtype, length, dims), rng.normal(size=(2, *dims))
    states = np.full((20, 2, *dims), np.nan, np.float32)
    states[1] = states[11] = start
    marks = [0, 77, 128, 128 + length % 128, length - 1]
    writes = [(2, length), *((3 + i, at) for i, at in enumerate(marks))]
    (whole,), after = run_pieces(run, [(given, 1, writes)], states)
    pieces, read = [], 11
    for low, high, beside in ((0, 128, (3, 130)), (128, length, (0, 16, 40))):
        part = {each: x[low:high] for each, x in given.items()}
        inside = [(13 + i, at - low) for i, at in enumerate(marks) if low <= at <= high and (at > low or low == 0)]
        others = [(prompt(name, strength, dtype, each, dims), 1, [(19, each)]) for each in beside]
        for each in others[1:]:
            each[0]["value"][:] = np.nan
        call = [*others[:1], (part, read, [(12, high - low), *inside]), *others[1:]]
        outputs, states = run_pieces(run, call, states, padding=7)
        pieces, read = [*pieces, outputs[1]], 12
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(states[12], after[2])
    np.testing.assert_array_equal(states[13 : 13 + len(marks)], after[3 : 3 + len(marks)])


@functools.cache
def compiled(name, options=()):
    front = functools.partial(getattr(ejkernel, name), **OPTIONS.get(name, {}))
    return jax.jit(front, compiler_options=dict(options))


def pool(slots=7, dtype=np.float32):
    return rng.normal(size=(slots, H, K, V)).astype(dtype)


@pytest.mark.parametrize("name", GATES)
def test_numbers(name):
    """As with initial states, packed; states inside by the same op on fewer tokens."""
    lengths, padding = (5, 0, 130, 1), 2
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    given, states = tokens(name, borders[-1] + padding), pool()
    reads = np.array([3, 0, -1, 9], np.int32)  # the last is no slot, which nobody can tell when tracing
    writes = np.array([[3, -1, 5], [1, 1, -1], [0, 2, 6], [4, 3, 12]], np.int32)
    at = np.array([[2, 5, 6], [0, 1, 0], [64, 130, 33], [1, -1, 1]], np.int32)
    starts = np.where((reads >= 0)[:, None, None, None] & (reads < 7)[:, None, None, None], states[reads % 7], 0)
    whole, _ = compiled(name)(**given, cu_seqlens=borders, initial_state=starts)
    states[4] = np.nan  # nobody reads it
    output, after = compiled(name)(**given, cu_seqlens=borders, states=states, reads=reads, writes=writes, at=at)
    np.testing.assert_allclose(output, whole, rtol=0, atol=2e-5)
    assert not np.asarray(output)[borders[-1] :].any()
    expected = states.copy()
    written = np.argwhere((writes >= 0) & (writes < 7) & (at >= 0) & (at <= np.array(lengths)[:, None]))
    numbers = np.concatenate([borders[n] + np.arange(at[n, c]) for n, c in written])
    ends = np.concatenate([[0], np.cumsum([at[n, c] for n, c in written])])
    parts = {each: x[numbers] for each, x in given.items()}
    _, inside = compiled(name)(**parts, cu_seqlens=ends, initial_state=starts[written[:, 0]])
    expected[[writes[n, c] for n, c in written]] = inside
    changed = [3, 1, 0, 2, 6, 4]
    np.testing.assert_allclose(after[np.array(changed)], expected[changed], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after[5], states[5])


@pytest.mark.parametrize("name", ["recurrent", "kda"])
def test_rows_and_the_definition(name):
    """A batch, against the float64 loop."""
    given = {each: x.reshape(3, 7, *x.shape[1:]) for each, x in tokens(name, 21).items()}
    states, reads, writes = pool(), np.array([2, -1, 0]), np.array([0, 2, -1])
    output, after = compiled(name)(**given, states=states, reads=reads, writes=writes)
    starts = np.stack([states[2], 0 * states[0], states[0]])
    exact = oracle.delta_rule if name == "kda" else oracle.recurrent
    wanted, final = exact(**given, initial_state=starts)[:2]
    np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(after[np.array([0, 2])], final[:2], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after[np.array([1, 3, 4, 5, 6])], states[[1, 3, 4, 5, 6]])


@pytest.mark.parametrize("name", ["recurrent", "retention", "gated_delta_rule", "kda"])
def test_bits_do_not_depend_on_the_call(name):
    """One prompt whole, and in pieces beside others, in other slots, as a row of a batch."""
    length = 257
    given = tokens(name, length)

    def call(low, high, states, read, write, others=0, padding=0):
        extra, end = tokens(name, 3 * others), tokens(name, padding)
        parts = {each: np.concatenate([extra[each], x[low:high], end[each]]) for each, x in given.items()}
        borders = np.array([*range(0, 3 * others + 1, 3), 3 * others + high - low], np.int32)
        fill = [-1] * others
        output, states = compiled(name, OPTIMISED)(
            **parts,
            cu_seqlens=borders,
            states=states,
            reads=np.array([*fill, read], np.int32),
            writes=np.array([*fill, write], np.int32),
        )
        return np.asarray(output)[3 * others : 3 * others + high - low], states

    whole, states = call(0, length, pool(3), -1, 2)
    first, after = call(0, 128, pool(9), -1, 5, others=2)
    second, after = call(128, 256, after, 5, 8, others=1, padding=3)
    last, after = call(256, 257, after, 8, 0)
    np.testing.assert_array_equal(np.concatenate([first, second, last]), whole)
    np.testing.assert_array_equal(after[0], states[2])
    rows = {each: np.stack([x[:128], x[128:256]]) for each, x in given.items()}
    output, _ = compiled(name, OPTIMISED)(
        **rows, states=pool(3), reads=np.array([1, -1], np.int32), writes=np.array([-1, -1], np.int32)
    )
    alone, _ = call(128, 256, pool(4), -1, -1)
    np.testing.assert_array_equal(output[1], alone)


@pytest.mark.parametrize("name, strength, dtype", PROMPTS[::2])
def test_prompts(name, strength, dtype):
    check_prompts(compiled(name), name, strength, dtype)


@pytest.mark.parametrize("name, strength, dtype", PROMPTS[::3])
def test_bits_of_prompts(name, strength, dtype):
    check_bits_of_prompts(compiled(name, OPTIMISED), name, strength, dtype, 257)


@pytest.mark.parametrize("name", GATES)
def test_a_token_alone_has_the_bits_of_a_prompt(name):
    """XLA makes other code of arrays of one token."""
    given, states = tokens(name, 4), pool()
    front = functools.partial(getattr(ejkernel, name), **OPTIONS.get(name, {}))
    run, step = (
        jax.jit(functools.partial(front, cu_seqlens=np.array([0, count], np.int32)), compiler_options=dict(OPTIMISED))
        for count in (4, 1)
    )
    slot = np.array([2], np.int32)
    whole, after = run(**given, states=states, reads=slot, writes=slot)
    for i in range(4):
        output, states = step(
            **{each: x[i : i + 1] for each, x in given.items()}, states=states, reads=slot, writes=slot
        )
        np.testing.assert_array_equal(output[0], whole[i])
    np.testing.assert_array_equal(states, after)


@pytest.mark.parametrize(("name", "recurrence"), [("recurrent", LINEAR), ("kda", DELTA), ("gated_delta_rule", DELTA)])
def test_chunks(name, recurrence, monkeypatch):
    """The walk of other devices than CPUs: the same numbers, and bits that do not depend on cuts or `at`."""
    given = tokens(name, 200) | {"cu_seqlens": np.array([0, 150, 150, 199], np.int32)}
    states, reads = pool(), np.array([2, 1, -1], np.int32)
    found = []

    def keep(implementations, call, *operands, platform=None):
        found.append((call, operands))
        return pools.run(recurrence, call, *operands)

    monkeypatch.setattr("ejkernel._pools.dispatch", keep)
    at = np.array([[70, 128, 150], [0, 0, 1], [0, 3, 49]], np.int32)
    writes = np.array([[0, 1, 2], [3, -1, 4], [4, 5, 6]], np.int32)
    op = functools.partial(getattr(ejkernel, name), **OPTIONS.get(name, {}))
    wanted = op(**given, states=states, reads=reads, writes=writes, at=at)
    ((call, operands),) = found
    assert isinstance(call, PooledCall)
    chunks = jax.jit(functools.partial(pools.run, recurrence, call, walk=pools.ChunkWalk))
    output, after = chunks(*operands)
    np.testing.assert_allclose(output[0], wanted[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(after, wanted[1], rtol=0, atol=2e-5)
    # the same with one state written, after all tokens of the first sequence, and then from where it was cut
    *arrays, cu, _, _, _, _ = operands
    end = np.array([[150], [0], [49]], np.int32)
    none = np.array([[6], [-1], [-1]], np.int32)
    same, states_after = chunks(*arrays, cu, jnp.asarray(states), jnp.asarray(reads), none, end)
    np.testing.assert_array_equal(same, output)
    np.testing.assert_array_equal(states_after[6], after[2])
    rest = np.array([0, 22, 22, 22], np.int32)
    shifted = [x if x is None or x.shape[:2] != (1, 200) else jnp.roll(x, -128, 1) for x in arrays]
    slots = np.array([1, -1, -1], np.int32)
    cut, _ = chunks(*shifted, rest, after, slots, none, np.array([[22], [0], [0]], np.int32))
    np.testing.assert_array_equal(cut[0, :22], output[0, 128:150])


def test_gates_that_overflow_and_reset():
    given = tokens("recurrent_gla", 6)
    given["g"][0], given["g"][3], given["g"][4] = 120.0, -np.inf, -1e4
    for x in (given["key"], given["value"]):
        x[:2] *= 1e-30
    output, after = compiled("recurrent_gla")(
        **given, cu_seqlens=np.array([0, 6]), states=pool(), reads=np.array([-1]), writes=np.array([0])
    )
    assert np.isfinite(output).all() and np.isfinite(after[0]).all()


def test_pools_of_bfloat16():
    given = tokens("simple_gla", 9)
    states = pool(dtype=jnp.bfloat16)
    options = {"cu_seqlens": np.array([0, 9]), "states": states, "reads": np.array([1]), "writes": np.array([2])}
    output, after = compiled("simple_gla")(**given, **options)
    wanted, state = compiled("simple_gla")(
        **given, cu_seqlens=np.array([0, 9]), initial_state=states[1:2].astype(np.float32)
    )
    assert after.dtype == jnp.bfloat16
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(after[2].astype(np.float32), state[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(states, 2, 0))


@pytest.mark.parametrize("name", ["recurrent_gla", "gated_delta_rule"])
def test_donated_pools_are_updated_in_place(name):
    slots = 64
    arrays = {each: jax.ShapeDtypeStruct(x.shape, x.dtype) for each, x in tokens(name, 8).items()}
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((5,), (4,), (4, 2), (4, 2))]

    def step(states, arrays, cu, reads, writes, at):
        op = getattr(ejkernel, name)
        return op(**arrays, cu_seqlens=cu, states=states, reads=reads, writes=writes, at=at)

    states = jax.ShapeDtypeStruct((slots, H, K, V), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(states, arrays, *ints).compile()
    text = compiled.as_text()
    assert "may-alias" in text or "must-alias" in text
    assert not [line for line in text.splitlines() if f"f32[{slots},{H},{K},{V}]" in line and " copy(" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < slots * H * K * V * 4


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_convolution(dtype):
    """Outputs and states as without a pool, of pieces as of the whole, to the bit; states inside a call too."""
    channels, taps, length = 5, 4, 261
    x, weight = (rng.normal(size=(each, channels)).astype(np.float32) for each in (length, taps))
    conv = jax.jit(functools.partial(ejkernel.causal_conv1d, activation="silu"))
    states = rng.normal(size=(6, taps - 1, channels)).astype(dtype)
    whole, final = conv(x, weight, cu_seqlens=np.array([0, length]))
    pieces, after = [], states
    for low, high in ((0, 128), (128, 256), (256, 257), (257, length)):
        other = rng.normal(size=(2, channels)).astype(np.float32)
        output, after = conv(
            np.concatenate([other, x[low:high]]),
            weight,
            cu_seqlens=np.array([0, 2, 2 + high - low], np.int32),
            states=after,
            reads=np.array([5, 1 if low else -1], np.int32),
            writes=np.array([-1, 1], np.int32),
        )
        pieces.append(output[2:])
    if dtype == np.float32:
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        np.testing.assert_array_equal(after[1], final[0])
    np.testing.assert_array_equal(np.delete(after, 1, 0), np.delete(states, 1, 0))
    # rows, and states after some of their tokens
    rows, at = x[:10].reshape(2, 5, channels), np.array([[0, 2, 5], [1, 6, -1]], np.int32)
    writes = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    output, after = conv(rows, weight, states=states, reads=np.array([3, -1]), writes=writes, at=at)
    starts = np.stack([states[3].astype(np.float32), 0 * x[: taps - 1]])
    np.testing.assert_array_equal(output, conv(rows, weight, initial_state=starts)[0])
    for n, c in ((0, 0), (0, 1), (0, 2), (1, 0)):
        wanted = np.concatenate([starts[n], rows[n, : at[n, c]]])[-(taps - 1) :]
        np.testing.assert_array_equal(after[writes[n, c]], wanted.astype(dtype))
    np.testing.assert_array_equal(after[4:], states[4:])


def test_derivatives_are_refused():
    given = tokens("kda", 4)
    slots = {"cu_seqlens": np.array([0, 4]), "reads": np.array([-1]), "writes": np.array([0])}

    def of_key(key):
        return ejkernel.kda(**given | {"key": key}, states=pool(), **slots)[0].sum()

    def of_pool(states):
        return ejkernel.kda(**given, states=states, **slots)[1].sum()

    def of_weight(weight):
        slots = {"states": np.zeros((3, 1, 2)), "reads": np.array([-1]), "writes": np.array([0])}
        return ejkernel.causal_conv1d(np.ones((1, 4, 2)), weight, **slots)[0].sum()

    with pytest.raises(TypeError, match="a call with states= is not differentiable"):
        jax.grad(of_weight)(jnp.ones((2, 2)))
    for derivative, x in ((jax.grad(of_key), given["key"]), (jax.jit(jax.grad(of_pool)), pool())):
        with pytest.raises(TypeError, match="a call with states= is not differentiable"):
            derivative(x)


def test_empty_calls():
    given = tokens("retention", 0)
    states = pool()
    output, after = ejkernel.retention(
        **given, cu_seqlens=[0, 0, 0], states=states, reads=np.array([1, -1]), writes=np.array([2, 3])
    )
    assert output.shape == (0, H, V)
    np.testing.assert_array_equal(after[2], states[1])
    assert not np.asarray(after[3]).any()


@pytest.mark.parametrize("device, dim, serves", [("h100", K, "triton"), ("v5e", 64, "pallas"), ("v5e", K, "xla")])
def test_explain_says_who_serves_pools(device, dim, serves):
    shapes = {"query": (H, dim), "key": (H, dim), "value": (H, V if dim == K else dim), "g": (H, dim), "beta": (H,)}
    given = {name: jax.ShapeDtypeStruct((4, *shape), jnp.float32) for name, shape in shapes.items()}
    states = jax.ShapeDtypeStruct((7, H, dim, shapes["value"][1]), jnp.float32)
    slots = {"cu_seqlens": np.array([0, 4]), "reads": np.array([-1]), "writes": np.array([0])}
    explanation = ejkernel.explain(ejkernel.kda, **given, states=states, **slots, device=device)
    assert set(explanation.chosen.values()) == {serves}
    if serves == "xla":
        assert explanation.refused["pallas"] == "head dims K=8, V=6; it takes multiples of 64 up to 256"
