"""What dispatch chooses for `flash_attention` on an NVIDIA GPU is what was measured to be the fastest."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import gpu_flash_attention
from ejkernel.kernels import _launch
from ejkernel.kernels.attention import cudnn

RESULTS = Path(gpu_flash_attention.__file__).parent / "results" / "flash_attention_h200.json"
PLATFORMS = ("cudnn", "triton", "xla")
WORKS = gpu_flash_attention.WORKS


def measured():
    """Milliseconds by call and platform, with backward where there is one, which is measured last."""
    found = defaultdict(dict)
    for row in json.loads(RESULTS.read_text())["rows"]:
        found[row["name"]] |= {name: row[f"{name}_ms"] for name in PLATFORMS if f"{name}_ms" in row}
    return found


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(cudnn, "_installed", lambda: None)
    monkeypatch.setattr(cudnn, "_hopper", lambda: True)
    monkeypatch.setattr(_launch, "unavailable", lambda: None)


@pytest.mark.parametrize("work", WORKS, ids=[work.name for work in WORKS])
def test_the_fastest_is_chosen(work):
    times = measured()[work.name]
    chosen = gpu_flash_attention.chosen(work)
    if work.bias and "cudnn" in times:
        # Triton is faster, but of a bias that is huge throughout a row it leaves less (`cudnn.slower`)
        assert chosen == "cudnn"
    else:
        # two that are as fast as each other differ by this much from run to run
        assert times[chosen] <= 1.06 * min(times.values()), f"{chosen} is chosen: {times}"
