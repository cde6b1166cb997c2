"""The delta rule: the gated linear recurrence with values replaced by what they correct."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.delta_rule import pallas, triton, xla
from ejkernel.kernels.delta_rule.phases import phases_from_wide_states
from ejkernel.kernels.delta_rule.xla.phases import PHASES

# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation(
        "pallas", ("tpu",), pallas.supports, pallas.run, phases_from_wide_states(pallas.run_or_xla), splits=False
    ),
    Implementation("triton", ("cuda",), triton.supports, triton.run),
    Implementation("xla", None, xla.supports, xla.run, PHASES),
)
