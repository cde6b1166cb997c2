"""Launching Triton kernels without a GPU: what jax-triton is asked for, and what is said where it is missing."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import _launch

X = jnp.ones((2, 3))
OUTPUTS = [jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)]


@pytest.fixture(autouse=True)
def forgotten():
    caches = _launch._jax_triton, _launch.unavailable, _launch.capability
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def asked():
    return {}


def older(asked):
    def triton_call(*arguments, kernel, out_shape, grid, **options):
        asked.update(options, arguments=arguments, kernel=kernel, outputs=out_shape, grid=grid)
        return tuple(jnp.zeros(each.shape, each.dtype) for each in out_shape)

    return triton_call


def newer(asked):
    def triton_call(*arguments, kernel, out_type=None, grid, **options):
        return older(asked)(*arguments, kernel=kernel, out_shape=out_type, grid=grid, **options)

    return triton_call


@pytest.mark.parametrize("version", [older, newer])
@pytest.mark.parametrize("aliases", [None, {0: 1}])
def test_launch_asks_either_version_of_jax_triton(version, aliases, asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=version(asked)))
    results = _launch.launch(
        "kernel", X, 7, outputs=OUTPUTS, programs=5, num_warps=4, num_stages=2, aliases=aliases, BLOCK=16
    )
    assert [(each.shape, each.dtype) for each in results] == [((4,), jnp.float32), ((), jnp.int32)]
    assert asked == {
        "arguments": (X, 7),
        "kernel": "kernel",
        "outputs": tuple(OUTPUTS),
        "grid": (5,),
        "num_warps": 4,
        "num_stages": 2,
        "input_output_aliases": aliases or {},
        "BLOCK": 16,
    }


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
    assert found.startswith("needs Triton and jax-triton: pip install ejkernel[cuda] (ModuleNotFoundError: ")
    assert missing in found


@pytest.mark.parametrize("text, number", [("9.0", 90), ("12.1", 121)])
def test_capability_of_the_first_gpu(text, number, monkeypatch):
    gpus = [SimpleNamespace(compute_capability=text), None]
    monkeypatch.setattr(jax, "local_devices", lambda backend: {"cuda": gpus}[backend])
    assert _launch.capability() == number
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace())
    assert _launch.unavailable() is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu():
    assert _launch.capability() is None
    assert _launch.unavailable() == "no NVIDIA GPU here to compile for"
