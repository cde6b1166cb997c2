"""`docs/extending.md` is all that a new op takes: its blocks, applied to a copy of the tree, give one that works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(
    r'^```diff title="(.*?)"\n(.*?)^```$', (ROOT / "docs" / "extending.md").read_text(), re.DOTALL | re.MULTILINE
)
COPIED = ("ejkernel", "tests", "docs", "benchmarks", "README.md", "CHANGELOG.md", "mkdocs.yml", "pyproject.toml")


def applied(text, block):
    """`text` with the lines that the block adds, each after the line above it there, or at the end if there is none."""
    lines, at = text.splitlines(), None
    for line in block.splitlines():
        if not line.startswith("+"):
            at = lines.index(line[1:], at or 0) + 1
        elif at is None:
            lines.append(line[1:])
        else:
            lines.insert(at, line[1:])
            at += 1
    return "\n".join(lines) + "\n"


def test_blocks_are_applied_where_they_say():
    assert applied("a\nb\nb\n", " b\n+c\n+d\n b\n+e\n") == "a\nb\nc\nd\nb\ne\n"
    assert applied("a\n", "+b\n") == "a\nb\n"
    with pytest.raises(ValueError):
        applied("a\n", " b\n+c\n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the page's op in it."""
    folder = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "*.svg", ".*")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    for name, block in BLOCKS:
        path = folder / name
        path.write_text(applied(path.read_text() if path.exists() else "", block))
    return folder


def run(tree, *command):
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_it_takes_few_files():
    assert len({name for name, _ in BLOCKS}) <= 15


def test_the_op_runs_and_is_explained(tree):
    printed = run(
        tree,
        "-c",
        "import sys; sys.path.insert(0, 'docs')\n"
        "import jax.numpy as jnp, ejkernel, _hooks\n"
        "x = jnp.ones((1, 12, 2, 8))\n"
        "decay = jnp.log(0.5) / jnp.array([64, 128])\n"
        "assert jnp.allclose(ejkernel.slow_retention(x, x, x)[0], ejkernel.recurrent(x, x, x, g_gamma=decay)[0])\n"
        "print(ejkernel.explain(ejkernel.slow_retention, x, x, x))\n"
        "print(_hooks.support_table('slow_retention'))\n",
    )
    assert "xla" in printed and "not triton: " in printed
    assert "| packed: `cu_seqlens` | yes | yes | yes |" in printed


def test_the_tests_of_all_ops_hold_for_it(tree):
    """Those that go through the tables: where it runs, wrong calls, borders, the oracle, the benchmark."""
    files = ("ops", "linear_attention", "bad_calls", "borders")
    chosen = "slow_retention or every_public or readme or changelog or there_are_enough or everything_that_takes"
    paths = [f"tests/test_{name}.py" for name in files]
    printed = run(tree, "-m", "pytest", "-p", "no:cacheprovider", *paths, "-k", chosen)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 15
    command = ("bench", "slow_retention", "--lengths", "8", "--heads", "2", "--dim", "4", "--rounds", "1", "--quick")
    assert "slow_retention" in run(tree, "-m", "ejkernel.cli", *command)
