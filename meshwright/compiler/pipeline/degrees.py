"""How many ranks do what in a plan: its mesh, how parameters are kept over it, and a placement's shardings over its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.placement.rows import CONTEXT, DATA, EP, TENSOR
from meshwright.ir.mesh import HEADS, PP, Mesh
from meshwright.ir.sharding import Sharding

REPLICATE, SHARD = "dp_replicate", "dp_shard"


@dataclass(frozen=True)
class Degrees:
    """How many ranks do what. ``shard``: of the data ranks, those that share a parameter's state; ``context``: ranks that split
    the sequence, ``mirrored``: in two chunks each; ``expert``: of those that share state, the ones that split the experts;
    ``heads``: of those that split the sequence, the near ones that exchange it for heads."""

    pp: int
    data: int
    shard: int
    tensor: int
    context: int = 1
    mirrored: bool = False
    expert: int = 1
    heads: int = 1

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        axes = {PP: self.pp} if self.pp > 1 else {}
        hybrid = 1 < self.shard < self.data
        axes |= {REPLICATE: self.data // self.shard, SHARD: self.shard} if hybrid else {DATA: self.data}
        if self.expert > 1:
            last = SHARD if hybrid else DATA
            axes |= {last: axes[last] // self.expert, EP: self.expert}
        axes |= {CONTEXT: self.context // self.heads} if self.context > 1 else {}
        axes |= {HEADS: self.heads} if self.heads > 1 else {}
        return Mesh((*axes, TENSOR), (*axes.values(), self.tensor), frozenset({CONTEXT} if self.mirrored else ()))

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which gradients are summed."""
        known, mesh = (DATA, REPLICATE, SHARD, EP, CONTEXT, HEADS), self.mesh
        return tuple(axis for axis in known if axis in mesh.axes and mesh.size(axis) > 1)

    def variant(self, zero: int) -> Variant:
        """How parameters are kept at a ZeRO level."""
        shards = tuple(axis for axis in self.data_axes if axis != REPLICATE)
        return Variant(zero if shards else 0, self.data_axes, shards if zero else ())


def renamed(sharding: Sharding, degrees: Degrees) -> Sharding:
    """A placement's sharding over the axes of the plan's mesh: hybrid data ranks are two axes."""
    return sharding if DATA in degrees.mesh.axes else _in_two(sharding)


@lru_cache(maxsize=1 << 12)
def _in_two(sharding: Sharding) -> Sharding:
    """A sharding with two axes in the place of the data ranks'."""

    def both(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(new for axis in axes for new in ((REPLICATE, SHARD) if axis == DATA else (axis,)))

    dims = tuple(both(axes) for axes in sharding.dims)
    return replace(sharding, dims=dims, partial=frozenset(both(sorted(sharding.partial))),
                   varying=frozenset(both(sorted(sharding.varying))))


def renamed_assignment(assignment: Mapping[str, str], degrees: Degrees) -> dict[str, str]:
    """An operator's assignment over the axes of the plan's mesh."""
    if DATA in degrees.mesh.axes:
        return dict(assignment)
    result: dict[str, str] = {}
    for axis, factor in assignment.items():
        result.update(dict.fromkeys((REPLICATE, SHARD) if axis == DATA else (axis,), factor))
    return result
