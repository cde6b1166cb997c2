"""`python -m benchmarks.gpu` without a GPU: it says so, programs of its rows trace, and small ones run on XLA."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from unittest import mock

import jax
import pytest

import ejkernel
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention, cudnn, layers, ops, part, phases, rows, serving

OPS = [pytest.param(work, id=f"{name}: {work.name}") for name, part in ops.PARTS.items() for work in part.works]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr == "python -m benchmarks.gpu: no NVIDIA GPU here to compile for\n"


def test_every_part_is_there_and_has_rows_of_its_own():
    for name, (module, _) in command.PARTS.items():
        if name == "bench":  # rows of `ejkernel bench`
            continue
        found = import_module(f"benchmarks.gpu.{module}").PARTS[name]
        names = [work.name for work in found.works]
        assert names and len(set(names)) == len(names), name
    for file in command.FIRST:
        assert (command.ROOT / "tests" / file).exists()


@pytest.mark.parametrize("work", OPS)
def test_rows_of_ops_trace_and_triton_serves_them(work):
    for direction in work.directions:
        arrays = jax.eval_shape(partial(ops.inputs, work, direction, 0))
        results = jax.eval_shape(ops.program(work, direction, "xla"), arrays)
        assert results["output"].shape == (arrays["x"] if "x" in arrays else arrays["value"]).shape
        call = ops.program(work, "forward", None)
        found = ejkernel.explain(call, {name: x for name, x in arrays.items() if name != "d_output"}, device="h200")
        assert found.chosen == {"cuda": "triton"}


# of each kind: heads that are shared, packed, with segments, with states, in place, of constant gates
SMALL = {
    "gates": replace(ops.KDA, B=2, T=24, H=2, K=8, V=8, gates="Kimi-K3's"),
    "heads": replace(ops.GATED, B=2, T=24, H=4, query_heads=2, K=8, V=8),
    "packed": replace(ops.GLA, B=1, T=40, H=2, K=8, V=8, packed=3),
    "segments": replace(ops.SIMPLE, B=2, T=40, H=2, K=8, V=8, segments=3),
    "gamma": replace(ops.SIMPLE, op="recurrent", B=2, T=24, H=2, K=8, V=8),
    "step": replace(ops.STEP, B=3, H=2, K=8, V=8),
    "convolution": replace(ops.CONVOLUTION[0], B=2, T=24, H=2, K=8, state=True),
}


@pytest.mark.parametrize("work", SMALL.values(), ids=SMALL)
def test_rows_of_ops_are_measured(work):
    work = replace(work, dtype="float32", bars=(1e9, 1e-9))
    with mock.patch.object(rows, "in_batches", lambda function, calls, batches=9: (function(0), (2.0, 0.5))[1]):
        found = ops.measure(work, 1e12, platform="xla")
    assert [row["direction"] for row in found] == list(work.directions)
    assert [row["met"] for row in found] == [True, False][: len(found)]
    for row in found:
        assert (
            (row["name"], row["ms"]) == (work.name, 2.0) and 0 <= row["largest_error"] < 1e-4 and row["floor_ms"] >= 0
        )


def test_a_wrong_result_is_a_failed_row():
    work = replace(SMALL["gates"], dtype="float32")
    arrays = ops.inputs(work, "forward", 0)
    results = jax.jit(ops.program(work, "forward", "xla"))(arrays)
    assert max(ops.errors(work, "forward", arrays, results).values()) < 1e-6
    results["output"] = results["output"].at[0, 3, 0].mul(1.5)
    assert ops.errors(work, "forward", arrays, results)["output"] > 1e-2


@pytest.mark.parametrize("work", attention.PARTS["flash_attention"].works, ids=lambda work: work.name)
def test_rows_of_attention_trace(work):
    arrays = jax.eval_shape(partial(attention.inputs, work, 0))
    for direction in work.directions:
        results = jax.eval_shape(attention.program(work, direction, "xla"), arrays)
        assert results["output"].shape == work.shapes[-1]
        assert ("tangent" in results, "key" in results) == (direction == "tangents", direction == "forward+backward")
    assert len(work.bars) == len(work.directions) or work.bars == (None, None)


def test_errors_of_attention_are_of_the_first_heads():
    work = replace(attention.CAUSAL, name="small", B=2, S=24, H=4, Hkv=2, D=8, dtype="float32")
    with mock.patch.object(attention, "flash_attention", partial(_on_xla, attention.flash_attention)):
        for direction in (*attention.DIRECTIONS, *attention.TANGENTS):
            assert attention.error(work, direction) < 1e-5


def _on_xla(op, *arrays, platform, **options):
    return op(*arrays, platform="xla", **options)


def test_the_other_rows_trace():
    for work in cudnn.PARTS["attention"].works:
        arrays = jax.eval_shape(work.inputs)
        for direction in rows.DIRECTIONS:
            jax.eval_shape(cudnn.program(cudnn.CANDIDATES["xla"], direction), *arrays)
    for work in layers.WORKS:
        given = jax.eval_shape(partial(layers.arguments, work))
        for projections in (False, True):
            jax.eval_shape(layers.program(work, projections=projections), *given)
    for work in serving.WORKS:
        cache, arrays = jax.eval_shape(work.make)
        _, after = jax.eval_shape(work.step, cache, arrays)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


@pytest.mark.parametrize("work", phases.WORKS, ids=lambda work: work.name)
def test_phases_trace(work):
    candidates, given = phases.programs(replace(work, B=1, T=256), "xla")
    for run in candidates.values():
        jax.eval_shape(run, *given)


def test_a_failed_row_and_the_end_of_time_leave_the_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rows, "copy_bandwidth", lambda: 1e12)
    file = tmp_path / "some.json"
    file.write_text(json.dumps({"rows": [{"name": "late", "ms": 7}, {"name": "gone", "ms": 8}]}))

    def measure(work, bandwidth):
        if work.name == "broken":
            raise RuntimeError("of no use")
        return [{"name": work.name, "direction": each, "ms": 1} for each in rows.DIRECTIONS]

    works = [mock.Mock() for _ in range(3)]
    for work, name in zip(works, ("broken", "good", "late"), strict=True):
        work.name = name
    some = rows.Part(works, measure)
    monkeypatch.setattr(rows.time, "monotonic", iter((0.0, 1.0, 2.0)).__next__)
    assert not rows.measured(some, [], file, until=1.5)
    said = capsys.readouterr().out
    assert "FAILED broken: RuntimeError: of no use\n" in said and "no time left for 'late'\n" in said
    found = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["ms"]) for row in found] == [("good", 1), ("good", 1), ("late", 7)]
    monkeypatch.undo()
    monkeypatch.setattr(rows, "copy_bandwidth", lambda: 1e12)
    assert rows.measured(some, ["good"], file, until=math.inf)


def test_a_failed_part_leaves_the_others(tmp_path, monkeypatch, capsys):
    begun = []
    monkeypatch.setattr(command, "missing", lambda: "")
    monkeypatch.setattr(command, "run", lambda part, given, seconds: begun.append(part) or part == "layers")
    assert command.main(["--parts", "layers,serving", "--folder", str(tmp_path)]) == 1
    assert begun == ["layers", "serving"] and "failed or not finished: layers\n" in capsys.readouterr().out
    assert command.main(["--parts", "serving"]) == 0
    assert command.main(["--parts", "serving", "--seconds", "0"]) == 1 and begun[2:] == ["serving"]
    with pytest.raises(SystemExit):
        command.main(["--parts", "nothing"])


# a shell has programs in the background ignore interrupts, and tests may be in one
HANGS = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); time.sleep(60)"


@pytest.mark.parametrize("script", [HANGS, "raise SystemExit(3)"])
def test_a_part_that_hangs_is_interrupted(script):
    start = time.monotonic()
    status = command.ended([sys.executable, "-c", script], os.environ, 3.0)
    assert status == 3 if "Exit" in script else status != 0
    assert time.monotonic() - start < 30


def test_files_come_once_and_the_most_telling_first():
    files = command.test_files()
    assert files[: len(command.FIRST)] == [f"tests/{each}" for each in command.FIRST]
    assert len(files) == len(set(files)) and "tests/test_attention.py" in files


def test_bench_asks_for_what_the_page_shows(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(part.bench.command, "main", lambda arguments: asked.append(arguments) or 0)
    assert part.main(["bench:bench", str(tmp_path), "9"]) == 0
    (arguments,) = asked
    shown = json.loads((rows.RESULTS / "bench_h200.json").read_text())["rows"]
    assert {row["op"] for row in shown} == set(arguments[: len(part.bench.OPS)])
    assert {str(row["tokens"]) for row in shown} <= set(arguments)


def test_an_unknown_row_is_told(tmp_path, capsys):
    assert part.main(["ops:segments", str(tmp_path), "9", "kdb"]) == 1
    assert "segments: no row kdb; there are 'recurrent_gla'," in capsys.readouterr().out
