"""One gated linear recurrence, behind every op that is not softmax attention."""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.linear_recurrence import xla

# Fastest first.
IMPLEMENTATIONS = (Implementation("xla", None, xla.supports, xla.run),)
