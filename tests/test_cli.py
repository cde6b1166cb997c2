"""The commands `ejkernel` and `python -m examples.demo`: what they print, and their exit codes."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import ejkernel
from ejkernel import cli
from examples.demo import __main__ as demo

HERE = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
NO_DEVICE = {**HERE, "JAX_PLATFORMS": "cuda"}


def test_info_names_what_runs_and_why_others_do_not(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for part in ("jaxlib", "devices", "0: cpu", "flash_attention", "xla", "not cudnn: "):
        assert part in printed
    printed.encode("ascii")


def test_info_where_jax_finds_no_device(capsys, monkeypatch):
    def devices():
        raise RuntimeError("no platform that is present")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(cli, "PACKAGES", ("jax", "a-package-of-no-name"))
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("devices\n  none; JAX has no device to run on: no platform that is present\n")
    assert "  a-package-of-no-name not installed\n" in printed


def test_info_notices_the_other_project_of_that_name(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "ejkernel-0.0.80.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ejkernel\nVersion: 0.0.80\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"ejkernel {ejkernel.__version__}, Python ")
    assert "  another project, ejkernel 0.0.80, is installed too; both write the folder ejkernel/" in printed
    assert "pip uninstall ejkernel ejkernel-jax" in printed


def test_info_where_it_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda name: cli.NOT_INSTALLED)
    assert cli.main(["info"]) == 0
    assert "another project" not in capsys.readouterr().out


def test_help_shows_examples(capsys):
    for main, example in ((cli.main, "ejkernel bench --quick"), (demo.main, "python -m examples.demo --resume")):
        with pytest.raises(SystemExit) as end:
            main(["--help"])
        assert end.value.code == 0
        assert example in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: command"),
        ("sing", "invalid choice: 'sing'"),
        ("info --loud", "unrecognized arguments: --loud"),
        ("demo --steps 0", "argument --steps: got 0; expected a whole number from 1 to 1073741824"),
        ("demo --steps many", "argument --steps: got many; expected a whole number"),
        ("demo --seed -1", "argument --seed: got -1; expected a whole number from 0 to 4294967295"),
        ("demo --seed 1000000000000000000000", "argument --seed: got 1000000000000000000000; expected a whole number"),
    ],
)
def test_wrong_use_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        run(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: ") and message in said


def run(command):
    """`demo` is the one of the examples."""
    name, _, rest = command.partition(" ")
    return demo.main(rest.split()) if name == "demo" else cli.main(command.split())


# a shell starts what follows, so that it is what a user types
PYTHON = f"exec {sys.executable} -m"


@pytest.mark.parametrize("command", ["examples.demo", "ejkernel info"])
def test_a_reader_that_leaves_ends_it_quietly(command, tmp_path):
    pipe = f"({PYTHON} {command} | head -n 0; exit ${{PIPESTATUS[0]}})"
    run = subprocess.run(["bash", "-c", pipe], cwd=tmp_path, capture_output=True, text=True, env=HERE)
    assert (run.returncode, run.stdout, run.stderr) == (141, "", "")


# buffered, as where a user's shell starts it: what is not written yet is found unwritable at the end
BUFFERED = {name: value for name, value in HERE.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["ejkernel.cli info", "ejkernel.cli --version", "examples.demo --help"])
def test_a_full_disk_is_told_in_one_line(command):
    run = subprocess.run(f"{PYTHON} {command} > /dev/full", shell=True, capture_output=True, text=True, env=BUFFERED)
    assert run.returncode == 2
    assert "No space left on device" in run.stderr and len(run.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix", reason="files are closed as shells do it")
def test_output_may_be_closed_from_the_start():
    run = subprocess.run(f"{PYTHON} ejkernel.cli info >&-", shell=True, capture_output=True, text=True, env=HERE)
    assert (run.returncode, run.stderr) == (0, "")


def test_interrupted_info_exits_with_130(capsys, monkeypatch):
    def report():
        yield "devices"
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_report", report)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that even root cannot write to")
@pytest.mark.parametrize("command", ["demo --out /proc/self", "bench --quick --json /proc/self/rows.json"])
def test_a_folder_that_cannot_be_written_is_told_before_the_work(command, capsys):
    assert run(command) == 2
    printed = capsys.readouterr()
    assert not printed.out and "/proc/self" in printed.err and len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["examples.demo", "ejkernel.cli bench --quick"])
def test_no_device_is_told(command, tmp_path):
    command = f"{PYTHON} {command}"
    run = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, env=NO_DEVICE)
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.startswith("JAX has no device to run on: ") and "Traceback" not in run.stderr


def test_layers_without_flax_say_what_to_install(monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("ejkernel.layers", "flax", "optax")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r"the extra layers: pip install '\.\[layers\]' in a checkout"):
        importlib.import_module("ejkernel.layers")


def test_the_command_imports_no_flax():
    probe = "import sys, ejkernel.cli; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
