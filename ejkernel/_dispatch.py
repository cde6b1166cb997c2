"""Which implementation serves a call on the device it is lowered for, and why the others do not."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ejkernel import _checked, _devices, _mesh, _sharding
from ejkernel._checks.wording import warn


class PlatformError(ValueError, NotImplementedError):
    """The implementation that `platform=` names cannot serve this call; the message says why."""


class SlowerImplementationWarning(UserWarning):
    """A GPU or TPU runs a call on a slower implementation than it would with other options; the message says which."""


# why kernels cannot serve a call that XLA splits; lowering says so too, where tracing could not know
NOT_SPLIT = (
    "XLA cannot split its kernels over several devices; on a mesh with Explicit axes, none of which vmap maps, or "
    "inside jax.shard_map, each device runs them on its part"
)


@dataclass(frozen=True)
class Later:
    """The object `name` of a module of `ejkernel.kernels`, which is imported when the object is first used.

    So `import ejkernel` imports no kernels: most programs run those of one kind of device.
    """

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return self._load()(*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def _load(self) -> Any:
        return getattr(_imported(f"ejkernel.kernels.{self.module}"), self.name)


_imported = functools.cache(importlib.import_module)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: What `platform=` calls it.
        devices: The platforms that JAX can lower it for (`"cpu"`, `"cuda"`, `"tpu"`, …); `None` means all.
        supports: Takes the op's `Call`; says why this implementation cannot serve it, or `None` if it can.
        run: `run(call, *arrays)`, the same signature for every implementation of an op.
        phases: The same in two phases, for start states that come from other devices between them, see
            `kernels._phases`; `None` where it has none.
        slower_than_next: Says in what kind of call a later implementation that serves it too is faster, or `None`.
        slower_than_fallback: Says in what kind of call the implementation for every device is faster, or `None`.
        splits: Whether XLA's partitioner can split it over devices.
        tracks_axes: Whether `shard_map` can check over which mesh axes its results vary (`check_vma`).
    """

    name: str
    devices: tuple[str, ...] | None
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]
    phases: Any = None
    slower_than_next: Callable[[Any], str | None] = lambda _: None
    slower_than_fallback: Callable[[Any], str | None] = lambda _: None
    splits: bool = True
    tracks_axes: bool = True

    def refuses(self, call: Any, partitioned: bool) -> str | None:
        """Why it cannot serve the call, or `None`; `partitioned` says that XLA splits the call over devices."""
        return self.supports(call) or (None if self.splits or not partitioned else NOT_SPLIT)


def choose(
    implementations: Sequence[Implementation], call: Any, platform: str | None = None, partitioned: bool = False
) -> dict[str, Implementation]:
    """Maps each device platform (and `"default"`) to the implementation that will run there.

    `implementations` are ordered fastest first, unless an entry's `slower_than_next` says otherwise. With `platform`
    given, only the implementation of that name is considered. `partitioned` says that XLA splits the call over devices.
    """
    if platform is not None:
        named = [each for each in implementations if each.name == platform]
        if not named:
            known = ", ".join(repr(each.name) for each in implementations)
            raise PlatformError(f"platform: got {platform!r}; expected one of {known}")
        if reason := named[0].refuses(call, partitioned):
            raise PlatformError(f"platform: {platform!r} cannot serve this call: {reason}")
        implementations = named
    chosen: dict[str, Implementation] = {}
    for each in implementations:
        if each.refuses(call, partitioned) is not None:
            continue
        for device in each.devices or ("default",):
            first = chosen.setdefault(device, each)
            if first.slower_than_next(call) and not each.slower_than_next(call):
                chosen[device] = each
    if "default" in chosen:
        chosen = {device: each for device, each in chosen.items() if not each.slower_than_fallback(call)}
    return chosen


def dispatch(implementations: Sequence[Implementation], call: Any, *arrays: Any, platform: str | None = None) -> Any:
    """Runs the fastest implementation that supports `call`, chosen when the computation is lowered."""
    mesh = _sharding.explicit_mesh(*arrays)
    mapping = None if mesh is None else _mesh.mapping(call, mesh, arrays)
    part = call if mapping is None else mapping.call
    mapped = mapping is not None and not mapping.by_xla
    chosen = resolve(implementations, part, mesh, platform=platform, mapped=mapped)
    return _run(chosen, call, mapping, *arrays)


