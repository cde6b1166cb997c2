"""One gated linear recurrence, behind every op that is not softmax attention."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.linear_recurrence import triton, xla

# Fastest first.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), triton.supports, triton.run),
    Implementation("xla", None, xla.supports, xla.run),
)
