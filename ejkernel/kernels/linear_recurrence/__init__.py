"""One gated linear recurrence, behind every op that is not softmax attention."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.linear_recurrence import triton_gpu, xla

# Fastest first.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), triton_gpu.supports, triton_gpu.run),
    Implementation("xla", None, xla.supports, xla.run),
)
