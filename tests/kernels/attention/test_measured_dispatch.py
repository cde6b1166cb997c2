"""What dispatch chooses for `flash_attention` on an NVIDIA GPU is what was measured to be the fastest."""

import json
from collections import defaultdict

import pytest

from benchmarks.gpu import attention, rows
from ejkernel.kernels import _launch
from ejkernel.kernels.attention import cudnn

RESULTS = rows.RESULTS / "flash_attention_h200.json"
PLATFORMS = ("cudnn", "triton", "xla")


def measured():
    """Milliseconds by call and platform, with backward where there is one, which is measured last."""
    found = defaultdict(dict)
    for row in json.loads(RESULTS.read_text())["rows"]:
        found[row["name"]] |= {name: row[f"{name}_ms"] for name in PLATFORMS if f"{name}_ms" in row}
    return found


# rows that were added since the last run wait for the next
WORKS = [work for work in attention.WORKS if work.name in measured()]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(cudnn, "_installed", lambda: None)
    monkeypatch.setattr(cudnn, "_hopper", lambda: True)
    monkeypatch.setattr(_launch, "unavailable", lambda: None)


def test_most_rows_are_measured():
    assert len(WORKS) > 0.9 * len(attention.WORKS)


@pytest.mark.parametrize("work", WORKS, ids=[work.name for work in WORKS])
def test_the_fastest_is_chosen(work):
    times = measured()[work.name]
    chosen = attention.chosen(work)
    if work.bias and "cudnn" in times:
        # Triton is faster, but of a bias that is huge throughout a row it leaves less (`cudnn.slower`)
        assert chosen == "cudnn"
    else:
        # two that are as fast as each other differ by this much from run to run
        assert times[chosen] <= 1.06 * min(times.values()), f"{chosen} is chosen: {times}"
