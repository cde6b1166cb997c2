"""What XLA would be given for each GPU of a mesh with `Auto` axes, where there is no GPU.

Programs are lowered for NVIDIA GPUs with the stand-ins of `triton_lowered.py`. XLA's part, to ask for a device's own
program with the shardings that our rules give, is done here; that program is traced.
"""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
from triton_lowered import lowered, stand_in

from ejkernel.kernels import _partitioned


def main():
    import jax._src.lib as lib

    lib.gpu_triton = sys.modules["jax._src.lib.gpu_triton"] = stand_in()
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for name, (call, arrays) in calls().items():

        def with_gradients(*arrays, call=call):
            results, pull = jax.vjp(call, *arrays)
            return results, pull(results)

        asked = []
        with mock.patch.object(_partitioned, "_custom_partitioned", _recorded(asked)):
            text = lowered(with_gradients, *(_sharded(mesh, x) for x in arrays))
        kernels = [_kernels(mesh, *each) for each in asked]
        print(f"{name}: {text.count('CustomSPMDPartitioning')} {text.count('triton_kernel_call')} {kernels}")


def calls():
    """The ops that Triton serves, by name, and their arrays, all of whose rows are 4 and heads 4, 2 or 1."""
    import ejkernel

    def of(op, **options):
        return lambda *arrays: op(*arrays, **options, platform="triton")

    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    x, few, one = (struct(4, 512, heads, 64) for heads in (4, 2, 1))
    gates, gate = struct(4, 512, 4, 64, dtype=jnp.float32), struct(4, 512, 4, dtype=jnp.float32)
    state, bias = struct(4, 4, 64, 64, dtype=jnp.float32), struct(1, 4, 512, 512)
    dropout = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.key(0)}
    return {
        "recurrent_gla": (
            lambda *x: of(ejkernel.recurrent_gla, initial_state=x[4])(*x[:4]),
            (x, few, few, gates, state),
        ),
        "both gates": (lambda *x: of(ejkernel.recurrent, gk=x[3], gv=x[4])(*x[:3]), (x, few, few, gates, gates)),
        "shared queries": (of(ejkernel.simple_gla), (one, one, x, gate)),
        "retention": (of(ejkernel.retention), (x, few, few)),
        "gated_delta_rule": (of(ejkernel.gated_delta_rule), (x, x, x, gate, gate)),
        "kda": (of(ejkernel.kda), (x, x, x, gates, gate)),
        "flash_attention": (of(ejkernel.flash_attention, causal=True, return_lse=True), (x, few, few)),
        "one key head": (of(ejkernel.flash_attention), (x, one, one)),
        "bias, dropout": (lambda *x: of(ejkernel.flash_attention, bias=x[3], **dropout)(*x[:3]), (x, few, few, bias)),
        "step": (
            lambda x, state: of(ejkernel.recurrent_gla, initial_state=state)(x, x, x, -x),
            (struct(4, 1, 4, 64), state),
        ),
    }


def _sharded(mesh, x):
    """Rows along one axis of the mesh, heads along the other."""
    spec = ["rows" if x.shape[0] > 1 else None] + [None] * (x.ndim - 1)
    heads = 1 if x.shape[-1] == x.shape[-2] else 2
    if x.shape[heads] > 1:
        spec[heads] = "heads"
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P(*spec)))


def _recorded(asked):
    """What is handed to XLA, as `asked` gets it, beside the types of what the whole call takes and gives."""
    original = _partitioned._custom_partitioned

    def custom_partitioned(body, operands, results):
        function = original(body, operands, results)
        asked.append((function.partition, function.sharding_rule, operands, results))
        return function

    return custom_partitioned


def _kernels(mesh, partition, rule, operands, results):
    """How many kernels a device runs in its program, whose results must be its part of the whole ones."""

    def sharding(factors, x):
        axes = {"B": "rows", "H": "heads"}
        # of a dimension with several places a row, rows are the first factor
        first = (each if isinstance(each, str) else each[0] for each in factors)
        return jax.sharding.NamedSharding(mesh, jax.P(*(axes.get(each[0]) for each in first)))

    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(factors, x))
        for factors, x in zip(rule.operand_mappings, operands, strict=True)
    ]
    _, run, given, taken = partition(mesh, placed, None)
    for factors, x, each in zip(rule.result_mappings, results, given, strict=True):
        assert each.is_equivalent_to(sharding(factors, x), x.ndim), (factors, each)
    parts = [jax.ShapeDtypeStruct(each.shard_shape(x.shape), x.dtype) for each, x in zip(taken, operands, strict=True)]
    program = jax.make_jaxpr(run, axis_env=list(mesh.shape.items()))(*parts)
    for x, part, each in zip(results, program.out_avals, given, strict=True):
        assert (part.shape, part.dtype) == (each.shard_shape(x.shape), x.dtype), (x, part)
    return str(program).count("ejkernel_triton_launch[")


if __name__ == "__main__":
    main()
