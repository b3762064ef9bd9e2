"""More loops of ``tests.loops``: hooks, what people do to weights and gradients by hand, copies and calls of other kinds."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.backwards import Reverse
from tests.looped import Loop, adamw, learn, whole

# ---------------------------------------------------------------------------------------------------------------------- hooks


def _after(hook: Callable[[Any], Any]) -> Loop:
    """A step after ``hook`` was registered somewhere."""
    def loop(model: Any, batches: Any) -> None:
        hook(model)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        learn(model, optimizer, batches(0))

    return loop


def _named(model: Any, word: str) -> list[Any]:
    return [p for name, p in model.named_parameters() if word in name and p.requires_grad]


def _halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def _on_accumulators(way: str) -> Loop:
    """Hooks on the nodes that accumulate gradients, which somebody keeps."""
    kept: list[Any] = []

    def hook(model: Any) -> None:
        kept[:] = [p.expand_as(p).grad_fn.next_functions[0][0] for p in _named(model, "layers.0")]
        for node in kept:
            getattr(node, way)(lambda *_: None)

    return _after(hook)


def stepping_in_backward(model: Any, batches: Any) -> None:
    """torch's tutorial: an optimizer for every parameter, which steps as soon as the gradient is there."""
    optimizers = {p: SGD([p], 0.1) for p in model.parameters() if p.requires_grad}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    for number in range(2):
        model(**batches(number))["loss"].backward()


def several_gradients(model: Any, batches: Any) -> Any:
    """``register_multi_grad_hook``."""
    seen: list[int] = []
    torch.autograd.graph.register_multi_grad_hook(
        [p for p in model.parameters() if p.requires_grad], lambda grads: seen.append(sum(g is not None for g in grads)))
    learn(model, adamw(model), batches(0))
    return len(seen)


def whole_hooks(model: Any, batches: Any) -> Any:
    """Hooks of the module itself: one that changes what is given, one that changes what comes out."""
    one = model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "weights": kwargs["weights"] * 2}), with_kwargs=True)
    two = model.register_forward_hook(lambda module, args, out: {**out, "loss": out["loss"] * 3})
    said = [learn(model, adamw(model), batches(0))]
    one.remove()
    two.remove()
    return [*said, learn(model, adamw(model), batches(1))]


def loss_hooks(model: Any, batches: Any) -> Any:
    """A hook on the loss, and its own gradient."""
    optimizer = adamw(model)
    loss = model(**batches(0))["loss"]
    scaled = loss * 2
    scaled.register_hook(lambda grad: grad * 3)
    scaled.retain_grad()
    scaled.backward()
    optimizer.step()
    return scaled.grad.item()


def hooked_loss(model: Any, batches: Any) -> None:
    """A hook on the loss as it comes."""
    loss = model(**batches(0))["loss"]
    loss.register_hook(lambda grad: grad * 3)
    loss.backward()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()


def reversed_loss(model: Any, batches: Any) -> None:
    """A function with a backward of its own around the loss."""
    Reverse.apply(model(**batches(0))["loss"], 0.5).backward()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()


# ------------------------------------------------------------------------------------------------------- weights and gradients


def averaged_state(model: Any, batches: Any) -> Any:
    """An average of state dicts, which is swapped in for an evaluation."""
    optimizer = adamw(model)
    average = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for step in range(2):
        learn(model, optimizer, batches(step))
        for name, x in model.state_dict().items():
            average[name].mul_(0.7).add_(x, alpha=0.3)
    own = {name: x.detach().clone() for name, x in model.state_dict().items()}
    model.load_state_dict(average)
    model.eval()
    with torch.no_grad():
        said = model(**batches(7))["loss"].item()
    model.load_state_dict(own)
    model.train()
    return [said, learn(model, optimizer, batches(2))]


