"""`delta_rule`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.delta_rule import delta_rule as _front

delta_rule = pinned(_front, "xla")
