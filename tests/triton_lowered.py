"""Lowers a call for an NVIDIA GPU by jax-triton itself, with stand-ins for JAX's own code for GPUs, and prints it.

What is asked of jax-triton (parameters, sizes, aliases) is so checked where there is no GPU.

With the argument `compiled`, Triton compiles nothing: all kernels must be in files.
"""

import os
import sys
import types
import warnings
from unittest import mock

import jax
import jax.numpy as jnp


def stand_in():
    """JAX's module of Triton kernels, as far as jax-triton needs it to lower a call."""
    # what is compiled with it is no real program, and must not be found by one
    os.environ.setdefault("EJKERNEL_CACHE_DIR", "")
    module = types.ModuleType("jax._src.lib.gpu_triton")
    module.TritonKernel = lambda *given: given[4]  # the compiled code
    module.TritonKernelCall = lambda code, *_: types.SimpleNamespace(to_proto=lambda *_: code.encode())
    for name in ("create_array_parameter", "create_scalar_parameter", "get_custom_call", "get_serialized_metadata"):
        setattr(module, name, lambda *_: None)
    module.get_compute_capability = lambda _: 90
    return module


def lowered(function, *arrays):
    from ejkernel.kernels import _launch

    with mock.patch.multiple(_launch, capability=lambda: 90, unavailable=lambda: None):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def main():
    import jax._src.lib as lib

    lib.gpu_triton = sys.modules["jax._src.lib.gpu_triton"] = stand_in()
    if sys.argv[1:] == ["compiled"]:
        from triton.compiler import code_generator

        code_generator.ast_to_ttir = None
    import ejkernel

    token = jax.ShapeDtypeStruct((2, 1, 4, 16), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((2, 4, 16, 16), jnp.float32)

    def step(token, state):
        return ejkernel.linear_attention(token, token, token, initial_state=state, platform="triton")

    print(lowered(step, token, state))
    whole = warned(step, token, state)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    sharded = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in (token, state)]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(jax.P("x"),) * 2, out_specs=jax.P("x"))
    print("warned:", whole, warned(mapped, *sharded), warned(step, *sharded))


def warned(function, *arrays):
    """Whether a warning says that kernels cannot be split."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered(function, *arrays)
    return any("XLA cannot split Triton kernels" in str(each.message) for each in caught)


if __name__ == "__main__":
    main()
