"""Launching Triton kernels without a GPU: what jax-triton is asked for, and what is said where it is missing."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.attention.call import Call as attention_call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton import launcher as attention
from ejkernel.kernels.delta_rule.call import Call as delta_rule_call
from ejkernel.kernels.delta_rule.triton import launcher as delta_rule
from ejkernel.kernels.linear_recurrence.call import Call as linear_recurrence_call
from ejkernel.kernels.linear_recurrence.triton import launcher as linear_recurrence

X, Y = jnp.ones((2, 3)), jnp.zeros((2, 3))
OUTPUTS = {"first": jax.ShapeDtypeStruct((4,), jnp.float32), "second": jax.ShapeDtypeStruct((2, 3), jnp.float32)}


@dataclass(frozen=True)
class Constants:
    block: int
    start: bool = False


@pytest.fixture(autouse=True)
def forgotten():
    caches = _launch._jax_triton, _launch._capability_here
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def asked():
    return {}


@pytest.fixture
def flat(monkeypatch):
    """What kernels are asked for with parameters instead of a tuple."""
    monkeypatch.setattr(_launch, "flat", lambda *given: Flat(given))


@dataclass(frozen=True)
class Flat:
    """In the place of a kernel of Triton's."""

    given: tuple
    identity = staticmethod(lambda: "source")


def older(asked):
    def triton_call(*arguments, out_shape, **options):
        asked.update(options, arguments=arguments, outputs=out_shape)
        arrays = [each for each in arguments if isinstance(each, jax.Array)]
        compiled = {"custom_call_api_version": 2, "legacy_backend_config": "compiled"}
        return jax.ffi.ffi_call("triton_kernel_call", out_shape, **compiled)(*arrays)

    return triton_call


def newer(asked):
    def triton_call(*arguments, out_type=None, input_output_aliases, **options):
        if input_output_aliases:
            warnings.warn("input_output_aliases is deprecated. Pass references", DeprecationWarning, stacklevel=2)
        options["input_output_aliases"] = input_output_aliases
        asked.update(options, arguments=arguments, outputs=out_type)
        return tuple(jnp.zeros(each.shape, each.dtype) for each in out_type)

    return triton_call


