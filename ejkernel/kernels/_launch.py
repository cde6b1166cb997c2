"""How every Triton kernel is launched, by jax-triton, which only this module imports.

A kernel is a function `kernel(p, CALL)`. `p` is a named tuple of its arrays and sizes; those that a call does not have
are `None`. `CALL` is a frozen record of all compile-time constants.
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

# With this flag of XLA, CUDA graphs can capture our kernels. Without it, XLA would fuse captured kernels with slices of
# the arrays they read and write: some programs then do not compile, others run a kernel twice (JAX 0.11.2).
GRAPHS = "--xla_gpu_enable_dynamic_slice_fusion=false"
# The dtypes that kernels read and write.
DTYPES = tuple(np.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float32))
INSTALL = "the extra cuda, as by pip install '.[cuda]' in a checkout"


@dataclass(frozen=True)
class Tile:
    """The tile of one program, its warps, and its pipeline stages.

    In a recurrence, rows and columns are those of the part of the state that a program carries; in attention, they are
    queries and keys. `joined`, for attention, makes one loop over all blocks of keys that looks which blocks need a
    mask, instead of three loops (before, inside and after the blocks that need none): loads are then never interrupted.
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
    """The smallest power of two that is at least `dim` and `least`; matrix products need 16."""
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
    """A message about the first of these dtypes that no Triton kernel takes, or `None`."""
    return next((f"dtype {each} is none of bfloat16, float16, float32" for each in dtypes if each not in DTYPES), None)


def refusal(dtypes: Sequence[Any], sizes: Sequence[Any]) -> str | None:
    """Why Triton cannot serve arrays of these dtypes and sizes here, or `None` if it may."""
    return refused_dtype(*dtypes) or ("an array without elements" if 0 in sizes else unavailable())


def target() -> str:
    """The custom call that launches a kernel: the one that CUDA graphs can capture, if the flag `GRAPHS` is set."""
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
    """Runs `kernel` on a grid of `programs` programs, and returns its outputs as a named tuple.

    Outputs that are `None` stay so. Those that `in_place` names overwrite the array there: they start with its values,
    in its memory.
    """
    if isinstance(module := _jax_triton(), str):
        raise RuntimeError(f"Triton kernels cannot be launched here: {module}")
    arguments, results, overwritten = operands(inputs, outputs, in_place)
    parameters = list(arguments)
    arrays = [each for each in arguments.values() if not isinstance(each, int)]
    it = Launch(
        flat(kernel, (*inputs, *outputs), (*arguments, *results)),
        tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays),
        tuple(each for each in arguments.values() if isinstance(each, int)),
        tuple(results.values()),
        tuple((parameters.index(source), list(results).index(name)) for name, source in overwritten.items()),
        programs,
        tile,
        constants,
        _kernel_cache.launches_of_this_pass(),
    )
    if "out_type" in inspect.signature(module.triton_call).parameters:
        values = _call_as_of_0_4(it, arrays, list(results))
    else:
        it.same_pass.append(it)
        values = _primitive().bind(*arrays, launch=it)
    # the primitive's results are not marked as varying over mesh axes
    values = _varying.align((*arrays, *values))[len(arrays) :]
    return named(outputs, dict(zip(results, values, strict=True)))


