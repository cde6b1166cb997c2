"""The only importer of jax-triton: whether Triton kernels can run here, and one way to launch them."""

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.kernels import _varying

INSTALL = "pip install ejkernel[cuda]"


@functools.cache
def _jax_triton() -> Any:
    """The module, or the text of the error that its import ended in."""
    try:
        # with Triton missing, jax-triton itself imports, and fails only when a kernel is launched
        importlib.import_module("triton")
        return importlib.import_module("jax_triton")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot be launched here, or `None` if they can."""
    if capability() is None:
        return "no NVIDIA GPU here to compile for"
    module = _jax_triton()
    return f"needs Triton and jax-triton: {INSTALL} ({module})" if isinstance(module, str) else None


@functools.cache
def capability() -> int | None:
    """Compute capability of the first NVIDIA GPU, as in 90 for 9.0; `None` without one."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    return int(str(device.compute_capability).replace(".", ""))


def launch(
    kernel: Any,
    *arguments: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    num_warps: int,
    num_stages: int,
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs `kernel` as `programs` programs; its outputs follow its arguments, `constants` are its constexprs."""
    if isinstance(module := _jax_triton(), str):
        raise RuntimeError(f"Triton kernels cannot be launched here: {module}")
    call = module.triton_call
    # jax-triton 0.4 renamed the argument; it also takes aliases otherwise, so the extra `cuda` does not admit it yet
    outputs_name = "out_type" if "out_type" in inspect.signature(call).parameters else "out_shape"
    results = call(
        *arguments,
        kernel=kernel,
        grid=(programs,),
        num_warps=num_warps,
        num_stages=num_stages,
        input_output_aliases=aliases or {},
        **{outputs_name: tuple(outputs)},
        **constants,
    )
    # jax-triton forgets over which axes of a mesh its results vary
    arrays = [each for each in arguments if isinstance(each, jax.Array)]
    return tuple(_varying.align((*arrays, *results))[len(arrays) :])
