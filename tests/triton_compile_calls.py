"""Compiles calls of any of the scripts beside it, in one process, as importing JAX and Triton takes a while.

python tests/triton_compile_calls.py [SCRIPT CAPABILITY DTYPE DIMS KIND]...

`SCRIPT` is a module as `triton_compile_step`; one line of JSON a call, as it prints.
"""

import importlib
import json
import sys

if __name__ == "__main__":
    for script, *call in zip(*[iter(sys.argv[1:])] * 5, strict=True):
        print(json.dumps(importlib.import_module(script).main(*call)), flush=True)
