"""Stored tensors as another program of the same module reads them: the program of ``eval()``, where that is another graph.

That program has no tensors of its own. When a segment of it runs, what it reads is taken from what the module holds at rest,

    split over shard axes (ZeRO)     gathered over them
    split otherwise than it reads    gathered whole, and cut as it reads
    with another pipeline stage      sent by the first that has it
    as it reads                      as it is

and let go after the segment. Literals of its graph alone are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import RunError
from meshwright.ir.program import Program, Stored
from meshwright.ir.sharding import piece
from meshwright.runtime import collectives
from meshwright.runtime.groups import Groups, live
from meshwright.runtime.state.layout import box, local_of, split_dim, take, under_fsdp


@dataclass(frozen=True)
class Lender:
    """``held``: {name of a parameter or buffer: how the module stores it, its dtype at rest, and the tensor, or None where
    other pipeline stages have it}. Both programs are on one mesh."""

    held: Mapping[str, tuple[Stored, torch.dtype, Tensor | None]]
    groups: Groups
    program: Program

    def __call__(self, wanted: Stored) -> Callable[[], Tensor]:
        """A function that gives ``wanted`` as its program reads it; every rank calls it. Raises RunError for what the module
        does not hold."""
        if wanted.value in self.program.constants:
            own = take(self.program.constants[wanted.value], self._box(wanted)).to(self.groups.device)
            return lambda: own
        mine, dtype, tensor = self._held(wanted)

        def fetch() -> Tensor:
            return self._placed(self._gathered(self._sent(mine, dtype, tensor), mine), mine, wanted)

        return fetch

    def _sent(self, stored: Stored, dtype: torch.dtype, tensor: Tensor | None) -> Tensor:
        """The share at rest, from the first pipeline stage that has it."""
        group = self.groups.pipeline
        if group is None or len(stored.holders) == group.size():
            assert tensor is not None
            return local_of(tensor)
        if tensor is None:
            local = torch.empty([length for _, length in self._box(stored)], dtype=dtype, device=self.groups.device)
        else:
            local = local_of(tensor).contiguous()
        dist.broadcast(local, group=group, group_src=stored.holders[0])
        return local

    @torch.no_grad()
    def give_back(self, wanted: Stored, changed: Tensor) -> None:
        """Write a buffer's new contents, placed as its program has them, to where the module holds it."""
        mine, _, tensor = self._held(wanted)
        placed = self._placed(changed, wanted, mine)
        if tensor is not None:
            local_of(tensor).copy_(placed)

    def _held(self, wanted: Stored) -> tuple[Stored, torch.dtype, Tensor | None]:
        known = next((self.held[fqn] for fqn in wanted.fqns if fqn in self.held), None)
        if known is None:
            raise RunError(f"in eval() the model reads {wanted.fqns[0]!r}, which it has not in training; make the modes alike")
        return known

    def _box(self, stored: Stored) -> tuple[tuple[int, int], ...]:
        return box(stored, self.groups.mesh, self.groups.coordinates)

    def _gathered(self, local: Tensor, stored: Stored) -> Tensor:
        """Over the shard axes."""
        mesh, shards = self.groups.mesh, live(self.groups.mesh, stored.shard_axes)
        if not under_fsdp(stored, mesh) or not shards:
            return local
        dim = split_dim(stored, mesh)
        size = stored.tensor.local_shape(stored.shape, mesh, self.groups.coordinates)[dim]
        return collectives.gather(local, dim, size, self.groups.group(shards))

    def _placed(self, local: Tensor, now: Stored, then: Stored) -> Tensor:
        """From the placement of ``now`` to that of ``then``, both without shard axes."""
        if now.tensor.dims == then.tensor.dims:
            return local
        mesh, here = self.groups.mesh, self.groups.coordinates
        for dim, axes in enumerate(now.tensor.dims):
            for level in reversed(range(len(axes))):  # the innermost axis first
                size = piece(now.shape[dim], mesh, axes[:level], here)[1]
                local = collectives.gather(local, dim, size, self.groups.group(axes[level]))
        return take(local, self._box(replace(then, shard_axes=())))
