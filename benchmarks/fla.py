"""`python -m benchmarks.fla`: `ejkernel bench` with flash-linear-attention, on PyTorch, among the peers."""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import jax
import numpy as np

from ejkernel._command_line import quietly
from ejkernel._ops import Op
from ejkernel.bench import command
from ejkernel.bench.calls import Arrays
from ejkernel.bench.peers import PEERS, Peer
from ejkernel.bench.programs import Program

# what it takes beside what ours takes
OPTIONS = {"linear_attention": {"normalize": False}}
INSTALL = "pip install flash-linear-attention, and PyTorch with CUDA"


def missing() -> str | None:
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU ({INSTALL})"
    absent = [name for name in ("torch", "fla") if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {' and '.join(absent)} ({INSTALL})"
    return None if import_module("torch").cuda.is_available() else f"PyTorch sees no GPU ({INSTALL})"


@contextlib.contextmanager
def _triton_cache() -> Iterator[None]:
    """jax-triton turns Triton's cache off for the whole process, without which Triton launches nothing for others."""
    setting = os.environ.get("TRITON_CACHE_DIR")
    if setting == "":
        del os.environ["TRITON_CACHE_DIR"]
    try:
        yield
    finally:
        if setting == "":
            os.environ["TRITON_CACHE_DIR"] = setting


def program(op: Op, inputs: Arrays, cotangent: jax.Array | None) -> Program:
    """The same numbers as JAX has, as tensors of the same types."""
    if op.fla is None:
        raise NotImplementedError(f"fla has no chunked kernel for the gates of {op.name}")
    module, name = op.fla.split(":")
    torch, function = import_module("torch"), getattr(import_module(module), name)
    options = {**op.options, **OPTIONS.get(op.name, {})}
    torch.cuda.empty_cache()  # JAX has no use for what PyTorch keeps from the calls before

    def tensor(x: jax.Array) -> Any:
        try:
            made = torch.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError):
            # through float32, which holds every smaller type and which NumPy and PyTorch both have
            made = torch.from_numpy(np.array(x, np.float32)).cuda().to(getattr(torch, str(x.dtype)))
        return made.detach().requires_grad_(cotangent is not None)

    jax.block_until_ready((inputs, cotangent))
    leaves = {name: tensor(x) for name, x in inputs.items()}
    upstream = None if cotangent is None else tensor(cotangent).detach()

    def call() -> dict[str, Any]:
        if upstream is None:
            with torch.no_grad():
                return {"output": function(*leaves.values(), **options)[0]}
        output = function(*leaves.values(), **options)[0]
        gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
        return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}

    def wait(results: Any) -> None:
        torch.cuda.synchronize()

    # the first call compiles and tunes; the second shows how much memory it takes
    start = time.perf_counter()
    with _triton_cache():
        wait(call())
    took = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    wait(results)
    returned = sum(x.numel() * x.element_size() for x in results.values())
    return Program(
        call=call,
        wait=wait,
        read=lambda results, head: {name: x[0, :, head].float().cpu().numpy() for name, x in results.items()},
        compile_s=took,
        temporary_bytes=max(torch.cuda.max_memory_allocated() - before - returned, 0),
    )


PEER = Peer(
    "fla",
    "flash-linear-attention, on PyTorch",
    missing,
    lambda op: op.fla is not None or op.core == "linear recurrence",
    program,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(arguments, prog="python -m benchmarks.fla", peers={**PEERS, "fla": PEER})


if __name__ == "__main__":
    sys.exit(quietly(main))
