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
    """As many equal layers as stages, or more."""

    def __init__(self, count: int = 2, bias: bool = True, more: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias or (more and i > 0)) for i in range(count))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh() * 1.5
        return {"loss": F.mse_loss(x, y)}


def given(step: int) -> dict[str, Tensor]:
    """x, y."""
    drawn = torch.Generator().manual_seed(step)
    return {name: torch.randn(64, WIDTH, generator=drawn, dtype=torch.float64) for name in "xy"}


def steps(
    change: Callable[[Any], Any], later: Callable[[Any, Any], None] | None = None, count: int = 2,
    edit: Callable[[Any], None] = lambda model: None, bias: bool = True,
    more: bool = False,
) -> Script:
    """Steps of an optimizer that is made by ``change`` of the model, to which ``later`` does something between them; before
    each of them ``edit`` changes gradients or weights. ``bias``: whether layers have one; ``more``: whether the second has."""
    def script(prepare: Callable[..., Any]) -> Any:
        model, said = prepare(Layers(count, bias, more).double(), **given(0)), []
        optimizer = change(model)
        for step in range(4):
            if step == 2 and later is not None:
                later(model, optimizer)
            optimizer.zero_grad()
            loss = model(**given(step))["loss"]
            loss.backward()
            edit(model)
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


def every_third(model: Any) -> Any:
    """Frozen by number, in steps."""
    for p in list(model.parameters())[::3]:
        p.requires_grad_(False)
    return SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def thirds(model: Any) -> Any:
    """Three groups, in steps of numbers."""
    return SGD([{"params": list(model.parameters())[i::3], "lr": 0.1 / (i + 1)} for i in range(3)])


def biases_frozen(model: Any) -> Any:
    for n, p in model.named_parameters():
        p.requires_grad_(not n.endswith("bias"))
    return SGD([{"params": [p for n, p in model.named_parameters() if n.endswith(kind)], "weight_decay": decay}
                for kind, decay in (("weight", 0.1), ("bias", 0.0))], 0.1)


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


# ---------------------------------------------------------------------------------------- what is done to gradients and weights


RATES = [0.5, 0.25, 2.0, 4.0, 1.0, 3.0, 0.75, 1.5]


def gradients_by_number(model: Any) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad.mul_(RATES[i])


def replaced_by_number(model: Any) -> None:
    for p, rate in zip(model.parameters(), torch.tensor(RATES, dtype=torch.float64), strict=False):
        p.grad = p.grad * rate


def foreach_by_number(model: Any) -> None:
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_mul_(gradients, RATES[:len(gradients)])


def made_by_foreach(model: Any) -> None:
    parameters = list(model.parameters())
    for p, new in zip(parameters, torch._foreach_mul([p.grad for p in parameters], RATES[:len(parameters)]), strict=True):
        p.grad = new


@torch.no_grad()
def weights_by_number(model: Any) -> None:
    for i, p in enumerate(model.parameters()):
        p.copy_(p * (1 - 0.01 * RATES[i]))


def third_alone(model: Any) -> None:
    list(model.parameters())[2].grad.zero_()


def none_for_the_last(model: Any) -> None:
    list(model.parameters())[-1].grad = None


def gradients_by_layer(model: Any) -> None:
    for name, p in model.named_parameters():
        p.grad.mul_(RATES[int(name.split(".")[1])])


def gradients_by_kind(model: Any) -> None:
    for name, p in model.named_parameters():
        p.grad.mul_(RATES[name.endswith("bias")])


@torch.no_grad()
def decayed_by_shape(model: Any) -> None:
    for p in model.parameters():
        p.grad.clamp_(-0.1, 0.1)
        if p.ndim > 1:
            p.mul_(0.99)


def edited(edit: Callable[[Any], None], count: int = 4) -> Script:
    return steps(lambda model: SGD(model.parameters(), 0.1, 0.9), None, count, edit)


NUMBERED: Mapping[str, Script] = {
    "rates by number": steps(by_number), "rates by number later": steps(nothing_yet, added),
    "rates reset by number": steps(each, reset), "the last alone": steps(last), "all frozen but the last": steps(all_but_last),
    "rates by number, long": steps(by_number, count=4), "rates reset, long": steps(each, reset, 4),
    "the last alone, long": steps(last, count=4), "gradients by number": edited(gradients_by_number, 2),
    "gradients by number, long": edited(gradients_by_number), "replaced by number": edited(replaced_by_number),
    "foreach by number": edited(foreach_by_number), "made by foreach": edited(made_by_foreach),
    "weights by number": edited(weights_by_number), "third alone": edited(third_alone),
    "none for the last": edited(none_for_the_last),
    "every third frozen": steps(every_third, count=4), "thirds": steps(thirds, count=4),
}
LONELY: Mapping[str, Script] = {
    "rates by number, one each": steps(by_number, bias=False),
    "rates by number, one and two": steps(by_number, bias=False, more=True),
    "gradients by number, one each": steps(lambda model: SGD(model.parameters(), 0.1), None, 2, gradients_by_number, False),
}
"""Stages of one parameter each, of which nobody can tell."""
NAMED: Mapping[str, Script] = {
    "rates by names later": steps(lambda model: SGD([("own", nn.Parameter(torch.zeros(1)))], 0.1),
                                  by_name_later),
    "biases frozen": steps(biases_frozen, count=4),
    "rates by kind": steps(by_kind), "rates by layer": steps(by_layer, all_fall), "one rate": steps(each, all_fall),
    "gradients by layer": edited(gradients_by_layer), "gradients by kind": edited(gradients_by_kind),
    "decayed by shape": edited(decayed_by_shape),
}
