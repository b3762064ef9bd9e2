"""``Whole`` tensors: what is made of one, by whatever way, is what torch's own DTensor makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.runtime.whole import Whole, adopt, plain


def alike(rank: int) -> list[str]:
    """What operators of one tensor make of a ``Whole``, in whatever way, that torch's own DTensor does not."""
    mesh, problems = init_device_mesh("cpu", (2,)), []
    split = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    given = {"rows": split, "columns": split.redistribute(mesh, [Shard(1)]),
             "replicated": split.redistribute(mesh, [Replicate()]),
             "turned": split.t(), "pending": DTensor.from_local(torch.ones(5, 3), mesh, [Partial()], run_check=False),
             "nothing": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]),
             "a number": split.sum().redistribute(mesh, [Replicate()])}
    made: dict[str, Callable[[Tensor], Tensor]] = {
        "detach": torch.detach, "clone": torch.clone, "zeros": torch.zeros_like, "cast": lambda x: x.to(torch.bfloat16),
        "ones": lambda x: torch.ones_like(x, dtype=torch.float64), "full": lambda x: torch.full_like(x, 2.5),
        "contiguous": lambda x: torch.clone(x, memory_format=torch.contiguous_format), "viewed": lambda x: x.view_as(x),
        "placed": lambda x: torch.zeros_like(x, device="cpu"),
    }
    for name, x in given.items():
        for what, make in made.items():
            wanted = x.detach() if what == "viewed" else make(x)  # torch's refuses to view what is empty
            whole = adopt(x.clone() if name != "pending" else x.detach(), None)
            found: Any = make(whole)
            same = found.shape == wanted.shape and found.stride() == wanted.stride() and found.dtype == wanted.dtype
            if type(found) is not Whole or not same or not torch.equal(found.full_tensor(), wanted.full_tensor()):
                problems.append(f"{what} of {name}: {found}, not {wanted}")
            if name != "pending" and what in ("detach", "viewed") and x.numel():
                found.add_(1)
                problems += [f"{what} of {name} is a copy"] * bool(not torch.equal(plain(whole), x.full_tensor() + 1))
    return problems


def test_tensors_made_of_one_are_those_of_torch(pool: Callable[[int], Any]) -> None:
    """Split, replicated, pending, transposed or empty ones: the same numbers, type and layout; views are views."""
    assert pool(2).run(alike) == [[]] * 2


REDUCED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum, "mean": torch.mean, "sum of rows": lambda x: x.sum(1, keepdim=True),
    "mean over rows": lambda x: x.mean(0, keepdim=True), "mean of rows": lambda x: x.mean(1, keepdim=True),
    "mean over both": lambda x: x.mean((0, 1)), "mean without its dim": lambda x: x.mean(0),
    "norm": torch.norm, "norm of rows": lambda x: x.norm(dim=1, keepdim=True), "3-norm": lambda x: x.norm(3),
    "largest": lambda x: torch.linalg.vector_norm(x, float("inf")), "1-norm": lambda x: x.norm(1, dim=0, keepdim=True),
    "root mean square": lambda x: x.square().mean().sqrt(), "in double": lambda x: x.mean(dtype=torch.float64),
}


def over_pieces(rank: int) -> list[str]:
    """What sums, means and norms of tensors in pieces, of unequal lengths among them, differ in from those of the whole."""
    mesh, problems = init_device_mesh("cpu", (2,)), []
    whole = torch.arange(15.0).view(5, 3) - 4
    for place in (Shard(0), Shard(1), Replicate()):
        x = adopt(distribute_tensor(whole, mesh, [place]), None)
        for what, reduce in REDUCED.items():
            found, wanted = plain(reduce(x)), reduce(whole)
            if found.shape != wanted.shape or found.dtype != wanted.dtype or not torch.allclose(found, wanted):
                problems.append(f"{what} over {place}: {found}, not {wanted}")
    return problems


def test_sums_means_and_norms_are_of_the_whole(pool: Callable[[int], Any]) -> None:
    """A mean of pieces is divided by the number of all elements."""
    assert pool(2).run(over_pieces) == [[]] * 2
