"""Wrong calls: each raises what the contract promises, names the argument, and leaves nothing behind."""

import ast
import contextlib
import copy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from bad_calls import CASES, OPS, Traced

import ejkernel

ROOT = Path(ejkernel.__file__).parent


def invoke(op, arguments):
    traced = {name: each.value for name, each in arguments.items() if isinstance(each, Traced)}
    fixed = {name: each for name, each in arguments.items() if name not in traced}
    if not traced:
        return op.call(**fixed)
    return jax.jit(lambda traced: op.call(**fixed, **traced))(traced)


@pytest.mark.parametrize("name, changes, error, message", CASES, ids=[f"{n}-{m[:40]}" for n, _, _, m in CASES])
def test_raises_and_names_the_argument(name, changes, error, message):
    op = OPS[name]
    arguments = op.good | changes
    data = {key: each for key, each in arguments.items() if isinstance(each, np.ndarray | list)}
    before = copy.deepcopy(data)
    with pytest.raises(error, match=f"^(?:{message})") as caught:
        invoke(op, arguments)
    argument = str(caught.value).split(":")[0].removesuffix("()")
    argument = argument if argument in op.names() else argument.split(".")[0]  # or a part of it
    assert argument in op.names(), f"{argument} is no argument of {name}"
    jax.tree.map(np.testing.assert_array_equal, data, before)


@pytest.mark.parametrize("name", OPS)
def test_good_calls_work_after_bad_ones(name):
    """With the results of before, and no warning: warnings are errors here."""
    op = OPS[name]
    # a plain call on a mesh compiles anew every time
    run = jax.eval_shape if name.startswith("parallel") else lambda call: jax.tree.map(np.asarray, call())
    before = run(lambda: op.call(**op.good))
    for changes, error, _ in op.rows:
        with contextlib.suppress(error):
            invoke(op, op.good | changes)
    after = run(lambda: op.call(**op.good))
    if name.startswith("parallel"):
        assert before == after
    else:
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_there_are_enough():
    assert len(CASES) >= 120
    assert len({(name, message, str(changes)) for name, changes, _, message in CASES}) > 120
    covered = {name.removeprefix("pinned ") for name in OPS}
    for module, prefix in ((ejkernel, ""), (ejkernel.xla_utils, ""), (ejkernel.parallel, "parallel.")):
        functions = {each for each in module.__all__ if callable(getattr(module, each)) and each[0].islower()}
        missing = {prefix + each for each in functions} - covered
        assert missing <= {"cdiv", "debug"}, missing


def test_no_assert_guards_input():
    """An `assert` is gone under `python -O`; those there are only tell a type checker that something is not None."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                narrows = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.IsNot)
                assert narrows and node.msg is None, f"{path}:{node.lineno} asserts more than a type"


def test_optimised_python_checks_too():
    """Some rows of the table where every `assert` is gone."""
    script = """
import sys, bad_calls
from test_bad_calls import invoke
for name, changes, error, message in bad_calls.CASES[::11]:
    op = bad_calls.OPS[name]
    try:
        invoke(op, op.good | changes)
    except error:
        continue
    sys.exit(f"{name}: no error that begins with {message}")
try:
    assert False
except AssertionError:
    sys.exit("this Python does check assertions")
"""
    subprocess.run([sys.executable, "-O", "-c", script], check=True, cwd=Path(__file__).parent)
