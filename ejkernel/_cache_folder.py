"""The folder in which the library keeps files for the next process."""

import os
from pathlib import Path


def folder() -> Path | None:
    """`EJKERNEL_CACHE_DIR`, by default a folder in the user's cache; `None` if the variable is empty."""
    folder = os.environ.get("EJKERNEL_CACHE_DIR")
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(home) / "ejkernel"
    return Path(folder) if folder else None
