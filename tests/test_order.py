"""Loops and optimizers that go over parameters in an order of each process's own: refused where ranks would take pieces of one
tensor for those of another, and right where they send each other nothing of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.errors import RunError
from tests.test_weights import same_state

REFUSED = r"ranks go over parameters in another order: .*is of '[ac]\.\w+' on rank \d, of '[ac]\.\w+' on rank \d.*no set"
X = torch.linspace(-1, 1, 64).view(8, 8)


class Three(nn.Module):
    """``last``: how many numbers it ends in, another shape than the others' where it is not 8."""

    def __init__(self, last: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, last)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh()).square().mean()


def _by_norms(parameters: Sequence[Any]) -> None:
    for p in parameters:
        p.grad.mul_(1 / (1 + p.grad.norm()))


def _by_spread(parameters: Sequence[Any]) -> None:
    for p in parameters:
        p.grad.div_(p.grad.std() + 1)


def _gathered(parameters: Sequence[Any]) -> None:
    for p in parameters:
        p.grad.copy_(p.grad.full_tensor().flip(0))


def _drawn(parameters: Sequence[Any]) -> None:
    for p in parameters:
        nn.init.normal_(p)


def _muon(parameters: Sequence[Any]) -> None:
    torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.1).step()


LOOPS: Mapping[str, Callable[[Sequence[Any]], None]] = {
    "norms": _by_norms, "spread": _by_spread, "gathered": _gathered, "drawn": _drawn, "muon": _muon,
}


def _made(last: int, pins: Mapping[str, Any]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    single = Three(last)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autoparallel(copy.deepcopy(single), mesh, (X,), pins=dict(pins), progress=False), single


def _apart(rank: int, last: int, pins: Mapping[str, Any]) -> None:
    """Odd ranks go through their parameters from behind; what was refused stops nothing."""
    parallel, single = _made(last, pins)
    parallel(X).backward()
    for loop in LOOPS.values():
        with pytest.raises(RunError, match=REFUSED):
            loop([*parallel.parameters()][::1 - 2 * (rank % 2)])
        assert same_state(parallel, single, rank, "refused before it was sent") == []


@pytest.mark.parametrize("last", [8, 4], ids=["one shape", "two shapes"])
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_another_order_on_each_rank_is_refused(pool: Callable[[int], Any], pins: Mapping[str, Any], last: int) -> None:
    """Before anything is sent: of tensors of one shape a rank would take pieces of two for one."""
    pool(2).run(_apart, last, pins)


def _later(rank: int, pins: Mapping[str, Any], method: str) -> None:
    """The ranks agree in the first step, and not in the second: found at the next call of all ranks."""
    parallel, _ = _made(8, pins)
    for order in (1, 1 - 2 * (rank % 2)):
        parallel(X).backward()
        _by_norms([*parallel.parameters()][::order])
    with pytest.raises(RunError, match=REFUSED):
        getattr(parallel, method)(*((X,) if method == "forward" else ()))
    parallel(X)


@pytest.mark.parametrize("method", ["forward", "full_state_dict"])
def test_an_order_that_changes_later_is_refused_at_the_next_call(pool: Callable[[int], Any], method: str) -> None:
    pool(2).run(_later, {"dp": 2, "zero": 3}, method)
    pool(4).run(_later, {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2}, method)


def _own(rank: int, pins: Mapping[str, Any], of: str) -> list[str]:
    """Each rank goes through in the order of its stage, or of the ranks that hold the other pieces of its tensors."""
    parallel, single = _made(8, pins)
    behind = parallel.data_rank == 1 if of == "data" else rank >= 2
    for step in range(3):
        for one in (parallel, single):
            one.zero_grad()
            one(X).backward()
            _muon([*one.parameters()][::-1 if behind else 1])
            if of == "data" and one is parallel and parallel.data_rank == 0 and step:
                assert parallel.get_parameter("a.weight").norm() > 0
            torch.optim.SGD(one.parameters(), lr=0.1).step()
    return same_state(parallel, single, rank, str(pins))


@pytest.mark.parametrize(("of", "pins"), [
    ("data", {"dp": 2, "tp": 2, "zero": 0}), ("stage", {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2}),
], ids=["other data", "other stages"])
def test_ranks_that_send_each_other_nothing_may_have_other_orders(
    pool: Callable[[int], Any], of: str, pins: Mapping[str, Any]
) -> None:
    assert pool(4).run(_own, pins, of)[0] == []
