"""Checkpoints: arrays and a JSON header in one npz, written whole or not at all, and checked when read."""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

FORMAT = "ejkernel demo checkpoint, version 1"
HEADER = "header.json"

Tree = TypeVar("Tree")


class CheckpointError(ValueError):
    """The file is no checkpoint that can be continued from; the message says why."""


def save(path: Path, header: dict[str, Any], tree: Any) -> None:
    """Writes `tree`'s arrays and `header` to `path`, which holds the old checkpoint until the new one is complete."""
    arrays = _named(tree)
    shapes = {name: [list(each.shape), str(each.dtype)] for name, each in arrays.items()}
    text = json.dumps({"format": FORMAT, "arrays": shapes, **header})
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays, **{HEADER: np.frombuffer(text.encode(), np.uint8)})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, settings: dict[str, Any], like: Tree) -> tuple[dict[str, Any], Tree]:
    """The header, and the arrays put together as `like`; `settings` must be those of the header."""
    try:
        # opened here, since NumPy leaves a broken file open
        with path.open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise ValueError("one array alone")
            arrays = {name: stored[name] for name in stored.files}
        # NumPy hands out as bytes what is no array
        if any(not isinstance(each, np.ndarray) for each in arrays.values()):
            raise ValueError("not all of it is arrays")
        header = json.loads(arrays.pop(HEADER).tobytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no checkpoint to resume") from None
    except KeyError:
        raise CheckpointError(f"{path}: has no header, so it is no checkpoint of the demo") from None
    # RuntimeError is what damaged flags in a zip file can end in
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: is not in the format {FORMAT!r}")
    stored_settings = header.get("settings")
    if not isinstance(stored_settings, dict):
        raise CheckpointError(f"{path}: does not say what settings it was made with")
    differing = [name for name, value in settings.items() if stored_settings.get(name) != value]
    if differing:
        was = {name: stored_settings.get(name) for name in differing}
        now = {name: settings[name] for name in differing}
        raise CheckpointError(f"{path}: was made with {was}, not {now}")
    expected = _named(like)
    if missing := sorted(expected.keys() ^ arrays.keys()):
        raise CheckpointError(f"{path}: its arrays are not the model's; {missing[0]} is in one of them only")
    for name, each in expected.items():
        got = arrays[name]
        if (got.shape, got.dtype) != (each.shape, each.dtype):
            raise CheckpointError(f"{path}: {name} is {got.dtype}{got.shape}, expected {each.dtype}{each.shape}")
    leaves = [jax.numpy.asarray(arrays[name]) for name in expected]
    return header, jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of `tree` by their place in it, in its order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
