"""The demo, shortened: it learns, stops and resumes exactly, and refuses checkpoints that are none."""

import functools
import html
import io
import json
import re
import signal
import subprocess
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close

pytest.importorskip("flax.nnx")

from flax import nnx

from examples.demo import __main__ as demo
from examples.demo import checkpoint, generation, text, training
from examples.demo.progress import Progress
from examples.demo.softmax import OneQueryAttention

ROOT = Path(__file__).parents[1]
SMALL = training.Settings(steps=3, tokens=256, width=16, heads=2, depth=1)


def test_text_is_what_its_bits_say():
    data = text.batch(0, 0, 2048)
    stream = bytes(data.tokens.astype(np.uint8))
    assert (data.cu_seqlens[1:] >= data.cu_seqlens[:-1]).all() and data.cu_seqlens[-1] <= 2048
    for each in data.questions:
        answer = stream[each.answer : each.answer + each.length].decode()
        assert answer in text.PLACES
        assert stream[each.answer - each.distance :].startswith(answer.encode())
    ends = data.cu_seqlens[1:][np.diff(data.cu_seqlens) > 0] - 1
    assert (data.targets[ends] == -1).all()
    assert data.predicted == data.cu_seqlens[-1] - len(ends)


def test_every_choice_can_be_read_back():
    """The bits of a document, computed anew from its text alone."""
    made = text.document(np.random.default_rng(3), 1000)
    told, bits = {}, 0.0
    for line in made.text.strip().splitlines():
        choices = {"tell": len(told) < text.PEOPLE, "ask": bool(told), "aside": True}
        weights = {"tell": text.TELL, "ask": text.ASK, "aside": text.ASIDE}
        total = sum(weight for kind, weight in weights.items() if choices[kind])
        if line.removesuffix(".") in text.ASIDES:
            bits -= np.log2(text.ASIDE / total / len(text.ASIDES))
        elif "?" in line:
            name, place = line.removesuffix(".").split("? ")
            assert told[name] == place
            bits -= np.log2(text.ASK / total / len(told))
        else:
            name = next(name for name in text.NAMES if line.startswith(name))
            bits -= np.log2(text.TELL / total / (len(text.NAMES) - len(told)) / len(text.PLACES))
            told[name] = next(place for place in text.PLACES if line == text.statement(name, place).strip())
    assert made.bits == pytest.approx(bits)


def test_resuming_changes_no_bit(tmp_path):
    whole = training.train(SMALL, tmp_path / "whole.npz")
    calls = iter([False, True])

    def interrupt(step, loss, tokens):
        if next(calls):
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Progress, "update", lambda self, *facts: interrupt(*facts))
        assert training.train(SMALL, tmp_path / "parts.npz") is None
    resumed = training.train(SMALL, tmp_path / "parts.npz", resume=True)
    assert resumed.history == whole.history and len(whole.history) == 3
    assert (tmp_path / "whole.npz").read_bytes() == (tmp_path / "parts.npz").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["parts.npz", "whole.npz"]


