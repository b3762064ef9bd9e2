"""Models of ``tests.brought``: what they are given and what they give is of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

D, T, B = 8, 4, 8
Given = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
"""(args, kwargs) of a step."""


def data(step: int) -> dict[str, Tensor]:
    """x, t."""
    drawn = torch.Generator().manual_seed(step)
    return {"x": torch.randn(B, T, D, generator=drawn).double(), "t": torch.randn(B, T, 3, generator=drawn).double()}


@dataclass
class Out:
    """As a class of outputs that somebody wrote."""

    loss: Tensor | None
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    note: str = "none"


@dataclass
class HalfOut(ModelOutput):
    """As transformers has them."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


class Pair(NamedTuple):
    """A tuple with names."""

    loss: Tensor
    rest: tuple[Tensor, Tensor]


class Picks(nn.Module):
    """Whole numbers that say which part of something is read: ``how``."""

    def __init__(self, how: Callable[[Any, Tensor, Tensor, Tensor], Tensor], count: int = 5) -> None:
        super().__init__()
        self.up, self.head, self.table = nn.Linear(D, D), nn.Linear(D, count), nn.Parameter(torch.randn(count, D))
        self.how = how

    def forward(self, x: Tensor, k: Tensor) -> dict[str, Tensor]:
        h = self.up(x).tanh()
        return {"loss": self.how(self, h, self.head(h), k) + h.square().mean()}


class Asked(nn.Module):
    """A batch in one dict, with a mask that is given or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        h = self.up(batch["inputs"][0]).tanh() * batch["inputs"][1]
        return {"loss": (self.head(h) - batch["t"]).square().mean(), "h": h}


def picking(odd: int) -> Given:
    """x, and whole numbers below five; from the second step on one of them is ``odd``."""
    def given(step: int) -> Any:
        k = (torch.arange(B * T).view(B, T) * (step + 2)) % 5
        k[3, 1] = odd if step else 0
        return (), {"x": data(step)["x"], "k": k}

    return given


def asking(requires: bool) -> Given:
    """A dict in which a list of tensors is; one of them takes a gradient from the second step on."""
    def given(step: int) -> Any:
        found = data(step)
        inner = [found["x"], found["x"][..., :1].abs().clone().requires_grad_(requires and step > 0)]
        return (), {"batch": {"inputs": inner, "t": found["t"]}}

    return given


class Net(nn.Module):
    """Two blocks and a head, and ``make`` of what goes out."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.up, self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.make = make

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden, logits."""
        h = self.mid(self.up(x).tanh()).tanh() + x
        return h, self.head(h)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        h, y = self.run(x)
        loss = (y - t).square().mean()
        return {"loss": loss, "y": y} if self.make is None else self.make(loss, y, h)


class Nested(Net):
    """Takes dicts in dicts."""

    def forward(self, given: Mapping[str, Any]) -> Any:  # type: ignore[override]
        h, y = self.run(given["text"]["x"] * given["text"]["mask"].unsqueeze(-1) + given["more"][0])
        return {"loss": (y - given["t"]).square().mean() * given["more"][1].get("weight", 1.0), "nest": {"h": [h, {"y": y}]}}


class Numbers(Net):
    """Takes numbers, switches and texts beside tensors."""

    def forward(self, x: Tensor, t: Tensor, scale: Any = 1.0, power: Any = 2, on: Any = True, how: Any = "mean",  # type: ignore
                mask: Any = None) -> Any:
        h, y = self.run(x if mask is None else x * mask)
        each = (y * scale - t).abs().pow(power)
        loss = each.mean() if how == "mean" else each.sum()
        return {"loss": loss + (0.1 * h.square().mean() if on else 0.0)}


class Variadic(Net):
    """Stars and keywords."""

    def forward(self, *xs: Tensor, t: Tensor, **more: Tensor) -> Any:  # type: ignore[override]
        h, y = self.run(sum(xs[1:], xs[0]) + sum((more[key] for key in sorted(more)), torch.zeros(()).to(t)))
        return Out(loss=(y - t).square().mean(), logits=y, hidden=[h, h * 2])


class Carries(Net):
    """A state that goes out and comes in again."""

    def forward(self, x: Tensor, t: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        h, y = self.run(x + state)
        return {"loss": (y - t).square().mean(), "state": h.mean(1, keepdim=True)}


class Rivals(nn.Module):
    """A generator and its judge in one."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = (nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, n)) for n in (3, 1))

    def forward(self, x: Tensor, t: Tensor, turn: Tensor | None = None) -> Any:
        made = self.maker(x)
        real, fake = self.judge(F.pad(t, (0, D - 3))), self.judge(F.pad(made.detach(), (0, D - 3)))
        judging = F.softplus(-real).mean() + F.softplus(fake).mean()
        own = {name: p.detach() for name, p in self.judge.named_parameters()}
        fooled = torch.func.functional_call(self.judge, own, (F.pad(made, (0, D - 3)),))
        making = F.softplus(-fooled).mean()
        if turn is not None:
            return {"loss": judging * turn + making * (1 - turn), "judging": judging.detach()}
        return {"loss": judging + making, "judging": judging.detach(), "making": making.detach()}


