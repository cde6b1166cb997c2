"""The Triton kernels of norm and output gate, against their definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.gated_norm import IMPLEMENTATIONS
from ejkernel.kernels.gated_norm.call import Call, Inputs

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")

from triton_interpreter import MARKS, kernels

pytestmark = MARKS
TRITON, XLA = (each.run for each in IMPLEMENTATIONS)
EPSILON = 1e-3
# batch, tokens, heads, dim
SHAPES = [(2, 3, 2, 16), (1, 70, 3, 5), (1, 1, 1, 1), (3, 1, 2, 130), (2, 40, 4, 64)]


@pytest.fixture(autouse=True)
def on_triton():
    with kernels():
        yield


def make(shape, dtype=jnp.float32, *, activation="silu", gate_first=False, skips=False, shared=True):
    random = np.random.default_rng(0)
    B, T, H, D = shape
    call = Call(B, T, H, D, EPSILON, activation, gate_first, shared, np.dtype(dtype))

    def normal(*shape, dtype=dtype):
        return jnp.asarray(random.normal(size=shape), dtype)

    parameters = (D,) if shared else (H, D)
    scale = normal(*parameters, dtype=jnp.float32)
    value, skip = (normal(*shape), normal(H, D, dtype=jnp.float32)) if skips else (None, None)
    return call, Inputs(normal(*shape), normal(*shape), scale, value, skip), normal(*shape)


def defined(call, inputs, cotangent):
    """Output and gradients in float64, written out."""
    x, gate, scale, value, skip = (None if each is None else np.asarray(each, np.float64) for each in inputs)
    d = np.asarray(cotangent, np.float64)
    y = x if value is None else x + skip * value
    share = 1 / (1 + np.exp(-gate))
    slope = share * (1 - share)
    if call.activation == "silu":
        share, slope = gate * share, share + gate * slope
    z = y * share if call.gate_first else y
    norm = np.sqrt(np.mean(z**2, -1, keepdims=True) + EPSILON)
    unit = z / norm
    output = unit * scale * (1 if call.gate_first else share)
    d_normed = d if call.gate_first else d * share
    d_unit = d_normed * scale
    d_z = (d_unit - unit * np.mean(d_unit * unit, -1, keepdims=True)) / norm
    d_y = d_z * share if call.gate_first else d_z
    d_gate = d_z * y * slope if call.gate_first else d * unit * scale * slope
    d_scale = (d_normed * unit).sum((0, 1, 2) if scale.ndim == 1 else (0, 1))
    d_value, d_skip = (None, None) if value is None else (d_y * skip, (d_y * value).sum((0, 1)))
    return output, Inputs(d_y, d_gate, d_scale, d_value, d_skip)


def derived(run, call, inputs, cotangent):
    @jax.jit
    def both(inputs, cotangent):
        output, pull = jax.vjp(lambda inputs: run(call, *inputs), inputs)
        return output, pull(cotangent)[0]

    return both(inputs, cotangent)


def assert_near(found, expected, tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.float64(one), np.float64(other), rtol=tolerance, atol=tolerance * np.abs(np.float64(other)).max()
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "sigmoid"},
        {"shared": False},
        {"gate_first": True, "skips": True, "shared": False},
        {"skips": True, "shared": False},
    ],
    ids=str,
)
def test_output_and_gradients(shape, options):
    call, inputs, cotangent = make(shape, **options)
    expected = defined(call, inputs, cotangent)
    for run in (TRITON, XLA):
        assert_near(derived(run, call, inputs, cotangent), expected, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    call, inputs, cotangent = make((2, 9, 2, 24), dtype, gate_first=True, skips=True, shared=False)
    output, gradients = derived(TRITON, call, inputs, cotangent)
    assert [each.dtype for each in (output, *gradients)] == [dtype] * 3 + [jnp.float32, dtype, jnp.float32]
    assert_near((output, gradients), defined(call, inputs, cotangent), 1e-2)


@pytest.mark.parametrize("size", [1e-30, 1e25, 3e38])
def test_sizes_whose_squares_are_no_numbers(size):
    call, inputs, cotangent = make((1, 4, 1, 24))
    inputs = inputs._replace(x=inputs.x / jnp.abs(inputs.x).max() * size)
    found = derived(TRITON, call, inputs, cotangent)
    assert all(np.isfinite(np.asarray(each)).all() for each in jax.tree.leaves(found))
    assert_near(found, derived(XLA, call, inputs, cotangent), 1e-5)


def test_nothing_leaks_between_rows():
    call, inputs, cotangent = make((2, 5, 2, 24), gate_first=True, skips=True, shared=False)
    spoilt = inputs._replace(**{each: getattr(inputs, each).at[0, 3].set(jnp.nan) for each in ("x", "gate", "value")})
    clean, found = (derived(TRITON, call, each, cotangent) for each in (inputs, spoilt))
    for one, other in zip((found[0], *found[1][:2]), (clean[0], *clean[1][:2]), strict=True):
        assert np.isnan(one[0, 3]).all()
        np.testing.assert_array_equal(one.at[0, 3].set(0), other.at[0, 3].set(0))


def test_vmap_forward_mode_and_second_derivatives():
    call, inputs, cotangent = make((1, 3, 2, 8), skips=True, shared=False)

    def all_of(run):
        def loss(*inputs):
            return (run(call, *inputs) * cotangent).sum()

        def of_gradients(x, gate):
            return sum((each**2).sum() for each in jax.grad(loss, (0, 1, 2, 3, 4))(x, gate, *inputs[2:]))

        rows = jax.vmap(lambda x, gate: run(call, x, gate, *inputs[2:]))(*(jnp.stack([x, x + 1]) for x in inputs[:2]))
        tangents = jax.jvp(lambda *inputs: run(call, *inputs), tuple(inputs), tuple(inputs))[1]
        return rows, tangents, jax.grad(of_gradients, (0, 1))(*inputs[:2])

    assert_near(*(jax.jit(all_of, static_argnums=0)(run) for run in (TRITON, XLA)), 1e-5)
