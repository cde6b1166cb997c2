"""Devices by name, so that `explain` can answer for a device that is not here."""

from contextvars import ContextVar
from dataclasses import dataclass

from ejkernel._checks.wording import fail

# compute capabilities, 90 for 9.0
GPUS = {
    "a100": 80,
    "a10": 86,
    "a6000": 86,
    "rtx3090": 86,
    "l4": 89,
    "l40s": 89,
    "rtx4090": 89,
    "h100": 90,
    "h200": 90,
    "gh200": 90,
    "b200": 100,
    "gb200": 100,
    "b300": 103,
    "rtx5090": 120,
}
# all run the same kernels
TPUS = ("v4", "v5e", "v5p", "v6e")


@dataclass(frozen=True)
class Device:
    """A device that is assumed to be here, with everything installed that the library needs to run on it."""

    name: str
    platform: str
    capability: int | None = None

    def __str__(self) -> str:
        if self.platform == "cuda":
            number = f"{self.capability // 10}.{self.capability % 10}" if self.capability else ""
            return f"{self.name}, compute capability {number}, with the extra cuda installed"
        return f"TPU {self.name}" if self.platform == "tpu" else "a CPU"


# `None` outside of `explain(…, device=…)`
assumed: ContextVar[Device | None] = ContextVar("assumed", default=None)


def named(device: str) -> Device:
    """The device of this name; case, blanks, dashes and the maker's name do not matter.

    >>> named("NVIDIA H100").capability, named("TPU v5e").platform, named("cpu").platform
    (90, 'tpu', 'default')
    """
    name = "".join(each for each in str(device).lower() if each.isalnum())
    for maker in ("nvidia", "geforce", "tpu"):
        name = name.removeprefix(maker)
    if name in GPUS:
        return Device(name, "cuda", GPUS[name])
    if name in TPUS:
        return Device(name, "tpu")
    if name == "cpu":
        return Device(name, "default")
    fail("device", repr(device), f"one of {', '.join([*GPUS, *TPUS, 'cpu'])}")
