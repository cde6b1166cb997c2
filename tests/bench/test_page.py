"""The page that `python -m benchmarks.page` makes of rows of `ejkernel bench`."""

import re
from pathlib import Path

import pytest

from benchmarks.page import blocks, figures, reading
from benchmarks.page.machine import machines
from ejkernel.bench import results
from ejkernel.bench.results import OURS, Row

ROOT = Path(__file__).parents[2]


def row(op, tokens, median_ms, who=OURS, direction="forward", **more):
    return Row(op, who, "xla", direction, "float32", 1, tokens, 4, 64, median_ms=median_ms, ratio=1.0, **more)


def test_crossings():
    linear, softmax = [(1, 4.0), (4, 8.0), (16, 16.0)], [(1, 2.0), (4, 16.0), (16, 128.0)]
    assert figures.crossings(linear, softmax) == [(pytest.approx(2.0), True)]
    assert figures.crossings(softmax, linear) == [(pytest.approx(2.0), False)]
    assert figures.crossings(linear, linear) == []
    assert figures.crossing_words([(256, 4.0), (1024, 8.0)], [(256, 2.0), (1024, 16.0)]) == "below about 510"
    assert figures.crossing_words([(256, 4.0), (1024, 8.0)], [(256, 5.0), (1024, 16.0)]) == "at none of 256 to 1024"
    assert figures.crossing_words([(256, 4.0), (1024, 8.0)], [(256, 3.0), (1024, 5.0)]) == "at all of 256 to 1024"
    assert figures.crossing_words([(256, 4.0)], [(512, 3.0)]) == "-"


def test_the_page_names_the_fastest_softmax_and_the_reasons(tmp_path):
    rows = [row("retention", 64, 2.0), row("retention", 256, 4.0)]
    rows += [row("flash_attention", 64, 4.0), row("flash_attention", 256, 64.0)]
    rows += [row("flash_attention", 64, 1.0, who="jax.nn"), row("flash_attention", 256, 8.0, who="jax.nn")]
    late = "would take about 9 s a call, from 64 tokens (--limit 5)"
    rows.append(row("retention", 256, None, who="scan", left_out=late))
    report = results.Report("Device <1>", "cpu", {"jax": "1"}, "2026-01-01", 1e9, {"float32": 1e12}, rows=rows)
    report.peers_missing = {"fla": "needs an NVIDIA GPU"}
    made = blocks.files(tmp_path / "a.md", [report], [])
    text = made[tmp_path / "a.md"]
    assert "| retention | below about 130 | - |" in text
    assert f"- lax.scan, forward, from 256 tokens, for retention: {late}\n- fla: needs an NVIDIA GPU\n" in text
    for path in list(made)[1:]:
        assert f"(a/{path.name})" in text and made[path].startswith("<svg")
    (html,) = blocks.files(tmp_path / "a.html", [report], []).values()
    assert "<h2>Device &lt;1&gt;</h2>" in html and html.count("<svg") == len(made) - 1
    assert not re.search(r"(?<!xmlns=\")(?<!xmlns:xlink=\")http", html)


def test_reports_of_one_device_are_one_section():
    reports = [
        results.Report(name, "cpu", {}, "", 1.0, {}, rows=[row("retention", 4, 1.0)]) for name in ("a", "b", "a")
    ]
    assert [(len(each.reports), each.slug) for each in machines(reports)] == [(2, "cpu"), (1, "cpu2")]


def test_the_table_is_of_a_length_that_most_were_timed_at():
    rows = [
        row(op, tokens, 1.0) for op in ("retention", "simple_gla", "recurrent", "attention") for tokens in (64, 256)
    ]
    rows += [row(op, 1024, 1.0) for op in ("retention", "simple_gla", "recurrent")] + [row("attention", 1024, None)]
    rows += [row("retention", 4096, 1.0)]
    (machine,) = machines([results.Report("a", "cpu", {}, "", 1.0, {}, rows=rows)])
    assert machine.common_length() == 1024


def test_the_committed_page_is_what_the_committed_rows_give(monkeypatch):
    monkeypatch.chdir(ROOT)
    sources = [Path("benchmarks/results/bench_h200.json")]
    made = blocks.files(Path("docs/benchmarks.md"), [reading.load(path) for path in sources], sources)
    assert {path for path in made if path.suffix == ".svg"} == set(Path("docs/benchmarks").iterdir())
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path} is not what its rows give; the page says how to make it"
        )
