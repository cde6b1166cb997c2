"""One decoding step of a recurrent layer between its projections: what would be several ops, in one kernel or two."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.step import xla

_TRITON = "step.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, lambda call: None, xla.run),
)
