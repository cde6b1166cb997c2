"""The kernels compile for GPUs that nobody here has, in the shared memory that a program may use there."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from properties import THOROUGH

TESTS = Path(__file__).parents[1]
KIBIBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # from NVIDIA's tables of compute capabilities
DTYPES = ("bfloat16", "float16", "float32")
DECAYS = ("key", "head", "constant", "none", "none+value", "key+value")
SMALL = ("1x1", "8x8", "16x16", "24x24", "32x32", "8x128", "128x8", "128x32")
KINDS = ("causal", "window", "packed", "pairs", "decoding")  # of calls of attention
EVERY = [
    *itertools.product(KIBIBYTES, DTYPES, ("64x64", "128x128", "256x256", "512x512"), DECAYS),
    *itertools.product((80, 90, 120), DTYPES, SMALL, DECAYS),
]
# the tightest of each kind of memory, and what warps and warpgroups multiply side by side; the rest takes minutes
FEW = [
    (80, "bfloat16", "128x128", "head"),
    (89, "float32", "512x512", "key+value"),
    (100, "bfloat16", "128x128", "head"),
    (120, "bfloat16", "512x512", "key"),
    (90, "bfloat16", "8x8", "key"),
    (90, "bfloat16", "128x32", "key"),
    (90, "bfloat16", "24x24", "head+value"),
    (90, "float16", "1x1", "key"),
]


DELTA_DECAYS = ("none", "head", "key")
EVERY_DELTA_RULE = list(
    itertools.product(KIBIBYTES, ("bfloat16", "float32"), ("128x128", "256x256", "64x512", "24x8"), DELTA_DECAYS)
)
FEW_DELTA_RULE = [(90, "bfloat16", "128x128", "head"), (89, "float32", "256x256", "key")]


EVERY_ATTENTION = list(itertools.product(KIBIBYTES, DTYPES, (64, 128, 192, 256), KINDS))
FEW_ATTENTION = [
    (80, "bfloat16", 128, "decoding"),
    (86, "float16", 64, "decoding"),
    (89, "bfloat16", 256, "window"),
    (90, "bfloat16", 256, "packed"),
    (100, "bfloat16", 256, "pairs"),
    (120, "float32", 128, "decoding"),
]


def taken(tmp_path, script, *arguments):
    """Names of the kernels that `script` compiles, and the shared memory that each takes."""
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    command = map(str, [sys.executable, TESTS / script, *arguments])
    # what another run compiled would prove nothing, and tests that interpret leave Triton's variable behind
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TESTS)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("capability, dtype, dims, decay", EVERY if THOROUGH else FEW)
def test_kernels_fit(capability, dtype, dims, decay, tmp_path):
    found = taken(tmp_path, "triton_compile.py", capability, dtype, dims, decay)
    assert {"walk"} <= {name for name, _ in found}
    assert all(size <= KIBIBYTES[capability] for _, size in found), found


@pytest.mark.parametrize("capability, dtype, dims, decay", EVERY_DELTA_RULE if THOROUGH else FEW_DELTA_RULE)
def test_delta_rule_kernels_fit(capability, dtype, dims, decay, tmp_path):
    found = taken(tmp_path, "triton_compile_delta_rule.py", capability, dtype, dims, decay)
    assert {"forward", "backward"} <= {name for name, _ in found}
    assert all(size <= KIBIBYTES[capability] for _, size in found), found


@pytest.mark.parametrize("capability, dtype, dim, kind", EVERY_ATTENTION if THOROUGH else FEW_ATTENTION)
def test_attention_kernels_fit(capability, dtype, dim, kind, tmp_path):
    found = taken(tmp_path, "triton_compile_attention.py", capability, dtype, dim, kind)
    assert {"query_gradient", "key_gradients"} <= {name for name, _ in found}
    assert all(size <= KIBIBYTES[capability] for _, size in found), found
