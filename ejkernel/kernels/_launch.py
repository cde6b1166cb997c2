"""The one way to Triton: how a kernel is cut, what it is given, and how jax-triton, imported here alone, launches it.

A kernel is a function `kernel(p, CALL)`. `p` is a named tuple of its arrays and sizes, in which what a call does not
have is `None`, and `CALL` the record of all that it is compiled for.
"""

import ast
import collections
import functools
import importlib
import inspect
import os
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _devices
from ejkernel._dispatch import _warn_once
from ejkernel.kernels import _kernel_cache, _pallas, _varying

# CUDA graphs capture kernels where this is among the flags of XLA. Without it XLA would join these with the slices of
# larger arrays that it reads and writes. Some programs do not compile then, others run a kernel twice (JAX 0.11.2).
GRAPHS = "--xla_gpu_enable_dynamic_slice_fusion=false"
# What kernels read and write.
DTYPES = tuple(np.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float32))
INSTALL = "the extra cuda, as by pip install '.[cuda]' in a checkout"


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut: rows and columns of a program's tile, warps, and pipeline stages.

    The rows are those of the state that a recurrence carries, and attention's queries; the columns are the state's
    others, and attention's keys. `joined` is attention's: a walk is one loop that finds out which tiles are at an edge,
    not a loop for each edge and one for what is between, so that loads never stop.
    """

    rows: int
    columns: int = 256
    _: KW_ONLY
    warps: int = 4
    stages: int = 1
    joined: bool = False


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def padded(dim: int, least: int = 16) -> int:
    """The least power of two that holds `dim`; dots need 16."""
    return max(least, 1 << (dim - 1).bit_length())


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


def refused_dtype(*dtypes: Any) -> str | None:
    """Which of these dtypes no Triton kernel takes, or `None`."""
    return next((f"dtype {each} is none of bfloat16, float16, float32" for each in dtypes if each not in DTYPES), None)


def refusal(dtypes: Sequence[Any], sizes: Sequence[Any]) -> str | None:
    """Why no Triton kernel takes arrays of these dtypes and sizes here, or `None` if one may."""
    return refused_dtype(*dtypes) or ("an array without elements" if 0 in sizes else unavailable())


def target() -> str:
    """What launches a kernel in a compiled program: of JAX's two calls the one that CUDA graphs capture, if it may."""
    graphs = jax.__version_info__ >= (0, 10, 2) and GRAPHS in os.environ.get("XLA_FLAGS", "").split()
    return "triton_kernel_call_ffi" if graphs else "triton_kernel_call"


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
    inputs: Mapping[str, jax.Array | int | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    constants: Any,
    programs: int,
    tile: Tile,
    in_place: Mapping[str, jax.Array] | None = None,
) -> Any:
    """Runs `kernel` as `programs` programs; returns its outputs as a named tuple, `None` where one is.

    Outputs that are in `in_place` start as these arrays, in their memory.
    """
    if isinstance(module := _jax_triton(), str):
        raise RuntimeError(f"Triton kernels cannot be launched here: {module}")
    given, made, before = operands(inputs, outputs, in_place)
    parameters = list(given)
    arrays = [each for each in given.values() if not isinstance(each, int)]
    it = Launch(
        flat(kernel, (*inputs, *outputs), (*given, *made)),
        tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays),
        tuple(each for each in given.values() if isinstance(each, int)),
        tuple(made.values()),
        tuple((parameters.index(source), list(made).index(name)) for name, source in before.items()),
        programs,
        tile,
        constants,
        _kernel_cache.of_this_pass(),
    )
    if "out_type" in inspect.signature(module.triton_call).parameters:
        results = _call_as_of_0_4(it, arrays, list(made))
    else:
        it.beside.append(it)
        results = _primitive().bind(*arrays, launch=it)
    # kernels' results do not say over which axes of a mesh they vary
    results = _varying.align((*arrays, *results))[len(arrays) :]
    return named(outputs, dict(zip(made, results, strict=True)))


