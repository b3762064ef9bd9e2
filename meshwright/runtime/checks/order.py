"""Whether ranks gather and sum the same tensors, one after the other.

What a loop or an optimizer computes of parameters and gradients that are split is gathered or summed over ranks as it comes to
them (Muon, LBFGS, norms, ``p.grad.std()``). A ``set`` has an order of its own in every process: what one rank sends of one
tensor another would take for its piece of another, silently where shapes are the same, and gloo ends the process where they
are not. So every rank remembers what it gathered and summed (``GatherOrder.before``), and ranks compare:

    from the first such step to the next call   before anything is sent, among the ranks that send it
    later                                       at the next call of all ranks, by a digest in the sum that they send anyway

The second is too late for one step, but nothing goes on from it. A set seldom changes its order in a run, so that the first
finds nearly all. Ranks that send each other nothing may each have an order of their own (``if parallel.data_rank == 0``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import RunError
from meshwright.runtime.verdict import interrupting

_KEPT = 4096
"""Tensors whose names are kept, to say which differ; of all of them there is a digest."""
_NOT_MINE = -(1 << 40)
"""Less than any digest, and than any digest's negative."""

Gone = Mapping[tuple[int, ...], Sequence[str]]
"""{ranks: names of the tensors that they gathered or summed among themselves, in order}."""


class _Among:
    """What some ranks gathered and summed among themselves since the last call."""

    def __init__(self, mesh: DeviceMesh, dims: Sequence[int]) -> None:
        here = mesh.get_coordinate() or ()
        self.mesh, self.dims, self.agreed = mesh, dims, False
        self.ranks = tuple(mesh.mesh[tuple(slice(None) if d in dims else at for d, at in enumerate(here))].flatten().tolist())
        self.clear()

    def clear(self) -> None:
        self.names, self.digest = list[str](), 0

    def add(self, name: str) -> None:
        self.digest = zlib.crc32(name.encode(), self.digest)
        if len(self.names) < _KEPT:
            self.names.append(name)

    def difference(self, device: torch.device) -> RunError | None:
        """On each of the ranks, unless all are at the same tensor. Every one of them calls this."""
        groups = [self.mesh.get_group(dim) for dim in self.dims]
        seen = torch.tensor([self.digest, -self.digest], device=device)
        for group in groups:
            dist.all_reduce(seen, dist.ReduceOp.MAX, group)
        if seen[0] == -seen[1]:
            return None
        known = {dist.get_rank(): self.names}
        for group in groups:
            of_ranks: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(of_ranks, known, group)
            known = {rank: names for one in of_ranks for rank, names in one.items()}
        return RunError(_otherwise(known))


class GatherOrder:
    """What this rank gathered and summed of a parallel module's tensors since the last call. ``stage``, ``stages``: those of a
    pipeline have other tensors."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        self.stage, self.stages, self.digest = stage, stages, 0
        self._among: dict[tuple[DeviceMesh, tuple[int, ...]], _Among] = {}

    def before(self, name: str, mesh: DeviceMesh, dims: Sequence[int], device: torch.device) -> None:
        """A tensor that is, or was made of, what is called so is about to be gathered or summed over ``dims`` of the mesh.
        Raises RunError if another rank is at another one, as far as that is looked at (see the file's head)."""
        over = tuple(dim for dim in dims if mesh.size(dim) > 1)
        if not over:
            return
        among = self._among.get((mesh, over))
        if among is None:
            among = self._among[mesh, over] = _Among(mesh, over)
        among.add(name)
        self.digest = zlib.crc32(name.encode(), self.digest)
        if not among.agreed and (error := among.difference(device)) is not None:
            self.taken(agreed=False)
            with interrupting():  # the ranks that these do not send to go on
                raise error

    def said(self) -> list[int]:
        """What the ranks' largest of is ``alike`` if each stage's ranks went the same way."""
        of_stages = [_NOT_MINE] * (2 * self.stages)
        of_stages[2 * self.stage:2 * self.stage + 2] = self.digest, -self.digest
        return of_stages

    @staticmethod
    def alike(largest: Sequence[int]) -> bool:
        """See ``said``."""
        return all(high == -low for high, low in zip(largest[::2], largest[1::2], strict=True))

    def taken(self, agreed: bool) -> Gone:
        """What was gone through since this was asked before; ``agreed``: alike on all ranks."""
        found = {among.ranks: among.names for among in self._among.values() if among.names}
        for among in self._among.values():
            among.agreed = among.agreed or (agreed and bool(among.names))
            among.clear()
        self.digest = 0
        return found


def difference(everyone: Sequence[Gone]) -> RunError | None:
    """What ranks that sent each other something did otherwise, of what each went through."""
    for ranks in {ranks: None for gone in everyone for ranks in gone}:
        known = {rank: everyone[rank].get(ranks, ()) for rank in ranks}
        if any(names != known[ranks[0]] for names in known.values()):
            return RunError(_otherwise(known))
    return None


def _otherwise(known: Mapping[int, Sequence[str]]) -> str:
    first, names = next(iter(known.items()))
    rank, others = next((rank, others) for rank, others in known.items() if others != names)
    at = next((i for i, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]),
              min(len(names), len(others)))
    here, there = (repr(one[at]) if at < len(one) else "nothing more" for one in (names, others))
    return (f"ranks go over parameters in another order: what is gathered or summed of them, of their gradients or of an "
            f"optimizer's state is of {here} on rank {first}, of {there} on rank {rank}, and pieces of one would be taken for "
            f"those of the other. Go over them in one order on every rank, as parallel.parameters() has them: no set, and no "
            f"dict that is made of one (sort by name); a checkpoint holds what was before")
