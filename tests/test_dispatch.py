"""Who serves a call: shown with implementations of two lines each, so that the choice is all there is to see."""

import inspect
import warnings
from dataclasses import FrozenInstanceError, dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel
from ejkernel import _dispatch
from ejkernel._dispatch import (
    Explanation,
    Implementation,
    PlatformError,
    SlowerImplementationWarning,
    choose,
    dispatch,
    explain,
    pinned,
)
from ejkernel.kernels import _launch

X = np.array([1.0, 2.0], np.float32)
RUNS = []


@dataclass(frozen=True)
class Call:
    factor: float = 1.0
    refused_by: tuple[str, ...] = ()

    def dims(self):
        return {"x": "BH"}

    def part(self, rows, heads, shapes):
        return self

    def result_specs(self, query):
        return PartitionSpec(*query)


def implementation(name, devices, added):
    def run(call, x, unused=None):
        RUNS.append(name)
        assert not jax.typeof(x).sharding.mesh.explicit_axes, "a core does not place its own values"
        return call.factor * x + added

    return Implementation(
        name, devices, lambda call: f"{name} does not like it" if name in call.refused_by else None, run
    )


FAST = implementation("fast", ("cuda", "rocm"), 10)
MIDDLE = implementation("middle", ("cuda",), 20)
PLAIN = implementation("plain", None, 0)
SLOW = implementation("slow", None, 30)
ALL = (FAST, MIDDLE, PLAIN, SLOW)


def front(x, factor=1.0, refused_by=(), platform=None):
    """Says `x`."""
    return dispatch(ALL, Call(factor, tuple(refused_by)), x, platform=platform)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(_dispatch, "_default_platform", lambda: "cuda")
    _dispatch._warn_once.cache_clear()
    yield
    _dispatch._warn_once.cache_clear()


@pytest.mark.parametrize(
    "refused_by, platform, chosen",
    [
        ((), None, {"cuda": FAST, "rocm": FAST, "default": PLAIN}),
        (("fast",), None, {"cuda": MIDDLE, "default": PLAIN}),
        (("fast", "middle"), None, {"default": PLAIN}),
        (("plain",), None, {"cuda": FAST, "rocm": FAST, "default": SLOW}),
        (("plain", "slow"), None, {"cuda": FAST, "rocm": FAST}),
        ((), "middle", {"cuda": MIDDLE}),
        (("plain",), "slow", {"default": SLOW}),
    ],
)
def test_the_first_that_can_serves_each_device(refused_by, platform, chosen):
    assert choose(ALL, Call(refused_by=refused_by), platform) == chosen


def test_one_leaves_to_others_what_it_is_slower_at():
    hesitant = replace(FAST, slower_than_next=lambda call: "large factors" if call.factor > 1 else None)
    implementations = (hesitant, MIDDLE, PLAIN)
    call = Call(factor=2.0)
    chosen = choose(implementations, call)
    assert chosen == {"cuda": MIDDLE, "rocm": hesitant, "default": PLAIN}
    assert choose(implementations, Call())["cuda"] == hesitant
    # where the others cannot, or if it is asked for, it serves them nevertheless
    assert choose(implementations, replace(call, refused_by=("middle",)))["cuda"] == hesitant
    assert choose(implementations, call, "fast")["cuda"] == hesitant
    alone = (replace(hesitant, devices=("cuda",)), MIDDLE, PLAIN)
    found = _dispatch._explanation(alone, call, choose(alone, call), partitioned=False)
    assert str(found) == "on cuda: middle\nelsewhere: plain\nnot fast: slower at large factors"


def test_one_leaves_to_what_serves_every_device_what_even_that_is_faster_at(on_a_gpu):
    slowest = replace(MIDDLE, slower_than_fallback=lambda call: "large factors" if call.factor > 1 else None)
    implementations, call = (slowest, PLAIN), Call(factor=2.0)
    assert choose(implementations, call) == {"default": PLAIN}
    assert choose(implementations, Call())["cuda"] == slowest
    assert choose(implementations, call, "middle") == {"cuda": slowest}
    found = _dispatch._explanation(implementations, call, choose(implementations, call), partitioned=False)
    assert str(found) == "everywhere: plain\nnot middle: slower at large factors"
    # it could have served: nothing that the caller could change would be faster
    with warnings.catch_warnings(action="error"):
        _dispatch._warn_if_slower(implementations, call, choose(implementations, call))


