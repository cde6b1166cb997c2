"""`ejkernel bench`: what it counts, how it judges, what it leaves behind. No time is asserted."""

import dataclasses
import io
import json
import math
import signal
import sys

import jax
import numpy as np
import oracle
import pytest

from benchmarks import fla
from benchmarks.page import reading
from ejkernel import cli
from ejkernel._ops import COMMON, OPS, Op
from ejkernel.bench import ceilings, command, exact, results
from ejkernel.bench.calls import DIRECTIONS, Shape, cotangent, flops, inputs, moved_bytes
from ejkernel.bench.measure import Limits, measure
from ejkernel.bench.peers import PEERS
from ejkernel.bench.results import OURS, Row

TINY = Shape(batch=2, tokens=5, heads=3, dim=4, dtype="float32")
FAST = Limits(rounds=2)


@pytest.fixture(autouse=True)
def no_large_products(monkeypatch):
    """What the machine can do at best is not what these tests are about."""
    monkeypatch.setattr(ceilings, "copy_rate", lambda **options: 1e10)
    monkeypatch.setattr(ceilings, "matmul_rate", lambda dtype, **options: 1e11)


def bench(*arguments):
    return cli.main(["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One run through the command: its exit code, the folder of its JSON, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as printed:
        patch.setattr(ceilings, "copy_rate", lambda **options: 1e10)
        patch.setattr(ceilings, "matmul_rate", lambda dtype, **options: 1e11)
        patch.setattr(sys, "stdout", printed)
        sizes = ("--lengths", 24, 8, "--heads", 2, "--dim", 4, "--rounds", 2)
        code = bench("linear_attention", "attention", *sizes, "--json", folder / "rows.json")
        text = printed.getvalue()
    return code, folder, text


def test_a_run_leaves_rows(measured):
    code, folder, printed = measured
    report = reading.load(folder / "rows.json")
    assert code == 0 and report.complete and report.platform == jax.default_backend()
    assert {"jax", "ejkernel", "python"} <= report.versions.keys()
    assert [(row.op, row.who, row.tokens, row.direction) for row in report.rows] == [
        (op, who, tokens, direction)
        for op, peer in (("linear_attention", "scan"), ("attention", "jax.nn"))
        for tokens in (8, 24)
        for direction in DIRECTIONS
        for who in (OURS, peer)
    ]
    for row in report.rows:
        assert row.left_out is None and row.failed is None
        assert row.median_ms > 0 and row.spread_ms >= 0 and row.ratio > 0 and row.compile_s > 0 and row.rounds == 2
        assert 0 < row.error < 1e-5
        assert set(row.errors) == {"output"} | ({"query", "key", "value"} if row.direction != "forward" else set())
    assert all(row.ratio == 1 and row.implementation == "xla" for row in report.rows if row.who == OURS)
    printed.encode("ascii")
    assert "\x1b" not in printed and "without cudnn: needs an NVIDIA GPU" in printed
    assert printed.count("forward+backward") == 8


def test_json_is_read_back_as_it_was(measured):
    text = (measured[1] / "rows.json").read_text()
    assert results.dumps(reading.loads(text)) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sing"], "no op sing; there are linear_attention,"),
        (["attention", "--peer", "rival"], "no peer rival; there are scan,"),
        (["--lengths", "0"], "expected a whole number from 1 to 2147483647"),
        (["--limit", "nan"], "expected a number above 0"),
        (["--dtype", "int8"], "invalid choice"),
        (["--forward", "--gradient"], "not allowed with"),
    ],
    ids=str,
)
def test_wrong_use_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench(*arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as end:
        bench("--help")
    assert end.value.code == 0
    assert "ejkernel bench --quick" in capsys.readouterr().out


def test_a_missing_peer_that_is_asked_for_ends_the_run_before_it_begins(capsys):
    assert bench("attention", "--peer", "cudnn") == 1
    printed = capsys.readouterr()
    assert "--peer cudnn: needs an NVIDIA GPU" in printed.err and not printed.out
    assert fla.main(["retention", "--peer", "fla"]) == 1
    printed = capsys.readouterr()
    assert "--peer fla: needs an NVIDIA GPU (pip install flash-linear-attention" in printed.err and not printed.out


@pytest.mark.parametrize(("name", "message"), [("none/x.json", "cannot be written"), ("", "expected a file")])
def test_unwritable_files_are_told_before_the_run(tmp_path, capsys, monkeypatch, name, message):
    monkeypatch.setattr(command, "measure", lambda *facts: pytest.fail("measured"))
    assert bench("retention", "--json", tmp_path / name) == 2
    assert message in capsys.readouterr().err


def fake_measure(op, shape, direction, peers, before, limits):
    if len(before) == 2:
        signal.raise_signal(signal.SIGINT)
    return [Row(op.name, OURS, "xla", direction, shape.dtype, 1, shape.tokens, 4, 64, 1, 1, 1.0, 0.1, 1.0, 3, 1)]


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "measure", fake_measure)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert bench("retention", "--json", tmp_path / "rows.json") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    assert "stopped" in printed.err and f"wrote {tmp_path / 'rows.json'}" in printed.out
    report = reading.load(tmp_path / "rows.json")
    assert len(report.rows) == 2 and not report.complete


