"""`ejkernel check`: every op and implementation that runs on this machine, against the definition in float64."""

import argparse
import functools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import PagedCache
from ejkernel._checked import remember
from ejkernel._command_line import no_device, whole
from ejkernel._dispatch import PlatformError, _default_platform
from ejkernel._ops import OPS, Op
from ejkernel.bench import exact
from ejkernel.bench.calls import Arrays, Shape, cotangent, inputs

# The largest error of a result, as the norm of its difference from the definition's over the norm of that. Half
# precision is rounded once at the end and in the products' operands before.
LIMITS = {"bfloat16": 2e-2, "float32": 2e-4, "float64": 1e-10}
# Two rows, as most kernels like them, in the dtype of most models; and a packed stream of odd lengths, with a sequence
# of one token in it, in float32.
EVEN, ODD, BORDERS = (2, 128, 2, 64), (1, 193, 3, 64), (0, 50, 51, 193)
PAGE = 16  # tokens in a page of `paged_attention`


@dataclass(frozen=True)
class Row:
    """One call to check, forward and backward if it has gradients; `borders` are those of packed sequences."""

    op: Op
    platform: str
    shape: Shape
    borders: tuple[int, ...] | None

    def __str__(self) -> str:
        sizes = f"{self.shape.batch} x {self.shape.tokens} x {self.shape.heads} x {self.shape.dim}"
        return (
            f"{self.op.name:<17} {self.platform:<7} {self.shape.dtype:<9} {sizes + ', packed' * bool(self.borders):<24}"
        )


def main(arguments: Sequence[str], prog: str = "ejkernel check") -> int:
    """Prints a line for each call. 0 if none is wrong, 1 if one is or there is no device."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "--seconds", type=whole(1, 86400), default=120, help="begin no call after so many seconds (default: 120)"
    )
    limit = parser.parse_args(arguments).seconds
    if why := no_device():
        print(why)
        return 1
    platform, device = _default_platform(), jax.devices()[0]
    print(f"{device.device_kind}: outputs, states and gradients against the definition in float64", flush=True)
    start, counts = time.monotonic(), {"ok": 0, "WRONG": 0, "not run": 0, "left out": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows(platform):
            if time.monotonic() - start > limit:
                counts["left out"] += 1
                continue
            verdict, why = judge(row)
            counts[verdict] += 1
            print(f"{verdict:<8} {row} {why}".rstrip(), flush=True)
    print(_summary(counts, limit, time.monotonic() - start))
    if not counts["WRONG"] and not counts["left out"]:
        remember()
    return 1 if counts["WRONG"] else 0


def rows(platform: str) -> Iterator[Row]:
    """The calls to check here: every op and implementation in one dtype, then in the next."""
    wide = ["float32", *(["float64"] if jnp.zeros(()).dtype == jnp.float64 else [])]
    for dtype in ("bfloat16", *wide):
        shape, borders = (Shape(*EVEN, dtype), None) if dtype == "bfloat16" else (Shape(*ODD, dtype), BORDERS)
        for op in OPS.values():
            for each in op.implementations:
                if platform in (each.devices or (platform,)):
                    # `attention` takes no packed sequences
                    yield Row(op, each.name, shape, None if op.name == "attention" else borders)


def judge(row: Row) -> tuple[str, str]:
    """The verdict on a call, and the reason or the largest error."""
    arrays, upstream = inputs(row.op, row.shape), cotangent(row.shape)
    try:
        results = _paged(row, arrays) if row.op.name == "paged_attention" else _results(row, arrays, upstream)
    except PlatformError as error:
        return "not run", str(error).partition("cannot serve this call: ")[2] or str(error)
    except Exception as error:  # compilers raise errors of any type
        return "WRONG", f"{type(error).__name__}: {error}".splitlines()[0]
    worst, name = _worst(results, exact.of_call(row.op, arrays, upstream, row.borders))
    # a NaN is no error below the limit
    right = worst <= LIMITS[row.shape.dtype]
    return ("ok", f"{worst:.0e}") if right else ("WRONG", f"{name}: an error of {worst:.1e} of its size")


def _results(row: Row, arrays: Arrays, upstream: jax.Array) -> dict[str, np.ndarray]:
    """The op's outputs and gradients, by name."""
    packed: dict[str, Any] = {} if row.borders is None else {"cu_seqlens": jnp.array(row.borders, jnp.int32)}

    @jax.jit
    def run(arrays: Arrays, upstream: jax.Array) -> dict[str, jax.Array]:
        def output(arrays: Arrays) -> tuple[jax.Array, Any]:
            results = row.op.results(arrays, **packed, platform=row.platform)
            return results if isinstance(results, tuple) else (results, None)

        (first, pull, second) = jax.vjp(output, arrays, has_aux=True)
        state = {"final state": second} if row.op.core != "softmax" and row.borders is None else {}
        return {"output": first, **state, **pull(upstream)[0]}

    return {name: np.asarray(x, np.float64) for name, x in jax.device_get(run(arrays, upstream)).items()}


def _paged(row: Row, arrays: Arrays) -> dict[str, np.ndarray]:
    """The output of `paged_attention`: first all tokens of each sequence but the last one, then that one."""
    batch, tokens, heads, dim = row.shape.batch, row.shape.tokens, row.shape.heads, row.shape.dim
    ends = np.asarray(row.borders if row.borders else range(0, (batch + 1) * tokens, tokens))
    count = len(ends) - 1
    columns = -(-int(np.diff(ends).max()) // PAGE)
    # pages in an order that is not that of the tokens
    table = jnp.arange(count * columns - 1, -1, -1, dtype=jnp.int32).reshape(count, columns)
    memory = jnp.zeros((2, count * columns, PAGE, heads, dim), row.shape.dtype)
    stream = [arrays[name].reshape(-1, heads, dim) for name in ("query", "key", "value")]
    last = np.zeros(batch * tokens, bool)
    last[ends[1:] - 1] = True
    call = jax.jit(functools.partial(row.op.function, platform=row.platform))
    output = np.zeros(stream[2].shape)
    pages, lengths = PagedCache(memory[0], memory[1]), jnp.zeros(count, jnp.int32)
    for turn in (~last, last):
        borders = jnp.asarray([np.count_nonzero(turn[:end]) for end in ends], jnp.int32)
        found, pages = call(*(x[turn] for x in stream), pages, table, lengths, borders)
        output[turn] = np.asarray(found, np.float64)
        lengths += jnp.diff(borders)
    return {"output": output.reshape(batch, tokens, heads, dim)}


def _worst(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest error, where NaN counts as infinite, and the name of its result."""
    errors = exact.errors(results, {name: expected[name] for name in results})
    name = max(errors, key=lambda each: np.inf if np.isnan(errors[each]) else errors[each])
    return errors[name], name


def _summary(counts: dict[str, int], limit: int, seconds: float) -> str:
    words = [f"{counts['ok']} right", f"{counts['WRONG']} wrong"]
    words += [f"{counts['not run']} that this implementation does not serve"] if counts["not run"] else []
    words += [f"{counts['left out']} left out after {limit} s (see --seconds)"] if counts["left out"] else []
    return f"{', '.join(words)}; {seconds:.0f} s. {'FAILED' if counts['WRONG'] else 'PASSED'}"
