"""What the documentation shows runs as shown: examples in docstrings, and Python blocks on its pages."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(__file__).parent.parent
MODULES = ["ejkernel", *(each.name for each in pkgutil.walk_packages(ejkernel.__path__, "ejkernel."))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("name", [name for name in MODULES if "triton_k" not in name])
def test_docstrings(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=flags).failed == 0


def test_every_public_function_has_an_example():
    for name in ejkernel.__all__:
        public = getattr(ejkernel, name)
        if callable(public) and not isinstance(public, type):
            assert ">>>" in (public.__doc__ or ""), f"{name} has no example"


@pytest.mark.parametrize("block", BLOCKS)
def test_pages(block, capsys):
    exec(compile(block, "page", "exec"), {})
