"""No network, no pickle, no code made at run time; files are read whole and checked, or not at all."""

import ast
import io
import itertools
import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import ejkernel

ROOT = Path(ejkernel.__file__).parent
PATHS = sorted(ROOT.rglob("*.py"))

# what reaches the network, makes objects out of bytes, or code out of text
MODULES = set(
    "aiohttp asyncio cloudpickle code codeop cPickle ctypes dill ftplib http httpx imaplib joblib marshal pickle poplib"
    " requests runpy shelve smtplib socket socketserver ssl telnetlib urllib urllib3 webbrowser xmlrpc yaml".split()
)
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("os", "system"), ("os", "popen"), ("subprocess", "run"), ("subprocess", "Popen"), ("np", "save")}


# device code is asked for by name, from the table in that file
BY_NAME = {
    "kernels/attention/paged/triton/__init__.py": ["DEVICE"],
    "kernels/attention/triton/launcher.py": ["DEVICE"],
    "kernels/chunks/pallas/pools.py": ["DEVICE"],
    "kernels/chunks/triton/packing.py": ["LISTS"],
    "kernels/chunks/triton/pools.py": ["SLOTS", "TABLES"],
    "kernels/chunks/triton/step.py": ["DEVICE"],
    "kernels/convolution/pallas/__init__.py": ["DEVICE"],
    "kernels/convolution/triton/__init__.py": ["DEVICE"],
    "kernels/delta_rule/triton/launcher.py": ["DEVICE"],
    "kernels/gated_norm/triton/__init__.py": ["DEVICE"],
    "kernels/linear_recurrence/triton/launcher.py": ["DEVICE"],
    "kernels/rotary/triton/__init__.py": ["DEVICE"],
    "kernels/step/triton/__init__.py": ["DEVICE"],
}


