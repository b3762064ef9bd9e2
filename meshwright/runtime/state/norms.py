"""The norm of all gradients, of which every rank holds pieces, and clipping by it: every element counts once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import RunError
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Stored
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.layout import local_of, owner

_LARGEST, _SMALLEST = float("inf"), float("-inf")


def clip(
    parameters: Sequence[tuple[Stored, Tensor | None]], groups: Groups, mesh: Mesh, max_norm: float, norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``; the norm before. Raises RunError.

    ``parameters``: of the whole model, in the same order on every rank, each with this rank's piece if it has one.
    """
    grads, norms = [], []
    for stored, parameter in parameters:
        grad = None if parameter is None else _gradient(parameter)
        if grad is not None:
            grads.append(grad)
        mine = grad if grad is not None and grad.numel() and owner(stored, mesh, groups.coordinates) else None
        norms.append(_power_sum(mine, norm_type, groups.device))
    total = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=groups.device)
    if dist.is_initialized():
        how = {_LARGEST: dist.ReduceOp.MAX, _SMALLEST: dist.ReduceOp.MIN}
        dist.all_reduce(total, how.get(norm_type, dist.ReduceOp.SUM))
    each = total if norm_type in (0.0, _LARGEST, _SMALLEST) else total.pow(1 / norm_type)
    double = any(stored.dtype == torch.float64 for stored, _ in parameters)
    norm: Tensor = torch.linalg.vector_norm(each, norm_type).to(torch.float64 if double else torch.float32)
    if error_if_nonfinite and not norm.isfinite():
        raise RunError(f"the norm of the gradients is {norm.item()}; they were not clipped")
    if grads:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _gradient(parameter: Tensor) -> Tensor | None:
    """The local part of a parameter's gradient, which is brought to the parameter's own placements if it has others."""
    if parameter.grad is None:
        return None
    parameter.grad = parameter.grad  # the setter sees to it
    return local_of(parameter.grad)


def _power_sum(grad: Tensor | None, power: float, device: torch.device) -> Tensor:
    """The sum of the powers of a gradient's elements (the largest, the smallest, the count of those not zero); of nothing, what
    changes no sum."""
    nothing = {_LARGEST: 0.0, _SMALLEST: _LARGEST}.get(power, 0.0)
    if grad is None:
        return torch.full((), nothing, dtype=torch.float64, device=device)
    norm = torch.linalg.vector_norm(grad, power, dtype=torch.promote_types(grad.dtype, torch.float32)).double()
    result: Tensor = norm if power in (0.0, _LARGEST, _SMALLEST) else norm.pow(power)
    return result
