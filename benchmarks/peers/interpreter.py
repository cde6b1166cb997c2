"""Triton's interpreter, made fit for fla's kernels: to be imported before them."""

import ast
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import ASTTransformer

_init = Autotuner.__init__


def _of_one_configuration(self: Any, fn: Any, arg_names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
    """Kernels cannot be timed here, so the first of their configurations has to do."""
    _init(self, fn, arg_names, configs[:1], *arguments, **options)


def _counted_by_a_tensor(self: ASTTransformer, loop: ast.For) -> ast.For:
    """The counter of `for i in range(…)` is a tensor when compiled, and kernels call its methods; here it is an int."""
    self.generic_visit(loop)
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range":
        counter = loop.target.id
        again = ast.Assign([ast.Name(counter, ast.Store())], ast.Name(counter, ast.Load()))
        loop.body.insert(0, self.visit(again))
    return loop


Autotuner.__init__ = _of_one_configuration
ASTTransformer.visit_For = _counted_by_a_tensor
