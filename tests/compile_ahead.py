"""A plugin of pytest that compiles the Triton kernels of tests that need a GPU, on a machine that has none.

JAX_PLATFORMS=cpu EJKERNEL_CACHE_DIR=kernels PYTHONPATH=tests python -m pytest -p compile_ahead -m gpu tests/kernels

With the files of that folder, tests need no Triton compiler on a machine with a GPU of capability 90 and the same
versions of JAX, jax-triton and Triton: they took 4 s each there, and 10 to 40 s of compiling here. JAX's CUDA plugin
has to be installed (`jax[cuda13]`). Kernels give zeros here, so a test that compares them with anything is skipped.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import gpu_triton
from jax.interpreters import mlir

from ejkernel.kernels import _kernel_cache, _launch

FOLDER = os.environ["EJKERNEL_CACHE_DIR"]
# as on a machine with an H100 or H200: also where a module asks when it is imported
gpu_triton.get_compute_capability = lambda _: 90
_launch.capability = _launch._capability_here = lambda: 90
_launch.unavailable = lambda: None
jax.default_backend = lambda: "gpu"
COMPILED = set()


def compile_only(*_, launch):
    for each in (launch, *launch.same_pass):
        if (key := each.key()) not in COMPILED:
            COMPILED.add(key)
            _kernel_cache.get(key, each.compile)
    launch.same_pass.clear()
    return [jnp.zeros(each.shape, each.dtype) for each in launch.outputs]


mlir.register_lowering(_launch._primitive(), mlir.lower_fun(compile_only, multiple_results=True), platform="cpu")


def compare_nothing(*_, **__):
    pass


for name in dir(np.testing):
    if name.startswith("assert_"):
        setattr(np.testing, name, compare_nothing)


def pytest_collection_finish():
    os.environ["EJKERNEL_CACHE_DIR"] = FOLDER  # the tests' own settings for CPUs leave no files


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    try:
        return (yield)
    except AssertionError:
        pytest.skip("compared")


def pytest_sessionfinish():
    print(f"\n{len(COMPILED)} kernels in {FOLDER}")
