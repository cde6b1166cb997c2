"""The delta rule: the gated linear recurrence with values replaced by what they correct."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.phases import phases_from_wide_states
from ejkernel.kernels.delta_rule.xla.phases import PHASES

_PALLAS, _TRITON = f"{__name__}.pallas", f"{__name__}.triton"
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
