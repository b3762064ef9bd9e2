"""A DTensor, its piece on this rank, and the whole: one made of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from meshwright.runtime.checks.edits import before_sending
from meshwright.runtime.state.reading import torch_dtensor


def local_piece(x: DTensor) -> Tensor:
    """This rank's piece: the very memory."""
    return x._local_tensor


def is_cut(placement: Placement) -> bool:
    """Whether ranks have different pieces."""
    return not isinstance(placement, Replicate | Partial)


def is_pending(x: DTensor) -> bool:
    """Whether pieces are still to be summed."""
    return any(isinstance(placement, Partial) for placement in x.placements)


def cut_alike(x: Tensor, lead: DTensor) -> bool:
    """Whether a tensor lies on the ranks as ``lead`` does."""
    if not isinstance(x, DTensor):
        return False
    same = x.device_mesh is lead.device_mesh or x.device_mesh == lead.device_mesh  # comparing meshes costs
    return same and x.placements == lead.placements


def dtensor_of(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor of this shape, contiguous as a whole, of which this rank has ``local``."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(strides))
    )


def whole_of(x: DTensor) -> Tensor:
    """The whole, gathered on every rank."""
    before_sending(x, [dim for dim, at in enumerate(x.placements) if not isinstance(at, Replicate)])
    return torch_dtensor(x).full_tensor()


def piece_of(whole: Tensor, lead: DTensor) -> Tensor:
    """This rank's piece of a tensor that every rank has, cut as ``lead`` is."""
    mesh = lead.device_mesh
    return local_piece(dtensor_of(whole, mesh, [Replicate()] * mesh.ndim, whole.shape).redistribute(placements=lead.placements))


def piece_like(x: Tensor, lead: DTensor) -> Tensor:
    """This rank's piece of an operand that broadcasts to ``lead``, cut as that is; a number as it is."""
    if isinstance(x, DTensor) and x.shape == lead.shape and cut_alike(x, lead):
        return local_piece(x)
    whole = whole_of(x) if isinstance(x, DTensor) else x
    if not x.ndim:
        return whole
    return piece_of((whole if isinstance(x, DTensor) else of_first(x, lead)).expand(lead.shape), lead)


def of_first(x: Tensor, lead: DTensor) -> Tensor:
    """A plain tensor as the first rank of the mesh of ``lead`` has it."""
    mesh = lead.device_mesh
    before_sending(lead, range(mesh.ndim))
    return local_piece(distribute_tensor(x.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim))
