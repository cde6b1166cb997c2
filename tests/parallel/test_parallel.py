"""Sequence parallelism against the op on one device, on virtual CPU devices in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = 8


MESHES = ("own_shard_map", "explicit_time", "explicit_heads", "explicit_utilities")
RING = ("ring_values", "ring_windows", "ring_packed", "ring_shard_map", "ring_collectives", "ring_errors")


@pytest.mark.parametrize(
    "part", ["values", "collectives", "delta_rule", "sharding", "family", "errors", *MESHES, *RING]
)
def test_on_virtual_devices(part):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    script = Path(__file__).parents[1] / "parallel_checks.py"
    subprocess.run([sys.executable, "-W", "error", script, part], check=True, env=os.environ | {"XLA_FLAGS": flags})
