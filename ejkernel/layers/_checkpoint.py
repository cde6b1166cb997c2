"""Arrays of safetensors files by name. Files are memory-mapped, so each array is read when it is used."""

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
    """The arrays of a published model, by the names in its state dict: a mapping that reads an array when it is used.

    The files' headers are checked first: a truncated file, a file in another format, and arrays that the index names
    but no file holds are errors. Arrays of dtypes that NumPy lacks, such as 4-bit floats, are returned as bytes.

    Args:
        path: A safetensors file, an index (`model.safetensors.index.json`), or a folder that contains one of them.

    Raises:
        FileNotFoundError: The file does not exist, or the folder contains no safetensors file.
        ValueError: A file is truncated or not a safetensors file, or arrays of the index are missing.

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
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: got no JSON ({error}); expected a JSON object") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a JSON {type(content).__name__}; expected an object")
    return content


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
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: got no 'weight_map' of names to files; expected an index of safetensors files")
    return weight_map


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """The arrays of one file by name. A file is 8 bytes with the header's length, the header in JSON, and the data."""
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
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
    arrays = {}
    for name, (kind, shape, start, stop) in entries.items():
        if not 0 <= start <= stop <= len(data):
            raise ValueError(f"{path}: got a file cut off: {name} ends at byte {stop} of {len(data)}")
        raw = data[start:stop]
        if kind in _DTYPES:
            if stop - start != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize:
                raise ValueError(f"{path}: got {stop - start} bytes of {name}, whose shape {shape} has another size")
            raw = raw.view(_DTYPES[kind]).reshape(shape)
        arrays[name] = raw
    return arrays