def test_a_slow_first_call_does_not_settle_how_many_a_reading_takes(monkeypatch):
    # one call a reading would count the way to the device and back, which many in a row do not wait for
    taken = iter([50.0])
    monkeypatch.setattr(sys.modules["ejkernel.bench.measure"], "milliseconds", lambda *call: next(taken, 0.1))
    [row] = measure(OPS["retention"], TINY, "forward", [], [], FAST)
    assert row.calls > 1


def test_a_failing_op_is_told_by_the_exit_code(capsys, monkeypatch):
    def broken(**arrays):
        return 1 / 0

    monkeypatch.setitem(COMMON, "retention", Op(broken))
    monkeypatch.setattr("ejkernel.bench.measure._implementation", lambda op, inputs: "xla")
    assert bench("retention", "--lengths", 4, "--heads", 1, "--dim", 2, "--forward", "--peer", "none") == 1
    assert "failed: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_counts_by_hand():
    # 2 rows, 3 heads, 5 tokens, K = V = 4. Recurrence: k vᵀ into the state and q out of it, 2·16 each
    assert flops(OPS["recurrent_gla"], TINY, gradient=False) == 2 * 3 * 5 * (32 + 32)
    assert flops(OPS["kda"], TINY, gradient=False) == 2 * 3 * 5 * (32 + 32 + 32)
    # softmax: 15 causal pairs, each q·k and weight·v, 2·4 each; the gradient has four products for these two
    assert flops(OPS["flash_attention"], TINY, gradient=False) == 2 * 3 * 15 * (8 + 8)
    assert flops(OPS["flash_attention"], TINY, gradient=True) == 2 * 3 * 15 * 8 * 6
    forward, both = (measure(OPS["simple_gla"], TINY, direction, [], [], FAST)[0].bytes for direction in DIRECTIONS)
    token_bytes, gate_bytes = 2 * 5 * 3 * 4 * 4, 2 * 5 * 3 * 4
    assert forward == 4 * token_bytes + gate_bytes
    assert both == forward + token_bytes + 3 * token_bytes + gate_bytes
    assert moved_bytes(np.zeros((3, 2), np.float32), {"x": np.zeros(5, np.int8)}) == 29


def test_shares_are_of_the_ceilings():
    report = results.Report("d", "cpu", {}, "", copy_bytes_per_s=1e9, flops_per_s={"float32": 1e12})
    row = Row(
        "retention", OURS, "xla", "forward", "float32", 1, 1, 1, 1, bytes=500_000, flops=250_000_000, median_ms=1.0
    )
    assert report.shares(row) == (0.5, 0.25)
    assert report.shares(dataclasses.replace(row, dtype="float16")) == (0.5, None)


