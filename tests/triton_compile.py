"""Compiles every kernel of a call for a GPU that need not be there, and prints the shared memory each program takes.

python tests/triton_compile.py [CAPABILITY DTYPE KEY_DIMxVALUE_DIM DECAY[+value|+shared|+segments|+pooled]]...

One line of JSON a call: the kernels by name, and KiB. `shared`: 32 heads on one query and key, which fill the GPU;
`segments`: rows of several sequences;
`pooled`: states in slots of a pool.

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
from ejkernel.kernels.chunks.pools import PooledCall
from ejkernel.kernels.linear_recurrence import triton as triton_gpu
from ejkernel.kernels.linear_recurrence.triton import configs


def launches(capability, program):
    """What `program` launches: kernel, types of its parameters by name, tile, constants."""
    found = {}

    def launch(kernel, inputs, outputs, *, constants, programs, tile, in_place=None):
        given = {name: each for name, each in {**inputs, **outputs}.items() if each is not None}
        types = {name: "i32" if isinstance(x, int) else "*" + DTYPES[str(x.dtype)] for name, x in given.items()}
        flat = _launch.flat(kernel, (*inputs, *outputs), tuple(given))
        found[flat, tuple(types.values()), tile, constants] = None
        return _launch.named(outputs, {name: jnp.zeros(x.shape, x.dtype) for name, x in outputs.items() if x})

    there = {"capability": lambda: capability, "unavailable": lambda: None, "launch": launch}
    with mock.patch.multiple(_launch, **there):
        program()
    return list(found)


def shared_memory(capability, kernel, types, tile, constants):
    """KiB a program takes, compiled down to the GPU's own code."""
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types) if type.startswith("*")}
    signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
    source = ASTSource(kernel, signature, {"CALL": constants}, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared / 1024


def main(capability, dtype, dims, decay):
    key_dim, value_dim = map(int, dims.split("x"))
    shape = {"B": 1, "T": 256, "H": 1, "Hkv": 1, "K": key_dim, "V": value_dim}
    decay, _, kind = decay.partition("+")
    if kind == "shared":
        shape |= {"H": 32, "shared": (1, 1, 32)}
    value_gate = "mild" if kind == "value" else None
    case = triton_cases.Case("compiled", decay=decay, dtype=dtype, value_gate=value_gate, **shape)
    call, ids = case.call, None
    if kind == "segments":
        call, ids = replace(call, segmented=True), jnp.zeros((1, 256), jnp.int32)
    configure, filled = configs.configure, {"fill": 1} if kind == "shared" else {}

    def program():
        (*arrays, _), cotangents = triton_cases.make(case)
        with mock.patch.object(configs, "configure", lambda *given: replace(configure(*given), **filled)):
            if kind == "pooled":
                slots = jnp.zeros((1, 1), jnp.int32)
                others = jnp.asarray([0, 256], jnp.int32), jnp.zeros((3, 1, key_dim, value_dim)), slots[0], slots, slots
                pooled = PooledCall(replace(call, packed=True), 1, 256)
                jax.jit(lambda: triton_gpu.run_pooled(pooled, *arrays[:5], *others)).lower()
                return
            # lowered, not only traced: what a backward pass launches is found then
            jax.jit(lambda: triton_cases.results(triton_gpu.run, call, [*arrays, ids], cotangents)).lower()

    found = [(each[0].fn.__name__, *each) for each in launches(int(capability), program)]
    return [(name, shared_memory(int(capability), *each)) for name, *each in found]


def print_each(main):
    """What `main` finds for every four arguments of the command line."""
    for case in zip(*[iter(sys.argv[1:])] * 4, strict=True):
        print(json.dumps(main(*case)), flush=True)


if __name__ == "__main__":
    print_each(main)
