"""Tensors of a model that lie in the same memory: kept one, or refused with both names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.errors import CaptureError
from tests.equality import compare


class Two(nn.Module):
    """Two layers, and what a test puts beside them."""

    def __init__(self, change: Callable[[Two], None], device: str = "cpu") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device)
        self.extra: Any = None
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x)))
        return (y + self.extra.sum() if isinstance(self.extra, Tensor) else y).sum()


def _set(**values: Callable[[Two], Any]) -> Callable[[Two], None]:
    def change(model: Two) -> None:
        for name, make in values.items():
            owner, _, key = name.rpartition("__")
            setattr(getattr(model, owner) if owner else model, key, make(model))

    return change


REFUSED: Mapping[str, tuple[Callable[[Two], None], str]] = {
    "parameter of a parameter's data": (
        _set(second__weight=lambda m: nn.Parameter(m.first.weight.data)), "'first.weight' and parameter 'second.weight' share"),
    "transpose": (_set(second__weight=lambda m: nn.Parameter(m.first.weight.data.t())), "'first.weight' and .*'second.weight'"),
    "slice": (_set(second__bias=lambda m: nn.Parameter(m.first.weight.data[2])), "'first.weight' and parameter 'second.bias'"),
    "attribute": (_set(extra=lambda m: m.first.weight.data), "parameter 'first.weight' and attribute 'extra'"),
    "list": (_set(extra=lambda m: [m.first.weight.data[1:3]]), "'first.weight' and what is kept in 'extra'"),
    "view of a parameter": (_set(extra=lambda m: m.first.weight[:, 0]), "parameter 'first.weight' and attribute 'extra'"),
    "made of a parameter": (_set(extra=lambda m: m.first.weight * 2), "'extra', a tensor that takes gradients"),
    "trained attribute": (
        _set(extra=lambda m: torch.ones(3, requires_grad=True)), "'extra', a tensor that takes gradients"),
    "sparse attribute": (_set(extra=lambda m: torch.eye(3).to_sparse()), "'extra' is of layout torch.sparse_coo"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, device: str) -> None:
    """With both names, on real memory and on none."""
    change, match = REFUSED[what]
    model = Two(change, device)
    with pytest.raises(CaptureError, match=match):
        capture(model, (torch.randn(4, 8),), {})


def test_disjoint_slices_share_nothing() -> None:
    """Weights that are slices or columns of one memory are as good as others."""
    flat = torch.randn(16, 8)
    model = Two(_set(first__weight=lambda m: nn.Parameter(flat[:8]), second__weight=lambda m: nn.Parameter(flat[8:])))
    assert len(capture(model, (torch.randn(4, 8),), {}).params) == 4
    wide = torch.randn(8, 16)
    model = Two(_set(first__weight=lambda m: nn.Parameter(wide[:, :8]), second__weight=lambda m: nn.Parameter(wide[:, 8:])))
    assert len(capture(model, (torch.randn(4, 8),), {}).params) == 4


class Queue(nn.Module):
    """A buffer under two names, which are two tensors of one memory."""

    queue: Tensor
    same: Tensor

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.inside, self.changes = nn.Linear(8, 8), changes
        self.register_buffer("queue", torch.ones(8))
        self.register_buffer("same", self.queue.detach())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inside(x)
        if self.changes:
            self.queue.add_(y.detach().mean(0))
        return {"loss": ((y * self.queue - self.same) ** 2).mean()}


def _queued(rank: int, cases: list[dict[str, Any]]) -> list[str]:
    torch.manual_seed(1)
    model, x = Queue(changes=False), torch.randn(4, 8)
    problems: list[str] = []
    for pins in cases:
        single = copy.deepcopy(model)
        parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)
        for module in (single, parallel):
            with torch.no_grad():
                module.queue.mul_(2)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                module(x)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        state = parallel.full_state_dict()
        problems += compare(state, single.state_dict()) if rank == 0 else []
    return problems


def test_buffers_that_are_one_stay_one(pool: Callable[[int], Any]) -> None:
    """What is written under one name is read under the other; a forward that writes is refused with both names."""
    assert pool(2).run(_queued, [{"dp": 2}, {"tp": 2}]) == [[]] * 2
    with pytest.raises(CaptureError, match="'queue', 'same' are one tensor"):
        capture(Queue(changes=True), (torch.randn(4, 8),), {})
