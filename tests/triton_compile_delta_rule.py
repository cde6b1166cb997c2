"""Compiles every kernel of a call of the delta rule, as `triton_compile.py` does those of the linear recurrence.

python tests/triton_compile_delta_rule.py [CAPABILITY DTYPE KEY_DIMxVALUE_DIM DECAY[+segments|+pooled]]...
"""

import jax
from triton_compile import launches, print_each, shared_memory
from triton_delta_rule_cases import compiled_call


def main(capability, dtype, dims, decay):
    program = compiled_call(dtype, *map(int, dims.split("x")), decay)
    found = launches(int(capability), lambda: jax.jit(program).lower())
    return [(each[0].fn.__name__, shared_memory(int(capability), *each)) for each in found]


if __name__ == "__main__":
    print_each(main)