def averaged_by_torch(model: Any, batches: Any) -> Any:
    """An exponential average by torch's own functions."""
    optimizer, average = adamw(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    for step in range(3):
        learn(model, optimizer, batches(step))
        average.update_parameters(model)
    with torch.no_grad():
        return average(**batches(7))["loss"].item()


def taught(model: Any, batches: Any) -> Any:
    """A frozen copy as a teacher."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer, said = adamw(model), []
    for step in range(2):
        with torch.no_grad():
            wanted = teacher(**batches(step))["loss"]
        loss = model(**batches(step))["loss"]
        (loss + (loss - 0.9 * wanted).square()).backward()
        optimizer.step()
        optimizer.zero_grad()
        said += [loss.item(), wanted.item()]
    return said


def by_lbfgs(model: Any, batches: Any) -> Any:
    """A closure that is called several times."""
    optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], 0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batches(0))["loss"]
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


def by_hand(model: Any, batches: Any) -> None:
    """SGD with momentum, decay and clipped weights in a loop over names."""
    moments: dict[str, Tensor] = {}
    for step in range(2):
        model(**batches(step))["loss"].backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is None:
                    continue
                moments[name] = moments.get(name, torch.zeros_like(p)) * 0.9 + p.grad
                p -= 0.1 * moments[name]
                p.data.mul_(0.99)
                p.data.clamp_(-1, 1)
                p.grad = None


def disturbed(model: Any, batches: Any) -> None:
    """The embedding is moved along its gradient for a second one, and put back."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(**batches(0))["loss"].backward()
    kept = {}
    for name, p in model.named_parameters():
        if "embed" in name:
            kept[name] = p.data.clone()
            norm = torch.norm(p.grad)
            if norm != 0:
                p.data.add_(0.1 * p.grad / norm)
    model(**batches(0))["loss"].backward()
    for name, p in model.named_parameters():
        if name in kept:
            p.data = kept[name]
    optimizer.step()


def penalized(model: Any, batches: Any) -> None:
    """The squares of all weights beside the loss."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    (model(**batches(0))["loss"] + 0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()
    optimizer.step()


def one_penalized(model: Any, batches: Any) -> None:
    """The squares of one weight, if it is there."""
    loss = model(**batches(0))["loss"]
    for p in _named(model, "layers.0.1.weight"):
        loss = loss + 0.1 * p.square().sum()
    loss.backward()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()


def twice_differentiated(model: Any, batches: Any) -> None:
    """A penalty on gradients."""
    params = [p for p in model.parameters() if p.requires_grad]
    loss = model(**batches(0))["loss"]
    found = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    (loss + sum(g.square().sum() for g in found if g is not None)).backward()
    SGD(params, 0.1).step()


def asked_gradients(model: Any, batches: Any) -> None:
    """``autograd.grad``, and the gradients put where they belong."""
    params = [p for p in model.parameters() if p.requires_grad]
    for p, grad in zip(params, torch.autograd.grad(model(**batches(0))["loss"], params, allow_unused=True), strict=True):
        p.grad = grad
    SGD(params, 0.1).step()


def kept_gradients(model: Any, batches: Any) -> None:
    """Gradients of two batches, put together by hand."""
    params = [p for p in model.parameters() if p.requires_grad]
    model(**batches(0))["loss"].backward()
    first = [None if p.grad is None else p.grad.clone() for p in params]
    model.zero_grad()
    model(**batches(1))["loss"].backward()
    for p, grad in zip(params, first, strict=True):
        if p.grad is not None and grad is not None:
            p.grad = torch.where(p.grad * grad > 0, p.grad + grad, torch.zeros_like(grad))
    SGD(params, 0.1).step()


def clipped_by_part(model: Any, batches: Any) -> Any:
    """The norm of a part's gradients."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(**batches(0))["loss"].backward()
    norm = whole(nn.utils.clip_grad_norm_(model.layers[0].parameters(), 0.01))
    optimizer.step()
    return norm.item()


def shaken(model: Any, batches: Any) -> None:
    """Noise on the weights after every step."""
    torch.manual_seed(5)
    learn(model, adamw(model), batches(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)


def made_alike(model: Any, batches: Any) -> None:
    """One layer's weight written into another's after a step."""
    learn(model, adamw(model), batches(0))
    with torch.no_grad():
        model.layers[0][1].weight.copy_(model.layers[1][1].weight)


def pruned(model: Any, batches: Any) -> None:
    """torch's pruning."""
    prune.l1_unstructured(model.layers[0][1], "weight", 0.3)
    learn(model, adamw(model), batches(0))


# ------------------------------------------------------------------------------------------------------------------ optimizers


def filtered(model: Any, batches: Any) -> None:
    """A plain list, of which a stage of a pipeline may have nothing."""
    optimizer = AdamW(_named(model, "layers.0"), lr=0.02, eps=1e-3)
    for step in range(2):
        learn(model, optimizer, batches(step))


def filtered_to_nothing(model: Any, batches: Any) -> None:
    """A word that is in no name."""
    learn(model, AdamW(_named(model, "decoder.blocks"), lr=0.02), batches(0))


def frozen_then_rebuilt(model: Any, batches: Any) -> None:
    """Layers that are frozen after a step, and an optimizer of the rest; then thawed, and one of all."""
    learn(model, adamw(model), batches(0))
    model.layers[0].requires_grad_(False)
    learn(model, adamw(model), batches(1))
    model.layers.requires_grad_(False)
    learn(model, adamw(model), batches(2))
    model.layers.requires_grad_(True)
    learn(model, adamw(model), batches(3))


def by_kind(model: Any, batches: Any) -> None:
    """Which weights decay follows from the modules that they are in."""
    decaying, others = set(), set()
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if isinstance(module, nn.Linear) and name == "weight":
                decaying.add(full)
            elif p.requires_grad:
                others.add(full)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [named[name] for name in sorted(decaying & named.keys())], "weight_decay": 0.3},
              {"params": [named[name] for name in sorted(others & named.keys() - decaying)], "weight_decay": 0.0}]
    learn(model, AdamW(groups, lr=0.02, eps=1e-3), batches(0))