def resolve(
    implementations: Sequence[Implementation],
    call: Any,
    mesh: _sharding.AnyMesh | None,
    *,
    platform: str | None = None,
    mapped: bool = False,
) -> tuple[tuple[str, Implementation], ...]:
    """What `choose` gives for a call that is about to run, with warnings; `explain` gets an explanation instead.

    `mesh` is the mesh with `Explicit` axes that the call's arrays are on, if any. `mapped` says that `call` is what one
    device runs inside a `shard_map` over these axes, along which XLA then has nothing to split.
    """
    partitioned = _sharding.left_to_xla(mesh, mapped) or (not mapped and _explained_arguments_are_sharded())
    chosen = choose(implementations, call, platform, partitioned)
    if _devices_explained.get():
        raise _ExplainedError(_explanation(implementations, call, chosen, partitioned))
    if platform is None:
        _warn_if_slower(implementations, call, chosen, partitioned)
        if "tpu" in chosen:
            _warn_until_checked()
    return tuple(chosen.items())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(chosen: tuple[tuple[str, Implementation], ...], call: Any, mapping: _mesh.Mapping | None, *arrays: Any) -> Any:
    # under jit, so that a call outside of one compiles once too, whatever the arrays' values

    def run(call: Any, *arrays: Any) -> Any:
        branches = {device: functools.partial(each.run, call) for device, each in chosen}
        if len(branches) == 1:  # serves every device, or was named by `platform=`
            return next(iter(branches.values()))(*arrays)
        return jax.lax.platform_dependent(*arrays, **branches)

    if mapping is None:
        return run(call, *arrays)
    return mapping.run(run, *arrays, check_vma=all(each.tracks_axes for _, each in chosen))


def _warn_if_slower(
    implementations: Sequence[Implementation], call: Any, chosen: dict[str, Implementation], partitioned: bool = False
) -> None:
    """On a GPU or TPU, says once why none of the implementations made for it serves `call`."""
    platform = _default_platform()
    name = {"cuda": "GPU", "tpu": "TPU"}.get(platform)
    if name is None or platform in chosen or "default" not in chosen:
        return
    refused = {
        each.name: each.refuses(call, partitioned) for each in implementations if platform in (each.devices or ())
    }
    if refused and None not in refused.values():
        reasons = "; ".join(f"{each!r}: {reason}" for each, reason in refused.items())
        serves = f"{chosen['default'].name!r} serves this call on the {name}"
        _warn_once(f"{serves}, which is slower than what cannot: {reasons}")


_unheard: ContextVar[bool] = ContextVar("unheard", default=False)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Inside, `warn_of_tangents` is silent: for tangents that are traced and perhaps never run."""
    token = _unheard.set(True)
    try:
        yield
    finally:
        _unheard.reset(token)


def warn_of_tangents(what: str) -> None:
    """Warns once that XLA serves `what`, some tangents of a call that kernels serve."""
    if not _unheard.get():
        _warn_once(f"'xla' serves {what}, which is slower than the kernels that serve the call itself")


def _default_platform() -> str:
    device = jax.devices()[0]
    return "cuda" if "cuda" in device.client.platform_version.lower() else device.platform


@functools.cache
def _warn_once(message: str) -> None:
    warn(message, SlowerImplementationWarning)


@functools.cache
def _warn_until_checked() -> None:
    """Warns once a process on TPUs, whose kernels no chip has run, unless `ejkernel check` has passed there."""
    if _default_platform() == "tpu" and not _checked.passed():
        warn("No TPU chip has run these kernels yet. Run `ejkernel check`, which compares them with their definition")


@dataclass(frozen=True)
class Explanation:
    """Which implementation serves a call, and why others do not; as text, one line for each.

    Attributes:
        chosen: The implementation's name by device platform; `"default"` stands for every other platform.
        refused: For implementations that cannot serve the call, the reason.
        slower: For implementations that could serve it and are slower, the kind of call that they are slower at.
        device: The device that `explain` was asked about, and what is assumed of it; empty if none was named.
    """

    chosen: dict[str, str]
    refused: dict[str, str]
    slower: dict[str, str] = field(default_factory=dict)
    device: str = ""

    def __str__(self) -> str:
        rest = "elsewhere" if len(self.chosen) > 1 else "everywhere"
        places = {device: rest if device == "default" else f"on {device}" for device in self.chosen}
        lines = [f"{f'on {self.device}' if self.device else places[key]}: {name}" for key, name in self.chosen.items()]
        others = {**self.refused, **{name: f"slower at {what}" for name, what in self.slower.items()}}
        return "\n".join([*lines, *(f"not {name}: {reason}" for name, reason in others.items())])


# over how many devices the arguments of `explain` are sharded, while it traces an op; otherwise 0
_devices_explained: ContextVar[int] = ContextVar("devices_explained", default=0)


def _explained_arguments_are_sharded() -> bool:
    """Whether `explain` traces a call on sharded arguments, outside of a `shard_map`."""
    return _devices_explained.get() > 1 and not jax.sharding.get_abstract_mesh().manual_axes


class _ExplainedError(Exception):
    """Carries the explanation out of the op before anything is traced."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