@pytest.mark.parametrize(
    "name", ["recurrent", "retention", "lightning_attn", "gated_delta_rule", "kda", "flash_attention"]
)
def test_the_yardstick_agrees_with_the_tests_oracle(name):
    """Outputs by its own formulas, gradients by finite differences."""
    op, head = OPS[name], 1
    arrays = {name: np.asarray(x, np.float64) for name, x in inputs(op, TINY).items()}
    upstream = np.asarray(cotangent(TINY), np.float64)
    if op.core == "softmax":
        expected = oracle.flash_attention(**arrays, causal=True)[0]
    elif op.core == "delta rule":
        expected = oracle.delta_rule(**arrays)[0]
    else:
        gamma = None if op.log_decay is None else op.log_decay(TINY.heads)
        expected = oracle.recurrent(**arrays, g_gamma=gamma)[0]
    cut = {name: x[0, :, head] for name, x in arrays.items()}

    def run(cut):
        return exact.of_head(op, cut, head, TINY.heads, upstream[0, :, head])

    found = run(cut)
    np.testing.assert_allclose(found["output"], expected[0, :, head], rtol=1e-12)
    rng, step = np.random.default_rng(0), 1e-6
    for which, x in cut.items():
        direction = rng.normal(size=x.shape)
        ends = [run(cut | {which: x + sign * step * direction})["output"] for sign in (1, -1)]
        slope = ((ends[0] - ends[1]) * upstream[0, :, head]).sum() / (2 * step)
        assert slope == pytest.approx((found[which] * direction).sum(), rel=1e-6), which


def row(op, tokens, median_ms, who=OURS, direction="forward", **more):
    return Row(op, who, "xla", direction, "float32", 1, tokens, 4, 64, median_ms=median_ms, ratio=1.0, **more)


def test_long_calls_are_foreseen_and_say_so():
    op, scan = OPS["retention"], PEERS["scan"]
    shape = Shape(1, 64, 4, 64, "float32")
    before = [row("retention", 32, 100.0), row("retention", 32, 9000.0, who="scan")]
    ours, its = measure(op, shape, "forward", [scan], before, Limits(rounds=2, call_s=5.0))
    assert ours.left_out is None and its.median_ms is None
    assert its.left_out == "would take about 18 s a call, from 32 tokens (--limit 5)"
    ours, again = measure(op, dataclasses.replace(shape, tokens=128), "forward", [scan], [ours, its], FAST)
    assert again.left_out == f"left out at 64 tokens already: {its.left_out}"


def test_too_little_memory_is_foreseen(monkeypatch):
    monkeypatch.setattr("ejkernel.bench.measure._memory", lambda: 10.0)
    (ours,) = measure(OPS["attention"], TINY, "forward", [], [], FAST)
    assert ours.median_ms is None and ours.left_out.startswith("needs ") and ours.left_out.endswith("GiB are free")


def test_growing_memory_is_foreseen(monkeypatch):
    monkeypatch.setattr("ejkernel.bench.measure._memory", lambda: 10 * 2.0**30)
    before = [row("attention", tokens, 1.0, temporary_bytes=size << 30) for tokens, size in ((32, 1), (64, 4))]
    (ours,) = measure(OPS["attention"], Shape(1, 128, 4, 64, "float32"), "forward", [], before, FAST)
    assert ours.left_out == "would need about 16 GiB beside its arrays, and 10 GiB are free"


@pytest.mark.parametrize(
    ("error", "field"),
    [(RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"), "left_out"), (ValueError("no\nsuch kernel"), "failed")],
    ids=str,
)
def test_a_peer_that_fails_is_a_line_of_the_report(error, field):
    def program(*facts):
        raise error

    peer = dataclasses.replace(PEERS["jax.nn"], program=program)
    ours, its = measure(OPS["attention"], TINY, "forward", [peer], [], FAST)
    assert ours.median_ms and its.median_ms is None and its.ratio is None
    assert getattr(its, field) == f"{type(error).__name__}: {str(error).splitlines()[0]}"


def test_what_is_not_finite_is_no_result():
    nan = Op(lambda **x: x["value"] * math.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ejkernel.bench.measure._implementation", lambda op, inputs: "xla")
        (ours,) = measure(nan, TINY, "forward", [], [], FAST)
    assert ours.failed == "its results are not finite" and ours.median_ms is None
