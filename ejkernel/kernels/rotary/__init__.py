"""One token before softmax attention: its query and key are normed and rotated, key and value go to the cache."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.rotary import xla

_TRITON = "rotary.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, lambda call: None, xla.run),
)
