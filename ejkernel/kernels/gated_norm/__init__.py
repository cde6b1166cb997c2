"""The norm and the output gate that a layer applies to its recurrence's output before the last projection."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.gated_norm import xla

_TRITON = "gated_norm.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, lambda call: None, xla.run),
)
