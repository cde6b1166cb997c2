"""A mark that `ejkernel check` has passed on this chip with this version: an empty file in the cache folder."""

import contextlib
from pathlib import Path

import jax

from ejkernel import _cache_folder
from ejkernel._version import __version__


def _file() -> Path | None:
    """The file, or `None` if there is no cache folder."""
    folder = _cache_folder.folder()
    name = f"{__version__}-jax-{jax.__version__}-{jax.devices()[0].device_kind}"
    safe = "".join(each if each.isalnum() or each in ".-" else "_" for each in name)
    return None if folder is None else folder / f"checked-{safe}"


def remember() -> None:
    """Makes the file; that the folder cannot be written is no error."""
    file = _file()
    if file is not None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


def passed() -> bool:
    """Whether `ejkernel check` has passed."""
    file = _file()
    try:
        return file is not None and file.exists()
    except OSError:
        return False
