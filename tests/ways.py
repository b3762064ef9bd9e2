"""What is promised of calls, modes, plans and state holds under every kind of plan: one model, tried in each way.

    python -m tests.ways            the ways of WAYS, a line for each trial that did not come out as it must
    python -m tests.ways -v tp      a line for each trial of one way
    python -m tests.ways calls      of one of PARTS

A trial is refused by an error of our own, with the words that it must say, or passes; on every rank alike. ``test_ways`` runs
one of the ways.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.api import autoparallel
from meshwright.errors import MeshwrightError
from meshwright.runtime.checks.elsewhere import Elsewhere
from tests.equality import compare
from tests.trials import parser_of

WAYS: Mapping[str, Mapping[str, Any]] = {
    "dp": {"dp": 2, "zero": 2, "microbatches": 1}, "micro-batches": {"dp": 2, "zero": 3, "microbatches": 2},
    "tp": {"dp": 1, "tp": 2}, "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2},
}
GAIN = 1.0
Trial = tuple[str, str, Callable[[], Any]]
"""What is tried, a word of the refusal ("" if it must pass), and how: what it returns is what is wrong, if anything is."""


class Options:
    """What a model may keep its numbers in."""

    def __init__(self, alpha: float) -> None:
        self.alpha, self.deep = alpha, {"gains": [1.0, 2.0]}


class Layer(nn.Module):
    """A half of a transformer's block, with what may be changed about it."""

    factor = 1.0

    def __init__(self, eps: float, act: str, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16, eps=eps), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.drop = act, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.drop(self.down(F.gelu(h) if self.act == "gelu" else F.relu(h))) * self.factor


class Net(nn.Module):
    """Training and evaluation are two graphs, and so is evaluation without gradients; ``seen`` counts in evaluation only."""

    shift: Tensor
    seen: Tensor

    def __init__(
        self, eps: float = 1e-5, act: str = "gelu", p: float = 0.0, tied: bool = False, shift: float = 0.1, extra: bool = True,
        alpha: float = 0.5, order: Sequence[int] = (0, 1), words: int = 32,
    ) -> None:
        super().__init__()
        self.embed, self.head, self.order = nn.Embedding(32, 16), nn.Linear(16, words, bias=False), order
        self.layers = nn.ModuleList(Layer(eps, act, p) for _ in range(2))
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((16,), shift))
        self.register_buffer("seen", torch.zeros(()))
        self.options, self.extra, self.table = Options(alpha), extra, {"w": [1.0]}
        self.functions: list[Callable[[Tensor], Tensor]] = [_same]

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) + self.shift * self.table["w"][0]
        for layer in (self.layers[number] for number in self.order):
            x = self.functions[0](layer(x)) * (2 * self.options.alpha)
        logits = self.head(x) * GAIN * self.options.deep["gains"][0]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.training and self.extra:
            loss = loss + 0.01 * logits.pow(2).mean()
        if not self.training:
            self.seen.add_(1)
            logits = logits.softmax(-1)
        return {"loss": loss, "logits": logits if torch.is_grad_enabled() else logits * 2}


def _same(x: Tensor) -> Tensor:
    return x


def _thrice(x: Tensor) -> Tensor:
    return x * 3


