"""`kda`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.delta_rule import kda as _front

kda = pinned(_front, "xla")