def variants(model: Any, batches: Any) -> None:
    """Fused and foreach optimizers, a rate that is a tensor."""
    params = [p for p in model.parameters() if p.requires_grad]
    for step, optimizer in enumerate((
        torch.optim.Adam(params, 0.01, eps=1e-3, fused=True, amsgrad=True), SGD(params, 0.1, momentum=0.9, fused=True),
        AdamW(params, torch.tensor(0.01), eps=1e-3, foreach=False, maximize=True), torch.optim.RAdam(params, 0.01, eps=1e-3),
        torch.optim.RMSprop(params, 0.001, eps=1e-3, centered=True, foreach=True), torch.optim.Adamax(params, 0.001, eps=1e-3),
    )):
        learn(model, optimizer, batches(step))


def copied_together(model: Any, batches: Any) -> Any:
    """A module and its optimizer in one deepcopy: the copies belong together."""
    optimizer = adamw(model)
    learn(model, optimizer, batches(0))
    twin, its = copy.deepcopy((model, optimizer))
    said = [learn(twin, its, batches(1)), twin(**batches(2))["loss"].item()]
    return [*said, learn(model, optimizer, batches(1))]


# ------------------------------------------------------------------------------------------------------------- calls and state


def _parametrized(by: Callable[..., Any]) -> Loop:
    """``by`` torch, after the build."""
    def loop(model: Any, batches: Any) -> None:
        by(model.layers[0][1])
        learn(model, adamw(model), batches(0))

    return loop


def functional(model: Any, batches: Any) -> Any:
    """``functional_call`` with weights of one's own."""
    weights = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (), batches(0))["loss"].item()


def in_a_thread(model: Any, batches: Any) -> Any:
    """A step in a thread of its own."""
    optimizer, said = adamw(model), []
    worker = threading.Thread(target=lambda: said.append(learn(model, optimizer, batches(0))))
    worker.start()
    worker.join()
    return [*said, learn(model, optimizer, batches(1))]


def through_a_file(model: Any, batches: Any) -> Any:
    """State dicts through ``torch.save``."""
    optimizer, file = adamw(model), io.BytesIO()
    learn(model, optimizer, batches(0))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    said = [learn(model, optimizer, batches(1))]
    file.seek(0)
    found = torch.load(file)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return [*said, learn(model, optimizer, batches(1)), learn(model, optimizer, batches(2))]


def prefixed(model: Any, batches: Any) -> Any:
    """Keys with a prefix, as DistributedDataParallel saves them."""
    state = {name: x.clone() for name, x in model.state_dict(prefix="module.").items()}
    learn(model, adamw(model), batches(0))
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)
    return model(**batches(1))["loss"].item()