def _explanation(
    implementations: Sequence[Implementation], call: Any, chosen: dict[str, Implementation], partitioned: bool
) -> Explanation:
    if (device := _devices.assumed.get()) is not None:
        serves = chosen.get(device.platform) or chosen.get("default")
        if serves is None:
            raise PlatformError(f"platform: {next(iter(chosen.values())).name!r} does not run on {device.name}")
        chosen = {device.platform: serves}
        implementations = [each for each in implementations if device.platform in (each.devices or (device.platform,))]
    refused = {each.name: reason for each in implementations if (reason := each.refuses(call, partitioned)) is not None}
    left = [each for each in implementations if each not in chosen.values() and each.name not in refused]
    return Explanation(
        {device: each.name for device, each in chosen.items()},
        refused,
        {
            each.name: what
            for each in left
            if (what := each.slower_than_next(call) or each.slower_than_fallback(call)) is not None
        },
        "" if device is None else str(device),
    )


def explain(op: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """Says which implementation would serve `op(*args, **kwargs)` on each platform, and why others would not.

    Nothing is computed, so `jax.ShapeDtypeStruct`s may stand in for arrays, with a `sharding` for what lies on several
    devices. `op` may also be a function of one's own or a module that calls an op somewhere inside, jitted or
    transformed; of several ops, the first is explained.

    Args:
        op: What would be called.
        args: What it would be called with.
        device: A device that need not be here, such as `"a100"`, `"h100"`, `"b200"`, `"v5e"` or `"cpu"`: the answer is
            that of a machine with one, where all that the library can use there is installed. `None` asks what this
            machine would run, and what other platforms would as far as it can tell from here.
        kwargs: What it would be called with by keyword.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import flash_attention
        >>> x = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.float32)
        >>> print(explain(flash_attention, x, x, x))
        everywhere: xla
        not splash: ...
        >>> print(explain(flash_attention, x, x, x, device="h100"))
        on h100, compute capability 9.0, with the extra cuda installed: triton
        not cudnn: float32 arrays; it takes float16 or bfloat16, all alike
    """
    if not callable(op):
        raise TypeError(f"op: got {type(op).__name__}; expected one of this library's ops")
    assumed = None if device is None else _devices.named(device)
    # imported here, as it is experimental in JAX, and nothing else may depend on it
    from jax.experimental.xla_metadata import set_xla_metadata

    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)]

    def run(arrays: list[Any]) -> Any:
        filled = list(leaves)
        for i, x in zip(traced, arrays, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        return op(*args, **kwargs)

    places = [getattr(leaves[i], "sharding", None) for i in traced]
    token = _devices_explained.set(max((each.num_devices for each in places if each is not None), default=1))
    device_token = _devices.assumed.set(assumed)
    try:
        # a jitted function that was traced before would not reach the op again: new metadata makes JAX's caches miss
        # without clearing them
        with set_xla_metadata(ejkernel="explain"):
            jax.eval_shape(run, [leaves[i] for i in traced])
    except _ExplainedError as error:
        return error.explanation
    finally:
        _devices_explained.reset(token)
        _devices.assumed.reset(device_token)
    raise ValueError(f"op: got {op!r}, which calls no op of this library; expected one of its ops")


def pinned(front: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """`front` with its `platform` argument fixed and gone from the signature."""

    @functools.wraps(front)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "platform" in kwargs:
            raise TypeError(
                f"{front.__name__}() here always runs {platform!r}; use ejkernel.{front.__name__} to choose"
            )
        return front(*args, platform=platform, **kwargs)

    signature = inspect.signature(front)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "platform"]
    call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return call
