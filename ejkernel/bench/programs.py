"""A call that is ready to be timed: compiled, with its memory known before it runs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ejkernel.bench.calls import Arrays


@dataclass(frozen=True)
class Program:
    """A call without arguments.

    Attributes:
        call: Starts the call and returns its results, perhaps before they are computed.
        wait: Takes the results, and returns when they are computed.
        read: Takes the results and a head; gives the output and the gradients of that head in the first row, by name.
        compile_s: How long compiling took.
        temporary_bytes: Memory beside arguments and results; `None` if the backend does not tell.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any]
    read: Callable[[Any, int], Mapping[str, np.ndarray]]
    compile_s: float
    temporary_bytes: int | None


def compiled(function: Callable[..., jax.Array], inputs: Arrays, cotangent: jax.Array | None) -> Program:
    """`function(**inputs)`, and with a cotangent its gradients too, by JAX."""

    def forward(inputs: Arrays) -> dict[str, jax.Array]:
        return {"output": function(**inputs)}

    def both(inputs: Arrays, cotangent: jax.Array) -> dict[str, jax.Array]:
        output, pull = jax.vjp(lambda inputs: function(**inputs), inputs)
        return {"output": output, **pull(cotangent)[0]}

    program = jax.jit(forward) if cotangent is None else jax.jit(both)
    arguments = (inputs,) if cotangent is None else (inputs, cotangent)
    start = time.perf_counter()
    ready = program.lower(*arguments).compile()
    took = time.perf_counter() - start
    return Program(
        call=lambda: ready(*arguments),
        wait=jax.block_until_ready,
        read=one_head,
        compile_s=took,
        temporary_bytes=_temporaries(ready),
    )


def one_head(arrays: Mapping[str, jax.Array], head: int) -> dict[str, np.ndarray]:
    """One head of the first row of each array, sliced before it leaves the device."""
    return {name: np.asarray(x[0, :, head], np.float32) for name, x in arrays.items()}


def _temporaries(ready: Any) -> int | None:
    try:
        return int(ready.memory_analysis().temp_size_in_bytes)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # not every backend tells