def test_graphs_capture_kernels_if_a_flag_allows_it(asked, flat, monkeypatch):
    """By the newer of JAX's calls; never where XLA may join it with slices of other arrays."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=older(asked)))

    def lowered(flags):
        monkeypatch.setenv("XLA_FLAGS", flags)

        def launch():
            return _launch.launch("kernel", {"x": X}, OUTPUTS, constants=Constants(16), programs=1, tile=Tile(16))[:2]

        return jax.jit(launch).trace().lower(lowering_platforms=("cuda",)).as_text()

    given = os.environ.get("XLA_FLAGS", "")
    for flags in (given, f"{given} --xla_gpu_enable_dynamic_slice_fusion=true"):
        assert "@triton_kernel_call(" in lowered(flags)
    captured = lowered(f"{given} {_launch.GRAPHS}")
    assert "@triton_kernel_call_ffi(" in captured
    assert 'opaque = "compiled"' in captured


@pytest.mark.parametrize(
    "version, in_place, parameters, aliases, named",
    [
        (older, None, (), {}, {}),
        (older, {"second": Y}, ("second_before",), {1: 1}, {}),
        # an input that is updated in place is one argument
        (older, {"second": X}, (), {0: 1}, {}),
        (newer, None, (), {}, {}),
        # an aliased output has no parameter of its own there: ours is one more operand, aliased in its place
        (newer, {"second": Y}, ("second_before",), {3: 1}, {"given_second": Y}),
    ],
)
def test_launch_asks_either_version_of_jax_triton(
    version, in_place, parameters, aliases, named, asked, flat, monkeypatch
):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=version(asked)))

    def launch():
        results = _launch.launch(
            "kernel",
            {"x": X, "gate": None, "n": 7},
            OUTPUTS | {"third": None},
            constants=Constants(16),
            programs=5,
            tile=Tile(16, warps=8, stages=2),
            in_place=in_place,
        )
        assert results._fields == ("first", "second", "third") and results.third is None
        return results[:2]

    lowered = jax.jit(launch).trace().lower(lowering_platforms=("cuda",))
    assert [(each.shape, each.dtype) for each in lowered.out_info] == [((4,), jnp.float32), ((2, 3), jnp.float32)]
    *arrays, size = asked.pop("arguments")
    # jax-triton's aliases count arrays alone, so no size may come before one
    assert ([each.shape for each in arrays], size) == ([(2, 3)] * (1 + len(parameters)), 7)
    fields = ("x", "gate", "n", "first", "second", "third")
    assert asked == named | {
        "kernel": Flat(("kernel", fields, ("x", *parameters, "n", "first", "second"))),
        "outputs": tuple(OUTPUTS.values()),
        "grid": (5,),
        "num_warps": 8,
        "num_stages": 2,
        "CALL": Constants(16),
        "input_output_aliases": aliases,
    }
    if version is older:
        (call,) = [line for line in lowered.as_text().splitlines() if "@triton_kernel_call" in line]
        assert 'backend_config = "compiled"' in call
        (aliased,) = aliases or [None]
        assert aliases == {} or re.search(rf"output_tuple_indices = \[1\],\s*operand_index = {aliased},", call)


def test_two_aliases_in_the_order_of_the_outputs(asked, flat, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=newer(asked)))
    y = X + 1
    before = {"second": X, "first": y}
    _launch.launch("kernel", {}, OUTPUTS, constants=Constants(16), programs=1, tile=Tile(16), in_place=before)
    assert asked["given_first"] is y and asked["given_second"] is X
    assert asked["input_output_aliases"] == {2: 0, 3: 1}


def test_parameters_instead_of_a_tuple():
    """A kernel's fields become parameters, in order, and those that are absent `None`."""
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    script = Path(__file__).parents[1] / "triton_flat.py"
    # a process of its own: once Triton interprets, as it does in other tests, it compiles no more
    env = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "names": ["given_x", "given_n", "given_out_before", "given_out", "CALL"],
        "constant": [False, False, False, False, True],
        "loads": 1,
        "stored by": 3,
    }


def test_what_jax_triton_makes_of_a_launch(tmp_path):
    """It takes the kernel, and the state is updated in place. Another process compiles nothing."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed (the extra cuda)")
    script = Path(__file__).parents[1] / "triton_lowered.py"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env["EJKERNEL_CACHE_DIR"] = str(tmp_path)
    run, again = (
        subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, env=env)
        for given in ([], ["compiled"])
    )
    assert run.returncode == 0, run.stderr
    assert again.returncode == 0, again.stderr
    assert again.stdout == run.stdout
    (call,) = [line for line in run.stdout.splitlines() if "@triton_kernel_call" in line]
    operands = re.search(r"@triton_kernel_call\((.*?)\)", call)[1].split(", ")
    # query, key, value, and the state that it starts from, once
    assert len(operands) == 4
    assert re.search(r"output_tuple_indices = \[1\],\s*operand_index = 3,", call), call
    # on one device, mapped over two, and split over two when XLA partitions the program
    assert run.stdout.splitlines()[-1] == "warned: False False False"


def test_what_xla_is_given_for_each_gpu_of_a_mesh():
    """Kernels on the device's own rows and heads, forward and backward; none is left in the program for all of them."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed (the extra cuda)")
    tests = Path(__file__).parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, tests / "triton_partitioned.py"], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        # the forward and the backward pass, no kernel beside them, and in both a device's own kernels
        assert re.fullmatch(r".+: 2 0 \[[1-9]\d*, [1-9]\d*\]", line), line


