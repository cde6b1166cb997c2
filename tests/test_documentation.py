"""What the documentation shows runs as shown: examples in docstrings, and Python blocks on its pages, which build."""

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from triton_interpreter import device_modules

import ejkernel

ROOT = Path(__file__).parent.parent
MODULES = ["ejkernel", *(each.name for each in pkgutil.walk_packages(ejkernel.__path__, "ejkernel."))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("name", sorted(set(MODULES) - set(device_modules())))
def test_docstrings(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    # decorated functions too, which are told to be the module's own by what they wrap
    decorated = {key: inspect.unwrap(x) for key, x in vars(module).items() if hasattr(x, "__wrapped__")}
    module.__test__ = {key: x for key, x in decorated.items() if getattr(x, "__module__", "") == name}
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
    """What a built page loads, the rows of its tables, its paragraphs and blocks of code, and what it typesets."""

    def __init__(self, path):
        super().__init__()
        self.loaded, self.rows, self.paragraphs, self.code, self.formulas = [], [], [], [], 0
        self.open = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag in ("script", "img", "link", "iframe"):
            self.loaded += [found[name] for name in ("src", "href") if found.get(name)]
        elif tag == "tr":
            self.rows.append([])
        elif tag == "math":
            self.formulas += 1
        elif tag in (texts := {"td": self.rows[-1] if self.rows else [], "p": self.paragraphs, "pre": self.code}):
            texts[tag].append("")
            self.open.append((tag, texts[tag]))

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            self.open.pop()

    def handle_data(self, text):
        if self.open:
            self.open[-1][1][-1] += text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages as `make docs` builds them, by path; a warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    # with what is installed here: `-o` takes the file that says so as it is
    command = ["make", "-o", f"{sys.prefix}/.docs", "docs", f"VENV={sys.prefix}", f"SITE={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return {str(path.relative_to(folder)): path for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(file) for path, file in site.items() if path.endswith(".html")}


def test_pages_build_and_need_no_network(site, pages):
    assert "ops/recurrent.html" in pages
    for path, page in pages.items():
        remote = [each for each in page.loaded if re.match(r"(https?:)?//", each)]
        assert not remote, f"{path} loads {remote}"
    styles = [file for path, file in site.items() if path.endswith(".css")]
    assert styles and not [file for file in styles if re.search(r"(url\(|@import)\W*(https?:)?//", file.read_text())]


def test_search_works_on_files(site, pages):
    """A page that is opened as a file may not fetch the index, nor start a worker to search it."""
    assert site["search/search_index.js"].read_text().startswith("var __index = {")
    assert "assets/iframe-worker.js" in pages["index.html"].loaded and "assets/iframe-worker.js" in site


def test_formulas_are_typeset(site, pages):
    for path in ("ops/recurrent.html", "ops/attention.html", "linear_recurrence.html", "published/gated_rnns.html"):
        assert pages[path].formulas, path
    for path, page in pages.items():
        assert "$$" not in "".join(page.paragraphs), path


def test_lists_and_tables_are_no_paragraphs(pages):
    """Without a blank line before it, a list ends up in the paragraph above."""
    for path, page in pages.items():
        lost = [text for text in page.paragraphs if re.search(r"^\s*([-*] |\d+\. |\|)", text, re.MULTILINE)]
        assert not lost, f"{path}: {lost[0][:80]}"


def test_examples_show_their_code(pages):
    shown = [text.strip() for text in pages["examples.html"].code]
    for script in (ROOT / "examples").glob("*.py"):
        assert script.read_text().strip() in shown, script.name


def test_comparisons_are_what_was_measured(pages):
    gla = measured_ops()["recurrent_gla, mild gates"]
    times = f"{gla['fla_ms'] / gla['ms']:.2f}"
    ours, theirs = f"{gla['ms']:.3f}", f"{gla['fla_ms']:.2f}"
    assert [times, "recurrent_gla, mild gates", "forward + backward", ours, theirs] in pages["peers.html"].rows
    for op in {row["op"] for row in measured("bench_h200")}:
        assert [row for row in pages["peers.html"].rows if row and row[0] == op], f"{op} stands beside nothing"


def test_times_of_layers_are_what_was_measured(pages):
    """A dash stands for what was not timed; bytes are those of the compiled steps at the speed of a copy."""
    training = next(row for row in pages["gpu.html"].rows if row and row[0] == "GatedDeltaNet")
    rows = {row["name"]: row for row in measured("layers_h200")}
    forward, gradients = (rows.get(f"GatedDeltaNet, {each}", {}) for each in ("forward", "gradients"))
    for cell, number in ((training[1], "ms"), (training[3], "projections_ms")):
        said = [None if each == "-" else float(each) for each in cell.split(" / ")]
        assert said == [each and pytest.approx(each, rel=0.05) for each in (forward.get(number), gradients.get(number))]
    step = next(row for row in pages["serving.html"].rows if row and row[0] == "GatedDeltaNet")
    (one,) = (row["ms"] for row in measured("steps_h200") if row["name"] == "GatedDeltaNet, step B1")
    (count,) = (row for row in measured("steps_compiled") if row["name"] == "GatedDeltaNet, step B1")
    least = 24 * (count["parameters_mb"] + 2 * count["carried_mb"]) / 4154
    assert [float(each) for each in step[1:3]] == [pytest.approx(one, rel=0.05), pytest.approx(least, rel=0.05)]


def test_the_readme_and_the_start_page_say_the_same_of_why():
    readme, start = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    why = re.search(r"^## Why this one$.*?(?=^## )", readme, re.DOTALL | re.MULTILINE)[0]
    assert why.replace("docs/assets/", "assets/") in start
    for name, row in measured_ops().items():
        op, *gates = name.split(", ")
        if row["fla_ms"] and gates in ([], ["mild gates"]) and op != "gated_delta_rule":
            beside = "beside fla's" if op == "recurrent_gla" else "beside"
            assert f"{op} {row['ms']:.2f} {beside} {row['fla_ms']:.2f}" in " ".join(why.split())


def measured_ops():
    """Rows of ops with gradients, by name."""
    rows = [row for file in ("linear_recurrence_h200", "delta_rule_h200") for row in measured(file)]
    return {row["name"]: row for row in rows if row["direction"] == "forward+backward"}


def measured(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]


def test_support_tables_come_from_the_implementations(pages):
    rows = pages["ops/recurrent.html"].rows
    no_dtype = "no: dtype float64 is none of bfloat16, "
    assert ["float64", f"{no_dtype}float32", f"{no_dtype}float16, float32", "yes"] in rows
    assert ["packed: cu_seqlens", "yes", "yes", "yes"] in rows
    rows = pages["ops/flash_attention.html"].rows
    assert ["causal", "yes", "yes", "yes", "yes"] in rows
    assert ["softmax_aux", "yes", "no: it has no softmax_aux", "yes", "yes"] in rows


def documented(path):
    """The names that a page has the reference of."""
    return [name.split(".")[-1] for name in re.findall(r'<h3 id="([\w.]+)" class="doc', path.read_text())]


def test_every_op_has_a_page_with_its_own_reference(site):
    for name in ejkernel.__all__:
        public = getattr(ejkernel, name)
        if callable(public) and not isinstance(public, type) and name not in ("debug", "explain"):
            assert documented(site[f"ops/{name}.html"]) == [name]
            assert "<!-- support" not in site[f"ops/{name}.html"].read_text(), f"{name}: no table"


@pytest.mark.parametrize("name", ["layers", "parallel", "xla_utils"])
def test_everything_public_of_a_module_is_on_its_page(site, name):
    """Or on those of a folder of its name, as each layer is."""
    pages = [page for page in site if page == f"ops/{name}.html" or re.fullmatch(rf"{name}/\w+\.html", page)]
    module = importlib.import_module(f"ejkernel.{name}")
    assert set(module.__all__) <= {each for page in pages for each in documented(site[page])}
