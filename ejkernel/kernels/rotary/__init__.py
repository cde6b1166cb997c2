"""One token before softmax attention: query and key are normalised and rotated, key and value stored in the cache."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.rotary import xla

_TRITON = "rotary.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, lambda call: None, xla.run),
)
