"""Compiles every kernel of a call for a GPU that need not be there, and prints the shared memory each program takes.

python tests/triton_compile.py [CAPABILITY DTYPE KEY_DIMxVALUE_DIM DECAY[+value|+shared]]...

One line of JSON a call: the kernels by name, and KiB. `shared`: 32 heads on one query and key, which fill the GPU.

A process of its own: once Triton interprets, as it does in other tests, it compiles no more.
"""

import json
import sys
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import triton
import triton_cases
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_interpreter import DTYPES

from ejkernel.kernels import _launch
from ejkernel.kernels.linear_recurrence import triton as triton_gpu
from ejkernel.kernels.linear_recurrence.triton import configs


def launches(capability, program):
    """What `program` launches: kernel, types of its arguments, warps, stages, constants."""
    found = {}

    def launch(kernel, *arguments, outputs, programs, num_warps, num_stages, aliases=None, **constants):
        types = tuple(
            "i32" if isinstance(each, int) else "*" + DTYPES[str(each.dtype)] for each in (*arguments, *outputs)
        )
        found[kernel, types, num_warps, num_stages, tuple(constants.items())] = None
        return tuple(jnp.zeros(each.shape, each.dtype) for each in outputs)

    there = {"capability": lambda: capability, "unavailable": lambda: None, "launch": launch}
    with mock.patch.multiple(_launch, **there):
        program()
    return list(found)


def shared_memory(capability, kernel, types, warps, stages, constants):
    """KiB a program takes, compiled down to the GPU's own code."""
    names, constants = [each.name for each in kernel.params], dict(constants)
    types = dict(zip((name for name in names if name not in constants), types, strict=True))
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): aligned for name, type in types.items() if type.startswith("*")},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared / 1024


def main(capability, dtype, dims, decay):
    key_dim, value_dim = map(int, dims.split("x"))
    shape = {"B": 1, "T": 256, "H": 1, "Hkv": 1, "K": key_dim, "V": value_dim}
    decay, _, kind = decay.partition("+")
    if kind == "shared":
        shape |= {"H": 32, "shared": (1, 1, 32)}
    value_gate = "mild" if kind == "value" else None
    case = triton_cases.Case("compiled", decay=decay, dtype=dtype, value_gate=value_gate, **shape)
    configure, filled = configs.configure, {"fill": 1} if kind == "shared" else {}

    def program():
        arrays, cotangents = triton_cases.make(case)
        with mock.patch.object(configs, "configure", lambda *given: replace(configure(*given), **filled)):
            jax.eval_shape(lambda: triton_cases.results(triton_gpu.run, case.call, list(arrays), cotangents))

    found = [(each[0].fn.__name__, *each) for each in launches(int(capability), program)]
    return [(name, shared_memory(int(capability), *each)) for name, *each in found]


def print_each(main):
    """What `main` finds for every four arguments of the command line."""
    for case in zip(*[iter(sys.argv[1:])] * 4, strict=True):
        print(json.dumps(main(*case)), flush=True)


if __name__ == "__main__":
    print_each(main)
