"""Scripts of ``tests.scripts`` that choose by the numbers of parameters, which every stage of a pipeline counts for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

WIDTH = 256
Script = Callable[[Callable[..., Any]], Any]


class Layers(nn.Module):
    """As many equal layers as stages."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh() * 1.5
        return {"loss": F.mse_loss(x, y)}


def given(step: int) -> dict[str, Tensor]:
    """x, y."""
    drawn = torch.Generator().manual_seed(step)
    return {name: torch.randn(64, WIDTH, generator=drawn, dtype=torch.float64) for name in "xy"}


def steps(change: Callable[[Any], Any], later: Callable[[Any, Any], None] | None = None, count: int = 2) -> Script:
    """Steps of an optimizer that is made by ``change`` of the model, to which ``later`` does something between them."""
    def script(prepare: Callable[..., Any]) -> Any:
        model, said = prepare(Layers(count).double(), **given(0)), []
        optimizer = change(model)
        for step in range(4):
            if step == 2 and later is not None:
                later(model, optimizer)
            optimizer.zero_grad()
            loss = model(**given(step))["loss"]
            loss.backward()
            optimizer.step()
            said.append(loss.item())
        return said, [model]

    return script


def by_number(model: Any) -> Any:
    return SGD([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())])


def by_kind(model: Any) -> Any:
    """The same groups on either stage, as names have it."""
    named = list(model.named_parameters())
    return SGD([{"params": [(n, p) for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
                {"params": [(n, p) for n, p in named if n.endswith("bias")]}], 0.1)


def by_name_later(model: Any, optimizer: Any) -> None:
    """Groups with names, of which each stage has one that is empty."""
    for i, layer in enumerate(("layers.1.", "layers.0.")):
        optimizer.add_param_group({"params": [(n, p) for n, p in model.named_parameters() if n.startswith(layer)],
                                   "lr": 0.1 * 0.5**i})


def by_layer(model: Any) -> Any:
    return SGD([{"params": [p], "lr": 0.1 * 0.5**int(n.split(".")[1])} for n, p in model.named_parameters()])


def last(model: Any) -> Any:
    return SGD(list(model.parameters())[-1:], 0.1)


def all_but_last(model: Any) -> Any:
    """Frozen by number."""
    for p in list(model.parameters())[:-1]:
        p.requires_grad_(False)
    return SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def each(model: Any) -> Any:
    """A group each, with one rate."""
    return SGD([{"params": [p]} for p in model.parameters()], 0.1)


def nothing_yet(model: Any) -> Any:
    return SGD([nn.Parameter(torch.zeros(1))], 0.1)


def added(model: Any, optimizer: Any) -> None:
    for i, p in enumerate(model.parameters()):
        optimizer.add_param_group({"params": [p], "lr": 0.1 / (i + 1)})


def reset(model: Any, optimizer: Any) -> None:
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (i + 1)


def all_fall(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


NUMBERED: Mapping[str, Script] = {
    "rates by number": steps(by_number), "rates by number later": steps(nothing_yet, added),
    "rates reset by number": steps(each, reset), "the last alone": steps(last), "all frozen but the last": steps(all_but_last),
    "rates by number, long": steps(by_number, count=4), "rates reset, long": steps(each, reset, 4),
    "the last alone, long": steps(last, count=4),
}
NAMED: Mapping[str, Script] = {
    "rates by names later": steps(lambda model: SGD([("own", nn.Parameter(torch.zeros(1)))], 0.1),
                                  by_name_later),
    "rates by kind": steps(by_kind), "rates by layer": steps(by_layer, all_fall), "one rate": steps(each, all_fall),
}
