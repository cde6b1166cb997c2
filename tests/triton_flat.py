"""Compiles a kernel with parameters instead of its tuple, and prints what became of it. Needs no GPU."""

import json
import re
from dataclasses import dataclass

import jax.numpy as jnp
import triton
import triton.language as tl
from triton_indices import intermediate

from ejkernel.kernels import _launch


@dataclass(frozen=True)
class Constants:
    start: bool


@triton.jit
def kernel(p, CALL: tl.constexpr):
    """Doubles numbers; it reads nothing that is absent."""
    out = tl.load(p.x + tl.program_id(0), mask=tl.program_id(0) < p.n, other=0.0) * 2
    if p.gate is not None:
        out += tl.load(p.gate)
    if CALL.start:
        out += tl.load(p.out)
    # the field and this variable have one name
    tl.store(p.out + tl.program_id(0), out)


if __name__ == "__main__":
    flat = _launch.flat(kernel, ("x", "gate", "n", "out"), ("x", "n", "out_before", "out"))
    x = jnp.zeros(4)
    text = intermediate(flat, [x, 4, x, x], Constants(start=False))
    parameters = re.findall(r"(%\w+): ", next(line for line in text.splitlines() if "tt.func" in line))
    (stored,) = re.findall(r"tt.store (%\w+)", text)
    (pointer,) = re.findall(rf"{stored} = tt.addptr (%\w+)", text)
    found = {"names": flat.arg_names, "constant": [each.is_constexpr for each in flat.params]}
    print(json.dumps(found | {"loads": text.count("tt.load"), "stored by": parameters.index(pointer)}))