@dataclass(frozen=True)
class Launch:
    """A kernel, all that it is compiled for, and how it is launched.

    Attributes:
        kernel: what `flat` returns
        arrays: shapes and dtypes of its first parameters
        sizes: the integers that follow them
        outputs: shapes and dtypes of its last parameters
        aliases: pairs of an array and the output that takes its memory
        programs: how many there are
        tile: how the kernel is cut
        constants: its `CALL`
        beside: launches of its pass whose compilation has not begun; they are compiled side by side
    """

    kernel: Any
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    sizes: tuple[int, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    aliases: tuple[tuple[int, int], ...]
    programs: int
    tile: Tile
    constants: Any
    beside: list[Any] = field(compare=False, repr=False)

    def options(self) -> dict[str, Any]:
        """The keywords that every version of jax-triton takes."""
        tile = {"num_warps": self.tile.warps, "num_stages": self.tile.stages}
        return {"kernel": self.kernel, "grid": (self.programs,), "CALL": self.constants, **tile}

    def key(self) -> str:
        """A name for what `compile` returns."""
        versions = [
            getattr(sys.modules.get(name), "__version__", None) for name in ("jax", "jaxlib", "jax_triton", "triton")
        ]
        settings = sorted(each for each in os.environ.items() if each[0].startswith(_COMPILER_SETTINGS))
        types = [(each.shape, str(each.dtype)) for each in (*self.arrays, *self.outputs)]
        # Triton's key of a kernel is of its source, and of all functions that it calls
        facts = self.kernel.cache_key, self.kernel.arg_names, types, self.sizes, self.aliases, self.programs, self.tile
        return _kernel_cache.digest(versions, settings, capability(), *facts, self.constants)

    def compile(self) -> bytes:
        """What XLA is given to launch the kernel, from jax-triton, which compiles it when it lowers a call."""

        def call(*arrays: jax.Array) -> Any:
            aliases = dict(self.aliases)
            sized = (*arrays, *self.sizes)
            return _jax_triton().triton_call(
                *sized, out_shape=self.outputs, input_output_aliases=aliases, **self.options()
            )

        # dtypes of 64 bits stay as they are
        with jax.enable_x64(True):
            module = jax.jit(call).trace(*self.arrays).lower(lowering_platforms=("cuda",)).compiler_ir()
        (main,) = (each for each in module.body.operations if each.name.value == "main")
        (custom_call,) = (each for each in main.body.blocks[0].operations if each.name == "stablehlo.custom_call")
        compiled: bytes = custom_call.attributes["backend_config"].value_bytes
        return compiled


# environment variables that change what Triton compiles begin so
_COMPILER_SETTINGS = ("TRITON_", "LLVM_", "MLIR_", "DISABLE_LLVM_OPT", "NVPTX_")


@functools.cache
def _primitive() -> Any:
    """A launch as an operation: its kernel is compiled, or read from a file, when the operation is lowered."""
    # not at the top: `import ejkernel` must not import Pallas, which the first of these does
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("ejkernel_triton_launch")
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, launch: jax.jit(functools.partial(primitive.bind, launch=launch))(*arrays))
    primitive.def_abstract_eval(
        lambda *_, launch: [jax.core.ShapedArray(each.shape, each.dtype) for each in launch.outputs]
    )

    def lower(ctx: Any, *arrays: Any, launch: Launch) -> Any:
        if not _pallas.one_device(ctx.module_context.axis_context):
            _warn_once(
                "XLA cannot split Triton kernels in an exported program or inside a jax.shard_map that leaves axes of "
                "the mesh out: arrays sharded over these are gathered, and every device computes the whole call. "
                "Inside a jax.shard_map over all axes each device computes its own part"
            )
        while launch.beside:
            each = launch.beside.pop()
            _kernel_cache.start(each.key(), each.compile)
        compiled: Any = _kernel_cache.get(launch.key(), launch.compile)
        options: dict[str, Any] = {"api_version": 2, "backend_config": compiled}
        if target() == "triton_kernel_call_ffi":
            named = {"name": "ejkernel", "opaque": compiled}
            options = {"backend_config": {name: mlir.ir.StringAttr.get(each) for name, each in named.items()}}
        rule: Any = jax.ffi.ffi_lowering(target(), operand_output_aliases=dict(launch.aliases), **options)
        return rule(ctx, *arrays)

    mlir.register_lowering(primitive, lower, platform="cuda")
    return primitive