def imported(tree, tables=()):
    """The modules that are imported, at the top, inside functions or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            (name,) = node.args
            if isinstance(name, ast.JoinedStr):  # of a module of our own, whatever follows
                name = name.values[0]
                assert isinstance(name, ast.Constant) and name.value.startswith("ejkernel.")
            known = isinstance(name, ast.Constant)
            assert known or tables, f"line {node.lineno}: imports what is not known before it runs"
            yield from [name.value] if known else []
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in tables:
            words = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            yield from (word for word in words if isinstance(word, str))


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_source(path):
    tree, tables = ast.parse(path.read_text()), BY_NAME.get(str(path.relative_to(ROOT)), ())
    roots = {name.split(".")[0] for name in imported(tree, tables)}
    ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ejkernel"):
            ours |= {alias.name for alias in node.names}
    assert not roots & MODULES, f"imports {sorted(roots & MODULES)}"
    for call in calls(tree):
        name = ast.unparse(call.func)
        assert name not in CALLS, f"line {call.lineno} calls {name}"
        assert tuple(name.rsplit(".", 1)) not in METHODS, f"line {call.lineno} calls {name}"
        if name.split(".")[-1] in ("load", "loads", "memmap", "fromfile"):
            keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
            safe = name == "json.loads" or (name, keywords.get("allow_pickle")) == ("np.load", "False")
            # bytes are no objects, whatever they are viewed as afterwards
            safe = safe or (name == "np.memmap" and ast.unparse(call.args[1]) == "np.uint8")
            # device code loads from pointers; what our own functions load is looked at there
            safe = safe or name == "tl.load" or name.split(".")[0] in ours
            assert safe, f"line {call.lineno} calls {name} without allow_pickle=False"


def test_walk_sees_what_it_looks_for():
    tree = ast.parse("import os.path, pickle\nfrom urllib import request\nimportlib.import_module('socket')")
    assert set(imported(tree)) == {"os.path", "pickle", "urllib", "socket"}
    assert len(PATHS) > 50


pytest.importorskip("flax.nnx")

from examples.demo import checkpoint, training  # noqa: E402

SETTINGS = {"seed": 0, "width": 16}
TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.arange(4)}}


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, {"settings": SETTINGS, "step": 3}, TREE)
    return path


def refused(path, message, settings=SETTINGS, like=TREE):
    """Loading says `message`, names the file, and leaves what it was to be put into as it was."""
    before = jax.tree.map(np.copy, like)
    with pytest.raises(checkpoint.CheckpointError, match=message) as caught:
        checkpoint.load(path, settings, like)
    assert path.name in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, like, before)


def members(path):
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def write(path, arrays, header=None):
    if header is not None:
        arrays = arrays | {checkpoint.HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def header_of(path):
    return json.loads(members(path)[checkpoint.HEADER].tobytes())


def test_a_whole_checkpoint_is_read(whole):
    header, tree = checkpoint.load(whole, SETTINGS, jax.tree.map(np.zeros_like, TREE))
    assert header["step"] == 3
    jax.tree.map(np.testing.assert_array_equal, tree, TREE)


def test_truncated_anywhere(whole):
    content = whole.read_bytes()
    for length in sorted({0, 1, 4, 30, *range(50, len(content), 97), len(content) - 22, len(content) - 1}):
        whole.write_bytes(content[:length])
        refused(whole, "cannot be read")


def test_a_flipped_byte_anywhere(whole):
    """Either the file is refused, or what comes out is what went in."""
    content = whole.read_bytes()
    for place, mask in itertools.product(range(0, len(content), 3), (0x01, 0xFF)):
        whole.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        try:
            header, tree = checkpoint.load(whole, SETTINGS, TREE)
        except checkpoint.CheckpointError as error:
            assert whole.name in str(error)
        else:
            assert header["settings"] == SETTINGS
            jax.tree.map(np.testing.assert_array_equal, tree, TREE)


def test_foreign_files(whole, tmp_path):
    for content in (b"", b"text", b"\x93NUMPY", b"PK\x03\x04", bytes(1000)):
        whole.write_bytes(content)
        refused(whole, "cannot be read")
    np.save(tmp_path / "array.npy", np.zeros(3))
    refused(tmp_path / "array.npy", "one array alone")
    write(whole, TREE["b"])
    refused(whole, "has no header")
    with zipfile.ZipFile(whole, "w") as file:
        file.writestr("readme.txt", "not an array")
    refused(whole, "cannot be read")
    with zipfile.ZipFile(whole, "a") as file:
        file.writestr(checkpoint.HEADER, "{}")
    refused(whole, "cannot be read")
    refused(tmp_path, "cannot be read")
    refused(tmp_path / "none.npz", "there is no checkpoint to resume")


def test_pickles_are_not_opened(whole):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    write(whole, members(whole) | {"a": np.array([Bomb()])})
    refused(whole, "cannot be read")
    memory = io.BytesIO()
    np.save(memory, np.array([Bomb()]))
    whole.write_bytes(memory.getvalue())
    refused(whole, "cannot be read")


@pytest.mark.parametrize(
    "header, message",
    [
        ([], "is not in the format"),
        ({}, "is not in the format"),
        ("text", "is not in the format"),
        ({"format": "ejkernel demo checkpoint, version 2", "settings": SETTINGS}, "is not in the format .*version 1"),
        ({"format": checkpoint.FORMAT}, "does not say what settings"),
        ({"format": checkpoint.FORMAT, "settings": None}, "does not say what settings"),
        ({"format": checkpoint.FORMAT, "settings": [1]}, "does not say what settings"),
        ({"format": checkpoint.FORMAT, "settings": {}}, "was made with"),
        ({"format": checkpoint.FORMAT, "settings": SETTINGS | {"width": 32}}, r"was made with {'width': 32}, not"),
    ],
    ids=str,
)
def test_wrong_headers(whole, header, message):
    arrays = members(whole)
    del arrays[checkpoint.HEADER]
    write(whole, arrays, header)
    refused(whole, message)


def test_headers_that_are_no_json(whole):
    arrays = members(whole)
    for junk in (b"", b"{", b"\xff\xfe", b"[1,"):
        write(whole, arrays | {checkpoint.HEADER: np.frombuffer(junk, np.uint8)})
        refused(whole, "cannot be read")


def test_wrong_arrays(whole):
    arrays = members(whole)
    header = header_of(whole)
    del arrays[checkpoint.HEADER]
    for changed, message in (
        ({"a": arrays["a"]}, "b/c is in one of them only"),
        (arrays | {"d": np.zeros(1)}, "d is in one of them only"),
        (arrays | {"a": arrays["a"].T}, r"a is float32\(3, 2\), expected float32\(2, 3\)"),
        (arrays | {"a": arrays["a"].astype(np.float64)}, r"a is float64\(2, 3\), expected float32\(2, 3\)"),
        (arrays | {"b/c": arrays["b/c"].astype(np.float32)}, r"b/c is float32\(4,\)"),
    ):
        write(whole, changed, header)
        refused(whole, message)


@pytest.mark.parametrize("history", [None, {}, [1.0], [[1.0]], [[1.0, "x"]], "ab", [[1, 2, 3]]], ids=str)
def test_wrong_histories(whole, history):
    with pytest.raises(checkpoint.CheckpointError, match=r"checkpoint.npz: its history is not"):
        training._history(whole, history)


def test_a_failed_write_leaves_the_old_checkpoint(whole, monkeypatch):
    content = whole.read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(whole, {"settings": SETTINGS}, TREE)
    assert whole.read_bytes() == content
    assert [each.name for each in whole.parent.iterdir()] == [whole.name]
