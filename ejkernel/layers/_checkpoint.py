"""Arrays of safetensors files by name: memory-mapped, so that each is read when it is used."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES: dict[str, Any] = {
    **{"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64},
    **{"F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "BOOL": np.bool_},
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
_INDEX = "model.safetensors.index.json"


class Checkpoint(Mapping[str, np.ndarray]):
    """The arrays of a model as it is published, by the names of its state dict: a dict that reads them when asked.

    Files are memory-mapped and looked at first: one that is cut off, or is no safetensors file, is an error. So are
    arrays that the index names and no file holds. Arrays whose dtype NumPy does not have, as 4-bit floats, are bytes.

    Args:
        path: A safetensors file, an index (`model.safetensors.index.json`), or a folder that holds either.

    Raises:
        FileNotFoundError: There is no such file, or no safetensors file in the folder.
        ValueError: A file is cut off or no safetensors file, or arrays of the index are missing.

    Examples:
        >>> import tempfile, pathlib, json, numpy as np
        >>> header = json.dumps({"norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> content = len(header).to_bytes(8, "little") + header + np.ones(2, np.float32).tobytes()
        >>> _ = (folder / "model.safetensors").write_bytes(content)
        >>> dict(Checkpoint(folder))
        {'norm.weight': memmap([1., 1.], dtype=float32)}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        index, files = _files(self.path)
        self._arrays: dict[str, np.ndarray] = {}
        for file in files:
            self._arrays |= _mapped(file)
        if index is not None and (missing := set(_weight_map(index)) - set(self._arrays)):
            raise ValueError(
                f"{index}: got {len(missing)} names that no file holds, as {min(missing)!r}; expected all of them"
            )

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: got no JSON ({error}); expected a JSON object") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a JSON {type(found).__name__}; expected an object")
    return found


def _files(path: Path) -> tuple[Path | None, list[Path]]:
    """The index, if there is one, and the safetensors files."""
    if path.is_dir():
        if (path / _INDEX).exists():
            return _files(path / _INDEX)
        if files := sorted(path.glob("*.safetensors")):
            return None, files
        raise FileNotFoundError(f"{path}: got a folder without *.safetensors; expected a model as it is published")
    if path.suffix == ".json":
        files = [path.parent / name for name in sorted(set(_weight_map(path).values()))]
        if missing := [file.name for file in files if not file.exists()]:
            raise FileNotFoundError(f"{path}: got no {', '.join(missing)} beside it; expected all files that it names")
        return path, files
    if not path.exists():
        raise FileNotFoundError(f"{path}: got no such file; expected a safetensors file, an index or a folder")
    return None, [path]


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index}: got no 'weight_map' of names to files; expected an index of safetensors files")
    return found


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name of one file: the length of a header in 8 bytes, the header in JSON, numbers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise ValueError(f"{path}: got no safetensors file, or one cut off in its header")
        try:
            entries = {
                name: (entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
                for name, entry in json.loads(file.read(length)).items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}: got a header that is none; expected a safetensors file") from None
    numbers = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
    arrays = {}
    for name, (kind, shape, start, stop) in entries.items():
        if not 0 <= start <= stop <= len(numbers):
            raise ValueError(f"{path}: got a file cut off: {name} ends at byte {stop} of {len(numbers)}")
        raw = numbers[start:stop]
        if kind in _DTYPES:
            if stop - start != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize:
                raise ValueError(f"{path}: got {stop - start} bytes of {name}, whose shape {shape} has another size")
            raw = raw.view(_DTYPES[kind]).reshape(shape)
        arrays[name] = raw
    return arrays
