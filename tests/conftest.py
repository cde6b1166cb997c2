"""Shared by all tests: the two precisions, comparison against float64, and how much the property tests draw."""

import contextlib
import functools
import gc
import os
import sys

import hypothesis
import jax
import numpy as np
import pytest

# On a CPU the tests compile much and run little: LLVM's optimiser is off and, as long as XLA has it, its older emitter
# of loops is on, which compiles in a third of the time; nor is every operation told which lines it comes from. The
# flags are read when JAX first computes, and all of it by the interpreters started here.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if jax.__version_info__ < (0, 11):
        QUICK.append("--xla_cpu_use_fusion_emitters=false")
    GIVEN = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*(each for each in QUICK if each not in GIVEN), *GIVEN])
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    os.environ["EJKERNEL_CACHE_DIR"] = ""  # nothing is taken from earlier runs, nor left for later ones
    jax.config.update("jax_traceback_in_locations_limit", 0)

# `ci` draws values for a few shapes, the same ones every time; `thorough` draws everything anew for about an hour:
# HYPOTHESIS_PROFILE=thorough pytest tests -k properties
CHECKS = hypothesis.HealthCheck
SLOW = [CHECKS.too_slow, CHECKS.data_too_large, CHECKS.large_base_example]
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, suppress_health_check=SLOW)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(PROFILE)


# Of tests that take half a minute each, two that one worker has left at the end would keep the other waiting.
LONGEST = ("test_triton_compile.py", "test_parallel.py")


def pytest_collection_modifyitems(items):
    """The longest come first; all else stays as it is."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """What is there now stays there: the collector need not go through it again for every few functions traced."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def run_parts(parts):
    """For scripts that tests start: calls those of `parts`, by name, that the command line names."""
    pytest_collection_finish()
    for part in sys.argv[1:]:
        print(part, flush=True)  # an error is the last one's
        with_room(parts[part])


def pytest_runtest_teardown(item, nextitem):
    """Programs of one file are of no use to the next, and thousands of them are gigabytes."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
        gc.collect()


def with_room(function, /, *arguments, **named):
    """Calls `function` with room for a million words of frames below it.

    Python keeps frames in pieces of 16 kB. Whatever calls others again and again at the end of a piece has the next one
    mapped and unmapped each time, which took up to half of the time of tests that trace or interpret.
    """
    return function(*arguments, **named)


# the frame itself takes a little more than half of a piece of 8 MB, which is not touched
with_room.__code__ = with_room.__code__.replace(co_stacksize=2**19 + 2000)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    function = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room, function)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def x64():
    """Turns 64-bit types on for one test."""
    with jax.enable_x64(True):
        yield


@contextlib.contextmanager
def token_by_token(states):
    """Calls without gradients whose states have up to so many numbers go token by token on a CPU, as small ones do."""
    from ejkernel.kernels.chunks import token_walk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_walk, "LARGEST_STATE", states)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def by_chunks():
    """Recurrences go by chunks, as everywhere but with small states on a CPU; tests of the other walk ask for it."""
    with token_by_token(states=0):
        yield


def assert_close(actual, expected, tolerance, what="", scale=None):
    """Bounds the largest error by `tolerance` times `scale`: the largest expected value, or 1 where all are 0."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return
    assert np.isfinite(actual).all(), f"{what}: {np.count_nonzero(~np.isfinite(actual))} values are not finite"
    error = np.abs(actual - expected).max() / (scale or np.abs(expected).max() or 1.0)
    assert error <= tolerance, f"{what}: error {error:.2e}, allowed {tolerance:.2e}"


def pytest_sessionfinish():
    # pytest-xdist ends a worker that takes its time to exit, and with it what coverage would save last of all
    if (coverage := sys.modules.get("coverage")) and (current := coverage.Coverage.current()):
        current.save()
