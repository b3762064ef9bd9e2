"""More loops of ``tests.loops``: optimizers and schedules that are rare, recipes of papers, what is done to a loss, and what a
module is wrapped in."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers

from tests.habits import DEFERRED, RUNS, refused
from tests.looped import Loop, adamw, learn, whole
from tests.own_optimizers import Factored, Lamb, Lion, Preconditioned, Sharpened

# ------------------------------------------------------------------------------------------------------------------ optimizers


def own(make: Callable[..., Any]) -> Loop:
    """Steps by an optimizer."""
    def loop(model: Any, batches: Any) -> Any:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        return [learn(model, optimizer, batches(step)) for step in range(3)]

    return loop


def sharpened(model: Any, batches: Any) -> Any:
    optimizer, said = Sharpened([p for p in model.parameters() if p.requires_grad], SGD, lr=0.1, momentum=0.9), []
    for step in range(2):
        def again(step: int = step) -> Tensor:
            loss = model(**batches(step))["loss"]
            loss.backward()
            return loss

        said += [again().item(), optimizer.step(again).item()]
        optimizer.zero_grad()
    return said


def exchanged(model: Any, batches: Any) -> Any:
    """One kind of optimizer first, another later, which goes on with the options of the first."""
    said = []
    for make in (partial(AdamW, lr=0.02, eps=1e-3), partial(SGD, lr=0.1, momentum=0.9, nesterov=True)):
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        said += [learn(model, optimizer, batches(step)) for step in range(2)]
    return said


def given_names(model: Any, batches: Any) -> Any:
    """An optimizer of names and parameters, whose state another takes over."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = AdamW(named, lr=0.02, eps=1e-3)
    learn(model, optimizer, batches(0))
    second = AdamW(named, lr=0.5, eps=1e-3)
    second.load_state_dict(optimizer.state_dict())
    return learn(model, second, batches(1)), second.param_groups[0]["lr"]


def beside_others(model: Any, batches: Any) -> Any:
    """Weights of another module in the same optimizer, a weight of the loss among them."""
    other, log = nn.Linear(1, 1).double(), nn.Parameter(torch.zeros((), dtype=torch.float64))
    nn.init.constant_(other.weight, 0.3)
    nn.init.constant_(other.bias, 0.1)
    optimizer = AdamW(chain((p for p in model.parameters() if p.requires_grad), other.parameters(), [log]), lr=0.02, eps=1e-3)
    for step in range(3):
        loss = model(**batches(step))["loss"]
        (other(whole(loss).view(1, 1)).square().sum() * torch.exp(-log) + log + loss * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [log.item(), other.weight.item()]


def many_groups(model: Any, batches: Any) -> Any:
    """Schedules by group, chained."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, others = ([p for _, p in named if (p.ndim > 1) is wide] for wide in (True, False))
    optimizer = SGD([{"params": matrices}, {"params": others, "lr": 0.2}], lr=0.1, momentum=0.9)
    scheduler = schedulers.ChainedScheduler([
        schedulers.LambdaLR(optimizer, [lambda n: 1 / (n + 1), lambda n: 0.9**n]), schedulers.StepLR(optimizer, 2, 0.5),
    ], optimizer)
    said = []
    for step in range(4):
        learn(model, optimizer, batches(step))
        scheduler.step()
        said += [group["lr"] for group in optimizer.param_groups]
    return said


def restarted(model: Any, batches: Any) -> Any:
    """Warm restarts by fractions of an epoch; momentum that goes round."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    warm = schedulers.CosineAnnealingWarmRestarts(optimizer, 2, 2)
    for step in range(4):
        learn(model, optimizer, batches(step))
        warm.step(step / 1.5)
    cycle = schedulers.CyclicLR(optimizer, 0.01, 0.1, 2)
    for step in range(3):
        learn(model, optimizer, batches(step))
        cycle.step()
    return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]


# --------------------------------------------------------------------------------------------------------------------- recipes


