"""Whose keys visit whom on a ring of devices."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels.attention.call import Call


@dataclass(frozen=True)
class Ring:
    """A device is visited by the slices that live `first`, `first + 1`, … places before it, then by edges of others.

    An edge is a place, as above, and the first and one past the last token of the slice that lives there.
    """

    axis: str
    devices: int
    slices: int  # that a device holds
    first: int
    visits: int
    edges: tuple[tuple[int, int, int], ...] = ()

    def held(self, device: Any) -> list[Any]:
        """Which slices of all tokens a device holds."""
        return [device, 2 * self.devices - 1 - device][: self.slices]

    def hop(self, tree: Any, places: int = 1) -> Any:
        """`tree`, sent on by so many places."""
        if places % self.devices == 0:
            return tree
        order = [(i, (i + places) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, order), tree)

    def split(self, x: Array) -> Array:
        """A device's tokens `[B, T, …]` by slices `[slices, B, T/slices, …]`."""
        return jnp.moveaxis(x.reshape(x.shape[0], self.slices, -1, *x.shape[2:]), 1, 0)

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def starts(self, device: Array, tokens: int) -> Array:
        """Where each of a device's slices begins among all tokens."""
        return tokens * jnp.stack(self.held(device))


def plan(call: Call, axis: str, devices: int, slices: int, shifted: bool) -> Ring:
    """The shortest way around that brings together everything in sight of each other, on any device.

    `call` has the sizes of a slice. `shifted` says that packed keys stand elsewhere than their queries, so that nothing
    is known of distances.
    """
    ring = Ring(axis, devices, slices, 0, devices)
    if not shifted and (edges := _edges(call, ring)) is not None:
        return replace(ring, visits=1, edges=edges)
    needed = np.arange(devices) if shifted else _needed(call, ring)
    if needed.size == 0:
        return replace(ring, visits=1)
    # all but the longest stretch that nobody needs
    gaps = np.diff(np.append(needed, needed[0] + devices)) - 1
    widest = int(gaps.argmax())
    visits = devices - int(gaps[widest])
    if visits == devices:
        return ring
    first = int(needed[(widest + 1) % needed.size])
    return replace(ring, first=first - devices if first + visits > devices else first, visits=visits)


def _edges(call: Call, ring: Ring) -> tuple[tuple[int, int, int], ...] | None:
    """What a window within the next slices needs of them; `None` if it reaches further."""
    left, right, tokens = call.left, call.right, call.keys
    if ring.slices > 1 or call.queries != tokens or left is None or right is None or max(left, right) > tokens:
        return None
    # of two devices each would be both neighbours of the other, and alone its own
    if ring.devices == 1 or (ring.devices == 2 and left and right):
        return None
    return tuple(edge for edge in ((1, tokens - left, tokens), (-1, 0, right)) if edge[1] < edge[2])


def _needed(call: Call, ring: Ring) -> np.ndarray:
    """How many places before it on the ring there are slices that some device can see."""
    place = np.arange(ring.devices)
    held = np.stack(ring.held(place))  # [slices, devices]
    query, key = call.queries * held[:, None, :, None], call.keys * held[:, None]
    # how far keys of a slice can stand to the right of queries of another
    nearest, farthest = key - (query + call.queries - 1), key + call.keys - 1 - query
    seen = np.ones(nearest.shape, bool)
    if call.left is not None:
        seen &= farthest >= -call.left
    if call.right is not None:
        seen &= nearest <= call.right
    return np.unique((place[:, None] - place)[seen.any((0, 1))] % ring.devices)
