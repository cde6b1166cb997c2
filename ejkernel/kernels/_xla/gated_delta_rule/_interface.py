"""`gated_delta_rule`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.delta_rule import gated_delta_rule as _front

gated_delta_rule = pinned(_front, "xla")
