"""Results files: `python -m benchmarks.page` draws whatever is in one, or says in a line what is wrong with it."""

import contextlib
import copy
import html
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote_to_bytes

import markdown
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples

from benchmarks.page import __main__ as page_command
from benchmarks.page.document import Heading, Paragraph, Points, Table, as_html, as_markdown
from ejkernel.bench.results import line

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "benchmarks" / "results" / "bench_h200.json").read_text())
# few pictures: each takes a tenth of a second
DOCUMENT["rows"] = [
    row
    for row in DOCUMENT["rows"]
    if (row["op"], row["direction"]) == ("attention", "forward") and row["tokens"] < 4096
]


def drawn(text, page="page.md"):
    """The exit code and what is said, of a file that holds `text`; nothing may appear but the page and its pictures."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        home = Path("home")
        home.mkdir()
        Path("rows.json").write_bytes(text)
        with (
            contextlib.redirect_stdout(io.StringIO()) as said,
            contextlib.redirect_stderr(io.StringIO()) as complaint,
        ):
            code = page_command.main(["rows.json", "--plot", str(home / page)])
        (home / "page").mkdir(exist_ok=True)
        assert {str(each) for each in Path(".").iterdir()} == {"home", "rows.json"}
        assert {each.name for each in home.iterdir()} <= {"page", page}
        assert all(each.suffix == ".svg" for each in (home / "page").iterdir())
        assert (home / page).exists() == (code == 0)
    return code, said.getvalue() + complaint.getvalue()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["device"], "", "device: got ''; expected a line of 1 to 1000 printable letters"),
        (["device"], "\ud800", r"device: got '\ud800'; expected a line"),
        (["device"], "a\nb", r"device: got 'a\nb'; expected a line"),
        (["platform"], "../../x", "platform: got '../../x'; expected a name of at most 20 letters, digits and _"),
        (["versions"], [], "versions: got a list; expected an object"),
        (["versions", "jax"], 3, "versions.jax: got 3; expected a line"),
        (["date"], "2026-02-30", "date: got '2026-02-30'; expected a date as in 2026-01-31"),
        (["copy_bytes_per_s"], float("nan"), "copy_bytes_per_s: got nan; expected a number from 1e-09 to 1e+30"),
        (["flops_per_s", "float32"], 0, "flops_per_s.float32: got 0; expected a number"),
        (["flops_per_s", "int8"], 1.0, "a name in flops_per_s: got 'int8'; expected one of float32, bfloat16, float16"),
        (["complete"], 1, "complete: got 1; expected true or false"),
        (["rows", 0], [], "row 0: got a list; expected an object"),
        (["rows", 0, "op"], "a/../b", "row 0: op: got 'a/../b'; expected a name of at most 40"),
        (["rows", 1, "who"], None, "row 1: who: got null; expected a name"),
        (
            ["rows", 0, "direction"],
            "sideways",
            "row 0: direction: got 'sideways'; expected one of forward, forward+bac",
        ),
        (["rows", 0, "tokens"], True, "row 0: tokens: got True; expected a whole number from 1 to 9007199254740992"),
        (["rows", 0, "median_ms"], 10**400, "row 0: median_ms: got 1000"),
        (["rows", 0, "median_ms"], 5e-324, "row 0: median_ms: got 5e-324; expected a number from 1e-09 to 1e+30"),
        (["rows", 0, "ratio"], float("inf"), "row 0: ratio: got inf; expected a number"),
        (["rows", 0, "errors"], {"output": -1e-9}, "row 0: errors.output: got -1e-09; expected a number from 0"),
        (["rows", 0, "\udfff"], 1, r"row 0: '\udfff' is no field of it; expected op, who,"),
    ],
)
def test_every_field_is_held_to_what_it_may_be(place, value, message):
    changed = copy.deepcopy(DOCUMENT)
    put(changed, place, value)
    code, said = drawn(json.dumps(changed).encode())
    assert code == 2 and said.startswith(f"rows.json: {message}") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no JSON, or only a part of it"),
        (lambda text: "", "is no JSON"),
        (lambda text: "[1, 2]", "is not in the format"),
        (lambda text: text.replace("version 1", "version 7"), "is not in the format 'ejkernel bench, version 1'"),
        (lambda text: text.replace('"op": ', '"opus": ', 1), "row 0: 'opus' is no field"),
        (
            lambda text: text.replace('"tokens": 512', '"tokens": "512"', 1),
            "row 0: tokens: got '512'; expected a whole number",
        ),
        (lambda text: text.replace('"who": "ejkernel", ', "", 1), "row 0: lacks who"),
        (lambda text: text.replace('"date": ', '"day": '), "'day' is no field"),
        (lambda text: text.replace('"rows"', '"columns"'), "has no rows"),
    ],
)
def test_foreign_files_are_told(tmp_path, capsys, change, message):
    path = tmp_path / "broken.json"
    path.write_text(change(json.dumps(DOCUMENT)))
    assert page_command.main([str(path), "--plot", str(tmp_path / "page.html")]) == 2
    assert f"{path}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_wrong_use_exits_with_2(capsys):
    for arguments, message in ((["rows.json"], "required: --plot"), (["x", "--plot", "a.png"], "ends in .html or .md")):
        with pytest.raises(SystemExit) as end:
            page_command.main(arguments)
        assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "message"), [("none/x.html", "cannot be written"), ("a.html", "expected a file")])
def test_unwritable_pages_are_told(tmp_path, capsys, name, message):
    (tmp_path / "a.html").mkdir()
    assert page_command.main([str(tmp_path / "rows.json"), "--plot", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page_command.main(["rows.json", "--plot", str(tmp_path / "page.html")]) == 1
    assert "--plot: drawing needs matplotlib, the extra cli: pip install '.[cli]'" in capsys.readouterr().err


def test_a_stopped_run_is_told_on_the_page(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(DOCUMENT | {"complete": False}))
    assert page_command.main([str(tmp_path / "rows.json"), "--plot", str(tmp_path / "page.md")]) == 0
    assert "The run was stopped before its end." in (tmp_path / "page.md").read_text()


def put(document, place, value):
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def places(document, before=()):
    """Where something stands in a document: the keys that lead there."""
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield [*before, key]
        yield from places(document[key], [*before, key])


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**53, 2**63, 10**400, 0, -1]),
        st.floats(),
        st.sampled_from([5e-324, 1e-9, 1e30, 1e308]),
        st.text(st.characters(exclude_categories=[]), max_size=8),
        st.sampled_from(["../x", "/x", "a|b", "<b>", "$x", "cpu2", "float16", "2026-01-31", "ejkernel", "a.b"]),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@examples(50, 2000)
@given(st.data())
def test_a_changed_document_is_drawn_or_told(data):
    changed = copy.deepcopy(DOCUMENT)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(places(changed))))
        old = changed
        for key in place:
            old = old[key]
        # a value of the same kind gets further than one drawn from all
        numbers = st.floats(1e-9, 1e30) if isinstance(old, float) else st.integers(1, 2**53)
        value = data.draw(numbers if type(old) in (int, float) and data.draw(st.booleans()) else VALUES)
        put(changed, place, value)
    expect_drawn_or_told(json.dumps(changed).encode(), data.draw(st.sampled_from(["page.md", "page.html"])))


@examples(60, 2000)
@given(st.data())
def test_a_damaged_file_is_drawn_or_told(data):
    whole = json.dumps(DOCUMENT).encode()
    start = data.draw(st.integers(0, len(whole)))
    rest = whole[start + data.draw(st.integers(0, 40)) :]
    expect_drawn_or_told(whole[:start] + data.draw(st.binary(max_size=8)) + rest)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff\xfe", b"9" * 5000], ids=len)
def test_what_is_no_document_is_told(text):
    assert drawn(text)[0] == 2
    expect_drawn_or_told(text)


@pytest.mark.parametrize("page", ["p\udcff.html", "p\udcff.md", "a (b) `c`.md"])
def test_files_may_have_any_name(page, tmp_path, capsys):
    source = tmp_path / "r\udcff.json"
    source.write_text(json.dumps(DOCUMENT))
    assert page_command.main([str(source), "--plot", str(tmp_path / page)]) == 0
    assert capsys.readouterr().out.startswith("wrote ")
    if page.endswith(".md"):
        links = re.findall(r"\]\((.*?\.svg)\)", (tmp_path / page).read_text())
        assert links and all((tmp_path / os.fsdecode(unquote_to_bytes(each))).exists() for each in links)


def expect_drawn_or_told(text, page="page.md"):
    code, said = drawn(text, page)
    assert (code, said.startswith("wrote ")) == (0, True) or (code, said.startswith("rows.json: ")) == (2, True)
    assert said.count("\n") == 1 and said.endswith("\n")


SIGNS = st.text(st.sampled_from("ab1. `*_{}[]()#+-!<>&|~^$:=\\\"'/é"), min_size=1, max_size=20)


@examples(200, 5000)
@example("`1``1`")
@example("[x](y) ![z] {: .a} 1. __b__ @given(SIGNS | st.text(max_size=20))amp; <i>")
@given(SIGNS | st.text(max_size=20))
def test_words_stay_words_in_markdown(text):
    """Under the extensions that the documentation uses, a reader sees in both kinds of page the same words."""
    text = line(text)
    blocks = [Heading(2, text), Paragraph(text), Points([text, text]), Table([text, "x"], [[text, "y"]])]
    extensions = ["admonition", "attr_list", "tables", "toc", "pymdownx.superfences"]
    made = markdown.markdown(as_markdown(blocks, "folder"), extensions=extensions)
    assert seen(made) == seen(re.sub(".*<body>|</body>.*", "", as_html(blocks), flags=re.DOTALL))


def seen(page):
    """The tags that a reader sees as such, with the words between them."""
    page = re.sub(r"</?(div|thead|tbody)[^>]*>|\n", "", page)
    parts = re.split(r"<(/?\w+)[^>]*>", page)
    return [html.unescape(part).strip() for part in parts if part.strip()]
