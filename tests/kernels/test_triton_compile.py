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
# of calls of attention
KINDS = ("causal", "window", "packed", "segments", "masked", "biased", "pairs", "decoding")
EVERY = [
    *itertools.product(KIBIBYTES, DTYPES, ("64x64", "128x128", "256x256", "512x512"), DECAYS),
    *itertools.product((80, 90, 120), DTYPES, SMALL, DECAYS),
    *itertools.product((90, 100), ("bfloat16",), ("128x64",), ("head+shared",)),
    *itertools.product(
        (80, 90, 120), ("bfloat16", "float32"), ("128x128",), [f"{each}+segments" for each in DECAYS[:4]]
    ),
]
# the tightest of each kind of memory, and what warps and warpgroups multiply side by side; the rest takes minutes
FEW = [
    (80, "bfloat16", "128x128", "head"),
    (89, "float32", "512x512", "key+value"),
    (100, "bfloat16", "64x64", "head"),
    (120, "bfloat16", "512x512", "key"),
    (90, "bfloat16", "128x32", "key"),
    (90, "bfloat16", "24x24", "head+value"),
    (90, "bfloat16", "128x64", "head+shared"),
    (90, "float16", "8x1", "key"),
    (90, "bfloat16", "128x128", "head+segments"),
    (90, "bfloat16", "64x64", "key+segments"),
]


DELTA_DECAYS = ("none", "head", "key", "none+segments", "head+segments", "key+segments")
EVERY_DELTA_RULE = list(
    itertools.product(KIBIBYTES, ("bfloat16", "float32"), ("128x128", "256x256", "64x512", "24x8"), DELTA_DECAYS)
)
FEW_DELTA_RULE = [
    (90, "bfloat16", "128x128", "head"),
    (89, "float32", "256x256", "key"),
    (100, "bfloat16", "64x64", "key"),
    (90, "bfloat16", "64x64", "head+segments"),
    (90, "bfloat16", "128x128", "key+segments"),
]


POOLED_KERNELS = {"make_tables", "hold", "walk_prompts", "step"}
EVERY_POOLED = list(
    itertools.product(KIBIBYTES, DTYPES, ("128x128", "256x256", "24x8"), [f"{each}+pooled" for each in DECAYS[:4]])
)
FEW_POOLED = [(90, "bfloat16", "128x128", "key+pooled"), (80, "bfloat16", "128x64", "head+pooled")]
EVERY_DELTA_POOLED = list(
    itertools.product(
        KIBIBYTES,
        ("bfloat16", "float32"),
        ("128x128", "256x256", "24x8"),
        [f"{each}+pooled" for each in DELTA_DECAYS[:3]],
    )
)
FEW_DELTA_POOLED = [(90, "float32", "64x24", "head+pooled"), (90, "bfloat16", "128x128", "none+pooled")]


EVERY_ATTENTION = [
    *itertools.product(KIBIBYTES, DTYPES, (64, 128, 192, 256), KINDS),
    *itertools.product(KIBIBYTES, DTYPES[:2], (512,), KINDS),
]
FEW_ATTENTION = [
    (86, "float16", 128, "decoding"),
    (89, "bfloat16", 256, "window"),
    (90, "bfloat16", 256, "packed"),
    (90, "bfloat16", 512, "causal"),
    (90, "bfloat16", 128, "segments"),
    (100, "bfloat16", 256, "pairs"),
    (120, "float32", 128, "decoding"),
]


LAYOUTS = ("rows", "rows+states", "packed", "packed+states", "segments")
EVERY_CONVOLUTION = list(itertools.product(KIBIBYTES, DTYPES, ("256x512", "7x96", "1x2048"), LAYOUTS))
FEW_CONVOLUTION = [
    (90, "bfloat16", "256x512", "rows"),
    (90, "float32", "256x512", "packed+states"),
    (80, "float16", "7x96", "segments"),
    (120, "bfloat16", "1x2048", "rows+states"),
]
DIMS_PAGED = ("64x64", "128x128", "192x128", "256x256", "512x512", "576x512")
EVERY_PAGED = [
    case
    for case in itertools.product(KIBIBYTES, DTYPES, DIMS_PAGED, ("decoding", "window"))
    if case[0] in (90, 100) or case[1] != "float32" or case[2] not in ("512x512", "576x512")
]
FEW_PAGED = [
    (90, "bfloat16", "576x512", "decoding"),
    (89, "float32", "128x128", "prompts"),
    (90, "float32", "192x128", "prompts"),
    (90, "bfloat16", "512x512", "prompts"),
]

