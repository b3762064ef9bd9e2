"""The model of ``tests.loops``, and the loops that differ in what a step calls and differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import SGD, AdamW

Loop = Callable[[Any, Callable[[int], dict[str, Tensor]]], Any]
ROWS, LENGTH, VOCABULARY, WIDTH = 8, 5, 13, 16


class Net(nn.Module):
    """Blocks between tied ends, with a frozen scale and a linear that nobody calls."""

    def __init__(self, tie: Callable[[nn.Linear], nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        linear = tie or (lambda one: one)
        self.layers = nn.ModuleList(nn.Sequential(
            nn.LayerNorm(WIDTH), linear(nn.Linear(WIDTH, 24)), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.spare = nn.Linear(WIDTH, 3)
        if tie is None:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(self.norm(x) * self.scale) * 4
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return {"loss": (each * weights).sum() / labels.numel(), "logits": logits}


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Ids, labels, and what each position counts."""
    drawn = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=drawn) for _ in range(2))
    return {"ids": ids, "labels": labels, "weights": torch.rand(ROWS, LENGTH, generator=drawn, dtype=torch.float64)}


def adamw(model: Any, lr: float = 0.02) -> torch.optim.Optimizer:
    """Over what takes gradients."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-3)


def whole(x: Any) -> Any:
    """A plain tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def clip(model: Any, norm: float) -> Tensor:
    """By the module's own function, as README asks of pipelines."""
    own = getattr(model, "clip_grad_norm_", None)
    return own(norm) if own else nn.utils.clip_grad_norm_(model.parameters(), norm)  # type: ignore[no-any-return]


def scale_and_step(model: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    """A backward and a step by a GradScaler, clipped."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip(model, 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def learn(model: Any, optimizer: Any, given: Mapping[str, Tensor]) -> float:
    """A step; the loss."""
    loss = model(**given)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ---------------------------------------------------------------------------------------------- gradients and calls in a step


def accumulated(model: Any, batches: Any) -> Any:
    """Means over calls that count differently, as token counts make them."""
    optimizer, losses = adamw(model), []
    for step in range(2):
        for call, share in enumerate((0.5, 0.3, 0.2)):
            loss = model(**batches(3 * step + call))["loss"] * share
            loss.backward()
            losses.append(loss.item())
        losses.append(clip(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses


def unsynchronized(model: Any, batches: Any) -> Any:
    """The idiom of DDP, for those that have it."""
    optimizer = adamw(model)
    for call in range(4):
        quiet = getattr(model, "no_sync", nullcontext) if call % 2 == 0 else nullcontext
        with quiet():
            model(**batches(call))["loss"].backward()
        if call % 2:
            optimizer.step()
            optimizer.zero_grad()


def two_calls(model: Any, batches: Any) -> None:
    """Two forwards before one backward, then before two in the other order."""
    optimizer = adamw(model)
    first, second = (model(**batches(n))["loss"] for n in (0, 1))
    (first * 0.3 + second**2).backward()
    optimizer.step()
    optimizer.zero_grad()
    first, second = (model(**batches(n))["loss"] for n in (2, 3))
    second.backward()
    first.backward()
    optimizer.step()


def listed(model: Any, batches: Any) -> None:
    """``autograd.backward`` of several losses, with gradients of their own."""
    losses = [model(**batches(n))["loss"] for n in (0, 1)]
    torch.autograd.backward(losses, [torch.tensor(0.5).double(), torch.tensor(-2.0).double()])
    adamw(model).step()


def transformed(model: Any, batches: Any) -> None:
    """Losses that are functions of the loss: ascent, flooding, a power, a gradient given."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for number, change in enumerate((lambda x: -0.1 * x, lambda x: (x - 3.0).abs() + 3.0, lambda x: x.exp(), lambda x: x)):
        change(model(**batches(number))["loss"]).backward(gradient=torch.tensor(0.7).double())
        optimizer.step()
        optimizer.zero_grad()


def retained(model: Any, batches: Any) -> None:
    """Through one loss twice."""
    loss = model(**batches(0))["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    adamw(model).step()


def dropped(model: Any, batches: Any) -> Any:
    """Forwards whose graphs are thrown away, skipped steps, no_grad and inference_mode in between."""
    optimizer, losses = adamw(model), []
    for step in range(4):
        out = model(**batches(step))
        with torch.no_grad():
            losses += [model(**batches(step + 9))["loss"].item()]
        with torch.inference_mode():
            losses += [model(**batches(step + 9))["loss"].item()]
        if step % 2:
            out["loss"].backward()
            optimizer.step()
        optimizer.zero_grad()
    return losses


def through_other_output(model: Any, batches: Any) -> None:
    """Distillation from logits, outside."""
    out = model(**batches(0))
    with torch.no_grad():
        teacher = whole(model(**batches(0))["logits"]).roll(1, -1)
    (out["loss"] + F.mse_loss(whole(out["logits"]), teacher)).backward()
    adamw(model).step()


def as_first(model: Any, batches: Any) -> None:
    """By position, by name, mixed."""
    optimizer = adamw(model)
    for step in range(3):
        given = batches(step)
        args = list(given.values())[:step]
        model(*args, **dict(list(given.items())[step:]))["loss"].backward()
        optimizer.step()


def half_a_batch(model: Any, batches: Any) -> None:
    """The last batch of an epoch."""
    optimizer = adamw(model)
    learn(model, optimizer, batches(0))
    learn(model, optimizer, {name: x[:4] for name, x in batches(1).items()})


def longer(model: Any, batches: Any) -> None:
    """Another length."""
    model(**{name: torch.cat([x, x], 1) for name, x in batches(1).items()})["loss"].backward()


def adversarial(model: Any, batches: Any) -> Any:
    """An input that takes a gradient."""
    given = batches(0)
    given["weights"].requires_grad_()
    model(**given)["loss"].backward()
    return given["weights"].grad


def perturbed(model: Any, batches: Any) -> None:
    """SAM: up along the gradient, a second gradient there, back, a step."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(2):
        model(**batches(step))["loss"].backward()
        norm = clip(model, 1e9)
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    moved.append((p, p.grad * (0.05 / norm.item())))
                    p.add_(moved[-1][1])
        optimizer.zero_grad()
        model(**batches(step))["loss"].backward()
        with torch.no_grad():
            for p, change in moved:
                p.sub_(change)
        optimizer.step()
        optimizer.zero_grad()


def norm_of_norms(model: Any, batches: Any) -> Any:
    """The norm that people write by hand."""
    model(**batches(0))["loss"].backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return whole(torch.stack(norms).norm())


def edited_gradients(model: Any, batches: Any) -> None:
    """Signs, centred rows, noise, none at all."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(2):
        model(**batches(step))["loss"].backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if "norm" in name:
                p.grad = None
            elif p.ndim == 2:
                p.grad.sub_(p.grad.mean(1, keepdim=True)).mul_(2.0)
            else:
                p.grad = p.grad.sign() + p.detach() * 0.1
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)


def finite(model: Any, batches: Any) -> None:
    """A step that is skipped where a gradient is not finite."""
    optimizer = adamw(model)
    for step in range(3):
        loss = model(**batches(step))["loss"]
        (loss * (float("inf") if step == 1 else 1.0)).backward()
        if bool(torch.isfinite(clip(model, 1.0))):
            optimizer.step()
        optimizer.zero_grad()


def overwritten_batch(model: Any, batches: Any) -> None:
    """A batch that is written into before the backward: one process raises where it would be wrong."""
    given = batches(0)
    loss = model(**given)["loss"]
    given["weights"].zero_()
    loss.backward()
    adamw(model).step()
