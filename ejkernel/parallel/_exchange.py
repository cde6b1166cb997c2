"""Effects of slices on their way between devices: all of them to everyone at once, or in a tree.

An effect keeps some of a state and adds a state. The state that a slice meets is what those before it make of the
first one. With `S` bytes an effect and `P` devices a gather brings `(P - 1) S` to each in one collective. In the tree
an effect goes to the next device, then those of 1, 2, 4, … slices joined go as many devices further: `S` bytes each
time, `1 + ceil(log2(P - 1))` times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _sharding
from ejkernel.kernels import _varying

# What a link carries in the time that a message takes to arrive, 50 GB/s for 5 µs: a step costs that much beside `S`.
BYTES_OF_A_STEP = 250_000


@dataclass(frozen=True)
class Algebra:
    """What effects are.

    Attributes:
        pack: `pack(keeping, added)`: what keeps of a state and what is added to it, in one array `[N, H, …]`, so that
            one collective carries both.
        parts: Undoes `pack`.
        keep: `keep(keeping, state)`: what is kept of a state.
        join: `join(later, earlier)`: what keeps of a state in both, one after the other.
        mirror: What keeps of a cotangent on the way back.
    """

    pack: Callable[[Any, jax.Array], jax.Array]
    parts: Callable[[jax.Array], tuple[Any, jax.Array]]
    keep: Callable[[Any, jax.Array], jax.Array]
    join: Callable[[Any, Any], Any]
    mirror: Callable[[Any], Any]


def tree_steps(devices: int) -> int:
    return 1 + math.ceil(math.log2(max(devices - 1, 1)))


def by_tree(devices: int, size: int) -> bool:
    """Whether a tree takes less time than a gather for effects of `size` bytes."""
    steps = tree_steps(devices)
    return (devices - 1 - steps) * size > steps * BYTES_OF_A_STEP


@dataclass(frozen=True)
class Exchange:
    """Slices over the devices of a mesh axis, from the first to the last or `reverse`."""

    algebra: Algebra
    axis: str
    devices: int
    reverse: bool

    @property
    def tracked(self) -> bool:
        """Whether the caller's `shard_map` keeps a record of what varies."""
        return self.axis in _varying.axes(lax.axis_index(self.axis))

    def __call__(self, start: jax.Array, keeping: Any, added: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """From the first slice's state: the last one, the same on all devices, and that which this slice meets.

        The third is what `mirrored` wants to know.
        """
        effect = self.algebra.pack(keeping, added)
        if self._by_tree(added):
            return *self._tree(start, effect), keeping
        keeping, added = self.algebra.parts(self._gather(effect))
        return *self._compose(start, keeping, added), keeping

    def mirrored(self, start: jax.Array, keeping: Any, added: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The same of cotangents, on the way back: `keeping` is what the way there has left."""
        keeping = self.algebra.mirror(keeping)
        if self._by_tree(added):
            return self._tree(start, self.algebra.pack(keeping, added))
        return self._compose(start, keeping, self._gather(added))

    def _by_tree(self, added: jax.Array) -> bool:
        # what XLA shards over other axes it would bring together before it gathers it over ours
        return _sharding.left_to_xla() or by_tree(self.devices, added.size * added.dtype.itemsize)

    def _gather(self, x: jax.Array) -> jax.Array:
        """Those of all devices, `[devices, …]`."""
        # without a record of what varies, nothing is known to be the same on all devices
        return lax.all_gather(x, self.axis, to="invarying" if self.tracked else "varying")

    def _compose(self, start: jax.Array, keeping: Any, added: jax.Array) -> tuple[jax.Array, jax.Array]:
        def visit(state: jax.Array, effect: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
            keeping, added = effect
            return self.algebra.keep(keeping, state) + added, state

        start, effects = _varying.align((start, (keeping, added)))
        last, met = lax.scan(visit, start, effects, reverse=self.reverse)
        return last, lax.dynamic_index_in_dim(met, lax.axis_index(self.axis), keepdims=False)

    def _tree(self, start: jax.Array, effect: jax.Array) -> tuple[jax.Array, jax.Array]:
        me = lax.axis_index(self.axis)
        first, last = (self.devices - 1, 0) if self.reverse else (0, self.devices - 1)
        keeping, added = self.algebra.parts(effect)
        # the first slice's effect on its state is known there: with it, nothing comes before what it adds
        entered = jnp.where(me == first, self.algebra.keep(keeping, start) + added, added)
        # what never arrives counts as zeros, which add nothing
        before = self._hop(self.algebra.pack(keeping, entered), 1)
        distance = 1
        while distance < self.devices - 1:
            (later, added_later), (earlier, added_earlier) = (
                self.algebra.parts(each) for each in (before, self._hop(before, distance))
            )
            joined = self.algebra.keep(later, added_earlier) + added_later
            before = self.algebra.pack(self.algebra.join(later, earlier), joined)
            distance *= 2
        met = jnp.where(me == first, start, self.algebra.parts(before)[1])
        left = jnp.where(me == last, self.algebra.keep(keeping, met) + added, 0)
        return lax.psum(left, self.axis), met

    def _hop(self, x: jax.Array, distance: int) -> jax.Array:
        """Each device's to the one that comes so many slices later."""
        places = range(self.devices - distance)
        pairs = [(i + distance, i) if self.reverse else (i, i + distance) for i in places]
        return lax.ppermute(x, self.axis, pairs)
