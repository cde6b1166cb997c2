"""Compiled kernels: made side by side in threads, and kept in files for the next process.

A file's name is a digest of all that its kernel depends on, so a file is never changed, and any process may write it.
A folder that cannot be read or written is no error: kernels are then compiled in every process.
"""

import contextlib
import contextvars
import functools
import hashlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ejkernel import _cache_folder

_pending: dict[str, Future[bytes]] = {}
_lock = threading.Lock()
_pass: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("ejkernel_pass", default=None)

# `ast.parse`, by which Triton reads a kernel, fails in two threads at once up to Python 3.11.7 and 3.12.1
_THREADS = sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12)


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Kernels launched in this context belong to one pass: when the first is lowered, all are compiled in parallel."""
    token = _pass.set([])
    try:
        yield
    finally:
        _pass.reset(token)


def launches_of_this_pass() -> list[Any]:
    """The launches of the pass that is being traced; `_launch.launch` appends to it."""
    launches = _pass.get()
    return [] if launches is None else launches


def digest(*parts: object) -> str:
    """A name for something that depends on `parts` only, through their `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def digest_of_sources(module: str) -> str:
    """A digest of the source of a module, and of all modules of this library that it imports, whatever was used before.

    Triton's own key of a kernel depends on which kernels the process has compiled before it.
    """
    sources: dict[str, str] = {}
    found = [module]
    while found:
        name = found.pop()
        if name not in sources:
            sources[name] = Path(str(sys.modules[name].__file__)).read_text()
            found += re.findall(r"^(?:from|import) (ejkernel\.[\w.]+)", sources[name], re.MULTILINE)
    return digest(sorted(sources.items()))


def start(key: str, make: Callable[[], bytes]) -> Future[bytes]:
    """Begins to read or compile a kernel in a thread, unless that has begun."""
    with _lock:
        if key not in _pending:
            _pending[key] = _pool(os.getpid()).submit(_read_or_make, key, make)
        return _pending[key]


def get(key: str, make: Callable[[], bytes]) -> bytes:
    """Waits for the compiled kernel and returns it. It is not held in memory: a later call reads the file."""
    try:
        return start(key, make).result()
    finally:
        with _lock:
            _pending.pop(key, None)


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process: a forked process does not have its parent's."""
    return ThreadPoolExecutor(os.cpu_count() if _THREADS else 1, thread_name_prefix="ejkernel-compile")


def _read_or_make(key: str, make: Callable[[], bytes]) -> bytes:
    file = _file(key)
    if file is not None and (known := _read(file)) is not None:
        return known
    compiled = make()
    if file is not None:
        _write(file, compiled)
    return compiled


def _file(key: str) -> Path | None:
    where = _cache_folder.folder()
    return None if where is None else where / "triton" / key


def _read(file: Path) -> bytes | None:
    """What `_write` wrote, or `None` if the file is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    checksum, compiled = content[:32], content[32:]
    return compiled if hashlib.sha256(compiled).digest() == checksum else None


def _write(file: Path, compiled: bytes) -> None:
    """Writes a temporary file and renames it, so that no process reads an unfinished one."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as unfinished:
                unfinished.write(hashlib.sha256(compiled).digest() + compiled)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
