"""Attention kernels for JAX: gated linear recurrences and softmax attention, packed, exact and fast."""

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel import xla_utils
from ejkernel._debug import debug
from ejkernel._dispatch import PlatformError, SlowerImplementationWarning, explain
from ejkernel._mesh import GatheredWarning
from ejkernel._version import __version__ as __version__
from ejkernel.attention import attention, flash_attention
from ejkernel.convolution import causal_conv1d
from ejkernel.delta_rule import delta_rule, gated_delta_rule, kda
from ejkernel.linear_attention import (
    lightning_attn,
    linear_attention,
    recurrent,
    recurrent_gla,
    retention,
    simple_gla,
)
from ejkernel.paged_attention import PagedCache, paged_attention

if TYPE_CHECKING:
    from ejkernel import parallel

__all__ = [
    "GatheredWarning",
    "PagedCache",
    "PlatformError",
    "SlowerImplementationWarning",
    "attention",
    "causal_conv1d",
    "debug",
    "delta_rule",
    "explain",
    "flash_attention",
    "gated_delta_rule",
    "kda",
    "lightning_attn",
    "linear_attention",
    "paged_attention",
    "parallel",
    "recurrent",
    "recurrent_gla",
    "retention",
    "simple_gla",
    "xla_utils",
]


def __getattr__(name: str) -> Any:
    # imported when first used, as most programs never do
    if name == "parallel":
        return importlib.import_module("ejkernel.parallel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
