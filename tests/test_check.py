"""`ejkernel check`: its verdicts, its end, and what it remembers."""

import functools
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _checked, _dispatch, check, cli
from ejkernel._ops import OPS
from ejkernel.bench.calls import Shape

SMALL = Shape(1, 5, 2, 4, "float32")
RIGHT = check.Row(OPS["simple_gla"], "xla", SMALL, (0, 2, 2, 5))
NOT_SERVED = replace(RIGHT, platform="triton")


def doubled(query, key, value, g, cu_seqlens, platform):
    output, state = OPS["simple_gla"].function(query, key, value, g, cu_seqlens=cu_seqlens, platform=platform)
    return 2 * output, state


def breaking(**_):
    raise RuntimeError("the compiler gave up\nat line 3")


def not_a_number(query, key, value, g, cu_seqlens, platform):
    return jnp.nan * query, g


def wrong(function):
    return replace(RIGHT, op=replace(RIGHT.op, function=function))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(rows, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(check, "rows", lambda platform: iter(rows))
    code = cli.main(["check", *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_passes_and_remembers(monkeypatch, capsys, cache):
    assert not _checked.passed()
    code, (head, first, second, end) = run([RIGHT, NOT_SERVED], monkeypatch, capsys)
    assert code == 0 and "against the definition in float64" in head
    assert first.startswith("ok       simple_gla        xla     float32   1 x 5 x 2 x 4, packed ")
    assert second.startswith("not run  simple_gla        triton")
    assert end.startswith("1 right, 0 wrong, 1 that this implementation does not serve; ") and end.endswith("PASSED")
    assert _checked.passed() and [each.name for each in (cache / "ejkernel").iterdir()] == [_checked._file().name]


@pytest.mark.parametrize(
    "function, why",
    [(doubled, "an error of "), (breaking, "RuntimeError: the compiler gave up"), (not_a_number, "an error of nan")],
)
def test_what_is_wrong_fails(function, why, monkeypatch, capsys):
    code, lines = run([wrong(function)], monkeypatch, capsys)
    assert code == 1 and lines[1].startswith(f"WRONG    {function.__name__} ") and why in lines[1]
    assert lines[-1].startswith("0 right, 1 wrong; ") and lines[-1].endswith("FAILED")
    assert not _checked.passed()


def test_what_is_left_out_for_time_is_told_and_not_remembered(monkeypatch, capsys):
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(check.time, "monotonic", lambda: next(clock))
    code, lines = run([RIGHT, RIGHT], monkeypatch, capsys, "--seconds", "150")
    assert code == 0 and "1 right, 0 wrong, 1 left out after 150 s (see --seconds)" in lines[-1]
    assert not _checked.passed()


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run([RIGHT], monkeypatch, capsys)[0] == 0
    assert not _checked.passed()


def test_every_op_and_implementation_of_a_platform_has_rows():
    for platform in ("cpu", "cuda", "tpu"):
        expected = {
            (name, each.name)
            for name, op in OPS.items()
            for each in op.implementations
            if platform in (each.devices or (platform,))
        }
        rows = list(check.rows(platform))
        assert {(row.op.name, row.platform) for row in rows} == expected
        assert {row.shape.dtype for row in rows} == {"bfloat16", "float32"}
        assert len(rows) == 2 * len(expected)
    with jax.enable_x64(True):
        assert "float64" in {row.shape.dtype for row in check.rows("cpu")}


@pytest.mark.parametrize("shape, borders", [(Shape(2, 20, 2, 8, "bfloat16"), None), (SMALL, (0, 2, 3, 5))])
def test_pages_are_checked_by_prompts_and_single_tokens(shape, borders):
    row = check.Row(OPS["paged_attention"], "xla", shape, borders)
    assert check.judge(row)[0] == "ok"

    def forgetful(query, key, value, pages, *rest, platform):
        output, _ = OPS["paged_attention"].function(query, key, value, pages, *rest, platform=platform)
        return output, pages

    verdict, why = check.judge(replace(row, op=replace(row.op, function=functools.wraps(row.op.function)(forgetful))))
    assert verdict == "WRONG" and why.startswith("output: an error of ")


def test_tpus_are_told_once_until_it_has_passed(monkeypatch):
    monkeypatch.setattr(_dispatch, "_default_platform", lambda: "tpu")
    _dispatch._warn_until_checked.cache_clear()
    with pytest.warns(UserWarning, match="No TPU chip has run these kernels yet. Run `ejkernel check`"):
        _dispatch._warn_until_checked()
    with warnings.catch_warnings(action="error"):
        _dispatch._warn_until_checked()
        _checked.remember()
        _dispatch._warn_until_checked.cache_clear()
        _dispatch._warn_until_checked()
    _dispatch._warn_until_checked.cache_clear()
