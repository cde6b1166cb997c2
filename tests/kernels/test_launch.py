"""Launching Triton kernels without a GPU: what jax-triton is asked for, and what is said where it is missing."""

import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import _launch

X = jnp.ones((2, 3))
OUTPUTS = [jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)]


@pytest.fixture(autouse=True)
def forgotten():
    caches = _launch._jax_triton, _launch._capability_here
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def asked():
    return {}


KERNEL = SimpleNamespace(
    params=[SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "n", "BLOCK", "first", "second")]
)


def older(asked):
    def triton_call(*arguments, kernel, out_shape, grid, **options):
        asked.update(options, arguments=arguments, kernel=kernel, outputs=out_shape, grid=grid)
        return tuple(jnp.zeros(each.shape, each.dtype) for each in out_shape)

    return triton_call


def newer(asked):
    def triton_call(*arguments, kernel, out_type=None, grid, input_output_aliases, **options):
        if input_output_aliases:
            warnings.warn("input_output_aliases is deprecated. Pass references", DeprecationWarning, stacklevel=2)
        options["input_output_aliases"] = input_output_aliases
        return older(asked)(*arguments, kernel=kernel, out_shape=out_type, grid=grid, **options)

    return triton_call


@pytest.mark.parametrize(
    "version, aliases, named",
    [
        (older, None, {"input_output_aliases": {}}),
        (older, {0: 1}, {"input_output_aliases": {0: 1}}),
        (newer, None, {"input_output_aliases": {}}),
        # an aliased output has no parameter of its own there: ours is one more operand, the third, aliased in its place
        (newer, {0: 1}, {"input_output_aliases": {2: 1}, "second": X}),
    ],
)
def test_launch_asks_either_version_of_jax_triton(version, aliases, named, asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=version(asked)))
    results = _launch.launch(
        KERNEL, X, 7, outputs=OUTPUTS, programs=5, num_warps=4, num_stages=2, aliases=aliases, BLOCK=16
    )
    assert [(each.shape, each.dtype) for each in results] == [((4,), jnp.float32), ((), jnp.int32)]
    assert asked == named | {
        "arguments": (X, 7),
        "kernel": KERNEL,
        "outputs": tuple(OUTPUTS),
        "grid": (5,),
        "num_warps": 4,
        "num_stages": 2,
        "BLOCK": 16,
    }


def test_two_aliases_in_the_order_of_the_outputs(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=newer(asked)))
    y = X + 1
    params = [SimpleNamespace(name=name, is_constexpr=False) for name in ("x", "y", "first", "second")]
    kernel = SimpleNamespace(params=params)
    _launch.launch(kernel, X, y, outputs=OUTPUTS, programs=1, num_warps=1, num_stages=1, aliases={0: 1, 1: 0})
    assert asked["first"] is y and asked["second"] is X
    assert asked["input_output_aliases"] == {2: 0, 3: 1}


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_without_the_packages(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        RuntimeError, match=f"^Triton kernels cannot be launched here: ModuleNotFoundError: .*{missing}"
    ):
        _launch.launch("kernel", X, outputs=OUTPUTS, programs=1, num_warps=1, num_stages=1)
    monkeypatch.setattr(_launch, "capability", lambda: 90)
    found = _launch.unavailable()
    assert found.startswith(
        "needs Triton and jax-triton, the extra cuda, as by pip install '.[cuda]' in a checkout (ModuleNotFoundError: "
    )
    assert missing in found


@pytest.mark.parametrize("text, number", [("9.0", 90), ("12.1", 121)])
def test_capability_of_the_first_gpu(text, number, monkeypatch):
    gpus = [SimpleNamespace(compute_capability=text), None]
    monkeypatch.setattr(jax, "local_devices", lambda backend: {"cuda": gpus}[backend])
    assert _launch.capability() == number
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace())
    assert _launch.unavailable() is None


@pytest.mark.parametrize("version, works", [((0, 11, 2), True), ((0, 12, 0), False)])
def test_a_pair_that_fails_is_told(version, works, monkeypatch):
    # its rule for dead code has the signature that JAX 0.11 asked for
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(_launch, "capability", lambda: 90)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(__version__="0.4.1"))
    assert (_launch.unavailable() is None) == works
    assert works or "jax-triton 0.4.1 fails under JAX" in _launch.unavailable()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu():
    assert _launch.capability() is None
    assert _launch.unavailable() == "no NVIDIA GPU here to compile for"
