"""Loops of ``tests.loops`` that are interrupted: kept in a folder (one process: in copies), gone on with, and taken up again by
new optimizers and schedules."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.looped import Loop, adamw, learn, scale_and_step

Made = tuple[Any, Any]
"""An optimizer, and what has a state dict beside it (a schedule, a scaler) or None."""


def kept(model: Any, optimizer: Any = None) -> Callable[[Any], None]:
    """Save; what is returned loads that, into another optimizer if it is given one."""
    if not hasattr(model, "load"):
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict() if optimizer else None))

        def back(other: Any) -> None:
            model.load_state_dict(state[0])
            if other:
                other.load_state_dict(copy.deepcopy(state[1]))

        return back
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model.save(f"{folder[0]}/kept", optimizer)

    def load(other: Any) -> None:
        model.load(f"{folder[0]}/kept", other)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])

    return load


def trained(model: Any) -> list[Any]:
    """What takes gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def _interrupted(make: Callable[[Any], Made], step: Callable[..., float]) -> Loop:
    def loop(model: Any, batches: Any) -> Any:
        optimizer, beside = make(model)
        said = [step(model, optimizer, beside, batches(n)) for n in range(2)]
        back, state = kept(model, optimizer), copy.deepcopy(beside.state_dict()) if beside else None
        said += [step(model, optimizer, beside, batches(n + 5)) for n in range(2)]
        optimizer, beside = make(model)
        back(optimizer)
        if beside:
            beside.load_state_dict(state)
        return said + [step(model, optimizer, beside, batches(n)) for n in range(2, 5)] + [
            group["lr"] for group in optimizer.param_groups]

    return loop


def plainly(model: Any, optimizer: Any, beside: Any, given: Any) -> float:
    """A step of both."""
    loss = learn(model, optimizer, given)
    if isinstance(beside, schedulers.ReduceLROnPlateau):
        beside.step(loss)
    elif beside:
        beside.step()
    return loss


def scaling(model: Any, optimizer: Any, scaler: Any, given: Any) -> float:
    """A step by a GradScaler."""
    loss = model(**given)["loss"]
    scale_and_step(model, optimizer, scaler, loss)
    return loss.item() * scaler.get_scale()  # type: ignore[no-any-return]


def _of(make: Callable[[Any], Any], beside: Callable[[Any], Any] | None = None) -> Callable[[Any], Made]:
    def made(model: Any) -> Made:
        optimizer = make(model)
        return optimizer, beside(optimizer) if beside else None

    return made


def by_kind(model: Any) -> Any:
    """Matrices decay, the rest does not; one group takes no step before the end."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Adam([{"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, "amsgrad": True},
                 {"params": [p for name, p in named if p.ndim < 2 and "layers" in name], "lr": 0.05},
                 {"params": [p for name, p in named if p.ndim < 2 and "layers" not in name], "lr": 0.0}], lr=0.01, eps=1e-3)


def averaged(model: Any, batches: Any) -> Any:
    """An exponential average, kept and taken up beside the model."""
    optimizer = adamw(model)

    def stepped(average: Any, n: int) -> float:
        loss = learn(model, optimizer, batches(n))
        average.update_parameters(model)
        return loss

    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    said = [stepped(average, n) for n in range(2)]
    backs, count = (kept(model, optimizer), kept(average.module)), int(average.n_averaged)
    said += [stepped(average, n + 5) for n in range(2)]
    optimizer = adamw(model)
    backs[0](optimizer)
    backs[1](None)
    average.n_averaged.fill_(count)
    said += [stepped(average, n) for n in range(2, 4)]
    average.module.eval()
    with torch.no_grad():
        return [*said, float(average.module(**batches(9))["loss"])]


def best_kept(model: Any, batches: Any) -> Any:
    """The best weights, taken up without the optimizer, which goes on with its moments."""
    optimizer, said = adamw(model), []
    learn(model, optimizer, batches(0))
    back = kept(model)
    said += [learn(model, optimizer, batches(n)) for n in range(1, 4)]
    back(None)
    return [*said, learn(model, optimizer, batches(4))]


def halfway(model: Any, batches: Any) -> Any:
    """Within an accumulation: gradients stay as they are, weights go back."""
    optimizer = adamw(model)
    learn(model, optimizer, batches(0))
    model(**batches(1))["loss"].backward()
    back = kept(model, optimizer)
    optimizer.step()
    back(optimizer)
    loss = model(**batches(2))["loss"]
    loss.backward()
    optimizer.step()
    return loss.item()


def two_optimizers(model: Any, batches: Any) -> Any:
    """Each kept by a call of its own."""
    ends = [p for name, p in model.named_parameters() if p.requires_grad and "layers" not in name]
    inner = [p for name, p in model.named_parameters() if p.requires_grad and "layers" in name]

    def made() -> list[Any]:
        return [AdamW([{"params": ends}], lr=0.02, eps=1e-3), SGD([{"params": inner}], lr=0.1, momentum=0.9)]

    def stepped(optimizers: list[Any], n: int) -> float:
        loss = model(**batches(n))["loss"]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    optimizers = made()
    said = [stepped(optimizers, n) for n in range(2)]
    backs = [kept(model, optimizer) for optimizer in optimizers]
    said += [stepped(optimizers, 7)]
    optimizers = made()
    for back, optimizer in zip(backs, optimizers, strict=True):
        back(optimizer)
    return said + [stepped(optimizers, n) for n in (2, 3)]


def frozen_when_kept(model: Any, batches: Any) -> Any:
    """A layer that is frozen when it is kept, thawed when it is taken up: its moments are those that it had."""
    optimizer, said = adamw(model), []
    layer = [p for name, p in model.named_parameters() if name.startswith("layers.0") and p.requires_grad]
    said += [learn(model, optimizer, batches(0))]
    for p in layer:
        p.requires_grad_(False)
    said += [learn(model, optimizer, batches(1))]
    back = kept(model, optimizer)
    for p in layer:
        p.requires_grad_()
    said += [learn(model, optimizer, batches(5))]
    optimizer = adamw(model)
    back(optimizer)
    return said + [learn(model, optimizer, batches(n)) for n in (2, 3)]


RESUMED: Mapping[str, tuple[Loop, Mapping[str, str]]] = {
    "resumed plateau": (_interrupted(_of(lambda m: SGD(trained(m), lr=0.1, momentum=0.9), lambda o: (
        schedulers.ReduceLROnPlateau(o, patience=0, threshold=1.0))), plainly), {}),
    "resumed cycle": (_interrupted(_of(lambda m: SGD(trained(m), lr=0.1, momentum=0.9), lambda o: (
        schedulers.OneCycleLR(o, 0.2, total_steps=9))), plainly), {}),
    "resumed swa": (_interrupted(_of(adamw, lambda o: SWALR(o, 0.05, anneal_epochs=3)), plainly), {}),
    "resumed groups": (_interrupted(_of(by_kind), plainly), {}),
    "resumed scaler": (_interrupted(_of(adamw, lambda o: torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)),
                                    scaling), {"pp": ""}),
    "resumed average": (averaged, {}), "resumed best": (best_kept, {}), "resumed halfway": (halfway, {}),
    "resumed twice": (two_optimizers, {}), "resumed frozen": (frozen_when_kept, {}),
}
"""As ``tests.loops.LOOPS``."""
