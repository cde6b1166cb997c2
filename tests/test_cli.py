"""The `ejkernel` command: what it prints, and its exit codes."""

import subprocess
import sys

import jax
import pytest

import ejkernel
from ejkernel import cli


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
    assert printed.endswith("devices\n  none that JAX can use: no platform that is present\n")
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
    for arguments, example in ((["--help"], "ejkernel demo --resume"), (["demo", "--help"], "ejkernel demo --resume")):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 0
        assert example in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["sing"], ["info", "--loud"], ["demo", "--steps", "0"]], ids=str)
def test_wrong_use_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: ejkernel" in capsys.readouterr().err


def test_demo_without_flax_says_what_to_install(capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("ejkernel.demo", "ejkernel.layers", "flax", "optax")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    assert cli.main(["demo"]) == 1
    assert "the extra layers: pip install '.[layers,cli]' in a checkout" in capsys.readouterr().err


def test_the_command_imports_flax_for_the_demo_only():
    probe = "import sys, ejkernel.cli; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
