"""The gated linear recurrence in plain JAX: chunk after chunk, with its own backward. Runs anywhere."""

from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla.recurrence import RECURRENCE

run = RECURRENCE.run


def supports(call: Call) -> str | None:
    """Everything."""
    return None
