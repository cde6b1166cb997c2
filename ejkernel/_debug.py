"""`ejkernel.debug`: checks of values that ops are called with, which checks of shapes and dtypes cannot see."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from ejkernel._checks.packing import border_values

GATES = ("g", "gk", "gv", "g_gamma")
_contexts = itertools.count()
# what is wrong with values seen so far inside `debug`; `None` outside
_problems_so_far: ContextVar[list[str] | None] = ContextVar("problems_so_far", default=None)
current_problems = _problems_so_far.get


@contextmanager
def debug() -> Iterator[None]:
    """Checks the values that ops are called with inside; a `ValueError` at its end says what is wrong with them.

    Ops always check shapes and dtypes, but values only where they are known when tracing. Inside this context values
    are checked when calls run, at some cost: borders that do not start at 0, decrease or end past the tokens; gates
    that look like decays instead of their logs; `g` and `beta` that look swapped; NaN. Functions that were compiled
    before are compiled again inside, and are as before afterwards. If the code inside raises, notes on its error say
    what is wrong with the values.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import ejkernel
        >>> query = key = value = jnp.ones((1, 8, 2, 4))
        >>> with ejkernel.debug():
        ...     result = jax.jit(ejkernel.recurrent_gla)(query, key, value, g=jnp.full((1, 8, 2, 4), 0.9))
        Traceback (most recent call last):
        ValueError: recurrent_gla: g: got only values in [0, 1], as decays are; expected their logs, as by jnp.log
    """
    # experimental in JAX; new metadata makes its caches miss without clearing them
    from jax.experimental.xla_metadata import set_xla_metadata

    problems: list[str] = []
    token = _problems_so_far.set(problems)
    try:
        with set_xla_metadata(ejkernel=f"debug {next(_contexts)}"):
            yield
    except Exception as error:
        jax.effects_barrier()
        for each in dict.fromkeys(problems):
            error.add_note(f"ejkernel.debug: {each}")
        raise
    finally:
        _problems_so_far.reset(token)
    jax.effects_barrier()
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def check_values(problems: list[str], op: str, arguments: Mapping[str, Any]) -> None:
    """Adds to `problems` what is wrong with the arrays among an op's arguments, now or when a traced function runs."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray) and _has_values(x)}
    # inside a `shard_map` arrays hold a slice of the tokens, but borders count all tokens
    has_all_tokens = arguments.get("axis_name") is None or arguments.get("mesh") is not None
    report = functools.partial(_report, problems, op, has_all_tokens)
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        jax.debug.callback(report, arrays)
    else:
        report(arrays)


def _has_values(x: Any) -> bool:
    return x.dtype.kind in "iuf" or jax.numpy.issubdtype(x.dtype, jax.numpy.floating)


def _report(problems: list[str], op: str, has_all_tokens: bool, arrays: Mapping[str, Any]) -> None:
    known = {name: np.asarray(x) for name, x in arrays.items()}
    problems += [f"{op}: {each}" for each in _problems(known, has_all_tokens)]


def _problems(arrays: Mapping[str, np.ndarray], has_all_tokens: bool) -> Iterator[str]:
    """What is wrong with the values of these arguments."""
    for name, x in arrays.items():
        if x.dtype.kind not in "iu":
            missing = np.isnan(x.astype(np.float32))
            if missing.any():
                place = ", ".join(map(str, np.argwhere(missing)[0]))
                yield f"{name}: got NaN in {missing.sum()} of {x.size} values, the first at [{place}]; expected none"
    # the convolution's tokens have no heads
    tokens = arrays["query"].shape[-3:-2] if "query" in arrays else arrays["x"].shape[-2:-1] if "x" in arrays else ()
    keys = arrays["key"].shape[-3:-2] if "key" in arrays else ()
    for name, count in (("cu_seqlens", tokens), ("cu_seqlens_kv", keys)):
        if name in arrays:
            yield from _border_problems(name, arrays[name], count[0] if has_all_tokens else None)
    gates = {name: arrays[name] for name in GATES if name in arrays and arrays[name].size}
    beta = arrays.get("beta")
    if "g" in gates and beta is not None and beta.size and _none_below_0(gates["g"]) and (beta <= 0).all():
        yield "g, beta: got no value below 0 for g and none above for beta, as if they were swapped; expected logs in g"
        return
    for name, gate in gates.items():
        if _none_below_0(gate) and (gate <= 1).all():
            yield f"{name}: got only values in [0, 1], as decays are; expected their logs, as by jnp.log"


def _none_below_0(gate: np.ndarray) -> bool:
    """Whether no gate decays and some grow: decays themselves may be 0, and gates that are all 0 keep everything."""
    return bool((gate >= 0).all() and (gate > 0).any())


def _border_problems(name: str, borders: np.ndarray, tokens: int | None) -> Iterator[str]:
    limit = np.iinfo(borders.dtype).max if tokens is None else tokens
    try:
        border_values(name, borders, limit, f"the {limit} tokens there are")
    except ValueError as error:
        yield str(error)
