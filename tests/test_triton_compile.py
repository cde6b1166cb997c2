"""The kernels compile for GPUs that nobody here has, in the shared memory that a program may use there."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from properties import THOROUGH

TESTS = Path(__file__).parent
KIBIBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # from NVIDIA's tables of compute capabilities
DTYPES = ("bfloat16", "float16", "float32")
DECAYS = ("key", "head", "constant", "none")
SMALL = ("1x1", "8x8", "16x16", "24x24", "32x32", "8x128", "128x8", "128x32")
EVERY = [
    *itertools.product(KIBIBYTES, DTYPES, ("128x128", "256x256"), DECAYS),
    *itertools.product((80, 90, 120), DTYPES, SMALL, DECAYS),
]
# the tightest of each kind of memory, and what warps and warpgroups multiply side by side; the rest takes minutes
FEW = [
    (80, "bfloat16", "128x128", "head"),
    (89, "float32", "256x256", "key"),
    (100, "bfloat16", "128x128", "head"),
    (120, "bfloat16", "256x256", "key"),
    (90, "bfloat16", "8x8", "key"),
    (90, "bfloat16", "128x32", "key"),
    (90, "bfloat16", "24x24", "head"),
    (90, "float16", "1x1", "key"),
]


@pytest.mark.parametrize("capability, dtype, dims, decay", EVERY if THOROUGH else FEW)
def test_kernels_fit(capability, dtype, dims, decay, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    script = [sys.executable, TESTS / "triton_compile.py", capability, dtype, dims, decay]
    # what another run compiled would prove nothing, and tests that interpret leave Triton's variable behind
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    run = subprocess.run(map(str, script), capture_output=True, text=True, env=env, cwd=TESTS)
    assert run.returncode == 0, run.stderr[-2000:]
    taken = json.loads(run.stdout)
    assert {"walk"} <= {name for name, _ in taken}
    assert all(size <= KIBIBYTES[capability] for _, size in taken), taken
