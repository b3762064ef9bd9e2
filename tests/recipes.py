"""More loops of ``tests.loops``: averages that are swapped in, layers that are thawed one after another, gradients and weights
that are edited by norms, quantiles and factorizations, and what compiles or watches a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedulers

from tests.habits import refused
from tests.looped import Loop, adamw, learn, whole


def _learned(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


# ------------------------------------------------------------------------------------------------------------------ averages


def swapped_in(model: Any, batches: Any) -> list[float]:
    """An average that takes the weights' place for an evaluation, and gives it back."""
    optimizer, said = adamw(model), []
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        said.append(learn(model, optimizer, batches(step)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].mul_(0.8).add_(p, alpha=0.2)
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        for here in (average, kept):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(here[name])
            model.eval()
            with torch.inference_mode():
                said.append(float(model(**batches(9))["loss"]))
            model.train()
    return said


def exchanged_by_data(model: Any, batches: Any) -> float:
    """An average by foreach operators on ``.data``, exchanged with the weights."""
    optimizer, average = adamw(model), [p.detach().clone() for p in _learned(model)]
    for step in range(2):
        learn(model, optimizer, batches(step))
        torch._foreach_lerp_(average, [p.data for p in _learned(model)], 0.3)
    for p, mean in zip(_learned(model), average, strict=True):
        now = p.data.clone()
        p.data.copy_(mean)
        mean.copy_(now)
    return learn(model, optimizer, batches(2))


def mixed(model: Any, batches: Any) -> float:
    """Weights half of one run and half of another; then a vector of what was learned, half as long."""
    twin = copy.deepcopy(model)
    learn(model, adamw(model), batches(0))
    learn(twin, adamw(twin), batches(1))
    other = twin.state_dict()
    model.load_state_dict({name: (x + other[name]) / 2 for name, x in model.state_dict().items()})
    start = {name: x.clone() for name, x in model.state_dict().items()}
    learn(model, adamw(model), batches(2))
    model.load_state_dict({name: start[name] + 0.5 * (x - start[name]) for name, x in model.state_dict().items()})
    return learn(model, adamw(model), batches(3))


# ------------------------------------------------------------------------------------------------ what is learned, and how fast


def thawed_in_turn(model: Any, batches: Any) -> list[float]:
    """Layers are frozen by their modules, and thawed from the last one on, each with a group of its own."""
    model.layers.requires_grad_(False)
    optimizer = SGD(_learned(model), lr=0.1)
    said = [learn(model, optimizer, batches(0))]
    for step, (layer, rate) in enumerate(((1, 0.05), (0, 0.01)), 1):
        model.layers[layer].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[layer].parameters()), "lr": rate})
        said.append(learn(model, optimizer, batches(step)))
    return said


def frozen_and_decayed(model: Any, batches: Any) -> None:
    """A frozen weight decays no more, once it has no gradient."""
    optimizer = AdamW(_learned(model), lr=0.02, eps=1e-3, weight_decay=0.5)
    for step, on in enumerate((True, False, True)):
        model.norm.requires_grad_(on)
        optimizer.zero_grad()
        learn(model, optimizer, batches(step))


def by(make: Callable[[list[Any]], Any]) -> Loop:
    """Three steps by an optimizer."""
    def loop(model: Any, batches: Any) -> list[float]:
        optimizer = make(_learned(model))
        return [learn(model, optimizer, batches(step)) for step in range(3)]

    return loop


def scheduled(make: Callable[[Any], Any]) -> Loop:
    """Two groups, whose rates a scheduler moves."""
    def loop(model: Any, batches: Any) -> list[float]:
        kinds = [[p for p in _learned(model) if (p.ndim > 1) == matrix] for matrix in (True, False)]
        optimizer = SGD([{"params": kinds[0]}, {"params": kinds[1], "lr": 0.05}], lr=0.1, momentum=0.9)
        scheduler, said = make(optimizer), []
        for step in range(4):
            said.append(learn(model, optimizer, batches(step)))
            scheduler.step()
            said += [group["lr"] for group in optimizer.param_groups]
        return said

    return loop


def given_a_gradient(model: Any, batches: Any) -> None:
    """``backward(gradient)``, and gradients that are set to zeros."""
    optimizer = SGD(_learned(model), lr=0.1)
    for step in range(2):
        model(**batches(step))["loss"].backward(gradient=torch.tensor(0.3).double())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


