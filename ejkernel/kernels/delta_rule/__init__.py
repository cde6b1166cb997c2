"""The delta rule: the gated linear recurrence, where a token writes the error of what its key recalls."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.chunks import pools
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.phases import phases_from_wide_states
from ejkernel.kernels.delta_rule.xla.phases import PHASES
from ejkernel.kernels.delta_rule.xla.recurrence import RECURRENCE

_PALLAS, _TRITON = "delta_rule.pallas", "delta_rule.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation(
        "pallas",
        ("tpu",),
        Later(_PALLAS, "supports"),
        Later(_PALLAS, "run"),
        phases_from_wide_states(Later(_PALLAS, "run_or_xla")),
        splits=False,
    ),
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), Later(_TRITON, "run")),
    Implementation("xla", None, xla.supports, xla.run, PHASES),
)
# The implementations of calls that read and write slots of a pool of states.
POOLED = pools.implementations(RECURRENCE, _TRITON)
