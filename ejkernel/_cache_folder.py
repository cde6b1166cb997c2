"""Where the library keeps files from one process to the next."""

import os
from pathlib import Path


def folder() -> Path | None:
    """`EJKERNEL_CACHE_DIR` or, without it, a folder in the user's cache; `None` if it is set to nothing."""
    chosen = os.environ.get("EJKERNEL_CACHE_DIR")
    if chosen is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(home) / "ejkernel"
    return Path(chosen) if chosen else None
