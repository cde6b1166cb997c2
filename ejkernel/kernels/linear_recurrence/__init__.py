"""One gated linear recurrence, behind every op that is neither softmax attention nor the delta rule."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.linear_recurrence import pallas, triton, xla
from ejkernel.kernels.linear_recurrence.phases import phases_from_reversed_runs
from ejkernel.kernels.linear_recurrence.triton import phases as triton_phases
from ejkernel.kernels.linear_recurrence.xla import phases as xla_phases

# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation(
        "pallas", ("tpu",), pallas.supports, pallas.run, phases_from_reversed_runs(pallas.run), splits=False
    ),
    Implementation("triton", ("cuda",), triton.supports, triton.run, triton_phases.PHASES),
    Implementation("xla", None, xla.supports, xla.run, xla_phases.PHASES),
)
