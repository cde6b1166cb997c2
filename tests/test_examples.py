"""The examples, shortened, do what they say. `multihost.py` has a test of its own."""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples"


def output_of(script, *arguments):
    command = [sys.executable, "-W", "error", FOLDER / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_training_packed_learns_to_repeat_and_leaks_nothing():
    output = output_of("train_packed.py", "--steps", 40, "--width", 32)
    repeated, new = numbers(r"repeated ([\d.]+)", output), numbers(r"new ([\d.]+)", output)
    (guessing,) = numbers(r"costs ([\d.]+) nats", output)
    assert repeated[-1] < guessing - 0.5
    # what cannot be foreseen never costs less than guessing, but for the spread of one batch's mean
    assert min(new) > guessing - 0.15
    # and more where repetition is expected
    assert new[-1] > guessing
    assert "40 different packings, 1 compilation" in output


def test_decoding_from_cached_states_agrees_with_one_pass():
    output = output_of("decode.py", "--tokens", 5, "--width", 16)
    errors = numbers(r"([\d.e+-]+) from one pass", output)
    assert len(errors) == 4 and max(errors) < 1e-5
    # a state does not grow with its prompt
    assert len(set(re.findall(r"state of ([\d,]+) bytes", output))) == 1


def test_sharded_time_agrees_with_one_device():
    output = output_of("shard_time.py", "--devices", 4, "--tokens", 128)
    errors = numbers(r"(?:output|gradients) ([\d.]+e[+-]\d+)", output)
    assert len(errors) == 4 and max(errors) < 1e-5
    assert "4 devices, 32 of 128 tokens on each" in output
    assert output.count("output lies on 4 devices") == 2