class Lazy(Net):
    """A table that the first call makes, and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor, t: Tensor) -> Any:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1).sin()
        _, y = self.run(x + self.table[: x.shape[1]])
        return {"loss": (y - t).square().mean()}


class Counts(Net):
    """A warm-up by a number in Python."""

    calls = 0

    def forward(self, x: Tensor, t: Tensor) -> Any:
        self.calls += 1
        return {"loss": (self.run(x)[1] - t).square().mean() * min(1.0, self.calls / 3)}


class Asks(Net):
    """What the forward asks of its surroundings."""

    def __init__(self, asks: Callable[[], Any]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor, t: Tensor) -> Any:
        return {"loss": (self.run(x)[1] - t).square().mean() * (2.0 if self.asks() else 1.0)}


class Words(Net):
    """Ids of small whole numbers, a mask of bools, weights in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(10, D), nn.BatchNorm1d(T)

    def forward(self, ids: Tensor, mask: Tensor, w: Tensor, t: Tensor) -> Any:  # type: ignore[override]
        _, y = self.run(self.norm(self.table(ids.int())) * mask.unsqueeze(-1))
        return {"loss": ((y - t).square().mean(-1) * w.to(y.dtype)).sum() / mask.sum().clamp(min=1), "y": y}


class Aliases(Net):
    """What goes out is what came in, a weight, a buffer, one tensor twice, a view, whole numbers, a constant."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3.0))

    def forward(self, x: Tensor, t: Tensor) -> Any:
        _, y = self.run(x)
        return {"loss": (y - t).square().mean(), "x": x, "w": self.up.weight, "b": self.kept, "y": y, "again": y,
                "part": y[:, :1], "best": y.argmax(-1),
                "most": y.argmax(), "large": y > 0, "one": torch.ones(2), "count": y.shape[0]}


class Named(nn.Module):
    """Names that a parallel module has for something else."""

    NAMES = ("plan", "rank", "names", "save", "load", "watch", "exporter", "resting", "lower_mode", "device_mesh", "data_size")

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(self.NAMES):
            setattr(self, name, nn.Linear(D, D) if number % 2 else nn.Parameter(torch.full((D,), 0.5 + number / 20)))

    def forward(self, x: Tensor, t: Tensor) -> Any:
        for number, name in enumerate(self.NAMES):
            x = x + getattr(self, name)(x).tanh() if number % 2 else x * getattr(self, name)
        return {"loss": (x[..., :3] - t).square().mean()}


class Stored(Net):
    """A weight in whole numbers and its scale, a table that no state dict has, a place that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randint(-127, 128, (D, D), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((D, 1), 0.01), requires_grad=False)
        self.register_buffer("table", torch.linspace(0, 1, T).unsqueeze(-1), persistent=False)
        self.register_buffer("empty", None)
        self.register_parameter("nobody", None)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        _, y = self.run(F.linear(x, self.small.to(x.dtype) * self.scale) + self.get_buffer("table"))
        return {"loss": (y - t).square().mean()}


def patched() -> nn.Module:
    """A forward that somebody put in the place of the class's."""
    model = Net()
    model.forward = MethodType(  # type: ignore[method-assign]
        lambda self, x, t: {"loss": Net.forward(self, x * 2, t)["loss"] * 0.5}, model)
    return model


def called_twice(model: nn.Module) -> Any:
    """Wrapped in one that calls it twice, on halves of the width."""
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, x: Tensor, t: Tensor) -> Any:
            one, two = (self.module(part, t) for part in (x, x.flip(-1)))
            return {"loss": one["loss"] + two["loss"], "y": one["y"] - two["y"]}

    return Twice()