def unevenly(model: Any, batches: Any) -> Any:
    """Accumulation over three calls, one, and two, each mean by what was counted; losses that are divided in place."""
    optimizer, said, call = adamw(model), [], 0
    for count in (3, 1, 2):
        for _ in range(count):
            loss = model(**batches(call))["loss"]
            loss = loss / count
            loss.backward()
            said.append(loss.item())
            call += 1
        optimizer.step()
        optimizer.zero_grad(set_to_none=count == 1)
    return said


def in_place(model: Any, batches: Any) -> Any:
    """``loss /= 2``, ``loss += ...``."""
    optimizer, said = adamw(model), []
    for step in range(2):
        loss = model(**batches(step))["loss"]
        loss /= 2
        loss += 0.1
        loss.mul_(3.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
    return said


def summed_up(model: Any, batches: Any) -> Any:
    """Losses in a list, a mean of all, a total that keeps every graph."""
    losses: list[Tensor] = []
    total: Any = 0
    for step in range(3):
        losses.append(model(**batches(step))["loss"])
        total = total + losses[-1].pow(2)
    (torch.stack(losses).mean() + total * 0.1 + torch.stack(losses).max()).backward()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    return [float(min(x.detach() for x in losses)), f"{losses[0].item():.6f}" == f"{losses[0]:.6f}"]


def centred_over_calls(model: Any, batches: Any) -> Any:
    """A baseline that moves with the losses, in a tensor and in a number."""
    optimizer, baseline, mean = adamw(model), torch.zeros((), dtype=torch.float64), 0.0
    for step in range(3):
        loss = model(**batches(step))["loss"]
        ((loss - baseline) * (1 + (loss.detach() - mean).abs())).backward()
        optimizer.step()
        optimizer.zero_grad()
        baseline.lerp_(loss.detach(), 0.5)
        mean = 0.5 * mean + 0.5 * loss.item()
    return [baseline.item(), mean]


def weights_clipped(model: Any, batches: Any) -> Any:
    """As a Wasserstein critic has it, and a decay and a norm by hand."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(2):
        learn(model, optimizer, batches(step))
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p.copy_(torch.renorm(p, 2, 0, 0.6))
                p.mul_(0.99)


def by_value(model: Any, batches: Any) -> Any:
    """Values that are cut, and every weight's gradient by the norms of its rows."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(2):
        model(**batches(step))["loss"].backward()
        if step == 0:
            clip_grad_value_([p for p in model.parameters() if p.grad is not None], 0.01)
        for p in model.parameters():
            if p.grad is not None and p.ndim == 2:
                limit = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
                norm = p.grad.norm(dim=1, keepdim=True)
                p.grad = torch.where(norm > limit, p.grad * (limit / norm.clamp(min=1e-6)), p.grad)
        optimizer.step()
        optimizer.zero_grad()


def importance(model: Any, batches: Any) -> Any:
    """Squares of gradients say what a later task must leave alone."""
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for step in range(2):
        model.zero_grad()
        model(**batches(step))["loss"].backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                fisher[name] += p.grad.detach() ** 2 / 2
    old, optimizer = {name: p.detach().clone() for name, p in model.named_parameters()}, adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        model(**batches(step + 3))["loss"].backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    p.grad += 50.0 * fisher[name] * (p - old[name])
        optimizer.step()


def inner_and_outer(model: Any, batches: Any) -> Any:
    """Reptile: some steps of a task, of which the weights take a part; an optimizer for each task."""
    for task in range(2):
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        inner = SGD([p for p in model.parameters() if p.requires_grad], 0.2)
        for step in range(2):
            learn(model, inner, batches(2 * task + step))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name] + (p - start[name]) * 0.3)


def rates_tried(model: Any, batches: Any) -> Any:
    """Rates that grow until all is put back."""
    optimizer = adamw(model)
    learn(model, optimizer, batches(0))
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    said = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.001 * 10**step
        said.append(learn(model, optimizer, batches(step)))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return [*said, learn(model, optimizer, batches(1))]


