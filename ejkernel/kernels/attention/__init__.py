"""Softmax attention, with its weights (`ATTENTION`) and in blocks without them (`FLASH_ATTENTION`).

The implementations of each are in order of speed on their device, as measured in `benchmarks/results`.
"""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.xla import reference

_CUDNN, _SPLASH, _TRITON = "attention.cudnn", "attention.splash", "attention.triton"
ATTENTION = (Implementation("xla", devices=None, supports=xla.supports, run=reference.run),)
FLASH_ATTENTION = (
    Implementation(
        "splash", ("tpu",), Later(_SPLASH, "supports"), Later(_SPLASH, "run"), splits=False, tracks_axes=False
    ),
    Implementation(
        "cudnn", ("cuda",), Later(_CUDNN, "supports"), Later(_CUDNN, "run"), slower_than_next=Later(_CUDNN, "slower")
    ),
    Implementation(
        "triton",
        ("cuda",),
        Later(_TRITON, "supports"),
        Later(_TRITON, "run"),
        slower_than_fallback=Later(_TRITON, "slowest"),
    ),
    Implementation("xla", devices=None, supports=xla.supports, run=xla.run),
)
