"""Whether `ejkernel check` has passed here, for this version and chip: an empty file in the user's cache folder."""

import contextlib
import os
from pathlib import Path

import jax

from ejkernel._version import __version__


def _file() -> Path:
    """Whose presence says so."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = f"{__version__}-jax-{jax.__version__}-{jax.devices()[0].device_kind}"
    safe = "".join(each if each.isalnum() or each in ".-" else "_" for each in name)
    return Path(folder) / "ejkernel" / f"checked-{safe}"


def remember() -> None:
    """Notes that it has passed; a folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def passed() -> bool:
    """Whether it has."""
    try:
        return _file().exists()
    except OSError:
        return False