def test_device_code_has_few_parameters():
    """What a kernel is given comes as one tuple and one record, and of what its functions share as little as can be."""
    functions = []
    for path in Path(_launch.__file__).parent.glob("*/triton/device/*.py"):
        functions += [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)]
    assert len(functions) > 100
    assert max(len(each.args.args) for each in functions) <= 16


def linear_recurrence_launcher():
    call = linear_recurrence_call(1, 32, 1, 16, 16, 1, False, "none", False, 1.0, False, jnp.dtype("bfloat16"))
    return linear_recurrence.Launcher.of(call, linear_recurrence.Plan.of(call), None)


def delta_rule_launcher():
    call, x = (
        delta_rule_call(1, 32, 1, 16, 16, 1, False, "none", 1.0, False, jnp.dtype("bfloat16")),
        X[None, :, :, None],
    )
    return delta_rule.Launcher.of(call, delta_rule.Plan.of(call), x, x, x, None)


def attention_launcher():
    fixed = dict.fromkeys(("left", "right", "mask_shape", "bias_shape", "bias_dtype", "sinks", "soft_cap"))
    sizes = dict.fromkeys(("batch", "queries", "keys", "heads", "kv_heads", "key_dim", "value_dim"), 16)
    names = ("query_dtype", "key_dtype", "value_dtype", "dtype", "softmax_dtype")
    call = attention_call(**fixed, **sizes, **dict.fromkeys(names, jnp.dtype("float32")), scale=1.0, dropout=0.0)
    x = jnp.zeros((16,) * 4)
    return attention.Launcher.of(call, attention.Plan.of(call), Inputs(x, x, x, *[None] * 7))


@pytest.mark.parametrize("make", [linear_recurrence_launcher, delta_rule_launcher, attention_launcher])
def test_a_constant_that_kernels_do_not_know_is_an_error(make, monkeypatch):
    """Misspelt, it is not dropped, and nothing is launched."""
    launched = []
    monkeypatch.setattr(_launch, "launch", lambda *_, constants, **__: launched.append(constants))
    make().launch("kernel", {}, {}, programs=1, tile=Tile(16, 16), scale=7.0)
    assert [each.scale for each in launched] == [7.0]
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        make().launch("kernel", {}, {}, programs=1, tile=Tile(16, 16), scales=7.0)
    assert len(launched) == 1


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_without_the_packages(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        RuntimeError, match=f"^Triton kernels cannot be launched here: ModuleNotFoundError: .*{missing}"
    ):
        _launch.launch("kernel", {"x": X}, OUTPUTS, constants=Constants(16), programs=1, tile=Tile(16))
    monkeypatch.setattr(_launch, "capability", lambda: 90)
    found = _launch.unavailable()
    assert found.startswith(
        "needs Triton and jax-triton, the extra cuda, as by pip install '.[cuda]' in a checkout (ModuleNotFoundError: "
    )
    assert missing in found


@pytest.mark.parametrize("text, number", [("9.0", 90), ("12.1", 121)])
def test_capability_of_the_first_gpu(text, number, monkeypatch):
    gpus = [SimpleNamespace(compute_capability=text), None]
    monkeypatch.setattr(jax, "local_devices", lambda backend: {"cuda": gpus}[backend])
    assert _launch.capability() == number
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace())
    assert _launch.unavailable() is None


@pytest.mark.parametrize("version, works", [((0, 11, 2), True), ((0, 12, 0), False)])
def test_a_pair_that_fails_is_told(version, works, monkeypatch):
    # its rule for dead code has the signature that JAX 0.11 asked for
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(_launch, "capability", lambda: 90)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(__version__="0.4.1"))
    assert (_launch.unavailable() is None) == works
    assert works or "jax-triton 0.4.1 fails under JAX" in _launch.unavailable()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu():
    assert _launch.capability() is None
    assert _launch.unavailable() == "no NVIDIA GPU here to compile for"