# --------------------------------------------------------------------------------------------------- edited by what they are


def edited(change: Callable[[str, Any], None]) -> Loop:
    """Gradients, or weights, that ``change`` edits of each parameter before the step."""
    def loop(model: Any, batches: Any) -> None:
        optimizer = SGD(_learned(model), lr=0.1)
        for step in range(2):
            model(**batches(step))["loss"].backward()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        change(name, p)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def _decay(name: str, p: Any) -> None:
    if "norm" not in name:
        p.grad.add_(p, alpha=0.05)
        p.grad = p.grad * 0.5


def _largest(name: str, p: Any) -> None:
    p.grad.mul_((p.grad.abs() >= p.grad.abs().flatten().kthvalue(max(1, p.numel() // 2)).values).to(p.dtype))


def _quantile(name: str, p: Any) -> None:
    p.grad.clamp_(max=float(torch.quantile(p.grad.abs(), 0.9)))


def _low_rank(name: str, p: Any) -> None:
    if p.ndim == 2:
        basis = torch.linalg.qr(p.grad @ p.grad.t() + torch.eye(len(p), dtype=p.dtype))[0][:, :2]
        p.grad.copy_(basis @ (basis.t() @ p.grad))


def _by_units(name: str, p: Any) -> None:
    if p.ndim == 2:
        p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        most, norm = 0.01 * p.norm(dim=1, keepdim=True).clamp(min=1e-3), p.grad.norm(dim=1, keepdim=True)
        p.grad.mul_(torch.where(norm > most, most / norm.clamp(min=1e-6), torch.ones_like(norm)))
        p.div_(p.std(dim=1, keepdim=True) + 0.1)


def _by_layer(name: str, p: Any) -> None:
    p.grad.mul_(p.norm() / (p.grad.norm() + 1e-6))


def by_foreach(model: Any, batches: Any) -> None:
    """Steps by torch's operators on lists."""
    for step in range(2):
        model(**batches(step))["loss"].backward()
        learned = [p for p in _learned(model) if p.grad is not None]
        grads, weights = [p.grad for p in learned], [p.detach() for p in learned]
        torch._foreach_add_(grads, weights, alpha=0.01)
        torch._foreach_div_(grads, [n + 1.0 for n in torch._foreach_norm(grads)])
        torch._foreach_add_(weights, grads, alpha=-0.1)
        model.zero_grad()


def clipped_at_the_largest(model: Any, batches: Any) -> float:
    """By the largest element of all gradients."""
    own = getattr(model, "clip_grad_norm_", None) or partial(nn.utils.clip_grad_norm_, model.parameters())
    model(**batches(0))["loss"].backward()
    norm = own(0.01, norm_type=float("inf"))
    SGD(_learned(model), lr=0.1).step()
    return float(whole(norm))


def total_norm(model: Any, batches: Any) -> float:
    """torch's two halves of clipping."""
    model(**batches(0))["loss"].backward()
    norm = nn.utils.get_total_norm([p.grad for p in _learned(model) if p.grad is not None])
    nn.utils.clip_grads_with_norm_(_learned(model), 0.1, norm)
    SGD(_learned(model), lr=0.1).step()
    return float(whole(norm))


def consolidated(model: Any, batches: Any) -> None:
    """EWC: squares of gradients say which weights are held where they were."""
    weighed = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        model.zero_grad()
        model(**batches(step))["loss"].backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                weighed[name] += p.grad.detach() ** 2 / 2

    def hold(name: str, p: Any) -> None:
        p.grad += 10 * weighed[name] * (p - start[name])

    model.zero_grad()
    edited(hold)(model, batches)


# ---------------------------------------------------------------------------------------------------------- around the call


def inference_first(model: Any, batches: Any) -> list[float]:
    """The first calls are made in inference mode."""
    said = []
    for mode in (model.train, model.eval):
        mode()
        with torch.inference_mode():
            out = model(**batches(3))
            said += [float(out["loss"]), float(whole(out["logits"]).softmax(-1).amax(-1).sum())]
    model.train()
    return [*said, *by(lambda learned: SGD(learned, lr=0.1))(model, batches)]


def inference_batch(model: Any, batches: Any) -> float:
    """A batch of tensors that no backward may read."""
    with torch.inference_mode():
        given = {name: x.clone() for name, x in batches(0).items()}
    return learn(model, adamw(model), given)


def profiled(model: Any, batches: Any) -> float:
    """Within torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), torch.profiler.record_function("step"):
        return learn(model, adamw(model), batches(0))


def compiled_step(model: Any, batches: Any) -> list[float]:
    """torch.compile around a function that goes back, and around the optimizer's step."""
    optimizer, said = adamw(model), []

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def forward_backward(given: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(**given)["loss"]
        loss.backward()
        return loss

    step = torch.compile(optimizer.step, backend="eager")
    for number in range(2):
        said.append(forward_backward(batches(number)).item())
        step()
        optimizer.zero_grad()
    return said


def two_labels(model: Any, batches: Any) -> list[float]:
    """Mixup of labels: two losses of one batch, weighed."""
    optimizer, said = adamw(model), []
    for step, share in enumerate((0.3, 0.8)):
        given = batches(step)
        other = {**given, "labels": given["labels"].flip(0)}
        loss = share * model(**given)["loss"] + (1 - share) * model(**other)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
    return said


def in_other_words(model: Any, batches: Any) -> list[float]:
    """Keys in another order, a loss read in many ways."""
    given = batches(1)
    loss = model(**{name: given[name] for name in ("weights", "labels", "ids")})["loss"]
    free = loss.detach()
    said = [float(free), loss.item(), float(free.numpy()), free.tolist(), float((free / 2 + 1).mean()),
            float(torch.stack([free, free]).sum()), float(torch.isfinite(free))]
    ((loss - 0.1).abs() + 0.1).log().backward()
    SGD(_learned(model), lr=0.1).step()
    return said


CHANGES: Mapping[str, Callable[[str, Any], None]] = {
    "decay by hand": _decay, "largest gradients": _largest, "cut at a quantile": _quantile, "low ranks": _low_rank,
    "by units": _by_units, "as long as weights": _by_layer,
}
OPTIMIZERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "nesterov": lambda learned: SGD(learned, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "maximized": lambda learned: SGD(learned, lr=0.01, maximize=True, weight_decay=0.1),
    "fused": lambda learned: Adam(learned, lr=0.01, eps=1e-3, fused=True),
    "amsgrad": lambda learned: AdamW(learned, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
    "rate in a tensor": lambda learned: Adam(learned, lr=torch.tensor(0.01), eps=1e-3),
    "rmsprop": lambda learned: torch.optim.RMSprop(learned, lr=0.01, eps=1e-3, centered=True, momentum=0.5),
    "adamax": lambda learned: torch.optim.Adamax(learned, lr=0.01, eps=1e-3),
    "radam": lambda learned: torch.optim.RAdam(learned, lr=0.01, eps=1e-3, decoupled_weight_decay=True),
    "adagrad": lambda learned: torch.optim.Adagrad(learned, lr=0.01, eps=1e-3, lr_decay=0.1),
}
SCHEDULES: Mapping[str, Callable[[Any], Any]] = {
    "rates by functions": lambda one: schedulers.LambdaLR(one, [lambda step: 0.9**step, lambda step: 1 / (step + 1)]),
    "cyclic": lambda one: schedulers.CyclicLR(one, 0.01, 0.1, 2),
    "warm restarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 2),
    "chained": lambda one: schedulers.ChainedScheduler([schedulers.ConstantLR(one, 0.5, 2), schedulers.PolynomialLR(one, 4)]),
}
RECIPES: Mapping[str, tuple[Loop, Mapping[str, str | None]]] = {
    "swapped in": (swapped_in, {}), "exchanged by data": (exchanged_by_data, {}), "mixed": (mixed, {}),
    "thawed in turn": (thawed_in_turn, {}), "frozen and decayed": (frozen_and_decayed, {}),
    "given a gradient": (given_a_gradient, {}), "by foreach": (by_foreach, {}),
    "clipped at the largest": (clipped_at_the_largest, {}), "total norm": (total_norm, {"pp": "of its own stages"}),
    "consolidated": (consolidated, {}), "inference first": (inference_first, {}),
    "inference batch": (inference_batch, refused("inference_mode")), "profiled": (profiled, {}),
    "compiled step": (compiled_step, {}), "two labels": (two_labels, {}), "in other words": (in_other_words, {}),
    **{name: (edited(change), {}) for name, change in CHANGES.items()},
    **{name: (by(make), {}) for name, make in OPTIMIZERS.items()},
    **{name: (scheduled(make), {}) for name, make in SCHEDULES.items()},
}
"""As ``tests.loops.LOOPS``."""
