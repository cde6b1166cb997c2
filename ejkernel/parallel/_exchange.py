"""The effects of slices of tokens on a state, exchanged between devices: all gathered at once, or in a tree.

A slice applies a transition to its start state and adds a state: both together are its effect. The start state of a
slice follows from the initial state and the effects of the slices before it. With `S` bytes an effect and `P` devices,
a gather brings `(P - 1) S` bytes to each device in one collective. In the tree an effect goes to the next device, then
the composed effects of 1, 2, 4, … slices go as many devices further: `S` bytes each time, in `1 + ceil(log2(P - 1))`
steps.
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

# A step of the tree costs as much as this many bytes more: what a link of 50 GB/s carries in a latency of 5 µs.
BYTES_OF_A_STEP = 250_000


@dataclass(frozen=True)
class Algebra:
    """How effects, pairs of a transition and an added state, are stored and composed.

    Attributes:
        pack: `pack(transition, added)`: both in one array `[N, H, …]`, so that one collective carries both.
        unpack: Undoes `pack`.
        apply: `apply(transition, state)`: the state after the transition.
        compose: `compose(later, earlier)`: the transition of both slices, in order.
        transpose: `transpose(transition)`: the transition of a state's cotangent, in the backward pass.
    """

    pack: Callable[[Any, jax.Array], jax.Array]
    unpack: Callable[[jax.Array], tuple[Any, jax.Array]]
    apply: Callable[[Any, jax.Array], jax.Array]
    compose: Callable[[Any, Any], Any]
    transpose: Callable[[Any], Any]


def tree_steps(devices: int) -> int:
    """How many collectives a tree takes."""
    return 1 + math.ceil(math.log2(max(devices - 1, 1)))


def by_tree(devices: int, size: int) -> bool:
    """Whether a tree takes less time than a gather for effects of `size` bytes."""
    steps = tree_steps(devices)
    return (devices - 1 - steps) * size > steps * BYTES_OF_A_STEP


@dataclass(frozen=True)
class Exchange:
    """The exchange between slices, one for each device of a mesh axis, visited first to last or `reverse`."""

    algebra: Algebra
    axis: str
    devices: int
    reverse: bool

    @property
    def tracked(self) -> bool:
        """Whether the caller's `shard_map` tracks over which axes values vary (`check_vma`)."""
        return self.axis in _varying.axes(lax.axis_index(self.axis))

    def forward(
        self, initial: jax.Array, transition: Any, added: jax.Array, passes: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """From the initial state and this slice's effect: the final state, the slice's start state, and residuals.

        The final state is the same on all devices. `backward` takes the residuals. `passes [devices, N]` says for all
        slices whether the state after a slice depends on the state before it; `None` says that all do.
        """
        effect = self.algebra.pack(transition, added)
        if passes is None and self._by_tree(added):
            return *self._tree(initial, effect), transition
        transitions, all_added = self.algebra.unpack(self.gather(effect))
        return *self._scan(initial, transitions, all_added, passes), transitions

    def backward(
        self, d_final: jax.Array, residuals: Any, d_start: jax.Array, passes: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The cotangents of the initial state and of the state at the end of this slice.

        `d_start` is the cotangent of this slice's start state through this slice's output alone. The exchange goes in
        the order opposite to that of the forward pass.
        """
        transition = self.algebra.transpose(residuals)
        if passes is None and self._by_tree(d_start):
            return self._tree(d_final, self.algebra.pack(transition, d_start))
        return self._scan(d_final, transition, self.gather(d_start), passes)

    def _by_tree(self, added: jax.Array) -> bool:
        # a gather over this axis would first gather what XLA shards over others
        return _sharding.left_to_xla() or by_tree(self.devices, added.size * added.dtype.itemsize)

    def gather(self, x: jax.Array) -> jax.Array:
        """The arrays of all devices, `[devices, …]`."""
        # without tracking, JAX does not know of any array that it is the same on all devices
        return lax.all_gather(x, self.axis, to="invarying" if self.tracked else "varying")

    def _scan(
        self, initial: jax.Array, transitions: Any, added: jax.Array, passes: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The final state and this slice's start state, from the effects of all slices."""

        def step(state: jax.Array, effect: tuple[Any, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
            transition, added, passes = effect
            following = self.algebra.apply(transition, state)
            if passes is not None:
                # selected rather than multiplied by 0, as a state that does not pass may be NaN
                following = jnp.where(passes[:, None, None, None], following, 0)
            return following + added, state

        initial, effects = _varying.align((initial, (transitions, added, passes)))
        final, starts = lax.scan(step, initial, effects, reverse=self.reverse)
        return final, lax.dynamic_index_in_dim(starts, lax.axis_index(self.axis), keepdims=False)

    def _tree(self, initial: jax.Array, effect: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The results of `_scan`, in a tree of exchanges that begins with this slice's effect."""
        algebra, device = self.algebra, lax.axis_index(self.axis)
        first, last = (self.devices - 1, 0) if self.reverse else (0, self.devices - 1)
        transition, added = algebra.unpack(effect)
        # the first slice applies its transition to the initial state at once: what it adds is then its end state
        total = jnp.where(device == first, algebra.apply(transition, initial) + added, added)
        # devices that receive nothing get zeros, which add nothing
        before = self._hop(algebra.pack(transition, total), 1)
        distance = 1
        while distance < self.devices - 1:
            later, added_later = algebra.unpack(before)
            earlier, added_earlier = algebra.unpack(self._hop(before, distance))
            composed = algebra.apply(later, added_earlier) + added_later
            before = algebra.pack(algebra.compose(later, earlier), composed)
            distance *= 2
        start = jnp.where(device == first, initial, algebra.unpack(before)[1])
        end = jnp.where(device == last, algebra.apply(transition, start) + added, 0)
        return lax.psum(end, self.axis), start

    def _hop(self, x: jax.Array, distance: int) -> jax.Array:
        """The `x` of the device that is visited `distance` slices earlier; zeros if there is none."""
        places = range(self.devices - distance)
        pairs = [(i + distance, i) if self.reverse else (i, i + distance) for i in places]
        return lax.ppermute(x, self.axis, pairs)