def autocast(model: Any, batches: Any) -> Any:
    """Autocast around an evaluation."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batches(0))["loss"].item()


def without_labels(model: Any, batches: Any) -> None:
    """An argument less than in the call before."""
    given = batches(0)
    model(**given)
    del given["labels"]
    model(**given)


def applied(model: Any, batches: Any) -> None:
    """``apply`` with a function that looks for linears."""
    def start(module: Any) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    model.apply(start)


def looked_at(model: Any, batches: Any) -> Any:
    """What is asked of a module without running it; an attribute of one's own."""
    model.epoch = 3
    next(model.parameters())
    assert "embed" in repr(model)
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    return [model.epoch, linears, len(list(model.children())), len(model.layers), model.get_submodule("layers.0") is not None]


def refused(word: str) -> Mapping[str, str]:
    """Under every plan, with this word."""
    return dict.fromkeys(ALL, word)


DEFERRED = "deferred"
"""The way of a module that has no example: its first call is made here."""
ALL = ("dp", "micro-batches", "tp", "pp", DEFERRED)
"""The ways that words are given for; those of "pp" are of every pipeline."""
RUNS = "runs, where one process raises: the gradients were computed within the call"
HOOK, STAGES = refused("would not be called"), {"pp": "of its own stages"}
HABITS: Mapping[str, tuple[Loop, Mapping[str, str]]] = {
    "hooks": (_after(lambda m: [p.register_hook(_halve) for p in _named(m, "")]), HOOK),
    "one hook": (_after(lambda m: [p.register_hook(_halve) for p in _named(m, "layers.0.1.weight")]), HOOK),
    "one hook after": (_after(lambda m: [p.register_post_accumulate_grad_hook(_halve) for p in _named(m, "layers.0.1")]), HOOK),
    "features": (_after(lambda m: m.layers[0].register_forward_hook(lambda *_: None)), HOOK),
    "accumulators": (_on_accumulators("register_hook"), HOOK),
    "before accumulators": (_on_accumulators("register_prehook"), HOOK),
    "spectral later": (_parametrized(parametrizations.spectral_norm), refused("before autoparallel")),
    "orthogonal later": (_parametrized(parametrizations.orthogonal), refused("")),
    "old weight norm later": (_parametrized(nn.utils.weight_norm), refused("before autoparallel")),
    "old spectral norm later": (_parametrized(nn.utils.spectral_norm), refused("before autoparallel")),
    "backward hook": (_after(lambda m: m.layers[0][1].register_full_backward_hook(lambda *_: None)), HOOK),
    "backward hook of all": (_after(lambda m: m.register_full_backward_hook(lambda *_: None)), {}),
    "output hook": (lambda m, b: m(**b(0))["logits"].register_hook(_halve) and None, refused("")),
    "in backward": (stepping_in_backward, HOOK), "several gradients": (several_gradients, HOOK),
    "whole hooks": (whole_hooks, {}), "loss hooks": (loss_hooks, {}), "hooked loss": (hooked_loss, {}),
    "reversed loss": (reversed_loss, {}), "averaged state": (averaged_state, {}),
    "averaged by torch": (averaged_by_torch, {}), "taught": (taught, {}), "lbfgs": (by_lbfgs, STAGES),
    "by hand": (by_hand, {}), "disturbed": (disturbed, refused("")), "penalized": (penalized, STAGES),
    "one penalized": (one_penalized, {}), "twice differentiated": (twice_differentiated, refused("create_graph")),
    "asked": (asked_gradients, dict.fromkeys(("dp", DEFERRED), "torch.autograd.grad")),
    "kept gradients": (kept_gradients, {}), "clipped by part": (clipped_by_part, STAGES),
    "shaken": (shaken, {"pp": "random numbers"}), "made alike": (made_alike, {"pp": "stage"}),
    "pruned": (pruned, refused("autoparallel")), "filtered": (filtered, {}),
    "filtered to nothing": (filtered_to_nothing, {"pp": "empty list of parameters"}), "rebuilt": (frozen_then_rebuilt, {}),
    "by kind": (by_kind, {}), "variants": (variants, {}), "copied together": (copied_together, {}),
    "functional": (functional, refused("tensor")), "in a thread": (in_a_thread, {}), "through a file": (through_a_file, {}),
    "prefixed": (prefixed, {}), "autocast": (autocast, refused("precision")),
    "without labels": (without_labels, refused("'labels'")), "applied": (applied, refused("before autoparallel")),
    "looked at": (looked_at, {}),
}
"""As ``tests.loops.LOOPS``."""