def momenta_by_hand(model: Any, batches: Any) -> Any:
    """Lists beside the parameters, moved by ``torch._foreach_*``."""
    params = [p for p in model.parameters() if p.requires_grad]
    velocity = [torch.zeros_like(p) for p in params]
    average = [p.detach().clone() for p in params]
    for step in range(3):
        model.zero_grad()
        model(**batches(step))["loss"].backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        with torch.no_grad():
            torch._foreach_mul_(velocity, 0.9)
            torch._foreach_add_(velocity, grads)
            torch._foreach_add_(params, velocity, alpha=-0.05)
            torch._foreach_lerp_(average, params, 0.3)
    with torch.no_grad():
        torch._foreach_copy_(params, average)


def conflicting(model: Any, batches: Any) -> Any:
    """Gradients of two tasks, of which one gives way where they point apart, weight by weight."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = []
    for step in range(2):
        model.zero_grad()
        model(**batches(step))["loss"].backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in params])
    for p, one, two in zip(params, *grads, strict=True):
        if one is not None:
            dot = (one * two).sum()
            p.grad = one + two - torch.clamp(dot, max=0.0) / two.square().sum().clamp(min=1e-9) * two
    SGD(params, 0.1).step()


def frozen_by_kind(model: Any, batches: Any) -> Any:
    """Layers that rest after a step, by their kind and by name, with the gradients that they had."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    learn(model, optimizer, batches(0))
    model(**batches(1))["loss"].backward()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for p in module.parameters():
                p.requires_grad = False
    optimizer.step()
    optimizer.zero_grad()
    model(**batches(2))["loss"].backward()
    optimizer.step()


def teacher(model: Any, batches: Any) -> Any:
    """A copy that follows, in eval(), whose logits weigh the batch of the student."""
    average, optimizer, said = copy.deepcopy(model).requires_grad_(False).eval(), adamw(model), []
    for step in range(2):
        given = batches(step)
        with torch.no_grad():
            logits = whole(average(**given)["logits"])
        given["weights"] = given["weights"] * logits.softmax(-1).amax(-1)
        said.append(learn(model, optimizer, given))
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters(), strict=True):
                q.mul_(0.7).add_(p.data, alpha=0.3)
            for p, q in zip(model.buffers(), average.buffers(), strict=True):
                q.copy_(p)
    return said


def rehearsed(model: Any, batches: Any) -> Any:
    """Several epochs over what an older policy did, until they are too far apart."""
    optimizer, given = adamw(model), batches(0)
    with torch.no_grad():
        before = whole(model(**given)["logits"]).log_softmax(-1)
    epochs, apart = 0, 0.0
    while epochs < 4:
        with torch.no_grad():
            now = whole(model(**given)["logits"]).log_softmax(-1)
            apart = (before.exp() * (before - now)).sum(-1).mean().item()
            ratio = (now - before).gather(-1, given["labels"].unsqueeze(-1)).squeeze(-1).exp().clamp(0.8, 1.2)
        if apart > 0.05:
            break
        learn(model, optimizer, {**given, "weights": given["weights"] * ratio})
        epochs += 1
    return [epochs, apart]


# ---------------------------------------------------------------------------------------------------- modes, copies, wrappers


def mode_by_attribute(model: Any, batches: Any) -> Any:
    """``model.training = False`` and nothing else."""
    model.training = False
    said = [model(**batches(0))["loss"].item()]
    model.training = True
    return [*said, learn(model, adamw(model), batches(1))]


