"""The Triton kernels of softmax attention, interpreted on the CPU, against the oracle and against XLA."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import CASES, OFFSET, PACKED, Case, check, results_and_gradients
from conftest import assert_close

from ejkernel._dispatch import Implementation
from ejkernel.attention import flash_attention
from ejkernel.kernels import _launch
from ejkernel.kernels.attention import triton, xla
from ejkernel.kernels.attention.triton import plan
from ejkernel.kernels.attention.triton.plan import Config, Tile

pytest.importorskip("triton", reason="Triton is not installed (pip install ejkernel[cuda])")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

from triton_interpreter import interpreted

# the smallest tiles that dots take, so that a few dozen tokens are several blocks
SMALL = Config(*[Tile(16, 16, 4, 1)] * 5, 4)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(plan, "configure", lambda *_: SMALL)
    monkeypatch.setattr(plan, "FEW_ROWS", 0)
    pretender = Implementation("triton", None, triton.supports, triton.run)
    everywhere = Implementation("xla", None, xla.supports, xla.run)
    monkeypatch.setattr(sys.modules["ejkernel.attention"], "FLASH_ATTENTION", (pretender, everywhere))
    with interpreted():
        yield


def options_of(case):
    borders = {name: np.array(each, np.int32) for name, each in case.options.items() if name.startswith("cu_")}
    return {**case.options, **borders}


def flash(case, **more):
    return lambda **arrays: flash_attention(**arrays, **options_of(case), dtype=None, **more)


@pytest.mark.parametrize("case", [*CASES, *PACKED, *OFFSET], ids=str)
def test_matches_oracle(case):
    """Output, log-sum-exp and the gradients of both."""
    if case.options.get("cu_seqlens") == [0]:
        pytest.skip("nothing packed is XLA's")
    check(
        flash(case, return_lse=True, platform="triton"),
        lambda **arrays: oracle.flash_attention(**arrays, **case.options),
        case.arrays(np.float32),
        3e-6,
        1e-2,
    )