def test_checkpoints_are_checked(tmp_path):
    path, tree, settings = tmp_path / "x.npz", {"a": np.zeros(3)}, asdict(SMALL)
    checkpoint.save(path, {"settings": settings}, tree)
    header, loaded = checkpoint.load(path, settings, jax.tree.map(np.ones_like, tree))
    assert header["settings"] == json.loads(json.dumps(settings)) and not np.asarray(loaded["a"]).any()
    whole = path.read_bytes()
    for content, message in (
        (b"", "cannot be read"),
        (b"not a checkpoint", "cannot be read"),
        (whole[: len(whole) // 2], "cannot be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.load(path, settings, tree)
    np.savez(path, a=np.zeros(3))
    with pytest.raises(checkpoint.CheckpointError, match="no header"):
        checkpoint.load(path, settings, tree)
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint to resume"):
        checkpoint.load(tmp_path / "none.npz", settings, tree)
    checkpoint.save(path, {"settings": settings}, tree)
    with pytest.raises(checkpoint.CheckpointError, match=r"made with {'seed': 0}, not {'seed': 7}"):
        checkpoint.load(path, asdict(replace(SMALL, seed=7)), tree)
    with pytest.raises(checkpoint.CheckpointError, match=r"a is float64\(3,\), expected float64\(4,\)"):
        checkpoint.load(path, settings, {"a": np.zeros(4)})
    with pytest.raises(checkpoint.CheckpointError, match="b is in one of them only"):
        checkpoint.load(path, settings, {**tree, "b": np.zeros(4)})


def test_nothing_to_resume_is_told(tmp_path, capsys):
    assert demo.main(["--resume", "--out", str(tmp_path)]) == 2
    assert "no checkpoint to resume" in capsys.readouterr().err


@pytest.mark.parametrize("ends", ["whole", "stopped", "interrupted"])
def test_how_a_run_ends(ends, tmp_path, capsys, monkeypatch):
    """Told by the exit code, and by a line that says how to go on if there is something to go on from."""

    def train(settings, path, resume):
        assert (settings.steps, settings.seed, resume) == (7, 3, False)
        if ends == "interrupted":
            raise KeyboardInterrupt
        path.write_bytes(b"")
        return object() if ends == "whole" else None

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "show", lambda settings, trained, out: print(f"shown in {out}"))
    code = demo.main(["--steps", "7", "--seed", "3", "--out", str(tmp_path / "new")])
    first, _, printed = capsys.readouterr().out.partition("\n")
    assert first.startswith("7 steps of training; first they are compiled")
    if ends == "whole":
        assert code == 0 and printed.startswith(f"shown in {tmp_path / 'new'}") and "s in all" in printed
    elif ends == "stopped":
        assert code == 130 and printed == f"stopped; --resume goes on from {tmp_path / 'new' / 'checkpoint.npz'}\n"
    else:
        assert code == 130 and printed == "stopped\n"


@pytest.mark.parametrize("rich", [True, False])
def test_progress_on_a_terminal(rich, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with Progress(3) as progress:
        for step in (1, 2, 3):
            progress.update(step, 1.25, 100)
    shown = terminal.getvalue()
    assert ("compiling" in shown) == rich
    assert "tokens/s   loss 1.250 bits/byte" in shown
    # a bar moves the cursor; lines do not, and come at the end if not before
    assert ("\x1b" in shown) == rich and ("step     3/3" in shown) != rich


def test_the_softmax_that_it_is_held_against_is_softmax():
    """Step by step from an empty cache, as one pass in float64 over all tokens."""
    layer = OneQueryAttention(8, 2, nnx.Rngs(0))
    tokens = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)
    cache, outputs = layer.empty_cache(7), []
    for t in range(5):
        output, cache = layer(jnp.asarray(tokens[:, t : t + 1]), cache)
        outputs.append(output)
    query, key, value = (
        (tokens @ np.asarray(each.kernel[...], np.float64)).reshape(1, 5, 2, 4)
        for each in (layer.query, layer.key, layer.value)
    )
    mixed = oracle.flash_attention(query, key, value, causal=True)[0].reshape(1, 5, 8)
    expected = mixed @ np.asarray(layer.out.kernel[...], np.float64)
    assert_close(np.concatenate(outputs, 1), expected, 1e-6)
    assert int(cache.position) == 5


def test_costs_are_of_every_context():
    parameters = training.build(SMALL)[1]
    written, going = generation.generate(SMALL, parameters, b"\nAda: Bonn.\n", (80, 200))
    assert len(written) == 192 and list(going) == [80, 200]
    linear, softmax = generation.costs(going, generation.softmax(SMALL, (80, 200)), rounds=1)
    # heads, key and value dims, bytes; and the four tokens before that a query, key and value are made of
    state = 2 * 8 * 8 * 4 + 4 * 3 * 16 * 4
    assert [(each.context, each.state_bytes) for each in linear] == [(80, state), (200, state)]
    caches = [2 * context * 16 * 4 + 4 for context in (80, 200)]  # keys and values, and how many there are
    assert [(each.context, each.state_bytes) for each in softmax] == list(zip((80, 200), caches, strict=True))
    assert all(each.milliseconds > 0 for each in linear + softmax)


def test_without_matplotlib_it_says_so_before_it_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert demo.main(["--out", str(tmp_path / "new")]) == 1
    assert "drawing needs matplotlib, the extra cli: pip install '.[cli]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_shortened_run_learns(tmp_path, capsys, monkeypatch):
    for name, value in {"NAMES": text.NAMES[:6], "PLACES": text.PLACES[:6], "PEOPLE": 4, "SENTENCES": (8, 24)}.items():
        monkeypatch.setattr(text, name, value)
    settings = training.Settings(steps=260, tokens=512, width=48, heads=2, depth=1)
    with monkeypatch.context() as optimised:  # unlike most tests, this one runs for longer than it compiles
        # of the training step alone: jitted functions inside it take no compiler options
        jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
        optimised.setattr(training, "jax", types.SimpleNamespace(**{**vars(jax), "jit": jit}))
        trained = training.train(settings, tmp_path / "checkpoint.npz")
    score = demo.show(settings, trained, tmp_path, contexts=(128, 512))
    # 0.08 and 2.5; without a memory, of a layer that forgets at every token, 0.11 and 0.4 after 220 steps
    assert score.floor < score.loss < score.unigram / 10
    assert score.recall > 2 * score.chance
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4 and not re.search(r"(?<!xmlns=\")(?<!xmlns:xlink=\")http", page)
    assert "prefers-color-scheme: dark" in page
    exec(html.unescape(re.search("<pre>(import.*?)</pre>", page, re.DOTALL)[1]), {})
    printed = capsys.readouterr().out
    assert "report.html" in printed and f"step   {settings.steps}/{settings.steps}" in printed and "\x1b" not in printed


def test_make_says_that_it_installs_before_it_does(tmp_path):
    command = ["make", "--dry-run", "demo", f"VENV={tmp_path / 'venv'}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    told, installed = (
        next(at for at, line in enumerate(lines) if part in line) for part in ("installing", "pip install ")
    )
    assert told < installed


def test_the_sample_ends_with_a_sentence():
    from examples.demo.report import _readable

    assert _readable(b"\nAda: Bonn.\nBen: Li") == "Ada: Bonn.\n"
