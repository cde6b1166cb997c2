"""A recurrence's output, normalised and gated: what a layer does before its last projection."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.gated_norm import xla

_TRITON = "gated_norm.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, lambda call: None, xla.run),
)
