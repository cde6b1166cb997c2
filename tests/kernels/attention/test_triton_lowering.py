"""Which kernels of softmax attention a program holds that is lowered for an NVIDIA GPU, where there is none."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.core import Primitive
from jax.interpreters import mlir

import ejkernel
from ejkernel import parallel
from ejkernel.kernels import _launch, _varying

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

# stands for jax-triton's, which cannot even be imported without JAX's own code for GPUs
_launched = Primitive("launched")
_launched.multiple_results = True
_launched.def_abstract_eval(lambda *_, outputs, name: [jax.core.ShapedArray(*each) for each in outputs])


def _lowered(context, *arrays, outputs, name):
    return jax.ffi.ffi_lowering(f"kernel.{name}", api_version=2)(context, *arrays)


mlir.register_lowering(_launched, _lowered, platform="cuda")


def launch(kernel, inputs, outputs, **_):
    arrays = [each for each in inputs.values() if not isinstance(each, int | None)]
    made = {name: each for name, each in outputs.items() if each is not None}
    shapes = tuple((each.shape, np.dtype(each.dtype)) for each in made.values())
    results = _launched.bind(*arrays, outputs=shapes, name=kernel.__name__)
    results = _varying.align((*arrays, *results))[len(arrays) :]
    return _launch.named(outputs, dict(zip(made, results, strict=True)))


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    there = {"launch": launch, "unavailable": lambda: None, "capability": lambda: 90}
    for name, each in there.items():
        monkeypatch.setattr(_launch, name, each)


def kernels(text):
    """How often a program calls each kernel; it multiplies nothing itself, as XLA's blocks would."""
    assert "dot_general" not in text
    return Counter(re.findall(r"@kernel\.(\w+)", text))


def with_gradients(op):
    def run(arrays):
        output, pull = jax.vjp(op, arrays)
        return output, pull(output)

    return jax.jit(run)


def tokens(queries, keys):
    shapes = {"query": (2, queries, 4, 16), "key": (2, keys, 2, 16), "value": (2, keys, 2, 8)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


BACKWARD = {"row_deltas": 1, "query_gradient": 1, "key_gradients": 1}


@pytest.mark.parametrize(
    "queries, options, expected",
    [
        (64, {"causal": True, "logits_soft_cap": 5.0}, {"forward": 1, **BACKWARD}),
        (64, {"bias": jnp.zeros((1, 1, 1, 64), jnp.bfloat16)}, {"forward": 1, **BACKWARD}),
        (1, {"causal": True, "query_offset": 40}, {"attend_part": 1, "merge_parts": 1, **BACKWARD}),
    ],
    ids=["soft cap", "bias", "decoding"],
)
def test_exported(queries, options, expected):
    """What is exported for CUDA holds the kernels, and nothing of XLA's."""
    allowed = [export.DisabledSafetyCheck.custom_call(f"kernel.{name}") for name in expected]
    run = with_gradients(lambda arrays: ejkernel.flash_attention(**arrays, **options, dtype=None))
    program = export.export(run, platforms=["cuda"], disabled_checks=allowed)(tokens(queries, 64))
    assert kernels(program.mlir_module()) == expected


@pytest.mark.parametrize("devices", [2, 4])
def test_ring_of_devices(devices):
    """The sharded program has the kernels in its ring: its own blocks, those on their way, and the last to visit."""
    mesh = jax.sharding.AbstractMesh((devices,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))

    def ring(arrays):
        return parallel.flash_attention(**arrays, causal=True, axis_name="time", mesh=mesh)

    text = with_gradients(ring).trace(tokens(512, 512)).lower(lowering_platforms=("cuda",)).as_text()
    found = kernels(text)
    assert set(found) == {"forward", *BACKWARD} and min(found.values()) >= 2
    assert "collective_permute" in text


def test_vmap_joins_rows():
    """A mapped call is one launch of each kernel, not one for each row."""

    def rows(arrays):
        return jax.vmap(lambda arrays: ejkernel.flash_attention(**arrays, causal=True, softmax_aux=jnp.ones(4)))(arrays)

    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), tokens(64, 64))
    text = with_gradients(rows).trace(stacked).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == {"forward": 1, **BACKWARD} and "stablehlo.while" not in text
