"""How a call is tiled for a TPU."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.convolution.call import Call
from ejkernel.xla_utils.utils import cdiv

DTYPES = {np.dtype(each) for each in (jnp.bfloat16, jnp.float32)}
LANES = 128
EDGE = 8  # how many tokens before and behind a block its results may depend on: the sublanes of a register
HALO = 16  # how many of them are read: bfloat16 is stored in tiles of so many rows
TOKENS, CHANNELS = 1024, 256  # of a block
ROWS = 128  # tokens whose intermediate results are held in registers at once


@dataclass(frozen=True)
class Sizes:
    """Everything that the device code of a call is compiled for."""

    taps: int
    tokens: int  # of a block
    blocks: int  # of tokens, in a row
    channels: int  # of a block
    channel_blocks: int
    rows: int  # tokens of a block that are computed at once
    silu: bool
    masked: bool  # whether a block may hold several sequences, or tokens past the end of the row

    @property
    def history(self) -> int:
        return self.taps - 1


def sizes(call: Call, backward: bool) -> Sizes:
    """How the call is tiled."""
    channels = min(CHANNELS, _rounded(call.channels, LANES))
    masked = call.layout != "rows"
    few = call.tokens <= ROWS and not (masked or backward)
    # masks lie along the lanes
    tokens = _rounded(call.tokens, HALO) if few else min(TOKENS, _rounded(call.tokens, LANES))
    return Sizes(
        taps=call.taps,
        tokens=tokens,
        blocks=cdiv(call.tokens, tokens),
        channels=channels,
        channel_blocks=cdiv(call.channels, channels),
        rows=min(ROWS, tokens),
        silu=call.activation == "silu",
        # outputs past the end of the row are not written; only their gradients need masks
        masked=masked or (backward and call.tokens % tokens != 0),
    )


def _rounded(size: int, step: int) -> int:
    return cdiv(size, step) * step
