"""Loops of ``tests.brought``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from tests.brought_models import B, D, Given, T, data
from tests.looped import whole


def by_name(step: int) -> Any:
    return (), data(step)


def with_more(more: Callable[[Any], Tensor]) -> Callable[[Any, Given], list[float]]:
    """Steps of the loss and of what somebody makes of the rest that goes out."""
    def loop(model: Any, given: Given) -> list[float]:
        optimizer, said = sgd(model), []
        for step in range(2):
            args, kwargs = given(step)
            out = model(*args, **kwargs)
            loss = loss_of(out) + more(out)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said.append(loss.item())
        return said

    return loop


def loss_of(out: Any) -> Tensor:
    """In whatever the model gives."""
    if isinstance(out, Mapping):
        return out["loss"]  # type: ignore[no-any-return]
    return out.loss if hasattr(out, "loss") else out[0]  # type: ignore[no-any-return]


def sgd(model: Any, lr: float = 0.1) -> Any:
    return SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.5)


def plain(model: Any, given: Given) -> list[float]:
    """Steps and evaluations."""
    optimizer, said = sgd(model), []
    for step in range(3):
        args, kwargs = given(step)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
        model.eval()
        with torch.no_grad():
            said.append(loss_of(model(*args, **kwargs)).item())
        model.train()
    return said


def read(model: Any, given: Given) -> list[float]:
    """As ``plain``, and all numbers that go out are read without gradients."""
    said = plain(model, given)
    with torch.no_grad():
        args, kwargs = given(7)
        for x in torch.utils._pytree.tree_leaves(model(*args, **kwargs)):
            said += [float(whole(x).double().abs().mean())] if isinstance(x, Tensor) else []
    return said


def carried(model: Any, given: Given) -> list[float]:
    """Truncated backpropagation: the state of a call is that of the next one's input."""
    optimizer, said, state = sgd(model), [], torch.zeros(B, 1, D).double()
    for step in range(3):
        out = model(**data(step), state=state)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        state = out["state"].detach()
        said.append(out["loss"].item())
    return said


def in_turn(model: Any, given: Given) -> list[float]:
    """Two optimizers of one module."""
    named = dict(model.named_parameters())
    judge, maker = (AdamW([{"params": [p for name, p in named.items() if word in name]}], lr=0.02, eps=1e-3)
                    for word in ("judge", "maker"))
    said = []
    for step in range(2):
        for optimizer in (judge, maker):
            args, kwargs = given(step)
            out = model(*args, **kwargs)
            model.zero_grad()
            out["loss"].backward()
            optimizer.step()
            said += [out["loss"].item(), out["judging"].item()]
    return said


def taking_turns(model: Any, given: Given) -> list[float]:
    """As ``in_turn``, which of the two is learned comes in as a number."""
    judge, maker = AdamW(model.judge.parameters(), lr=0.02, eps=1e-3), AdamW(model.maker.parameters(), lr=0.02, eps=1e-3)
    said = []
    for step in range(2):
        for turn, optimizer in ((1.0, judge), (0.0, maker)):
            out = model(**data(step), turn=torch.tensor(turn).double())
            out["loss"].backward()
            optimizer.step()
            model.zero_grad()
            said.append(out["loss"].item())
    return said


def evaluated_between(model: Any, given: Given) -> list[float]:
    """An evaluation between a forward and its backward; the backward in eval()."""
    optimizer, said = sgd(model), []
    for step in range(2):
        args, kwargs = given(step)
        loss = loss_of(model(*args, **kwargs))
        model.eval()
        with torch.no_grad():
            other = loss_of(model(*args, **kwargs)).item()
        (loss * (1 + other)).backward()
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        said += [loss.item(), other]
    return said


