"""Calls on arrays that are sharded over `Auto` axes of a mesh, on CPUs and GPUs: each device computes its own part.

With `Auto` axes only XLA knows the shardings. When XLA partitions a program, `custom_partitioning` lets it ask for the
program of one device. Programs for one device are lowered without any of this. The compiler of TPUs does not support
`custom_partitioning`: there XLA partitions a call as it does any other computation.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel import _mesh
from ejkernel.kernels import _pallas

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operands:
    """Which arrays a computation takes or returns, in this order.

    Attributes:
        inputs: Indices of inputs of the call, or of the inputs whose cotangents these are.
        outputs: Indices of outputs or residuals of the call, or of the outputs whose cotangents or tangents these are.
            Outputs are counted first, then residuals.
        tangents: Indices of the inputs whose tangents these are.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()

    def of(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """One entry for each array, taken from the entries for all inputs, outputs and residuals."""
        return (
            [inputs[i] for i in self.inputs] + [outputs[i] for i in self.outputs] + [inputs[i] for i in self.tangents]
        )


@dataclass(frozen=True)
class Body:
    """A computation on the arrays of a call: its forward pass, its tangents or its cotangents.

    Attributes:
        static: The static facts of an op: a call, or a tuple that contains one.
        present: Which of the call's arrays, in the order of `call.dims()`, are not `None`.
        operands: The arrays that it takes.
        results: The arrays that it returns.
        run: `run(static, *operands)` returns the results.
        outputs: `outputs(static, *inputs)` returns the outputs and residuals of the call.
    """

    static: Any
    present: tuple[bool, ...]
    operands: Operands
    results: Operands
    run: Callable[..., Any]
    outputs: Callable[..., Any]


def lower(ctx: Any, *values: Any, body: Body | None, run: Callable[..., Any]) -> Any:
    """Lowers `run(*operands)`; where XLA partitions the program, as one call of `body` on each device's part."""
    from jax.interpreters import mlir

    parted = body is not None and _call_of(body.static) is not None and _is_partitioned(ctx.module_context)
    if body is not None and parted and all(each.size for each in ctx.avals_in):
        run = _custom_partitioned(body, ctx.avals_in, ctx.avals_out)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def _is_partitioned(module: Any) -> bool:
    """Whether XLA will partition the module that is being lowered, and supports `custom_partitioning`."""
    context = module.axis_context
    if _pallas.one_device(context) or getattr(context, "device_assignment", None) is None:
        return False  # one device, or inside a `shard_map` over some of several axes
    exported = module.lowering_parameters.for_export  # a callback cannot be stored in an exported program
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return shardy and not exported and "tpu" not in module.platforms


def needs_devices() -> Any:
    """A parameter for primitives that are lowered here. JAX tells their lowering rule the devices because of it.

    `None` inside a `shard_map`, where XLA partitions no primitive: with it, JAX refuses programs that have one mesh
    with both `Explicit` and `Auto` axes, which `_sharding.partitioned` makes.
    """
    return None if jax.sharding.get_abstract_mesh().manual_axes else _devices_parameter()


@functools.cache
def _devices_parameter() -> Any:
    from jax.experimental.custom_partitioning import custom_partitioning

    function = custom_partitioning(lambda x: x)
    function.def_partition(lambda mesh, operands, results: None, sharding_rule="->")
    return jax.make_jaxpr(function)(0.0)


def _call_of(static: Any) -> Any:
    """The call among an op's static facts, if the call names the dimensions of its arrays."""
    each = static if isinstance(static, tuple) else (static,)
    return next((call for call in each if hasattr(call, "dims")), None)


def _with_call(static: Any, call: Any) -> Any:
    """The static facts for one device's part of the call. A plan that has `of_part` is made again for that part."""
    if not isinstance(static, tuple):
        return call

    def of_part(fact: Any) -> Any:
        return call if hasattr(fact, "dims") else fact.of_part(call) if hasattr(fact, "of_part") else fact

    return tuple(map(of_part, static))


@dataclass(frozen=True)
class _Output:
    """The dimensions of an output or a residual: `B` rows, `H` heads, `.` anything that is not sharded."""

    letters: str

    def spec(self, rows: tuple[str, ...], heads: tuple[str, ...]) -> PartitionSpec:
        """Its sharding where rows and heads are sharded over these mesh axes."""
        return PartitionSpec(*({"B": rows, "H": heads}.get(each) or None for each in self.letters))


def _custom_partitioned(body: Body, operands: Sequence[Any], results: Sequence[Any]) -> Callable[..., Any]:
    """`body` as a function of these operand and result types that XLA partitions by asking for one device's program."""
    from jax.experimental.custom_partitioning import custom_partitioning

    call = _call_of(body.static)
    names = [name for name, there in zip(call.dims(), body.present, strict=False) if there]
    inputs = dict(zip(names, operands, strict=False))
    sizes = {name: tuple(inputs[name].shape) if name in inputs else None for name in call.dims()}
    outputs = _outputs(body, call, sizes, [each.dtype for each in inputs.values()])

    def partition(mesh: Any, operands: Any, _: Any) -> Any:
        # the sharding of a replicated array may have no `spec`
        known = (getattr(each.sharding, "spec", PartitionSpec()) for each in operands)
        specs = dict(zip(names, known, strict=False))
        split = _mesh.split(call, mesh, sizes, specs, outputs)
        static = _with_call(body.static, split.call)
        of_inputs = [each for each in split.arrays if each is not None]
        of_outputs = [_Output(letters) for _, letters in outputs]
        takes, gives = (each.of(of_inputs, of_outputs) for each in (body.operands, body.results))

        def run(*operands: Any) -> Any:
            own = [
                split.own(x, part) if isinstance(part, _mesh.Part) else x
                for x, part in zip(operands, takes, strict=True)
            ]
            # what one device runs is on no mesh, whatever mesh the caller has entered
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                found = body.run(static, *own)
            # cotangents of inputs are summed over the devices that share them
            return [
                split.of_all(x, part, each.shape) if isinstance(part, _mesh.Part) else x
                for x, part, each in zip(found, gives, results, strict=True)
            ]

        def shardings(parts: Sequence[Any]) -> list[NamedSharding]:
            return [NamedSharding(mesh, each.spec(split.rows, split.heads)) for each in parts]

        return mesh, run, shardings(gives), tuple(shardings(takes))

    # XLA replaces the body of this function, and uses only the types of its results
    function = custom_partitioning(lambda *_: [jnp.zeros(each.shape, each.dtype) for each in results])
    letters = [call.dims()[name] for name in names], [each for _, each in outputs]
    takes, gives = body.operands.of(*letters), body.results.of(*letters)
    function.def_partition(partition, sharding_rule=_rule(call.batch, takes, operands, gives, results))
    return function


def _outputs(body: Body, call: Any, sizes: dict[str, Any], dtypes: Sequence[Any]) -> list[tuple[Shape, str]]:
    """Shapes and letters of outputs and residuals.

    A dimension is one of rows, `B`, if it is smaller in a call on one row, and one of heads, `H`, if it is smaller in a
    call on one head.
    """

    def shapes(rows: int, heads: int) -> list[Shape]:
        part, parts = _mesh.parts(call, sizes, rows, heads)
        arrays = [each for each in parts.values() if each is not None]
        structs = [jax.ShapeDtypeStruct(each.shape, dtype) for each, dtype in zip(arrays, dtypes, strict=True)]
        leaves = jax.eval_shape(functools.partial(body.outputs, _with_call(body.static, part)), *structs)
        return [tuple(each.shape) for each in leaves]

    def letter(size: int, of_row: int, of_head: int) -> str:
        return "B" if of_row < size else "H" if of_head < size else "."

    triples = zip(shapes(1, 1), shapes(call.batch, 1), shapes(1, call.heads), strict=True)
    return [(each[0], _once("".join(map(letter, *each)))) for each in triples]


def _once(letters: str) -> str:
    """`letters` with a dot instead of each repetition: of two dimensions of heads only the first is sharded."""
    return "".join("." if each in letters[:i] else each for i, each in enumerate(letters))


def _rule(
    batch: int, takes: Sequence[str], operands: Sequence[Any], gives: Sequence[str], results: Sequence[Any]
) -> Any:
    """The Shardy rule: all dimensions of equally many rows, or heads, are sharded in the same way.

    A residual may have several entries for each row of the `batch`; it is sharded as the rows are.
    """
    from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

    others, sizes = itertools.count(), dict[str, Any]()

    def factor(letter: str, size: int) -> Any:
        if letter == "B" and size > batch > 1 and size % batch == 0:
            entries = f"x{next(others)}"
            sizes[entries] = size // batch
            return CompoundFactor(f"B{batch}", entries)
        return f"{letter}{size}" if letter in "BH" and size > 1 else f"x{next(others)}"

    def factors(letters: str, array: Any) -> Any:
        return ArrayMapping(*map(factor, letters.ljust(array.ndim, "."), array.shape))

    return SdyShardingRule(tuple(map(factors, takes, operands)), tuple(map(factors, gives, results)), **sizes)
