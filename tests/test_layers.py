"""Imports go down the layers of `docs/architecture.md`, never up; the tests have the same folders."""

import ast
import re
from pathlib import Path

import ejkernel

ROOT = Path(ejkernel.__file__).parent
# Lower layers first; a module may import from its own layer and the ones below.
LAYERS = (
    (
        "ejkernel._cache_folder",
        "ejkernel._checked",
        "ejkernel._checks",
        "ejkernel._command_line",
        "ejkernel._debug",
        "ejkernel._devices",
        "ejkernel._front",
        "ejkernel._mesh",
        "ejkernel._normalization",
        "ejkernel._sharding",
        "ejkernel._version",
        "ejkernel.bench.timing",
    ),
    ("ejkernel.xla_utils",),
    ("ejkernel._dispatch",),
    (
        "ejkernel.kernels._differentiable",
        "ejkernel.kernels._kernel_cache",
        "ejkernel.kernels._launch",
        "ejkernel.kernels._mapping",
        "ejkernel.kernels._op",
        "ejkernel.kernels._pallas",
        "ejkernel.kernels._partitioned",
        "ejkernel.kernels._phases",
        "ejkernel.kernels._shared_memory",
        "ejkernel.kernels._varying",
        "ejkernel.kernels._views",
        "ejkernel.kernels.chunks",
    ),
    ("ejkernel.kernels",),
    ("ejkernel._bind", "ejkernel._pools"),
    (
        "ejkernel.attention",
        "ejkernel.convolution",
        "ejkernel.delta_rule",
        "ejkernel.linear_attention",
        "ejkernel.paged_attention",
    ),
    ("ejkernel.kernels._xla", "ejkernel.layers", "ejkernel.parallel"),
    ("ejkernel",),
)


DEVICE_CODE = re.compile(r"^(import triton|from jax.experimental(\.pallas)? import (pallas as pl|tpu as pltpu))$", re.M)


def layer(module):
    """The number of the layer with the longest name that `module` starts with."""
    names = [
        (len(name), number)
        for number, layer in enumerate(LAYERS)
        for name in layer
        if f"{module}.".startswith(f"{name}.")
    ]
    return max(names)[1]


def name_of(path):
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """The modules of ours that the one at `path` imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] == "ejkernel")


def test_imports_go_down():
    for path in ROOT.rglob("*.py"):
        module = name_of(path)
        for name in imports(path):
            assert layer(name) <= layer(module), f"{module} imports {name}, which is above it"


CORES = (
    "ejkernel.kernels.attention",
    "ejkernel.kernels.convolution",
    "ejkernel.kernels.delta_rule",
    "ejkernel.kernels.linear_recurrence",
    "ejkernel.kernels.rotary",
    "ejkernel.kernels.step",
)


def test_no_core_imports_another():
    """What they share is in `ejkernel.kernels.chunks` or beside it; by name counts too, as device code is imported."""
    for core in CORES:
        others = [f"{each}." for each in CORES if each != core]
        for path in (ROOT / core.removeprefix("ejkernel.").replace(".", "/")).rglob("*.py"):
            words = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            by_name = (word for word in words if isinstance(word, str) and word.startswith("ejkernel."))
            found = [name for name in (*imports(path), *by_name) if f"{name}.".startswith(tuple(others))]
            assert not found, f"{name_of(path)} imports {found}"


def test_only_one_module_imports_jax_triton():
    users = {path.name for path in ROOT.rglob("*.py") if "jax_triton" in path.read_text()}
    assert users <= {"_launch.py"}


def test_device_code_is_imported_when_it_is_launched():
    """`import ejkernel` must not import Triton or Pallas: only device code does, and only device code imports that."""
    paths = list(ROOT.rglob("*.py"))
    device = {name_of(path) for path in paths if DEVICE_CODE.search(path.read_text()) or path.parent.name == "device"}
    assert {name.split(".")[2] for name in device} >= {"chunks", "linear_recurrence"}
    for path in ROOT.rglob("*.py"):
        if name_of(path) not in device:
            found = [name for name in imports(path) if any(f"{name}.".startswith(f"{each}.") for each in device)]
            assert not found, f"{path} imports {found}"


def test_tests_mirror_the_tree():
    """And have names of their own: pytest imports them by these alone."""
    here = Path(__file__).parent
    tests = [path for path in here.rglob("*.py") if "__pycache__" not in path.parts]
    for folder in {path.parent.relative_to(here) for path in tests}:
        assert (ROOT / folder).is_dir(), f"tests/{folder} holds tests of nothing"
    assert len({path.name for path in tests}) == len(tests)
