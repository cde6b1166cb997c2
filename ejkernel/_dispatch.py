"""Which implementation serves a call on the device it is lowered for, and why the others do not."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


class PlatformError(ValueError, NotImplementedError):
    """The implementation that `platform=` names cannot serve this call; the message says why."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: What `platform=` calls it.
        devices: The platforms that JAX can lower it for (`"cpu"`, `"cuda"`, `"tpu"`, …); `None` means all.
        supports: Takes the op's `Call`; says why this implementation cannot serve it, or `None` if it can.
        run: `run(call, *arrays)`, the same signature for every implementation of an op.
    """

    name: str
    devices: tuple[str, ...] | None
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]


def choose(
    implementations: Sequence[Implementation], call: Any, platform: str | None = None
) -> dict[str, Implementation]:
    """Maps each device platform (and `"default"`) to the implementation that will run there.

    `implementations` are ordered fastest first. With `platform` given, that one alone is considered.
    """
    if platform is not None:
        named = [each for each in implementations if each.name == platform]
        if not named:
            known = ", ".join(repr(each.name) for each in implementations)
            raise PlatformError(f"platform: got {platform!r}; this op has {known}")
        if reason := named[0].supports(call):
            raise PlatformError(f"platform: {platform!r} cannot serve this call: {reason}")
        implementations = named
    chosen: dict[str, Implementation] = {}
    for each in implementations:
        if each.supports(call) is None:
            for device in each.devices or ("default",):
                chosen.setdefault(device, each)
    return chosen


def dispatch(implementations: Sequence[Implementation], call: Any, *arrays: Any, platform: str | None = None) -> Any:
    """Runs the fastest implementation that supports `call`, chosen when the computation is lowered."""
    return _run(tuple(choose(implementations, call, platform).items()), call, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(chosen: tuple[tuple[str, Implementation], ...], call: Any, *arrays: Any) -> Any:
    # under jit so that a plain call compiles once too, whatever the arrays' values
    branches = {device: functools.partial(each.run, call) for device, each in chosen}
    if list(branches) == ["default"]:
        return branches["default"](*arrays)
    return jax.lax.platform_dependent(*arrays, **branches)


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
