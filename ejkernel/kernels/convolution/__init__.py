"""The short convolution over tokens, which is depthwise: it does not mix channels."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.convolution import xla

_PALLAS, _TRITON = "convolution.pallas", "convolution.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("pallas", ("tpu",), Later(_PALLAS, "supports"), Later(_PALLAS, "run"), splits=False),
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, xla.supports, xla.run),
)