def all_frozen(model: Any, batches: Any) -> Any:
    """Everything, for a call, and a step after it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    said = [model(**batches(0))["loss"].item()]
    for p in trained:
        p.requires_grad_(True)
    return [*said, learn(model, adamw(model), batches(1))]


def nothing_to_learn(model: Any, batches: Any) -> Any:
    """A backward where all is frozen: one process raises."""
    model.requires_grad_(False)
    model(**batches(0))["loss"].backward()


def shallow(model: Any, batches: Any) -> Any:
    """``copy.copy``: the same weights."""
    twin = copy.copy(model)
    said = [learn(twin, adamw(twin), batches(0))]
    return [*said, model(**batches(1))["loss"].item()]


def by_proxy(model: Any, batches: Any) -> Any:
    """A weak reference, a partial, a bound method."""
    proxy, call = weakref.proxy(model), partial(model, labels=batches(0)["labels"])
    given = batches(0)
    said = [proxy(**given)["loss"].item(), call(ids=given["ids"], weights=given["weights"])["loss"].item()]
    return [*said, model.forward(**given)["loss"].item(), model.__call__(**given)["loss"].item()]


def in_containers(model: Any, batches: Any) -> Any:
    """In a list and a dict of modules, whose modes and gradients are set together."""
    both = nn.ModuleDict({"one": model, "two": nn.ModuleList([nn.Linear(2, 2).double()])})
    both.train().zero_grad()
    said = [learn(both["one"], adamw(model), batches(0))]
    both.eval()
    with torch.no_grad():
        said.append(both["one"](**batches(1))["loss"].item())
    both.train()
    both.to(torch.float64)
    return said


def traced(by: Callable[[Any, Any], Any]) -> Loop:
    """What takes a model apart or wraps it for processes of its own."""
    def loop(model: Any, batches: Any) -> Any:
        return by(model, batches(0))(**batches(0))["loss"].item()

    return loop


def reduced_by_hand(model: Any, batches: Any) -> Any:
    """What is left of a loop for DistributedDataParallel: means of gradients over ranks, which are whole here already."""
    model(**batches(0))["loss"].backward()
    if torch.distributed.is_initialized() and hasattr(model, "plan"):
        for p in model.parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                p.grad /= torch.distributed.get_world_size()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()


def moved_between(model: Any, batches: Any) -> Any:
    """Weights moved through ``.data`` between a forward and its backward."""
    loss = model(**batches(0))["loss"]
    for p in model.parameters():
        p.data.mul_(1.1)
    loss.backward()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()


OTHER: Mapping[str, Callable[..., Any]] = {
    "adadelta": partial(torch.optim.Adadelta, lr=1.0, eps=1e-2), "asgd": partial(torch.optim.ASGD, lr=0.1, t0=1),
    "rprop": partial(torch.optim.Rprop, lr=0.01), "nadam": partial(torch.optim.NAdam, lr=0.02, eps=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05), "lion": Lion, "lamb": Lamb, "factored": Factored,
    "preconditioned": Preconditioned,
}
IDIOMS: Mapping[str, tuple[Loop, Mapping[str, str | None]]] = {
    **{name: (own(make), {}) for name, make in OTHER.items()},
    "sharpened": (sharpened, {}), "exchanged": (exchanged, {}), "given names": (given_names, {}),
    "beside others": (beside_others, {}), "many groups": (many_groups, {}), "restarted": (restarted, {}),
    "unevenly": (unevenly, {}), "in place": (in_place, {}), "summed up": (summed_up, {}),
    "centred over calls": (centred_over_calls, {}), "weights clipped": (weights_clipped, {}), "by value": (by_value, {}),
    "importance": (importance, {}), "inner and outer": (inner_and_outer, {}), "rates tried": (rates_tried, {}),
    "momenta by hand": (momenta_by_hand, {}), "conflicting": (conflicting, {}), "frozen by kind": (frozen_by_kind, {}),
    "teacher": (teacher, {}), "rehearsed": (rehearsed, {}),
    "mode by attribute": (mode_by_attribute, {**refused("parallel.eval()"), DEFERRED: None}),
    "all frozen": (all_frozen, {}), "nothing to learn": (nothing_to_learn, {"pp": RUNS}),
    "shallow": (shallow, {**refused(""), DEFERRED: None}),
    "by proxy": (by_proxy, {}), "in containers": (in_containers, {}),
    "reduced by hand": (reduced_by_hand, refused("Take the call")),
    "moved between": (moved_between, refused("written into")),
    "exported": (traced(lambda m, given: torch.export.export(m, (), given).module()), refused("")),
    "distributed": (traced(lambda m, given: nn.parallel.DistributedDataParallel(m)), refused("")),
    "data parallel": (traced(lambda m, given: nn.DataParallel(m)), {}),
}
"""As ``tests.loops.LOOPS``."""
