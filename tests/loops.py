"""Loops that people write around a model: each on one process and under every kind of plan. Equal, or refused by an error of
our own on every rank; nothing else.

    python -m tests.loops                   every loop under the plans of WAYS, a line for each that did not come out as it must
    python -m tests.loops -v tp swa         a line for each trial: of one way, of the loops whose names hold a word
    python -m tests.loops zbv hook          any way of ``tests.strangers`` may be named

A loop is a function of a model and of batches, run twice: on the model, and on what autoparallel makes of it. What it returns
and the weights that it leaves are compared, in double precision. ``test_loops`` runs some of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from meshwright.api import autoparallel
from tests import looped
from tests.equality import captured_once
from tests.habits import ALL, DEFERRED, HABITS, RUNS
from tests.idioms import IDIOMS
from tests.looped import Loop, Net, adamw, batch, learn, scale_and_step, whole
from tests.recipes import RECIPES
from tests.resumed import RESUMED
from tests.strangers import FOUR, WAYS
from tests.trials import State, judged, report

# ------------------------------------------------------------------------------------------------------ optimizers, schedules


def several_optimizers(model: Any, batches: Any) -> None:
    """Matrices, the rest, and the ends by optimizers of their own; as groups, of which a stage of a pipeline may have none."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizers = [
        AdamW([{"params": [p for name, p in named if p.ndim == 2 and "layers" in name]}], lr=0.02, eps=1e-3),
        SGD([{"params": [p for name, p in named if p.ndim < 2]}], lr=0.1, momentum=0.9),
        torch.optim.Adagrad([{"params": [p for name, p in named if "embed" in name]}], lr=0.02, eps=1e-3),
    ]
    for step in range(2):
        model(**batches(step))["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_muon(model: Any, batches: Any) -> None:
    """The blocks' matrices by torch's Muon, of which a stage of a pipeline may have none, and the rest by AdamW."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            kinds[p.ndim == 2 and "layers" in name].append(p)
    optimizers = [torch.optim.Muon(kinds[True], lr=0.02), AdamW(kinds[False], lr=0.02, eps=1e-3)]
    for step in range(2):
        model(**batches(step))["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_layer(model: Any, batches: Any) -> None:
    """Rates by the layer's number, which its name says: a group for each."""
    groups: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        layer = name.split(".")[1] if name.startswith("layers") else "rest"
        rate = 0.01 * (2 + int(layer)) if layer.isdigit() else 0.01
        groups.setdefault(layer, {"params": [], "lr": rate, "weight_decay": 0.1})["params"].append(p)
    optimizer = AdamW(list(groups.values()), eps=1e-3)
    for step in range(2):
        learn(model, optimizer, batches(step))


def counted(pairs: bool) -> Loop:
    """Rates by the number of a parameter, which is another on every stage of a pipeline, or by names that are told."""
    def loop(model: Any, batches: Any) -> None:
        place = {"embed": 1, "layers.0": 2, "layers.1": 3}
        groups: list[dict[str, Any]] = []
        for name, p in ((name, p) for name, p in model.named_parameters() if p.requires_grad):
            number = next((n for word, n in place.items() if name.startswith(word)), 4) if pairs else len(groups) + 1
            groups.append({"params": [(name, p) if pairs else p], "lr": 0.01 * number})
        optimizer = SGD(groups)
        for step in range(2):
            learn(model, optimizer, batches(step))

    return loop


def ends_alone(model: Any, batches: Any) -> None:
    """One layer is trained, by an optimizer that has nothing else."""
    optimizer = AdamW(model.layers[0].parameters(), lr=0.02, eps=1e-3)
    for step in range(2):
        learn(model, optimizer, batches(step))


def grown(model: Any, batches: Any) -> None:
    """``add_param_group`` after a step."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = AdamW([{"params": [p for name, p in named if "layers" in name]}], lr=0.02, eps=1e-3)
    learn(model, optimizer, batches(0))
    optimizer.add_param_group({"params": [p for name, p in named if "layers" not in name], "lr": 0.05})
    model.zero_grad()
    learn(model, optimizer, batches(1))


def edited_state(model: Any, batches: Any) -> None:
    """Moments that are halved, options that are changed, a state that is cleared."""
    optimizer = adamw(model)
    for step in range(3):
        learn(model, optimizer, batches(step))
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        optimizer.param_groups[0]["weight_decay"] = 0.3
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    optimizer.state.clear()
    learn(model, optimizer, batches(3))


def copied_state(model: Any, batches: Any) -> None:
    """Another optimizer goes on from a state dict."""
    optimizer = adamw(model)
    learn(model, optimizer, batches(0))
    state = copy.deepcopy(optimizer.state_dict())
    learn(model, optimizer, batches(1))
    second = adamw(model, lr=1.0)
    second.load_state_dict(state)
    learn(model, second, batches(2))


def _scheduled(make: Callable[[Any], Any], *of_step: str) -> Loop:
    def loop(model: Any, batches: Any) -> Any:
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        scheduler, said = make(optimizer), []
        for step in range(4):
            loss = learn(model, optimizer, batches(step))
            scheduler.step(*([loss] if of_step else ()))
            said += [loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
        return said

    return loop


def scaled(model: Any, batches: Any) -> Any:
    """A GradScaler with a step that overflows."""
    optimizer, said = adamw(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        loss = model(**batches(step))["loss"] * (float("inf") if step == 1 else 1.0)
        scale_and_step(model, optimizer, scaler, loss)
        said.append(scaler.get_scale())
    return said


def hooked_optimizer(model: Any, batches: Any) -> None:
    """Hooks of the optimizer: weights that are kept on a sphere."""
    optimizer = adamw(model)

    def project(one: Any, *_: Any) -> None:
        with torch.no_grad():
            for p in one.param_groups[0]["params"]:
                if p.ndim == 2:
                    p.div_(p.norm(dim=1, keepdim=True))

    optimizer.register_step_post_hook(project)
    for step in range(2):
        learn(model, optimizer, batches(step))


def lookahead(model: Any, batches: Any) -> None:
    """Slow weights beside fast ones."""
    optimizer = adamw(model)
    slow = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        learn(model, optimizer, batches(step))
        if step % 2:
            with torch.no_grad():
                for p, q in zip(model.parameters(), slow, strict=True):
                    q.lerp_(p, 0.5)
                    p.copy_(q)


def vectors(model: Any, batches: Any) -> None:
    """All weights as one vector."""
    learn(model, adamw(model), batches(0))
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    learn(model, adamw(model), batches(1))


# -------------------------------------------------------------------------------------------------- copies, weights and state


def averaged_copy(model: Any, batches: Any) -> Any:
    """An average by deepcopy, which is evaluated and then trained."""
    optimizer, average = adamw(model), copy.deepcopy(model)
    for step in range(2):
        learn(model, optimizer, batches(step))
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters(), strict=True):
                q.lerp_(p, 0.3)
    average.eval()
    with torch.no_grad():
        said = [float(average(**batches(7))["loss"])]
    average.train()
    return [*said, learn(average, adamw(average), batches(8)), average(**batches(9))["loss"].item()]


def swa(model: Any, batches: Any) -> Any:
    """torch's AveragedModel and SWALR; its ``update_bn`` does nothing here, for there are no batch norms."""
    optimizer, average = adamw(model), AveragedModel(model)
    scheduler = SWALR(optimizer, 0.05, anneal_epochs=2)
    for step in range(3):
        learn(model, optimizer, batches(step))
        average.update_parameters(model)
        scheduler.step()
    update_bn([batches(5)["ids"]], average.module.norm)
    with torch.no_grad():
        return float(average(**batches(7))["loss"])


def restored(model: Any, batches: Any) -> Any:
    """Early stopping: the best weights are put back; a state dict that is no copy moves along."""
    optimizer = adamw(model)
    live = model.state_dict()
    best = copy.deepcopy(live)
    learn(model, optimizer, batches(0))
    moved = sum(not torch.equal(whole(x), whole(best[name])) for name, x in live.items() if "layers.0" in name)
    model.load_state_dict(best)
    learn(model, optimizer, batches(1))
    return moved if moved else None


def partly_loaded(model: Any, batches: Any) -> Any:
    """``strict=False``, with keys that are missing and keys that nobody has."""
    state = {name: torch.full(x.shape, 0.1).double() for name, x in model.state_dict().items() if "norm" in name}
    found = model.load_state_dict({**state, "nobody.weight": torch.ones(3)}, strict=False)
    learn(model, adamw(model), batches(0))
    return len(found.unexpected_keys)


def converted(model: Any, batches: Any) -> None:
    """``half()`` after the build."""
    model.half()


def converted_to_itself(model: Any, batches: Any) -> None:
    """``to``, ``double``, ``cpu``, ``share_memory`` that change nothing."""
    model.to("cpu").double().to(torch.float64).cpu()
    learn(model, adamw(model), batches(0))


def tied_later(model: Any, batches: Any) -> None:
    """A weight in another's place."""
    model.layers[0][1].weight = model.layers[1][1].weight
    learn(model, adamw(model), batches(0))


def parametrized_later(model: Any, batches: Any) -> None:
    """``weight_norm`` after the build."""
    parametrizations.weight_norm(model.layers[0][1])
    learn(model, adamw(model), batches(0))


def frozen_for_a_while(model: Any, batches: Any) -> None:
    """Layers that rest, in turn."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        for name, p in model.named_parameters():
            if "layers" in name:
                p.requires_grad_(f"layers.{step % 2}" in name)
        learn(model, optimizer, batches(step))


def compiled(model: Any, batches: Any) -> Any:
    """``torch.compile`` around it, and around the step."""
    called, optimizer = torch.compile(model, backend="eager"), adamw(model)
    losses = []
    for step in range(2):
        loss = called(**batches(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(model: Any, batches: Any) -> Any:
    """Part of a larger module, whose loss is another, with a weight of its own."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.temperature = model, nn.Parameter(torch.tensor(1.5).double())

        def forward(self, **given: Tensor) -> Tensor:
            return self.inner(**given)["loss"] * self.temperature.exp()  # type: ignore[no-any-return]

    around = Around()
    optimizer = SGD([p for p in around.parameters() if p.requires_grad], 0.05)
    for step in range(2):
        around(**batches(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return around.temperature.item()


def loaded_whole(model: Any, batches: Any) -> Any:
    """The state of a larger module around it."""
    around = nn.ModuleDict({"inner": model, "more": nn.Linear(2, 2).double()})
    state = copy.deepcopy(around.state_dict())
    learn(model, adamw(model), batches(0))
    around.load_state_dict(state)
    return learn(model, adamw(model), batches(1))


def accuracy(model: Any, batches: Any) -> Any:
    """Metrics from logits, in evaluation."""
    model.eval()
    said = []
    with torch.no_grad():
        for step in range(2):
            given = batches(step)
            out = model(**given)
            said += [out["loss"].item(), (whole(out["logits"]).argmax(-1) == given["labels"]).double().mean().item()]
    model.train()
    learn(model, adamw(model), batches(3))
    return said


PIPES = ("pp",)
SEVERAL = ("micro-batches", "pp")
LOOPS: Mapping[str, tuple[Loop, Mapping[str, str | None]]] = {
    "counted": (counted(False), {"pp": "stage had counted"}), "counted by names": (counted(True), {}),
    "accumulated": (looped.accumulated, {}), "no_sync": (looped.unsynchronized, {}), "two calls": (looped.two_calls, {}),
    "listed": (looped.listed, {}),
    "transformed": (looped.transformed, {}), "retained": (looped.retained, dict.fromkeys(SEVERAL, "")),
    "dropped": (looped.dropped, {}),
    "another output": (looped.through_other_output, dict.fromkeys(SEVERAL, "loss_fn=")), "by position": (looped.as_first, {}),
    "half a batch": (looped.half_a_batch, dict.fromkeys(ALL, "[8, 5]")),
    "longer": (looped.longer, dict.fromkeys(ALL, "[8, 5]")),
    "adversarial": (looped.adversarial, dict.fromkeys(ALL, "requires a gradient")), "sam": (looped.perturbed, {}),
    "norm of norms": (looped.norm_of_norms, dict.fromkeys(PIPES, "of its own stages")),
    "edited gradients": (looped.edited_gradients, {}),
    "finite": (looped.finite, {}), "overwritten batch": (looped.overwritten_batch, dict.fromkeys(SEVERAL, RUNS)),
    "several optimizers": (several_optimizers, {}), "muon": (by_muon, {}),
    "by layer": (by_layer, {}), "one layer alone": (ends_alone, {}), "grown": (grown, {}), "edited state": (edited_state, {}),
    "copied state": (copied_state, {}),
    "one cycle": (_scheduled(lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=6)), {}),
    "plateau": (_scheduled(lambda o: schedulers.ReduceLROnPlateau(o, patience=0), "loss"), {}),
    "warmed up": (_scheduled(lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.CosineAnnealingWarmRestarts(o, 2)], [2])), {}),
    "scaler": (scaled, dict.fromkeys(PIPES, "")), "hooked optimizer": (hooked_optimizer, {}), "lookahead": (lookahead, {}),
    "vectors": (vectors, {**dict.fromkeys(ALL, ".copy_"), "pp": "of its own stages"}), "averaged copy": (averaged_copy, {}),
    "swa": (swa, {}),
    "restored": (restored, {}), "partly loaded": (partly_loaded, {}), "half": (converted, dict.fromkeys(ALL, "")),
    "to itself": (converted_to_itself, {}), "tied later": (tied_later, dict.fromkeys(ALL, "before autoparallel")),
    "parametrized later": (parametrized_later, dict.fromkeys(ALL, "before autoparallel")),
    "frozen for a while": (frozen_for_a_while, {}), "compiled": (compiled, {}), "wrapped": (wrapped, {}),
    "state around": (loaded_whole, {}),
    "accuracy": (accuracy, {}), **HABITS, **IDIOMS, **RESUMED, **RECIPES,
}
"""{name: (loop, {way: a word of its refusal, or RUNS})}: equal under the ways that are not named."""

