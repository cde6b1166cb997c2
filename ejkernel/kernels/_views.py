"""Heads in the outputs of projections, which kernels of one token read where they are."""

from dataclasses import dataclass

import jax

from ejkernel.kernels._launch import padded


@dataclass(frozen=True)
class View:
    """Where heads stand in an array `[rows, groups, width]`: side by side in each group, from `offset` on."""

    groups: int
    width: int
    offset: int
    heads: int
    dim: int

    def of(self, x: jax.Array, rows: int) -> jax.Array:
        """The first `rows`, `[rows, heads, dim]`."""
        size = self.heads // self.groups * self.dim
        return x[:rows, :, self.offset : self.offset + size].reshape(rows, self.heads, self.dim)

    @property
    def block(self) -> int:
        """The power of two that holds a head."""
        return padded(self.dim)
