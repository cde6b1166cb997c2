"""The short convolution over tokens, every channel by itself."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.convolution import xla

_TRITON = "convolution.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, xla.supports, xla.run),
)
