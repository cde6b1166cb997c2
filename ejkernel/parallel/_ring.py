"""Which slices of keys visit which devices of a ring, and in which order."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels.attention.call import Call


@dataclass(frozen=True)
class Ring:
    """A ring of devices, each of which holds some slices of the tokens.

    Attributes:
        axis: The mesh axis.
        devices: How many devices there are.
        slices: How many slices a device holds.
        first: Keys of the device `first` places before a device visit it first.
        visits: How many devices' keys visit: then those of the device `first + 1` places before, `first + 2`, ….
        edges: Parts of slices that visit last, `(places, begin, end)`: tokens `begin` to `end` of the device that is
            `places` before.
    """

    axis: str
    devices: int
    slices: int
    first: int
    visits: int
    edges: tuple[tuple[int, int, int], ...] = ()

    def slices_of(self, device: Any) -> list[Any]:
        """The numbers, counted over all devices, of the slices that a device holds."""
        return [device, 2 * self.devices - 1 - device][: self.slices]

    def hop(self, tree: Any, places: int = 1) -> Any:
        """Sends `tree` to the device so many places after this one, and receives the tree of the one before."""
        if places % self.devices == 0:
            return tree
        order = [(i, (i + places) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, order), tree)

    def split(self, x: Array) -> Array:
        """Splits a device's tokens `[B, T, …]` into its slices `[slices, B, T/slices, …]`."""
        return jnp.moveaxis(x.reshape(x.shape[0], self.slices, -1, *x.shape[2:]), 1, 0)

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def starts(self, device: Array, tokens: int) -> Array:
        """Where each of a device's slices begins among all tokens."""
        return tokens * jnp.stack(self.slices_of(device))


def plan(call: Call, axis: str, devices: int, slices: int, shifted: bool) -> Ring:
    """The ring with the fewest visits that brings every query all keys that it may attend to.

    `call` has the sizes of a slice. `shifted` says that packed keys have borders of their own, so that nothing is known
    of the distance between queries and keys.
    """
    ring = Ring(axis, devices, slices, 0, devices)
    if not shifted and (edges := _edges(call, ring)) is not None:
        return replace(ring, visits=1, edges=edges)
    needed = np.arange(devices) if shifted else _needed(call, ring)
    if needed.size == 0:
        return replace(ring, visits=1)
    # skip the longest run of places that no device needs
    gaps = np.diff(np.append(needed, needed[0] + devices)) - 1
    widest = int(gaps.argmax())
    visits = devices - int(gaps[widest])
    if visits == devices:
        return ring
    first = int(needed[(widest + 1) % needed.size])
    return replace(ring, first=first - devices if first + visits > devices else first, visits=visits)


def _edges(call: Call, ring: Ring) -> tuple[tuple[int, int, int], ...] | None:
    """The tokens of neighbouring slices that a window reaches; `None` if it reaches beyond these slices."""
    left, right, tokens = call.left, call.right, call.keys
    if ring.slices > 1 or call.queries != tokens or left is None or right is None or max(left, right) > tokens:
        return None
    # with two devices both neighbours are the same device, and a single device is its own neighbour
    if ring.devices == 1 or (ring.devices == 2 and left and right):
        return None
    return tuple(edge for edge in ((1, tokens - left, tokens), (-1, 0, right)) if edge[1] < edge[2])


def _needed(call: Call, ring: Ring) -> np.ndarray:
    """The distances on the ring at which some device has keys that it must see."""
    place = np.arange(ring.devices)
    held = np.stack(ring.slices_of(place))  # [slices, devices]
    query, key = call.queries * held[:, None, :, None], call.keys * held[:, None]
    # the least and the largest distance of a key of one slice to the right of a query of another
    nearest, farthest = key - (query + call.queries - 1), key + call.keys - 1 - query
    seen = np.ones(nearest.shape, bool)
    if call.left is not None:
        seen &= farthest >= -call.left
    if call.right is not None:
        seen &= nearest <= call.right
    return np.unique((place[:, None] - place)[seen.any((0, 1))] % ring.devices)
