"""Small parameters whose gradients are summed in one all-reduce, such as norms under sequence parallelism.

``Stored.late_axes`` names the axes beside the data axes over which such a gradient is a pending sum. When it is summed depends
on who runs the backward:

    one micro-batch         autograd runs under the caller: those of a segment, when all are there (``vary_together``)
    several, or a pipeline  all of a step, when its last backward is done (``sum_late``)

Sums are in fp32 whatever the gradients' dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.runtime import collectives as comm
from meshwright.runtime.collectives import Group
from meshwright.runtime.state.layout import local_of


class _VaryTogether(Function):
    """The same values, read differently on each rank. What no gradient reaches, on all ranks alike, has none."""

    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        whole = iter(_summed([grad for grad in grads if grad is not None], ctx.group))
        return None, *(None if grad is None else next(whole) for grad in grads)


def vary_together(tensors: Sequence[Tensor], groups: Sequence[Group | None]) -> list[Tensor]:
    """Each tensor, its gradient summed over its group if it has one: those of one group in one all-reduce."""
    found = list(tensors)
    for group in dict.fromkeys(group for group in groups if group is not None):
        at = [i for i, other in enumerate(groups) if other == group and tensors[i].requires_grad]
        if at:
            for i, tensor in zip(at, _VaryTogether.apply(group, *(found[i] for i in at)), strict=True):
                found[i] = tensor
    return found


def sum_late(late: Mapping[str, Group], tensors: Mapping[str, Tensor]) -> None:
    """Complete the gradients that a step left in ``tensors`` of the values in ``late``. Every rank of a group calls this with
    the same values in the same order."""
    for group in dict.fromkeys(late.values()):
        grads = list(_grads(tensors[value] for value, other in late.items() if other == group))
        for grad, whole in zip(grads, _summed(grads, group), strict=True):
            grad.copy_(whole)


def _grads(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    for tensor in tensors:
        if tensor.grad is not None:
            yield local_of(tensor.grad)


def _summed(grads: Sequence[Tensor], group: Group) -> list[Tensor]:
    if not grads:
        return []
    wide = [grad.flatten().to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    whole = comm.reduce(torch.cat(wide), group)
    parts = whole.split([grad.numel() for grad in grads])
    return [part.view(grad.shape).to(grad.dtype) for part, grad in zip(parts, grads, strict=True)]
