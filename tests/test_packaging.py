"""What is installed, and what is said about installing it."""

import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(__file__).parent.parent
WORDS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")),
    *(
        path
        for folder in ("docs", "ejkernel", "examples", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*")
    ),
]
# on the public index our import name is another project, which nobody should be told to install, with extras or without
OTHER_PROJECT = re.compile(r"pip install[^\n`]*[ '\"]ejkernel\b(?![-_/.])")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout: its files, and its metadata."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    assert path.name == f"ejkernel_jax-{ejkernel.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return archive.namelist(), email.message_from_bytes(archive.read(name))


def test_metadata(wheel):
    _, metadata = wheel
    assert metadata["Name"] == "ejkernel-jax"
    assert metadata["Version"] == ejkernel.__version__
    assert metadata["Author"] == "The ejkernel authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"cuda", "layers", "cli", "docs", "dev"} <= set(metadata.get_all("Provides-Extra"))
    # the extra that names our own ones brings what they bring, and not the other project
    required = metadata.get_all("Requires-Dist")
    assert not [each for each in required if each.startswith("ejkernel")]
    assert [each for each in required if each.startswith("flax") and "extra == 'dev'" in each]


def test_files(wheel):
    names, _ = wheel
    assert {"ejkernel/__init__.py", "ejkernel/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"ejkernel", f"ejkernel_jax-{ejkernel.__version__}.dist-info"}


def test_description_stands_alone(wheel):
    """On an index page there is nothing beside it that a relative link could lead to."""
    _, metadata = wheel
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "## Install" in text
    links = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=[\"']([^\"']*)", text, re.MULTILINE)
    targets = ["".join(found) for found in links]
    assert not [target for target in targets if not target.startswith(("https://", "#"))]


@pytest.mark.parametrize(
    "text",
    ["pip install ejkernel", "pip install 'ejkernel[cuda]'", "pip install 'jax[cuda13]' 'ejkernel[cuda]'"],
)
def test_the_search_finds_the_other_project(text):
    assert OTHER_PROJECT.search(text)


def test_nothing_says_to_install_the_other_project():
    here = Path(__file__)
    for path in WORDS:
        if path.is_file() and path != here and "__pycache__" not in path.parts:
            found = OTHER_PROJECT.search(path.read_bytes().decode(errors="replace"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"
