"""What the documentation shows runs as shown: examples in docstrings, and Python blocks on its pages, which build."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
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
    """Also: a comment after a `print` is what it prints."""
    with warnings.catch_warnings():
        exec(compile(block, "page", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    for line in re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert line in printed


class Page(HTMLParser):
    """What a built page loads, and the rows of its tables."""

    def __init__(self, path):
        super().__init__()
        self.loaded, self.rows, self.in_cell = [], [], False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag in ("script", "img", "link", "iframe"):
            self.loaded += [found[name] for name in ("src", "href") if found.get(name)]
        elif tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, text):
        if self.in_cell:
            self.rows[-1][-1] += text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages, by path; a warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {str(path.relative_to(folder)): path for path in folder.rglob("*")}


def test_pages_build_and_need_no_network(site):
    pages = {path: Page(file) for path, file in site.items() if path.endswith(".html")}
    assert "ops/recurrent.html" in pages
    for path, page in pages.items():
        remote = [each for each in page.loaded if re.match(r"(https?:)?//", each)]
        assert not remote, f"{path} loads {remote}"
    styles = [file for path, file in site.items() if path.endswith(".css")]
    assert styles and not [file for file in styles if re.search(r"(url\(|@import)\W*(https?:)?//", file.read_text())]


def test_support_tables_come_from_the_implementations(site):
    rows = Page(site["ops/recurrent.html"]).rows
    assert ["gv", "no: decay along the value dims (gv) has no Triton kernel", "yes"] in rows
    assert ["packed: cu_seqlens", "yes", "yes"] in rows
    rows = Page(site["ops/flash_attention.html"]).rows
    assert ["causal", "yes", "yes"] in rows
    assert ["softmax_aux", "no: it has no softmax_aux", "yes"] in rows


def documented(path):
    """The names that a page has the reference of."""
    return [name.split(".")[-1] for name in re.findall(r'<h3 id="([\w.]+)" class="doc', path.read_text())]


def test_every_op_has_a_page_with_its_own_reference(site):
    for name in ejkernel.__all__:
        public = getattr(ejkernel, name)
        if callable(public) and not isinstance(public, type) and name != "explain":
            assert documented(site[f"ops/{name}.html"]) == [name]
            assert "<!-- support" not in site[f"ops/{name}.html"].read_text(), f"{name}: no table"


@pytest.mark.parametrize("name", ["layers", "parallel", "xla_utils"])
def test_everything_public_of_a_module_is_on_its_page(site, name):
    module = importlib.import_module(f"ejkernel.{name}")
    assert set(module.__all__) <= set(documented(site[f"ops/{name}.html"]))