def test_a_platform_that_cannot_serve_is_an_error():
    with pytest.raises(PlatformError, match=r"^platform: 'fast' cannot serve this call: fast does not like it$"):
        front(X, refused_by=["fast"], platform="fast")
    known = "'fast', 'middle', 'plain', 'slow'"
    with pytest.raises(PlatformError, match=f"^platform: got 'quick'; expected one of {known}$"):
        front(X, platform="quick")
    assert issubclass(PlatformError, ValueError) and issubclass(PlatformError, NotImplementedError)


def test_the_device_lowered_for_decides():
    def added(platform):
        text = jax.jit(front).trace(X).lower(lowering_platforms=(platform,)).as_text()
        return [number for number in (10, 20, 30) if f"dense<{number:.6e}>" in text]

    assert added("cpu") == [] and added("cuda") == added("rocm") == [10]
    np.testing.assert_array_equal(front(X), X)
    np.testing.assert_array_equal(front(X, 3.0, platform="slow"), 3 * X + 30)


def test_plain_calls_trace_once_for_each_call_and_shape():
    RUNS.clear()
    for x in (X, X + 1):
        np.testing.assert_array_equal(front(x, 5.0, ["fast", "middle"]), 5 * x)
    # the one branch is run without the others being traced
    assert RUNS == ["plain"]
    front(X, 6.0, ["fast", "middle"])
    assert RUNS == ["plain", "plain"]


@pytest.mark.parametrize("manual", [False, True])
def test_explicit_shardings_follow_the_query(manual):
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    run = lambda x: front(x, 7.0)  # noqa: E731
    if manual:
        run = jax.shard_map(run, in_specs=PartitionSpec("y"), out_specs=PartitionSpec("y"), axis_names={"y"})
    with jax.set_mesh(mesh):
        x = jax.device_put(X[:, None], NamedSharding(mesh, PartitionSpec("y", "x")))
        result = jax.jit(run)(x)
        assert jax.typeof(result).sharding.spec == PartitionSpec("y", "x")
        np.testing.assert_array_equal(result, 7 * X[:, None])


def test_warns_once_if_a_gpu_runs_the_slower_one(on_a_gpu):
    with pytest.warns(SlowerImplementationWarning) as caught:
        front(X, refused_by=["fast", "middle"])
        front(X, 2.0, refused_by=["fast", "middle"])
    assert [str(each.message) for each in caught] == [
        "'plain' serves this call on the GPU, which is slower than what cannot: "
        "'fast': fast does not like it; 'middle': middle does not like it"
    ]
    # it points at the caller of the op
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "implementations, refused_by, platform",
    [
        (ALL, ("fast",), None),  # another one made for it serves
        (ALL, ("fast", "middle"), "plain"),  # the caller asked for it
        ((PLAIN, SLOW), ("plain",), None),  # nothing was made for it
    ],
)
def test_does_not_warn(on_a_gpu, implementations, refused_by, platform):
    with warnings.catch_warnings(action="error"):
        choice = choose(implementations, call := Call(refused_by=refused_by), platform)
        if platform is None:
            _dispatch._warn_if_slower(implementations, call, choice)
        else:
            dispatch(implementations, call, X, platform=platform)


def test_does_not_warn_elsewhere():
    _dispatch._warn_once.cache_clear()
    front(X, refused_by=["fast", "middle"])


@pytest.mark.parametrize(
    "platform, version, name",
    [("cpu", "cpu", "cpu"), ("gpu", "PJRT C API\nCUDA 12090", "cuda"), ("gpu", "PJRT C API\nrocm 60000", "gpu")],
)
def test_default_platform(monkeypatch, platform, version, name):
    device = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    monkeypatch.setattr(jax, "devices", lambda: [device, None])
    assert _dispatch._default_platform() == name


def test_explain_says_who_and_why():
    RUNS.clear()
    found = explain(front, jax.ShapeDtypeStruct((2,), jnp.float32), refused_by=["fast"])
    assert found == Explanation({"cuda": "middle", "default": "plain"}, {"fast": "fast does not like it"})
    assert str(found) == "on cuda: middle\nelsewhere: plain\nnot fast: fast does not like it"
    everywhere = explain(front, X, 1.0, ["fast", "middle"])
    assert str(everywhere) == (
        "everywhere: plain\nnot fast: fast does not like it\nnot middle: middle does not like it"
    )
    assert str(explain(front, X, platform="middle")) == "on cuda: middle"
    assert not RUNS


