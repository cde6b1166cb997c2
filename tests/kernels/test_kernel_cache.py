"""Compiled kernels from one process to the next: what a file's name depends on, and files that are no use."""

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import _kernel_cache, _launch
from ejkernel.kernels._launch import Launch, Tile


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Compiler:
    """Counts how often it compiles."""

    def __init__(self, result=b"kernel"):
        self.times, self.result = 0, result

    def __call__(self):
        self.times += 1
        return self.result


def test_a_kernel_is_compiled_once_for_all_processes(folder):
    compile = Compiler()
    assert [_kernel_cache.get("name", compile) for _ in range(3)] == [b"kernel"] * 3
    assert compile.times == 1 and not _kernel_cache._pending
    assert [file.name for file in (folder / "triton").iterdir()] == ["name"]
    assert _kernel_cache.get("other", compile) == b"kernel" and compile.times == 2


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:-1] + b"L", lambda x: x + b"!"])
def test_a_damaged_file_is_written_anew(folder, damage):
    compile = Compiler()
    _kernel_cache.get("name", compile)
    file = folder / "triton" / "name"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert _kernel_cache.get("name", compile) == b"kernel"
    assert compile.times == 2 and file.read_bytes() == whole


def test_where_nothing_can_be_written(folder, monkeypatch):
    folder.write_text("a file where the folder should be")
    compile = Compiler()
    assert [_kernel_cache.get("name", compile) for _ in range(2)] == [b"kernel"] * 2
    assert compile.times == 2
    folder.unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert _kernel_cache.get("name", compile) == b"kernel"
    assert list((folder / "triton").iterdir()) == []


def test_files_are_turned_off(folder, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "")
    compile = Compiler()
    assert [_kernel_cache.get("name", compile) for _ in range(2)] == [b"kernel"] * 2
    assert compile.times == 2 and not folder.exists()


def test_an_error_is_raised_each_time_and_nothing_is_kept(folder):
    def fails():
        raise ValueError("does not compile")

    for _ in range(2):
        with pytest.raises(ValueError, match="does not compile"):
            _kernel_cache.get("name", fails)
    assert _kernel_cache.get("name", Compiler()) == b"kernel"


def test_kernels_of_a_pass_compile_side_by_side(folder, monkeypatch):
    """Each waits for the other to begin."""
    monkeypatch.setattr(_kernel_cache, "_THREADS", True)
    _kernel_cache._pool.cache_clear()
    both = threading.Barrier(2, timeout=30)
    for name in ("a", "b"):
        _kernel_cache.start(name, lambda: bytes([both.wait()]))
    assert {_kernel_cache.get(name, Compiler()) for name in ("a", "b")} == {b"\0", b"\1"}
    _kernel_cache._pool.cache_clear()


def test_a_pass_knows_its_launches():
    assert _kernel_cache.launches_of_this_pass() is not _kernel_cache.launches_of_this_pass()
    with _kernel_cache.one_pass():
        _kernel_cache.launches_of_this_pass().append(1)
        with _kernel_cache.one_pass():
            assert _kernel_cache.launches_of_this_pass() == []
        assert _kernel_cache.launches_of_this_pass() == [1]


@dataclass(frozen=True)
class Kernel:
    source: str = "source"

    def identity(self):
        return (self.source,)


@dataclass(frozen=True)
class Constants:
    block: int = 16


LAUNCH = Launch(
    Kernel(),
    (jax.ShapeDtypeStruct((4,), jnp.float32),),
    (3,),
    (jax.ShapeDtypeStruct((4,), jnp.float32),),
    (),
    5,
    Tile(16),
    Constants(),
    [],
)


@pytest.mark.parametrize(
    "other",
    [
        {"kernel": Kernel("other source")},
        {"arrays": (jax.ShapeDtypeStruct((4,), jnp.bfloat16),)},
        {"sizes": (4,)},
        {"outputs": (jax.ShapeDtypeStruct((5,), jnp.float32),)},
        {"aliases": ((0, 0),)},
        {"programs": 6},
        {"tile": Tile(16, warps=8)},
        {"constants": Constants(32)},
    ],
)
def test_a_name_says_all_that_a_launch_is(other):
    assert replace(LAUNCH, **other).key() != LAUNCH.key()
    # another object that is the same
    assert replace(LAUNCH, kernel=Kernel(), same_pass=[LAUNCH]).key() == LAUNCH.key()


def test_a_name_says_chip_versions_and_settings(monkeypatch):
    names = {LAUNCH.key()}
    monkeypatch.setattr(_launch, "capability", lambda: 100)
    names.add(LAUNCH.key())
    monkeypatch.setattr(sys.modules["jaxlib"], "__version__", "0.0")
    names.add(LAUNCH.key())
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    names.add(LAUNCH.key())
    assert len(names) == 4


def test_a_kernel_has_the_same_name_whatever_was_compiled_before():
    """Triton's own keys differ, which had a process compile anew what another had compiled in another order."""
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    script = """
import sys
from ejkernel.kernels import _launch
from ejkernel.kernels.delta_rule.triton.device import decays
from ejkernel.kernels.linear_recurrence.triton.device import head_gates
if len(sys.argv) > 1:
    head_gates.fold_head_gates.cache_key
kernel = _launch.flat(decays.prepare_rows, ("x", "y"), ("x",))
print(kernel.identity(), kernel.cache_key)
"""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outputs = []
    for arguments in ([], ["another first"]):
        command = [sys.executable, "-c", script, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=compiling)
        outputs.append(ran.stdout.rsplit(" ", 1))
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] != outputs[1][1], "Triton's keys no longer depend on the order: use those"


def test_a_kernel_is_named_after_its_source_and_parameters():
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    from ejkernel.kernels.delta_rule.triton.device import walk

    kernels = [
        _launch.flat(*each).identity()
        for each in (
            (walk.forward, ("x", "y"), ("x",)),
            (walk.backward, ("x", "y"), ("x",)),
            (walk.forward, ("x", "z"), ("x",)),
            (walk.forward, ("x", "y"), ("y",)),
        )
    ]
    assert len(set(kernels)) == len(kernels)


def test_sources_are_those_of_all_modules_that_are_imported(monkeypatch, tmp_path):
    files = {"a": "from ejkernel.b import x\n", "b": "import ejkernel.a\nx = 1\n", "c": "x = 1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setitem(sys.modules, f"ejkernel.{name}", SimpleNamespace(__file__=tmp_path / name))

    def digests():
        _kernel_cache.digest_of_sources.cache_clear()
        return {name: _kernel_cache.digest_of_sources(f"ejkernel.{name}") for name in files}

    before = digests()
    (tmp_path / "b").write_text("import ejkernel.a\nx = 2\n")
    after = digests()
    _kernel_cache.digest_of_sources.cache_clear()
    assert [name for name in files if before[name] != after[name]] == ["a", "b"]


def test_device_code_imports_from_modules_and_not_from_packages():
    """Of a package `digest_of_sources` sees `__init__` alone, so a kernel would keep its file when a module changes."""
    root = Path(_kernel_cache.__file__).parents[2]
    files = list(root.rglob("triton/device/*.py"))
    assert len(files) > 20
    for file in files:
        for name in re.findall(r"^(?:from|import) (ejkernel[\w.]*)", file.read_text(), re.MULTILINE):
            assert (root / name.replace(".", "/")).with_suffix(".py").is_file(), f"{file}: {name}"
