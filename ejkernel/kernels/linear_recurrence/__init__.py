"""One gated linear recurrence, behind every op that is neither softmax attention nor the delta rule."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.chunks import pools
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.phases import phases_from_reversed_runs
from ejkernel.kernels.linear_recurrence.xla import phases as xla_phases
from ejkernel.kernels.linear_recurrence.xla.recurrence import RECURRENCE

_PALLAS, _TRITON = "linear_recurrence.pallas", "linear_recurrence.triton"
# Fastest first, on each device.
IMPLEMENTATIONS = (
    Implementation(
        "pallas",
        ("tpu",),
        Later(_PALLAS, "supports"),
        Later(_PALLAS, "run"),
        phases_from_reversed_runs(Later(_PALLAS, "run")),
        splits=False,
    ),
    Implementation(
        "triton",
        ("cuda",),
        Later(_TRITON, "supports"),
        Later(_TRITON, "run"),
        Later(f"{_TRITON}.phases", "PHASES"),
    ),
    Implementation("xla", None, xla.supports, xla.run, xla_phases.PHASES),
)
# Of calls that read and write slots of a pool of states.
POOLED = pools.implementations(RECURRENCE, _TRITON)
