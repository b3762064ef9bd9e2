"""A mesh: named axes over the ranks, row-major, the last axis nearest.

An *axis* is a mesh axis. Rank r of a mesh with axes (dp=2, tp=4) has the coordinates {dp: r // 4, tp: r % 4}. The ranks
that differ only in some axes form a *group* of those axes: the ranks a collective over them talks to.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshwright.errors import MeshwrightError

PP = "pp"
"""The axis along which pipeline stages lie, the outermost of a mesh that has any. No sharding names it."""
HEADS = "up"
"""The near ones of two axes that split the sequence: along it sequence is exchanged for heads while attention runs."""

DATA, EXPERT, SEQUENCE, TENSOR, STAGE, ANY = "data", "expert", "sequence", "tensor", "stage", "any"
"""What an axis is for, its *role*:

    data       splits the batch and nothing else
    expert     splits the batch as data does, and of mixtures the experts: their tokens travel along it
    sequence   splits the sequence (context parallelism), and of mixtures the experts as well where they are folded over it; any
               other parameter sees it as one more data axis
    tensor     splits anything but the batch
    stage      pipeline stages lie along it
    any        whatever the solver decides
"""
ROLES: Mapping[str, str] = {
    PP: STAGE, "dp": DATA, "dp_replicate": DATA, "dp_shard": DATA, "ep": EXPERT, "cp": SEQUENCE, HEADS: SEQUENCE, "tp": TENSOR,
}
"""{axis: its role}; an axis with another name may do anything."""
ORDER = (PP, "dp", "dp_replicate", "dp_shard", "ep", "cp", HEADS, "tp")
"""The order in which a search lays out axes that have roles, the outermost first: what talks most lies nearest."""
SAMPLED = frozenset({DATA, EXPERT})
"""Roles of axes that split the batch."""
SHARED = frozenset({DATA, EXPERT, SEQUENCE})
"""Roles of axes whose ranks hold the same parameters and see other tokens: gradients are summed over them, and ZeRO splits
state over them. Experts are split over an expert axis instead, and summed over the others."""
ROUTED = frozenset({EXPERT, SEQUENCE})
"""Those of them whose ranks may hold different experts, if what reads these says so."""


def role_of(axis: str) -> str:
    """The role of an axis.

    >>> role_of("dp_shard"), role_of("cp"), role_of("x")
    ('data', 'sequence', 'any')
    """
    return ROLES.get(axis, ANY)

_NAME = re.compile(r"[A-Za-z_]\w*")


class MeshError(MeshwrightError, ValueError):
    """A mesh that cannot be, or an axis that it does not have."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, major axis first. ``mirrored``: axes whose pieces of a sequence are two chunks each, see
    ``ir.sharding``.

    >>> mesh = Mesh(("dp", "tp"), (2, 4))
    >>> mesh.world, mesh.coordinates(6)
    (8, {'dp': 1, 'tp': 2})
    >>> print(mesh)
    dp=2 x tp=4
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    mirrored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes):
            raise MeshError(f"mesh has {len(self.axes)} axis names {self.axes} but {len(self.sizes)} sizes {self.sizes}")
        if len(set(self.axes)) != len(self.axes):
            raise MeshError(f"mesh axis names repeat: {self.axes}")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if not _NAME.fullmatch(axis):
                raise MeshError(f"mesh axis {axis!r} is not an identifier")
            if size < 1:
                raise MeshError(f"mesh axis {axis!r} has size {size}; sizes are at least 1")
        if not self.mirrored <= set(self.axes):
            raise MeshError(f"mesh {self} has no axis {min(self.mirrored - set(self.axes))!r} to mirrored")

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """``Mesh.of(dp=2, tp=4)``."""
        return cls(tuple(sizes), tuple(sizes.values()))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def distributes(self, data: Collection[str]) -> bool:
        """Whether ranks read a parameter whose gradient is summed over the axes ``data`` by FSDP2 as a DTensor: others than
        these, and those of other stages, have pieces or copies of it. Of one that FSDP2 does not take (no axis): any others."""
        return any(self.size(axis) > 1 and axis != PP and axis not in data for axis in self.axes) if data else self.world > 1

    def innermost(self, axis: str, size: int) -> Mesh:
        """The mesh with one more axis, the nearest."""
        return Mesh((*self.axes, axis), (*self.sizes, size), self.mirrored)

    def having(self, *roles: str) -> tuple[str, ...]:
        """The axes with one of some roles.

        >>> Mesh.of(dp=2, cp=2, tp=2).having(DATA, SEQUENCE)
        ('dp', 'cp')
        """
        return tuple(axis for axis in self.axes if role_of(axis) in roles)

    def size(self, axes: str | Iterable[str]) -> int:
        """Number of ranks along one axis, or along several together (1 for none)."""
        total, name = 1, ""
        try:
            for name in (axes,) if isinstance(axes, str) else axes:
                total *= self.sizes[self.axes.index(name)]
        except ValueError:
            raise MeshError(f"mesh {self} has no axis {name!r}") from None
        return total

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index along every axis."""
        result: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, result[axis] = divmod(rank, size)
        if rank:
            raise MeshError(f"rank is outside mesh {self}")
        return {axis: result[axis] for axis in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; an axis not given counts as 0."""
        rank = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def index(self, coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
        """Position within the group of ``axes`` (major axis first) of the rank at ``coordinates``."""
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinates[axis]
        return index

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only in ``axes``, each ordered by its index along ``axes``."""
        axes = tuple(axes)
        rest = [axis for axis in self.axes if axis not in axes]
        result = []
        for outer in itertools.product(*(range(self.size(axis)) for axis in rest)):
            fixed = dict(zip(rest, outer, strict=True))
            inner = itertools.product(*(range(self.size(axis)) for axis in axes))
            result.append(tuple(self.rank({**fixed, **dict(zip(axes, at, strict=True))}) for at in inner))
        return tuple(result)

    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        result, stride = {}, 1
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            result[axis] = stride
            stride *= size
        return {axis: result[axis] for axis in self.axes}

    def __str__(self) -> str:
        marks = ["*" if axis in self.mirrored else "" for axis in self.axes]
        shown = (f"{axis}{mark}={size}" for axis, mark, size in zip(self.axes, marks, self.sizes, strict=True))
        return " x ".join(shown) or "one device"