def operands(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], in_place: Mapping[str, jax.Array] | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The arguments of a launch by name, its outputs, and of those that are in place the name of their argument.

    That is the input which is the same array, if one is: as another argument it would be copied.
    """
    sizes = {name: each for name, each in inputs.items() if isinstance(each, int)}
    arrays = {name: each for name, each in inputs.items() if each is not None and name not in sizes}
    before = {}
    for name, each in (in_place or {}).items():
        before[name] = next((known for known, array in arrays.items() if array is each), f"{name}_before")
        arrays[before[name]] = each
    # sizes come last: aliases count arrays alone
    return arrays | sizes, {name: each for name, each in outputs.items() if each is not None}, before


def named(names: Mapping[str, Any] | Sequence[str], values: Mapping[str, Any]) -> Any:
    """A named tuple of these names; those without a value are `None`."""
    return _tuple_of(tuple(names))(*(values.get(name) for name in names))


@functools.cache
def _tuple_of(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Arrays", names)


@functools.cache
def flat(kernel: Any, fields: tuple[str, ...], parameters: tuple[str, ...]) -> Any:
    """`kernel`, whose `p` has these fields, with parameters instead of `p`: jax-triton passes arrays one by one.

    Fields that are no parameter are `None`, and parameters that are no field nobody reads.
    """
    jit = importlib.import_module("triton.runtime.jit")
    source = kernel.fn

    class Flat(jit.JITFunction):  # type: ignore[name-defined]
        def parse(self) -> ast.Module:
            tree: ast.Module = super().parse()
            function: Any = tree.body[0]
            values = ", ".join(_parameter(name) if name in parameters else "None" for name in fields)
            (packed,) = ast.parse(f"{function.args.args[0].arg} = Arrays({values})").body
            function.args.args[:1] = [ast.arg(_parameter(name)) for name in parameters]
            function.body.insert(0, packed)
            return ast.fix_missing_locations(tree)

    function = types.FunctionType(source.__code__, source.__globals__ | {"Arrays": _tuple_of(fields)}, source.__name__)
    each = [inspect.Parameter(_parameter(name), inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
    _, constants = inspect.signature(source).parameters.values()
    function.__signature__ = inspect.Signature([*each, constants])  # type: ignore[attr-defined]
    return Flat(function)


def _parameter(name: str) -> str:
    """What a field's parameter is called: by a name that hides nothing which the kernel reads."""
    return f"given_{name}"


def _call_as_of_0_4(launch: Launch, arrays: Sequence[jax.Array], names: Sequence[str]) -> tuple[jax.Array, ...]:
    """Kernels have a parameter for each output. jax-triton 0.4 has none for an output that is aliased to an input.

    So that parameter gets the input once more, and it is this one which the output is aliased to. The other may be a
    copy, or the same memory, as it was before 0.4.
    """
    arguments = *arrays, *launch.sizes
    of_outputs = sorted((output, argument) for argument, output in launch.aliases)
    again = {_parameter(names[output]): arguments[argument] for output, argument in of_outputs}
    renumbered = {len(arguments) + i: output for i, (output, _) in enumerate(of_outputs)}
    with warnings.catch_warnings():
        # 0.4 would rather have references, which 0.3 does not know
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        outputs, call = launch.outputs, _jax_triton().triton_call
        return call(*arguments, **again, **launch.options(), out_type=outputs, input_output_aliases=renumbered)
