"""One gated linear recurrence, behind every op that is not softmax attention."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.linear_recurrence import pallas, triton, xla
from ejkernel.kernels.linear_recurrence.phases import of_walks
from ejkernel.kernels.linear_recurrence.xla.phases import PHASES

# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation("pallas", ("tpu",), pallas.supports, pallas.run, of_walks(pallas.run), splits=False),
    Implementation("triton", ("cuda",), triton.supports, triton.run, of_walks(triton.run)),
    Implementation("xla", None, xla.supports, xla.run, PHASES),
)
