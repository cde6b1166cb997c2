"""The same code in several processes: `examples/multihost.py` compares them with one device itself."""

import subprocess
import sys
from pathlib import Path


def test_two_processes_of_four_devices():
    script = Path(__file__).parents[2] / "examples" / "multihost.py"
    command = [sys.executable, "-W", "error", script, "--local", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    for process in range(2):
        assert f"process {process} of 2: 8 devices agree with one" in done.stdout