LAYERS = ("gla", "delta", "kda", "mamba")
EVERY_STEP = list(itertools.product(KIBIBYTES, DTYPES, ("128x128", "256x256", "24x40"), LAYERS))
FEW_STEP = [
    (90, "bfloat16", "128x128", "delta"),
    (80, "float16", "256x256", "kda"),
    (120, "float32", "24x40", "mamba"),
    (100, "bfloat16", "64x128", "gla"),
]
EVERY_ROTARY = list(itertools.product(KIBIBYTES, DTYPES, ("128x128", "24x24"), ("softmax",)))
FEW_ROTARY = [(90, "bfloat16", "128x128", "softmax")]
EVERY_GATED_NORM = list(
    itertools.product(KIBIBYTES, DTYPES, ("16x128", "1x4096", "2x8192", "3x5"), ("heads", "groups"))
)
FEW_GATED_NORM = [
    (90, "bfloat16", "16x128", "heads"),
    (90, "float32", "1x4096", "groups"),
    (89, "bfloat16", "2x8192", "groups"),
    (120, "bfloat16", "16x128", "groups"),
]

# a script, its calls, and kernels that any of them has
SCRIPTS = [
    ("triton_compile", EVERY if THOROUGH else FEW, {"walk"}),
    ("triton_compile_delta_rule", EVERY_DELTA_RULE if THOROUGH else FEW_DELTA_RULE, {"forward", "backward"}),
    ("triton_compile_convolution", EVERY_CONVOLUTION if THOROUGH else FEW_CONVOLUTION, {"forward", "backward"}),
    (
        "triton_compile_attention",
        EVERY_ATTENTION if THOROUGH else FEW_ATTENTION,
        {"query_gradient", "key_gradients", "tangent"},
    ),
    ("triton_compile", EVERY_POOLED if THOROUGH else FEW_POOLED, POOLED_KERNELS),
    ("triton_compile_delta_rule", EVERY_DELTA_POOLED if THOROUGH else FEW_DELTA_POOLED, POOLED_KERNELS),
    ("triton_compile_paged", EVERY_PAGED if THOROUGH else FEW_PAGED, {"attend"}),
    ("triton_compile_step", EVERY_STEP if THOROUGH else FEW_STEP, {"step"}),
    ("triton_compile_step", EVERY_ROTARY if THOROUGH else FEW_ROTARY, {"rotate_and_store"}),
    ("triton_compile_gated_norm", EVERY_GATED_NORM if THOROUGH else FEW_GATED_NORM, {"forward", "backward"}),
]
CALLS = [(script, call, kernels) for script, calls, kernels in SCRIPTS for call in calls]
# several to a process, which takes a while to start
BATCHES = [CALLS[at : at + 10] for at in range(0, len(CALLS), 10)]


@pytest.mark.parametrize("calls", BATCHES, ids=lambda calls: f"{calls[0][0]}-{'-'.join(map(str, calls[0][1]))}")
def test_kernels_fit(calls, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    given = itertools.chain(*((script, *call) for script, call, _ in calls))
    command = map(str, [sys.executable, TESTS / "triton_compile_calls.py", *given])
    # what another run compiled would prove nothing, tests that interpret leave Triton's variable behind, and to say of
    # every instruction which line it comes from takes a tenth of the time
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TESTS)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    for (script, call, kernels), line in zip(calls, run.stdout.splitlines(), strict=True):
        found = json.loads(line)
        assert kernels <= {name for name, _ in found}, (script, call)
        assert all(size <= KIBIBYTES[call[0]] for _, size in found), f"{script} {call}: {found}"
