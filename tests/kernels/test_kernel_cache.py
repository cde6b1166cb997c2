"""Compiled kernels from one process to the next: what a file's name depends on, and files that are no use."""

import os
import sys
import threading
from dataclasses import dataclass, replace

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
    cache_key: str = "source"
    arg_names: tuple = ("x",)


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
        {"kernel": Kernel(arg_names=("y",))},
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
