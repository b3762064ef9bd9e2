"""Sums, means and norms of a DTensor: every rank of its piece, and what is pending is summed at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.runtime.checks.edits import before_sending
from meshwright.runtime.state.pieces import dtensor_of, is_pending, local_piece


def reduction(name: str, func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of ``reduced``; None for what it does not do."""
    given = {argument.name: arg for argument, arg in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    x, dim = given["self"], given.get("dim")
    if not isinstance(x, DTensor) or not x.ndim or is_pending(x) or not x.dtype.is_floating_point:
        return None
    if given.get("out") is not None:
        return None
    dims = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)} if dim not in (None, [], ()) else set(range(x.ndim))
    power = {"sum": None, "mean": None}.get(name, given.get("ord", given.get("p")))
    power = 2.0 if power is None and name not in ("sum", "mean") else power
    keep = bool(given.get("keepdim", False))
    if (len(dims) < x.ndim and not keep) or (power is not None and power <= 0):
        return None
    return {"x": x, "dims": dims, "power": power, "keep": keep, "mean": name == "mean", "dtype": given.get("dtype") or x.dtype}


def reduced(x: DTensor, dims: set[int], power: float | None, keep: bool, mean: bool, dtype: torch.dtype) -> Tensor:
    """Summed over ``dims`` (the ``power``-th powers of the absolute values, if given), each piece by the rank that has it."""
    exact = torch.promote_types(dtype, torch.float32)  # pieces of a sum are not rounded to 16 bits
    local, largest = local_piece(x).to(exact), power == float("inf")
    over = sorted(dims)
    if power is None:
        part = local.sum(over, keepdim=True)
    elif 0 in local.shape:  # of nothing there is no largest
        part = local.new_zeros([1 if d in dims else n for d, n in enumerate(local.shape)])
    else:
        part = torch.linalg.vector_norm(local, power, over, keepdim=True)
        part = part if largest else part.pow(power)
    split = [not isinstance(at, Replicate) and at.dim in dims for at in x.placements]  # type: ignore[attr-defined]
    before_sending(x, [dim for dim, cut in enumerate(split) if cut])
    pending = [Partial("max" if largest else "sum") if cut else at for cut, at in zip(split, x.placements, strict=True)]
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    whole = dtensor_of(part, x.device_mesh, pending, shape)
    whole = whole.redistribute(placements=[Replicate() if cut else at for cut, at in zip(split, x.placements, strict=True)])
    found = local_piece(whole)
    if mean:
        found = found / (x.numel() // max(whole.numel(), 1))
    elif power is not None and not largest:
        found = found.pow(1 / power)
    found = found.to(dtype)
    if len(dims) == x.ndim and not keep:
        return dtensor_of(found.reshape(()), x.device_mesh, [Replicate()] * x.device_mesh.ndim, [])
    return dtensor_of(found, x.device_mesh, whole.placements, shape)
