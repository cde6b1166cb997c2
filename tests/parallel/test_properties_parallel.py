"""Sequence parallelism, drawn by Hypothesis, on virtual CPU devices in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = 4


@pytest.mark.parametrize("parts", [("recurrence", "attention"), ("meshes", "shard_maps", "leaks")], ids="-".join)
def test_on_virtual_devices(parts):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    script = Path(__file__).parents[1] / "properties_parallel.py"
    subprocess.run([sys.executable, "-W", "error", script, *parts], check=True, env=os.environ | {"XLA_FLAGS": flags})
