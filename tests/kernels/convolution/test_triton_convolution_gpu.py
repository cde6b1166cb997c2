"""The Triton kernels of `causal_conv1d` on an NVIDIA GPU, against float64: `pytest -m gpu`."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from convolution_cases import CASES, UNITS, Case, check, check_sizes, results_and_gradients, spoilt

import ejkernel
from ejkernel.convolution import unit_conv1d
from ejkernel.kernels import _launch

pytestmark = pytest.mark.gpu
if _launch.capability() is None:
    pytest.skip("no NVIDIA GPU", allow_module_level=True)
elif reason := _launch.unavailable():
    pytest.skip(reason, allow_module_level=True)

LARGE = (
    Case("large", batch=2, tokens=333, channels=1030),
    Case("large, packed", lengths=(1, 0, 130, 64, 63, 60), padding=15, channels=1030),
    Case("large, norms", batch=2, tokens=333, channels=2048, unit_dim=128, bias=False),
    Case("large, norms of 64", batch=1, tokens=70, channels=960, unit_dim=64),
    Case("large, norms of 256", batch=1, tokens=70, channels=1280, unit_dim=256),
    Case("large, norms of 96, which no program has whole", batch=1, tokens=70, channels=960, unit_dim=96),
    Case("large, norms, packed", lengths=(1, 0, 130, 64, 63, 60), padding=15, channels=640, unit_dim=128),
    Case("large, norms, segments", ids=((0,) * 70 + (1,) * 130 + (-1,) * 9,), channels=640, unit_dim=128),
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (jnp.bfloat16, 2e-2), (np.float16, 2e-3)])
@pytest.mark.parametrize("case", [case for case in (*CASES, *UNITS, *LARGE) if case.taps <= 8], ids=str)
def test_results_and_gradients(case, dtype, tolerance):
    check(case, dtype, tolerance, platform="triton")


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("unit_dim", [64, 128, 256])
def test_norms_of_heads_of_any_size(unit_dim, dtype, tolerance):
    case = Case("sizes", tokens=140, channels=6 * unit_dim, unit_dim=unit_dim, bias=False)
    check_sizes(case, dtype, tolerance, platform="triton")


@pytest.mark.parametrize("unit_dim", [0, 128])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_split_calls_and_packing_have_the_bits_of_whole_ones(dtype, unit_dim):
    front = functools.partial(unit_conv1d, unit_dim=unit_dim) if unit_dim else ejkernel.causal_conv1d
    run = functools.partial(front, platform="triton")
    arrays = Case("bits", batch=1, tokens=300, channels=640).arrays(dtype)
    x, given, cuts = arrays["x"], (arrays["weight"], arrays["bias"], "silu"), [0, 1, 3, 70, 200, 300]
    whole, state = run(x, *given)
    packed, finals = run(x, *given, cu_seqlens=cuts)
    carried = None
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        piece, carried = run(x[:, start:end], *given, carried)
        alone, last = run(x[:, start:end], *given)
        np.testing.assert_array_equal(piece, whole[:, start:end])
        np.testing.assert_array_equal(packed[:, start:end], alone)
        np.testing.assert_array_equal(finals[n : n + 1], last)
    np.testing.assert_array_equal(carried, state)


@pytest.mark.parametrize("case", [LARGE[1], LARGE[6]], ids=str)
def test_nothing_leaks(case):
    arrays = case.arrays(np.float32)
    owner = np.repeat(np.arange(len(case.lengths) + 1), (*case.lengths, case.padding))
    bad = np.isin(owner, [2, len(case.lengths)])
    changed = {name: spoilt(arrays[name], (0, bad), np.nan) for name in ("x", "d_output")}
    clean, found = (results_and_gradients(case, each, platform="triton") for each in (arrays, arrays | changed))
    for name in ("output", "x"):
        np.testing.assert_array_equal(np.asarray(found[name])[0, ~bad], np.asarray(clean[name])[0, ~bad], name)
        assert not np.asarray(found[name])[0, owner == len(case.lengths)].any(), name
