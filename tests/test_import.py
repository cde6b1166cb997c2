"""`import ejkernel` only defines things."""

import subprocess
import sys

PROBE = """
import os, sys, threading
import jax, jaxtyping, numpy
environment, threads, before = dict(os.environ), threading.active_count(), set(sys.modules)

opened = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        opened.append(args[0])
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect"):
        opened.append((event, args))
sys.addaudithook(watch)
sys.dont_write_bytecode = True

import ejkernel

assert dict(os.environ) == environment, "environment changed"
assert threading.active_count() == threads, "threads started"
assert not opened, opened
assert not jax._src.xla_bridge._backends, "devices initialised"
ours = [name for name in sys.modules if name.startswith("ejkernel")]
assert not [name for name in ours if {"triton", "pallas"} & set(name.split("."))], "kernels imported"
roots = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert not any("pallas" in name for name in set(sys.modules) - before if name.startswith("jax")), "Pallas imported"
assert roots <= {"ejkernel", "jax", "jaxlib", "numpy", "jaxtyping"}, roots
"""


def test_import_has_no_side_effects():
    subprocess.run([sys.executable, "-W", "error", "-c", PROBE], check=True)


def test_public_names_exist():
    import ejkernel
    from ejkernel import xla_utils

    for module in (ejkernel, xla_utils):
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert sorted(module.__all__) == list(module.__all__)
