"""`causal_conv1d`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.convolution import causal_conv1d as _front

causal_conv1d = pinned(_front, "xla")
