"""Shared by all tests: the two precisions, and comparison against float64."""

import jax
import numpy as np
import pytest


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def x64():
    """Turns 64-bit types on for one test."""
    with jax.enable_x64(True):
        yield


def assert_close(actual, expected, tolerance, what=""):
    """Bounds the largest error by `tolerance` times the largest expected value (by `tolerance` where all are 0)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return
    assert np.isfinite(actual).all(), f"{what}: {np.count_nonzero(~np.isfinite(actual))} values are not finite"
    error = np.abs(actual - expected).max() / (np.abs(expected).max() or 1.0)
    assert error <= tolerance, f"{what}: error {error:.2e}, allowed {tolerance:.2e}"