_PLANS: dict[str, Any] = {}


def _parallel(model: nn.Module, way: str) -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with captured_once("loops", double=True):
        if way == DEFERRED:
            parallel: Any = autoparallel(model, mesh, pins=dict(WAYS["dp"]), progress=False)
            with torch.no_grad():
                parallel(**batch())
            return parallel
        if way in _PLANS:
            return autoparallel(model, mesh, ((), batch()), plan=_PLANS[way], progress=False)
        parallel = autoparallel(model, mesh, ((), batch()), pins=dict(WAYS[way]), progress=False)
    _PLANS[way] = parallel.plan
    return parallel


def trials(rank: int, way: str, names: Sequence[str] = tuple(LOOPS)) -> list[tuple[str, bool, str]]:
    """(loop, whether it came out as it must, what came out) under a way."""
    torch.set_num_threads(1)
    return [(name, *_tried(name, way)) for name in names]


def _kind(way: str) -> str:
    """The way whose words are those of another."""
    pins = WAYS.get(way, {})
    if "pp" in pins or way in ALL:
        return "pp" if "pp" in pins else way
    return "tp" if pins.get("tp", 1) > 1 else "micro-batches" if pins.get("microbatches", 1) > 1 else "dp"


def _tried(name: str, way: str) -> tuple[bool, str]:
    loop, by_way = LOOPS[name]
    word = by_way.get(_kind(way))
    torch.manual_seed(0)
    single = Net().double()
    model = copy.deepcopy(single)  # kept, for eval() captures it once more
    parallel = _parallel(model, way)

    def together() -> tuple[Any, State]:
        said = loop(parallel, batch)
        return said, parallel.full_state_dict()

    return judged(lambda: loop(single, batch), together, single.state_dict, word, equal=word is None, runs=word == RUNS)


def main(arguments: Sequence[str]) -> int:
    """Print what did not come out as it must."""
    return report(__doc__, arguments, trials, LOOPS, (*WAYS, DEFERRED), usual=(*ALL, "pp x dp"), four=FOUR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
