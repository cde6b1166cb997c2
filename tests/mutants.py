"""Mutation testing, `make mutants`: breaks a module in one place at a time and asks whether a test notices.

Each mutant lives in a forked process that imports the broken module in place of the file and runs, fastest first, the
tests that visit the broken line. What still passes is a survivor: a missing test, or a change that no caller could see.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKING = ["xla_utils/test_utils.py", "xla_utils/test_cumsum.py"]
TESTS = {
    **{
        f"ejkernel._checks.{each}": ["test_checks.py", "test_bad_calls.py"]
        for each in ("wording", "values", "arrays", "packing", "softmax", "recurrence", "meshes")
    },
    "ejkernel._dispatch": ["test_dispatch.py", "kernels/attention/test_cudnn_attention.py"],
    "ejkernel.xla_utils": ["xla_utils/test_utils.py"],
    "ejkernel.xla_utils.utils": PACKING,
    "ejkernel.xla_utils.cumsum": PACKING,
}
# Under jit only the first test that traces a line is seen to visit it, so here the module's other tests are asked too.
JITTED = {"ejkernel._dispatch", "ejkernel.xla_utils.utils", "ejkernel.xla_utils.cumsum"}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
}
TIMEOUT = 120  # seconds of one mutant's CPU time, after which it counts as noticed


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.what}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What `node` may be replaced by, one fault each."""
    match node:
        case ast.Compare(ops=[op]):
            yield ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield ast.Compare(node.left, [*ops[:i], COMPARISONS[type(op)](), *ops[i + 1 :]], node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.BinOp(op=ast.BitOr()):
            yield node.left
            yield node.right
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=str()):
            yield ast.Constant(f"XX{node.value}XX")
        # a lone comparison or `not` is turned round by itself
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.Return(value=value) if value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Call(args=[first, second, *rest]):
            yield ast.Call(node.func, [second, first, *rest], node.keywords)
    if isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            yield ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every place of a node that is code at run time: its parent, the field and the index in a list."""
    if isinstance(node, ast.FunctionDef) and any("overload" in ast.unparse(each) for each in node.decorator_list):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):
                continue  # the words between the braces
            yield node, field, i
            yield from places(child)


def mutants_of(module: str) -> list[Mutant]:
    spec = importlib.util.find_spec(module.partition(".")[0])
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    found = {}
    for parent, field, index in list(places(tree)):
        held = getattr(parent, field)
        node = held if index is None else held[index]
        for new in replacements(node):
            ast.copy_location(new, node)
            before, after = shown(node), shown(new)
            put(parent, field, index, new)
            broken = ast.unparse(ast.fix_missing_locations(tree))
            put(parent, field, index, node)
            mutant = Mutant(module, node.lineno, f"{before}  ->  {after}", broken)
            found.setdefault(broken, mutant)
    found.pop(ast.unparse(tree), None)
    return list(found.values())


def put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def shown(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]
    return text if len(text) < 90 else text[:87] + "..."


class Broken(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from a text instead of its file."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        real = importlib.util.find_spec(name)
        return importlib.util.spec_from_file_location(
            name, real.origin, loader=self, submodule_search_locations=real.submodule_search_locations
        )

    def get_filename(self, name):
        return self.module

    def get_data(self, path):
        return self.source.encode()

    def get_code(self, name):
        return compile(self.source, f"<{self.module}, broken>", "exec")


class Recorder:
    """A pytest plugin that notes which tests visit which line of a module, and how long each takes."""

    def __init__(self, path: str) -> None:
        import coverage

        self.path, self.seconds, self.failed = path, {}, []
        self.coverage = coverage.Coverage(data_file=None, include=[path], config_file=False, branch=False)

    def pytest_runtest_logstart(self, nodeid):
        self.coverage.switch_context(nodeid)
        self.began = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self.seconds[nodeid] = time.monotonic() - self.began
        self.coverage.switch_context("import")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def visits(self) -> dict[int, list[str]]:
        by_line = self.coverage.get_data().contexts_by_lineno(self.path)
        return {line: sorted(set(names) - {"", "import"}) for line, names in by_line.items()}


def in_child(work: Callable[[], int], log: Path, limit: int = TIMEOUT) -> int:
    """Runs `work` in a fork, which has JAX imported and no backend yet; its exit status, or -1 past the time limit."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    return -1 if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def pytest_main(tests: list[str], *plugins: object) -> int:
    import pytest

    os.chdir(ROOT)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
    return int(pytest.main([*options, *tests], plugins=list(plugins)))


def baseline(module: str, work: Path) -> tuple[dict[int, list[str]], dict[str, float]]:
    """Which tests visit which line of the sound module, and their seconds."""
    tests = [f"tests/{name}" for name in TESTS[module] if (ROOT / "tests" / name).exists()]
    record = work / f"{module}.json"

    def run() -> int:
        path = Path(importlib.util.find_spec("ejkernel").origin).parent.joinpath(*module.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        recorder = Recorder(str(path))
        recorder.coverage.start()
        recorder.coverage.switch_context("import")
        status = pytest_main(tests, recorder)
        recorder.coverage.stop()
        record.write_text(json.dumps([recorder.visits(), recorder.seconds]))
        return status

    if in_child(run, work / f"{module}.log", 20 * TIMEOUT) != 0:
        sys.exit(f"{(work / f'{module}.log').read_text()[-4000:]}\nthe tests of {module} fail as it is")
    visits, seconds = json.loads(record.read_text())
    return {int(line): names for line, names in visits.items()}, seconds


def survives(mutant: Mutant, visits: dict[int, list[str]], seconds: dict[str, float], work: Path) -> bool:
    def run(tests: list[str]) -> int:
        sys.meta_path.insert(0, Broken(mutant.module, mutant.source))
        return pytest_main(tests)

    # Python may count a line of a long expression to the one above
    here = visits.get(max((line for line in visits if line <= mutant.line), default=0), [])
    log = work / "mutant.log"
    # what is run at import is seen by no test in particular
    for tests in (here, list(seconds) if mutant.module in JITTED or not here else []):
        tests = sorted(tests, key=lambda name: seconds[name])
        if tests and in_child(lambda tests=tests: run(tests), log) != 0:
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="which modules; all by default")
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant only")
    parser.add_argument("--at-least", type=float, default=0.85, help="the share that must be noticed")
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "compiled")
        for heavy in ("jax", "jax.numpy", "flax.nnx", "pytest", "coverage"):
            importlib.import_module(heavy)
        noticed = total = 0
        for module in options.modules:
            began = time.monotonic()
            mutants = mutants_of(module)
            chosen = mutants[:: options.every]
            visits, seconds = baseline(module, work)
            print(f"{module}: {len(chosen)} of {len(mutants)} mutants, {len(seconds)} tests", flush=True)
            alive = [each for each in chosen if survives(each, visits, seconds, work) and not print(each, flush=True)]
            noticed, total = noticed + len(chosen) - len(alive), total + len(chosen)
            spent = time.monotonic() - began
            print(f"{module}: {len(chosen) - len(alive)} of {len(chosen)} noticed, {spent:.0f} s", flush=True)
    share = noticed / total
    print(f"all: {noticed} of {total} noticed, {share:.1%}")
    sys.exit(share < options.at_least)


if __name__ == "__main__":
    main()
