"""The delta rule in plain JAX: chunk after chunk, with its own backward. Runs anywhere."""

from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.xla.recurrence import RECURRENCE

run = RECURRENCE.run


def supports(call: Call) -> str | None:
    """Everything."""
    return None