def make(**options: Any) -> Net:
    """The model, the same on every call and rank."""
    torch.manual_seed(3)
    return Net(**options)


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Ids and labels."""
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 32, (4, 6), generator=drawn) for name in ("ids", "labels")}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def calls(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """Inputs and initial weights (point 7 of what was found silent), other outputs (6), whose the optimizer is."""
    model = make()
    parallel = _parallel(model, pins)

    def other_weights() -> None:
        torch.manual_seed(rank)
        _parallel(Net(), pins)

    def other_output() -> None:
        found = parallel(**batch())
        total = found["loss"] + 0.1 * _whole(found["logits"]).pow(2).mean()
        total.backward()

    def optimized(trained: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(**batch())["loss"].backward()
        optimizer.step()

    def changed(name: str, value: int) -> dict[str, Tensor]:
        return {**batch(), name: batch()[name].index_fill_(1, torch.tensor([2]), value)}

    one_graph = "pp" not in pins and pins.get("microbatches", 1) == 1
    return [
        ("an id too large", "index 32", lambda: parallel(**changed("ids", 32))),
        ("an id below zero", "index -2", lambda: parallel(**changed("ids", -2))),
        ("a label too large", "index 40", lambda: parallel(**changed("labels", 40))),
        ("another batch on one rank", "make another call", lambda: parallel(**batch(rank))),
        ("another dtype", "i32", lambda: parallel(**{**batch(), "ids": batch()["ids"].int()})),
        ("other weights on one rank", "other weights than rank 0", other_weights),
        ("a gradient through another output", "" if one_graph else "loss_fn=", other_output),
        ("another method on one rank", "while rank 0 calls",
         lambda: parallel.full_state_dict() if rank else parallel(**batch())),
        ("the optimizer of the model", "of parallel.parameters()", lambda: optimized(parallel)),
        ("the model trained by itself", "", lambda: optimized(model)),
    ]


def modes(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """``eval()`` and ``no_grad`` between training steps (4), and ``eval()`` of another."""

    def both() -> Any:
        single = make()
        parallel = _parallel(make(), pins)
        pair = [(model, torch.optim.SGD(model.parameters(), lr=0.5)) for model in (single, parallel)]
        wrong = []
        for step in range(2):
            for model, optimizer in pair:
                model.train()
                model(**batch(step))["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            for gradients in (True, False):
                with torch.set_grad_enabled(gradients):
                    one, two = (model.eval()(**batch(step + 7)) for model, _ in pair)
                wrong += [(step, gradients, name) for name in one
                          if not torch.allclose(one[name], _whole(two[name]), rtol=1e-4, atol=1e-6)]
        state = parallel.full_state_dict()
        return wrong + compare(state, single.state_dict()) if rank == 0 else wrong

    def of_the_model() -> None:
        model = make()
        parallel = _parallel(model, pins)
        model.eval()
        parallel(**batch())

    return [("eval() and no_grad between steps", "", both), ("eval() of the model", "Call parallel.eval()", of_the_model)]


def states(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """Python state that the forward reads (8): set, tried, and set back."""
    model = make()
    parallel = _parallel(model, pins)

    def while_(holder: Any, name: Any, value: Any) -> Callable[[], None]:
        def attempt() -> None:
            table = holder if isinstance(holder, dict | list) else None
            old = getattr(holder, name) if table is None else table[name]

            def put(new: Any) -> None:
                if table is None:
                    setattr(holder, name, new)
                else:
                    table[name] = new

            put(value)
            try:
                parallel(**batch())
            finally:
                put(old)

        return attempt

    places = {
        "options": (model.options, "alpha", 0.7), "a list in options": (model.options.deep["gains"], 0, 3.0),
        "a list in a dict": (model.table["w"], 0, 2.0), "a global": (globals(), "GAIN", 2.0),
        "a class": (Layer, "factor", 2.0), "functions": (model.functions, 0, _thrice),
        "a layer": (model.layers[1], "act", "relu"), "dropout": (model.layers[0].drop, "p", 0.5),
        "a norm": (model.layers[0].norm, "eps", 0.5),
    }
    return [
        *((f"another value in {what}", "was captured", while_(*place)) for what, place in places.items()),
        ("a number that nobody reads", "", while_(model.options.deep["gains"], 1, 7.0)),
        ("all set back", "", lambda: parallel(**batch()) and None),
    ]


def plans(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """A plan beside other models and contradicting arguments (2)."""
    plan = _parallel(make(), pins).plan
    mesh = init_device_mesh("cpu", (2,))

    def frozen() -> Net:
        model = make()
        model.layers[0].up.weight.requires_grad_(False)
        return model

    def beside(build: Callable[[], nn.Module], **more: Any) -> Callable[[], None]:
        return lambda: autoparallel(build(), mesh, plan=plan, progress=False, **more) and None

    def runs() -> Any:
        model = make(shift=0.4)
        found, wanted = (one(**batch())["loss"] for one in (autoparallel(model, mesh, plan=plan, progress=False), model))
        return None if torch.allclose(found, wanted, rtol=1e-5) else (found, wanted)

    return [
        ("another eps", "another model", beside(lambda: make(eps=1e-3))),
        ("another activation", "another model", beside(lambda: make(act="relu"))),
        ("dropout", "another model", beside(lambda: make(p=0.1))),
        ("a tied weight", "the plan", beside(lambda: make(tied=True))),
        ("a loss less", "another model", beside(lambda: make(extra=False))), ("a frozen weight", "the plan", beside(frozen)),
        ("double precision", "the plan", beside(lambda: make().double())),
        ("a loss function", "another model", beside(make, loss_fn=lambda output: output["loss"] * 2)),
        ("another number", "another model", beside(lambda: make(alpha=0.7))),
        ("layers in another order", "another model", beside(lambda: make(order=(1, 0)))),
        ("another precision", "the plan", beside(make, precision="bf16")),
        ("other heads", "the plan", beside(lambda: make(words=24))),
        ("a contradicting pin", "recompute", beside(make, pins={"recompute": "full"})),
        ("other contents of a buffer", "", runs),
    ]


def resumes(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """An interrupted run with dropout, groups of parameters and a scheduler (10): to the bit."""

    def started(seed: int) -> tuple[Any, Any, Any]:
        model = make(p=0.2)
        torch.manual_seed(seed)
        parallel = _parallel(model, pins)
        alike = [[p for p in parallel.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
        optimizer = torch.optim.NAdam([{"params": alike[0], "weight_decay": 0.1, "lr": 0.02}, {"params": alike[1]}], lr=0.01)
        return parallel, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=8)

    def steps(run: tuple[Any, Any, Any], numbers: Sequence[int]) -> list[float]:
        parallel, optimizer, scheduler = run
        losses = []
        for number in numbers:
            loss = parallel(**batch(number))["loss"]
            loss.backward()
            parallel.clip_grad_norm_(0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def interrupted() -> Any:
        folder = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        first = started(1)
        steps(first, range(3))
        first[0].save(folder[0], first[1])
        schedule = copy.deepcopy(first[2].state_dict())
        second = started(99)
        second[0].load(folder[0], second[1])
        second[2].load_state_dict(schedule)
        wanted, found = steps(first, range(3, 6)), steps(second, range(3, 6))
        one, two = first[0].full_state_dict(), second[0].full_state_dict()
        same = wanted == found and all(torch.equal(one[name], two[name]) for name in one)
        return None if same else (wanted, found)

    return [("an interrupted run", "", interrupted)]


def around(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """What people put around a call or its backward: the same gradients, or refused."""
    model = make()
    parallel = _parallel(model, pins)

    def loss() -> Tensor:
        return parallel(**batch())["loss"]  # type: ignore[no-any-return]

    def alike(step: Callable[[], Any]) -> Any:
        """What differs after a backward in the module from one of the model."""
        for one in (parallel, model):
            one.zero_grad()
        step()
        model(**batch())["loss"].backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        return [name for name, p in parallel.named_parameters() if p.numel()
                and not torch.allclose(_whole(p.grad), wanted[name], rtol=1e-4, atol=1e-6)]

    def kept_on_the_cpu() -> None:
        with torch.autograd.graph.save_on_cpu():
            found = loss()
        found.backward()

    def looked_for_anomalies() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            loss().backward()

    def twice() -> None:
        found = loss()
        found.backward()
        try:
            found.backward()
        except RuntimeError:  # of one micro-batch torch's own, as in one process; gradients stay what they were
            return
        raise AssertionError("a second backward went through")

    def stale() -> None:
        found = loss()
        with torch.no_grad():
            for p in parallel.parameters():
                p.mul_(1.0)
        found.backward()

    def twice_differentiable() -> None:
        held = [p for p in parallel.parameters() if p.numel()]
        torch.autograd.grad(loss(), held, create_graph=True, allow_unused=True)

    def again(seed: int) -> list[float]:
        other = make(p=0.3)
        run = _parallel(other, pins)
        torch.manual_seed(seed)
        return [run(**batch(step))["loss"].item() for step in range(2)]

    dummy, given = torch.ones((), requires_grad=True), batch()
    return [
        ("checkpointed", "torch.utils.checkpoint", lambda: checkpoint(lambda _: loss(), dummy, use_reentrant=False).backward()),
        ("reentrant", "torch.utils.checkpoint", lambda: checkpoint(lambda _: loss(), dummy, use_reentrant=True).backward()),
        ("vmap", "torch.func",
         lambda: torch.vmap(lambda ids: parallel(**{**given, "ids": ids})["loss"])(given["ids"][None])),
        ("torch.func.grad", "torch.func", lambda: torch.func.grad(lambda x: parallel(**given)["loss"] * x)(torch.ones(()))),
        ("create_graph", "create_graph", twice_differentiable), ("a stale backward", "a forward and its", stale),
        ("save_on_cpu", "", lambda: alike(kept_on_the_cpu)), ("detect_anomaly", "", lambda: alike(looked_for_anomalies)),
        ("a second backward", "", lambda: alike(twice)),
        ("a plain backward after all this", "", lambda: alike(lambda: loss().backward())),
        ("seeded again", "", lambda: None if again(1) == again(99) else ["other numbers"]),
    ]


def outputs(rank: int, pins: Mapping[str, Any]) -> list[Trial]:
    """What is computed from outputs is of the whole; in a pipeline every rank has all where nothing is trained."""
    model = make()
    parallel = _parallel(model, pins)

    def numbers(training: bool, gradients: bool) -> Any:
        found = []
        with torch.set_grad_enabled(gradients):
            for one in (model, parallel):
                out, labels = one.train(training)(**batch()), batch()["labels"]
                if training and gradients and isinstance(out["logits"], Elsewhere):
                    return _elsewhere(out["logits"])
                logits = out["logits"].detach()
                found.append([float(x.detach()) for x in (
                    out["loss"], logits.sum(), (logits.argmax(-1) == labels).double().mean(),
                    logits.sort(-1).values[..., 0].mean(), logits[1, 2, 3], logits.topk(2).values.mean(),
                    F.cross_entropy(logits.flatten(0, 1), labels.flatten()))])
        parallel.train()
        model.train()
        return None if torch.allclose(*map(torch.tensor, found), rtol=1e-4) else found

    return [(f"numbers, training={mode}, gradients={grad}", "", lambda mode=mode, grad=grad: numbers(mode, grad))
            for mode in (True, False) for grad in (True, False)]


def _elsewhere(logits: Elsewhere) -> Any:
    """What is wrong with how it is refused."""
    try:
        return ["no refusal", logits.sum()]
    except MeshwrightError as error:
        return None if "of the pipeline" in str(error) and logits.shape == (4, 6, 32) else [str(error)]


PARTS: Mapping[str, Callable[[int, Mapping[str, Any]], list[Trial]]] = {
    one.__name__: one for one in (calls, modes, states, plans, resumes, around, outputs)
}
_KEPT: list[nn.Module] = []
"""The models, which the parallel modules watch as long as they are there."""


def _parallel(model: nn.Module, pins: Mapping[str, Any]) -> Any:
    _KEPT.append(model)
    return autoparallel(model, init_device_mesh("cpu", (2,)), ((), batch()), pins=dict(pins), progress=False)


def trials(rank: int, way: str, parts: Sequence[str] = tuple(PARTS)) -> list[tuple[str, bool, str]]:
    """(trial, whether it came out as it must, what came out) of a way."""
    found = []
    for part in parts:
        for what, word, attempt in PARTS[part](rank, WAYS[way]):
            try:
                wrong = attempt()
                bad = bool(wrong) and isinstance(wrong, list | tuple)
                found.append((what, not bad and not word, str(wrong) if bad else "passes"))
            except MeshwrightError as error:
                found.append((what, word != "" and word in str(error), f"refused: {type(error).__name__}: {error}"))
            except Exception as error:
                found.append((what, False, f"RAW {type(error).__name__}: {error}"))
            gc.collect()  # with the frames of an error torch 2.11 keeps the hooks of the checkpoint that it came through
    _KEPT.clear()
    return found


def main(arguments: Sequence[str]) -> int:
    """Print what did not come out as it must."""
    from tests.pool import Pool

    parser = parser_of(__doc__, f"ways ({', '.join(WAYS)}) and parts ({', '.join(PARTS)})")
    parser.add_argument("-v", action="store_true", help="a line for each trial")
    given = parser.parse_args(arguments)
    if unknown := sorted({*given.words} - {*WAYS, *PARTS}):
        parser.error(f"{unknown[0]!r} is neither a way nor a part")
    pool, faults, count = Pool(), 0, 0
    parts = tuple(name for name in given.words if name in PARTS) or tuple(PARTS)
    for way in [name for name in given.words if name in WAYS] or WAYS:
        for (what, *one), (_, *two) in zip(*pool.run(2, trials, way, parts, timeout=600), strict=True):
            count += 1
            good = one[0] and two[0]
            faults += not good
            if not good or given.v:
                other = "" if one == two else f" | rank 1: {two[1]}"
                print(f"{way:14} {what:36} {'' if good else 'WRONG: '}{one[1]}{other}", flush=True)
    pool.close()
    print(f"{count} trials, {faults} not as they must be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
