"""Sequence parallelism against the op on one device, on virtual CPU devices in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = 8


# of one process each, as JAX takes a while to start; calls on one device that two parts compare with are compiled once
PARTS = [
    ("values", "tree", "collectives", "errors", "delta_rule", "family", "twice"),
    ("sharding", "ring_shard_map"),
    ("own_shard_map", "explicit_heads", "auto_heads", "gathers", "dropout"),
    ("parts", "shared_heads", "transformed", "short_rows", "decoding"),
    ("pools", "serving", "one_program", "mapped"),
    ("explicit_time", "explicit_utilities"),
    (
        "ring_values",
        "ring_windows",
        "ring_packed",
        "ring_collectives",
        "ring_platforms",
        "ring_errors",
        "ring_segments",
    ),
    ("layers", "tpu_kernels", "segments"),
    (
        "forward_mode",
        "tangents_of_kernels",
        "forward_mode_in_shard_map",
        "forward_mode_explicit",
        "collectives_of_tangents",
        "ring_forward_mode",
        "ring_tangents_of_kernels",
    ),
]


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_on_virtual_devices(parts):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    script = Path(__file__).parents[1] / "parallel_checks.py"
    subprocess.run([sys.executable, "-W", "error", script, *parts], check=True, env=os.environ | {"XLA_FLAGS": flags})