@dataclass(frozen=True)
class Launch:
    """A kernel, everything that it is compiled for, and how it is launched.

    Attributes:
        kernel: What `flat` returns.
        arrays: Shapes and dtypes of its first parameters.
        sizes: The integers that follow them.
        outputs: Shapes and dtypes of its last parameters.
        aliases: Pairs of indices: an array, and the output that overwrites it.
        programs: The size of the grid.
        tile: The tile, warps and stages of a program.
        constants: The kernel's `CALL`.
        same_pass: Launches of the same pass whose compilation has not begun. They are compiled in parallel.
    """

    kernel: Any
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    sizes: tuple[int, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    aliases: tuple[tuple[int, int], ...]
    programs: int
    tile: Tile
    constants: Any
    same_pass: list[Any] = field(compare=False, repr=False)

    def options(self) -> dict[str, Any]:
        """The keywords that every version of jax-triton takes."""
        tile = {"num_warps": self.tile.warps, "num_stages": self.tile.stages}
        return {"kernel": self.kernel, "grid": (self.programs,), "CALL": self.constants, **tile}

    def key(self) -> str:
        """The name of the file that holds what `compile` returns."""
        versions = [
            getattr(sys.modules.get(name), "__version__", None) for name in ("jax", "jaxlib", "jax_triton", "triton")
        ]
        settings = sorted(each for each in os.environ.items() if each[0].startswith(_COMPILER_SETTINGS))
        types = [(each.shape, str(each.dtype)) for each in (*self.arrays, *self.outputs)]
        facts = self.kernel.identity(), types, self.sizes, self.aliases, self.programs, self.tile, self.constants
        return _kernel_cache.digest(versions, settings, capability(), *facts)

    def compile(self) -> bytes:
        """The compiled kernel as XLA's custom call takes it. jax-triton compiles it when it lowers a call."""

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


# prefixes of environment variables that change what Triton compiles
_COMPILER_SETTINGS = ("TRITON_", "LLVM_", "MLIR_", "DISABLE_LLVM_OPT", "NVPTX_")


@functools.cache
def _primitive() -> Any:
    """A launch as a primitive: its kernel is compiled, or read from a file, when the primitive is lowered."""
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
        while launch.same_pass:
            each = launch.same_pass.pop()
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
    """Arguments of a launch by name, its outputs by name, and for each output in place the argument it overwrites.

    Where an input is the array that is overwritten, it is that argument: as a second argument it would be copied.
    """
    sizes = {name: each for name, each in inputs.items() if isinstance(each, int)}
    arrays = {name: each for name, each in inputs.items() if each is not None and name not in sizes}
    overwritten = {}
    for name, each in (in_place or {}).items():
        overwritten[name] = next((known for known, array in arrays.items() if array is each), f"{name}_before")
        arrays[overwritten[name]] = each
    # sizes come last: aliases count arrays only
    return arrays | sizes, {name: each for name, each in outputs.items() if each is not None}, overwritten


def named(names: Mapping[str, Any] | Sequence[str], values: Mapping[str, Any]) -> Any:
    """A named tuple with these names; names without a value are `None`."""
    return _tuple_of(tuple(names))(*(values.get(name) for name in names))


@functools.cache
def _tuple_of(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Arrays", names)


@functools.cache
def flat(kernel: Any, fields: tuple[str, ...], parameters: tuple[str, ...]) -> Any:
    """`kernel` with a parameter for each array instead of `p`, because jax-triton passes arrays one by one.

    `fields` are those of `p`. A field that is not among the parameters is `None`; a parameter that is not a field, as
    an array that is only overwritten, is not read.
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

        def identity(self) -> tuple[Any, ...]:
            """All that its compiled code depends on besides types and constants."""
            return source.__name__, fields, parameters, _kernel_cache.digest_of_sources(source.__module__)

    function = types.FunctionType(source.__code__, source.__globals__ | {"Arrays": _tuple_of(fields)}, source.__name__)
    each = [inspect.Parameter(_parameter(name), inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
    _, constants = inspect.signature(source).parameters.values()
    function.__signature__ = inspect.Signature([*each, constants])  # type: ignore[attr-defined]
    return Flat(function)


def _parameter(name: str) -> str:
    """The name of a field's parameter, which must not hide a global name that the kernel uses."""
    return f"given_{name}"


def _call_as_of_0_4(launch: Launch, arrays: Sequence[jax.Array], names: Sequence[str]) -> tuple[jax.Array, ...]:
    """A launch by jax-triton 0.4, which passes kernels no parameter for an output that is aliased to an input.

    Our kernels have a parameter for each output. So the input is passed a second time, as that parameter, and the
    output is aliased to this second argument. The first may be a copy or the same memory.
    """
    arguments = *arrays, *launch.sizes
    of_outputs = sorted((output, argument) for argument, output in launch.aliases)
    aliased = {_parameter(names[output]): arguments[argument] for output, argument in of_outputs}
    renumbered = {len(arguments) + i: output for i, (output, _) in enumerate(of_outputs)}
    with warnings.catch_warnings():
        # 0.4 would rather have references, which 0.3 does not know
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        outputs, call = launch.outputs, _jax_triton().triton_call
        return call(*arguments, **aliased, **launch.options(), out_type=outputs, input_output_aliases=renumbered)