def pseudo(model: Any, given: Given) -> list[float]:
    """Labels that the model gives itself, in eval(), for the step after it."""
    optimizer, said = sgd(model), []
    for step in range(2):
        _, kwargs = given(step)
        model.eval()
        with torch.no_grad():
            kwargs["t"] = whole(model(**kwargs)["y"]).roll(1, -1)
        model.train()
        loss = loss_of(model(**kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
    return said


def edited(change: Callable[[Any], None], scale: float = 1.0) -> Callable[[Any, Given], list[float]]:
    """Gradients that are changed by ``change`` of each parameter; a loss that is scaled before."""
    def loop(model: Any, given: Given) -> list[float]:
        optimizer, said = sgd(model), []
        for step in range(2):
            loss = loss_of(model(**data(step)))
            (loss * scale).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        change(p)
            optimizer.step()
            optimizer.zero_grad()
            said.append(loss.item())
        return said

    return loop


def centred(p: Any) -> None:
    if p.ndim > 1:
        p.grad -= p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True)


def rows_held(p: Any) -> None:
    if p.ndim > 1:
        p.grad[:2] = 0
        p.data[0] = 0.0


def orthogonalized(p: Any) -> None:
    if p.ndim == 2:
        u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
        p.grad = u @ v


def unscaled(p: Any) -> None:
    p.grad.div_(1024)


def along_the_weight(p: Any) -> None:
    """The part of a gradient along its weight is taken out; steps in proportion to norms."""
    w = p.detach()
    p.grad.sub_(w * ((w * p.grad).sum() / w.square().sum().clamp(min=1e-6)))
    p.grad.mul_(w.norm() / (p.grad.norm() + 1e-6))


def switched(model: Any, given: Given) -> list[float]:
    """Anomaly detection, deterministic algorithms, gradients off and on by function."""
    said = []
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            said += plain(model, given)
        torch.set_grad_enabled(False)
        said.append(loss_of(model(**data(5))).item())
    finally:
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
    return said


def default_dtype(model: Any, given: Given) -> list[float]:
    """Another default dtype after the first step."""
    said = [loss_of(model(**data(0))).item()]
    torch.set_default_dtype(torch.float64)
    try:
        said.append(loss_of(model(**data(0))).item())
    finally:
        torch.set_default_dtype(torch.float32)
    return said


def thawed_in_between(model: Any, given: Given) -> list[float]:
    """A parameter that is frozen between a forward and its backward, and thawed after it."""
    optimizer, said = sgd(model), []
    for step in range(2):
        loss = loss_of(model(**data(step)))
        model.mid.weight.requires_grad_(False)
        loss.backward()
        model.mid.weight.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
    return said


def thawed_before_backward(model: Any, given: Given) -> list[float]:
    """A parameter that is frozen in a forward, and not in its backward."""
    optimizer, said = sgd(model), []
    for step in range(3):
        model.mid.weight.requires_grad_(step != 1)
        loss = loss_of(model(**data(step)))
        model.mid.weight.requires_grad_(True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
    return said


def closure(model: Any, given: Given) -> list[float]:
    """A step that is given a function; a loss under enable_grad within no_grad."""
    optimizer, said = sgd(model), []
    for step in range(2):
        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(**data(step)))
            loss.backward()
            return loss

        said.append(float(optimizer.step(again).detach()))
    with torch.no_grad(), torch.enable_grad():
        loss_of(model(**data(4))).backward()
    optimizer.step()
    return said


def evaluated_first(model: Any, given: Given) -> list[float]:
    """The first call is one in eval()."""
    model.eval()
    with torch.no_grad():
        said = [loss_of(model(**data(3))).item()]
    model.train()
    return [*said, *plain(model, given)]


def both_at_once(model: Any, given: Given) -> list[float]:
    """Two modules whose losses go back together."""
    twin = copy.deepcopy(model)
    optimizers, said = (sgd(model), sgd(twin, 0.05)), []
    for step in range(2):
        one, two = (loss_of(m(**data(step))) for m in (model, twin))
        (one + 0.5 * two + 0.1 * one * two).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        said += [one.item(), two.item()]
    return said


def gradients_given(model: Any, given: Given) -> list[float]:
    """Gradients that are there before, a backward under no_grad, gradients moved from one step to the next."""
    optimizer, kept, said = sgd(model), {}, []
    for step in range(3):
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.grad = torch.ones_like(p) * 0.01 if step == 0 else kept[name] * 0.5
        loss = loss_of(model(**data(step)))
        with torch.no_grad():
            loss.backward()
        kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
    return said


def shared_among_ranks(wrap: Callable[[Any], Any]) -> Callable[[Any, Given], list[float]]:
    """In torch's own wrappers for several processes; one process has none."""
    def loop(model: Any, given: Given) -> list[float]:
        return plain(wrap(model) if hasattr(model, "plan") else model, given)

    return loop


class Weighed:
    """A loss that reads a number, which others change."""

    def __init__(self) -> None:
        self.alpha = 1.0

    def __call__(self, out: Any) -> Tensor:
        return out["loss"] * self.alpha if isinstance(out, Mapping) else out  # type: ignore[no-any-return]


    def again(self, out: Any) -> Tensor:
        """As a method, by another one."""
        return self.scaled(out)

    def scaled(self, out: Any) -> Tensor:
        """See above."""
        return self(out)


class Module(torch.nn.Module):
    """A loss that is a module, with a number and a buffer."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.register_buffer("weight", torch.ones((), dtype=torch.float64))

    def forward(self, out: Any) -> Tensor:
        return out["loss"] * self.alpha * self.weight if isinstance(out, Mapping) else out  # type: ignore[no-any-return]


ALPHA = [1.0]
MODULE = Module()
WEIGHED, LEARNED = Weighed(), torch.nn.Linear(1, 1).double()


def closed_over(out: Any) -> Tensor:
    """A loss that reads a list of its file."""
    return out["loss"] * ALPHA[0] if isinstance(out, Mapping) else out  # type: ignore[no-any-return]


def given_before(alpha: list[float], out: Any) -> Tensor:
    """A loss that is given a list beforehand."""
    return out["loss"] * alpha[0] if isinstance(out, Mapping) else out  # type: ignore[no-any-return]


PARTIAL = partial(given_before, ALPHA)


def learned_loss(out: Any) -> Tensor:
    """A loss with weights of its own."""
    return LEARNED(out["loss"].view(1, 1)).square().sum() if isinstance(out, Mapping) else out  # type: ignore[no-any-return]


def with_loss(loss_fn: Callable[[Any], Tensor], change: Callable[[float], None] = lambda value: None) -> Any:
    """Steps with a loss that changes between them."""
    def loop(model: Any, given: Given) -> list[float]:
        optimizer, said = sgd(model), []
        try:
            for step in range(2):
                change(1.0 + step)
                loss = loss_fn(model(**data(step)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                said.append(loss.item())
        finally:
            change(1.0)
        return said

    return loop


# -------------------------------------------------------------------------------------------------------------------- arguments


def others_then(*more: Mapping[str, Any]) -> Given:
    """Arguments that are others at every call."""
    return lambda step: ((), {**data(step), **more[min(step, len(more) - 1)]})


def nested(step: int) -> Any:
    """Dicts in dicts, and a list."""
    given = data(step)
    text = {"x": given["x"], "mask": (given["x"][..., 0] > -1).double()}
    return (), {"given": {"text": text, "t": given["t"], "more": [given["x"].flip(0), {"weight": torch.tensor(0.5 + step)}]}}


def turned(step: int) -> Any:
    """Keys in another order every time."""
    args, kwargs = nested(step)
    return args, {"given": dict(reversed(kwargs["given"].items()) if step % 2 else kwargs["given"].items())}


def nested_number(step: int) -> Any:
    """A number in a dict, another one later."""
    args, kwargs = nested(step)
    kwargs["given"]["more"][1]["weight"] = 0.5 + step
    return args, kwargs


def nested_longer(step: int) -> Any:
    """A list that is longer later."""
    args, kwargs = nested(step)
    kwargs["given"]["more"] += [torch.zeros(3)] * step
    return args, kwargs


def odd_strides(step: int) -> Any:
    """Tensors that do not lie densely."""
    given = data(step)
    wide = torch.zeros(2 * B, T, 3 * D).double()
    wide[::2, :, 1::3] = given["x"]
    t = given["t"].transpose(0, 1).contiguous().transpose(0, 1)
    return (), {"x": wide[::2, :, 1::3], "t": t if step else t[:1].expand(B, T, 3)}


def same_twice(step: int) -> Any:
    """One tensor in two places, later two; views of one tensor."""
    given = data(step)
    wide = torch.cat([given["x"], given["t"]], -1)
    x = wide[..., :D]
    t = x[..., :3] if step < 2 else given["t"]
    return (), {"x": x, "scale": x[0, 0, 0], "mask": x if step == 0 else given["x"].flip(0), "t": t}


def words(step: int) -> Any:
    given = data(step)
    return (), {"ids": (given["x"][..., 0].abs() * 5).clamp(max=9).to(torch.uint8), "mask": given["x"][..., 1] > -1,
                "w": given["x"][..., 2].abs().half(), "t": given["t"]}


def stars(step: int) -> Any:
    given = data(step)
    return (given["x"], given["x"].flip(0)), {"t": given["t"], "b": given["x"].flip(1), "a": given["x"] * 0.5}


def turned_stars(step: int) -> Any:
    args, kwargs = stars(step)
    return args, dict(reversed(kwargs.items()) if step % 2 else kwargs.items())
