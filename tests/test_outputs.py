"""What a user computes from outputs: numbers, comparisons with plain tensors and losses are those of the single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.api import autoparallel
from meshwright.errors import RunError

TARGETS = torch.tensor([1, 0, 3, 2, 2, 7, 5, 1])
OTHER = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)


class Net(nn.Module):
    """An output of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.out(self.inside(x).tanh())
        return {"loss": y.square().mean(), "y": y, "best": y.argmax(-1)}


def written(y: Tensor) -> Tensor:
    y = y.clone()
    y[y > 0.1] = -5
    y.mul_(2).add_(OTHER).masked_fill_(y < -9, 0.5)
    y.index_fill_(0, TARGETS[:2], 7.0).div_(y.sum(-1, keepdim=True) + 99)
    return y


VALUES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "numbers": lambda out: [float(out["y"].abs().mean()), out["y"].sum().item(), out["y"][3].max().item(), len(out["y"]),
                            float(out["y"].std()), float(out["y"].norm()), bool((out["y"] > 0.2).any()), float(out["y"][0, 0])],
    "accuracy": lambda out: [float((out["best"] == TARGETS).double().mean()), int(out["y"].argmax(-1).ne(TARGETS).sum()),
                             int(TARGETS.ne(out["best"]).sum())],
    "beside plain tensors": lambda out: [out["y"] * OTHER, OTHER - out["y"], OTHER @ out["y"], torch.cat([OTHER, out["y"]]),
                                         torch.where(out["y"] > 0, out["y"], OTHER), out["y"][TARGETS], OTHER[out["best"]]],
    "any operator": lambda out: [out["y"].sort(0).values, out["y"].median(), out["y"].quantile(0.3), out["y"].cumsum(0),
                                 torch.cdist(out["y"], OTHER), out["y"].unique(), out["y"].topk(3, 0).values],
    "lists": lambda out: [out["y"].tolist(), out["best"].tolist(), out["y"].detach().numpy().sum()],
    "formatted": lambda out: [len(f"{out['y'].mean():9.4f}"), int(f"{out['best'].max()}")],
    "writing": lambda out: written(out["y"].detach()),
}
LOSSES: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "a second term": lambda out: out["loss"] + 0.1 * out["y"].abs().mean(),
    "losses": lambda out: F.mse_loss(out["y"], OTHER) + F.smooth_l1_loss(out["y"], OTHER) + F.cross_entropy(out["y"], TARGETS),
    "across the batch": lambda out: (out["y"] @ out["y"].T).triu(1).square().sum() + out["y"].sort(0).values[2:].sum(),
}


def plain(found: Any) -> Any:
    if isinstance(found, list):
        return [plain(item) for item in found]
    return found.full_tensor() if isinstance(found, DTensor) else found


def computed(rank: int, pins: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    model, x, problems = Net().double(), torch.randn(8, 8).double(), []
    single = copy.deepcopy(model)
    parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)
    for what, value in VALUES.items():
        try:
            torch.testing.assert_close(plain(value(parallel(x))), plain(value(single(x))))
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
    for what, loss in LOSSES.items():
        found, wanted = loss(parallel(x)), loss(single(x))
        found.backward()
        wanted.backward()
        assert float(found) == pytest.approx(float(wanted))
        for (name, p), q in zip(parallel.named_parameters(), single.parameters(), strict=True):
            if not torch.allclose(plain(p.grad), q.grad):
                problems.append(f"{what}: the gradient of {name}")
            p.grad = q.grad = None
    noise = plain(F.dropout(parallel(x)["y"].detach(), 0.5))
    drawn = [torch.empty_like(noise) for _ in range(2)]
    torch.distributed.all_gather(drawn, noise)
    assert torch.equal(*drawn), "what is drawn for outputs is the same on every rank"
    with pytest.raises(RunError, match="plain tensor that requires a gradient"):
        nn.Linear(8, 2).double()(parallel(x)["y"])
    y = parallel(x)["y"].detach()
    if pins["dp"] == 2:
        with pytest.raises(RunError, match="this view is a copy"):
            y[2:4].zero_()
    y[:, 2:4].zero_()  # of every row: the pieces of the view are those of the tensor
    assert not plain(y)[:, 2:4].any()
    return problems


@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], ids=str)
def test_what_is_computed_from_outputs(pool: Callable[[int], Any], pins: dict[str, Any]) -> None:
    """Where torch's own DTensor takes a rank's summand for the number, or divides a loss by the size of a piece."""
    assert pool(2).run(computed, pins) == [[], []]


class Held(nn.Module):
    """Gives out what it holds, and what is made of that alone; looks up by an embedding that asks for sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)
        self.aside = nn.Parameter(torch.linspace(0, 1, 6, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        y = self.out(self.rows(ids))
        return {"loss": y.square().mean(), "weight": self.out.weight, "aside": self.aside, "norm": self.rows.weight.norm(),
                "still": self.rows.weight.detach(), "turned": self.out.weight.T[2:], "scale": self.scale,
                "flat": self.out.weight.detach().view(-1), "columns": self.out.weight.square().sum(0)}


class Vectors(nn.Module):
    """Linears on vectors, the samples one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for i, row in enumerate(x):
            for block in self.blocks:
                row = row + block(row)
            losses.append(self.head(row).square().mean() * (i + 1))
        return torch.stack(losses).mean()


def on_vectors(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Vectors().double(), torch.randn(8, 8).double()
    single = copy.deepcopy(model)
    parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins={"dp": 1, "tp": 2}, progress=False)
    for module in (single, parallel):
        module(x).backward()
    for p, q in zip(parallel.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(plain(p.grad), q.grad)


def test_linears_on_vectors(pool: Callable[[int], Any]) -> None:
    pool(2).run(on_vectors)


def given_out(rank: int, cases: list[dict[str, Any]]) -> None:
    ids, problems = torch.arange(8).view(8, 1) % 5, []
    for pins in cases:
        torch.manual_seed(0)
        model = Held().double()
        single = copy.deepcopy(model)
        parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((ids,), {}), pins=pins, progress=False)
        outs = single(ids), parallel(ids)
        torch.testing.assert_close(*(plain(list(out.values())) for out in outs))
        for out in outs:
            (out["loss"] + out["norm"] + out["columns"].sum() + out["aside"].square().sum() + out["weight"].mean()).backward()
        for (name, p), q in zip(parallel.named_parameters(), single.parameters(), strict=True):
            if not torch.allclose(plain(p.grad), q.grad.to_dense() if q.grad.is_sparse else q.grad):
                problems.append((pins, name))
    assert problems == []


def test_parameters_and_buffers_as_outputs(pool: Callable[[int], Any]) -> None:
    """They count once, whether or not something else reads them."""
    pool(2).run(given_out, [{"dp": 2}, {"dp": 2, "zero": 3}, {"dp": 1, "tp": 2}])
