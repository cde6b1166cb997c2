"""The delta rule: the gated linear recurrence with values replaced by what they correct."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.delta_rule import triton, xla
from ejkernel.kernels.delta_rule.xla.phases import PHASES

# Fastest first.
IMPLEMENTATIONS = (
    Implementation("triton", ("cuda",), triton.supports, triton.run),
    Implementation("xla", None, xla.supports, xla.run, PHASES),
)
