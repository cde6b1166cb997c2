"""Compiles every kernel of a call of the short convolution, as `triton_compile.py` does those of the linear recurrence.

python tests/triton_compile_convolution.py [CAPABILITY DTYPE TOKENSxCHANNELS LAYOUT[+states]]...
"""

import jax
import numpy as np
from convolution_cases import Case, results_and_gradients
from triton_compile import launches, print_each, shared_memory


def main(capability, dtype, sizes, layout):
    tokens, channels = map(int, sizes.split("x"))
    layout, _, states = layout.partition("+")
    several = {"packed": {"lengths": (tokens,)}, "segments": {"ids": ((0,) * tokens,)}}.get(layout, {})
    case = Case("compiled", batch=1, tokens=tokens, channels=channels, state=bool(states), **several)

    def program():
        arrays = case.arrays(np.dtype(dtype))
        # lowered, not only traced: what a backward pass launches is found then
        jax.jit(lambda: results_and_gradients(case, arrays, platform="triton")).lower()

    found = launches(int(capability), program)
    return [(each[0].fn.__name__, shared_memory(int(capability), *each)) for each in found]


if __name__ == "__main__":
    print_each(main)