def test_explain_leaves_nothing_behind():
    with pytest.raises(ValueError, match=r"^op: got <.*sin.*>, which calls no op of this library; expected one of its"):
        explain(jnp.sin, X)
    np.testing.assert_array_equal(front(X), X)
    with pytest.raises(PlatformError):
        explain(front, X, platform="quick")
    np.testing.assert_array_equal(front(X), X)
    explain(front, X)
    np.testing.assert_array_equal(front(X), X)


INNER = jax.jit(front)
CALLERS = {
    "jit": jax.jit(lambda x: front(x)),
    "jit of jit": jax.jit(lambda x: INNER(x) + 1),
    "a function of a jitted one": lambda x: INNER(x) * 2,
    "grad": jax.grad(lambda x: INNER(x).sum()),
    "jit of grad": jax.jit(jax.grad(lambda x: INNER(x).sum())),
    "vmap": jax.vmap(INNER),
    "jit of vmap": jax.jit(jax.vmap(INNER)),
    "scan": jax.jit(lambda x: jax.lax.scan(lambda x, _: (INNER(x), None), x, length=2)[0]),
    "while": jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: INNER(x), x)),
    "cond": jax.jit(lambda x: jax.lax.cond(x.sum() > 0, INNER, lambda x: x, x)),
    "checkpoint": jax.jit(jax.checkpoint(INNER)),
    "shard_map": jax.jit(
        jax.shard_map(
            INNER,
            mesh=jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)),
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec("x"),
        )
    ),
}


@pytest.mark.parametrize("name", CALLERS)
def test_explains_what_ran_before(name):
    """And does not make it compile again."""
    call = CALLERS[name]
    wanted = explain(front, X)
    assert explain(call, X) == wanted
    first = call(X)
    for _ in range(2):
        assert explain(call, X) == wanted
    RUNS.clear()
    np.testing.assert_array_equal(call(X), first)
    assert not RUNS


def test_pinned_runs_that_one_and_no_other():
    slow = pinned(front, "slow")
    np.testing.assert_array_equal(slow(X, factor=2.0), 2 * X + 30)
    assert list(inspect.signature(slow).parameters) == ["x", "factor", "refused_by"]
    assert slow.__name__ == "front" and slow.__doc__ == front.__doc__
    message = r"^front\(\) here always runs 'slow'; use ejkernel.front to choose$"
    with pytest.raises(TypeError, match=message):
        slow(X, platform="slow")


def test_records_cannot_be_changed():
    for record, name in ((PLAIN, "name"), (Explanation({}, {}), "chosen")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, None)


WIDE = jax.ShapeDtypeStruct((1, 64, 2, 256), jnp.bfloat16)


@pytest.mark.parametrize(
    "device, platform, chosen",
    [
        ("h100", "cuda", "cudnn"),
        ("NVIDIA H200", "cuda", "cudnn"),
        ("b200", "cuda", "cudnn"),
        ("A100", "cuda", "triton"),  # on which cuDNN has no head dim above 128
        ("rtx 4090", "cuda", "triton"),
        ("cpu", "default", "xla"),
    ],
)
def test_explain_answers_for_a_device_that_is_not_here(device, platform, chosen):
    explanation = ejkernel.explain(ejkernel.flash_attention, WIDE, WIDE, WIDE, causal=True, device=device)
    assert explanation.chosen == {platform: chosen}
    assert ("with the extra cuda installed" in str(explanation)) == (platform == "cuda")
    assert set(explanation.refused) <= {"cudnn"}
    # and nothing is assumed any longer
    here = ejkernel.explain(ejkernel.flash_attention, WIDE, WIDE, WIDE, causal=True)
    assert here.device == "" and (_launch.capability() is not None or "triton" in here.refused)


def test_explain_answers_for_tpus():
    x = jax.ShapeDtypeStruct((1, 128, 2, 128), jnp.bfloat16)
    assert str(ejkernel.explain(ejkernel.retention, x, x, x, device="TPU v5e")) == "on TPU v5e: pallas"
    with pytest.raises(PlatformError, match="platform: 'pallas' does not run on h100"):
        ejkernel.explain(ejkernel.retention, x, x, x, platform="pallas", device="h100")


def test_explain_knows_its_devices():
    with pytest.raises(ValueError, match="device: got 'mi300'; expected one of a100, "):
        ejkernel.explain(ejkernel.retention, WIDE, WIDE, WIDE, device="mi300")
