"""The only importer of jax-triton: whether Triton kernels can run here, and one way to launch them."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel import _devices
from ejkernel.kernels import _varying

INSTALL = "the extra cuda, as by pip install '.[cuda]' in a checkout"


@functools.cache
def _jax_triton() -> Any:
    """The module, or the text of the error that its import ended in."""
    try:
        # with Triton missing, jax-triton itself imports, and fails only when a kernel is launched
        importlib.import_module("triton")
        module = importlib.import_module("jax_triton")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if jax.__version_info__ >= (0, 12) and getattr(module, "__version__", "") in ("0.4.0", "0.4.1"):
        return f"jax-triton {module.__version__} fails under JAX {jax.__version__}, jax-triton 0.3 does not"
    return module


def unavailable() -> str | None:
    """Why Triton kernels cannot be launched here, or `None` if they can."""
    if (device := _devices.assumed.get()) is not None and device.platform == "cuda":
        return None
    if capability() is None:
        return "no NVIDIA GPU here to compile for"
    module = _jax_triton()
    return f"needs Triton and jax-triton, {INSTALL} ({module})" if isinstance(module, str) else None


def capability() -> int | None:
    """Compute capability of the first NVIDIA GPU, as in 90 for 9.0; `None` without one."""
    device = _devices.assumed.get()
    return _capability_here() if device is None else device.capability


@functools.cache
def _capability_here() -> int | None:
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
    call = functools.partial(
        module.triton_call,
        kernel=kernel,
        grid=(programs,),
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )
    if "out_type" not in inspect.signature(module.triton_call).parameters:
        results = call(*arguments, out_shape=tuple(outputs), input_output_aliases=aliases or {})
    else:
        results = _call_as_of_0_4(call, arguments, tuple(outputs), aliases or {})
    # jax-triton forgets over which axes of a mesh its results vary
    arrays = [each for each in arguments if isinstance(each, jax.Array)]
    return tuple(_varying.align((*arrays, *results))[len(arrays) :])


def _call_as_of_0_4(
    call: functools.partial[Any],
    arguments: Sequence[Any],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    aliases: dict[int, int],
) -> tuple[jax.Array, ...]:
    """Our kernels have a parameter for each output. jax-triton 0.4 has none for an output that is aliased to an input.

    So that parameter gets the input once more, and it is this one which the output is aliased to. The other may be a
    copy, or the same memory, as it was before 0.4.
    """
    kernel = call.keywords["kernel"]
    names = [each.name for each in kernel.params if not each.is_constexpr][len(arguments) :]
    of_outputs = sorted((output, argument) for argument, output in aliases.items())
    again = {names[output]: arguments[argument] for output, argument in of_outputs}
    renumbered = {len(arguments) + i: output for i, (output, _) in enumerate(of_outputs)}
    with warnings.catch_warnings():
        # 0.4 would rather have references, which 0.3 does not know
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return call(*arguments, **again, out_type=outputs, input_output_aliases=renumbered)
