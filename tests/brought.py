"""What users bring beside a model of tensors in and tensors out: arguments and outputs of all kinds, several calls a step,
states that go around, modes that change between a forward and its backward. Each on one process and under every kind of plan.
Equal, or refused by an error of our own on every rank; nothing else.

    python -m tests.brought                  every case under the ways of WAYS, a line for each that is neither
    python -m tests.brought -v pp carried    a line for each trial: of one way, of the cases whose names hold a word

``test_brought`` runs some of them. Any way of ``tests.strangers`` may be named.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from meshwright.api import autoparallel
from tests import brought_loops as loops
from tests import brought_models as models
from tests.brought_loops import by_name, edited, loss_of, others_then, plain, read, sgd
from tests.brought_models import Given, HalfOut, Net, Numbers, Out, Pair, asking, data, picking
from tests.habits import RUNS
from tests.looped import whole
from tests.strangers import FOUR, WAYS
from tests.trials import State, judged, report

B, D = models.B, models.D


@dataclass(frozen=True)
class Case:
    """``word``: of the refusal that must come; None: it must be equal; "": either."""

    make: Callable[[], nn.Module]
    given: Given = by_name
    loop: Callable[[Any, Given], Sequence[float]] = plain
    word: str | None = None
    loss_fn: Any = None
    only: Mapping[str, str] = field(default_factory=dict)


SEVERAL = {way: "" for way, pins in WAYS.items() if pins.get("microbatches", 1) > 1 or "pp" in pins}
PIPES = {way: "" for way, pins in WAYS.items() if "pp" in pins}
NUMBERS: dict[str, Any] = {"scale": 0.5, "power": 2, "on": False, "how": "sum"}


def _grown(key: str, one: Any, other: Any) -> Case:
    """An argument that is another one at the second call."""
    return Case(Numbers, others_then({key: one}, {key: other}), word=key)


def _picks(how: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: models.Picks(how)


CASES: Mapping[str, Case] = {
    "dataclass": Case(lambda: Net(lambda loss, y, h: Out(loss, y, [h, y])), loop=read),
    "model output": Case(lambda: Net(lambda loss, y, h: HalfOut(loss=loss, states=(h, y))), loop=read),
    "named tuple": Case(lambda: Net(lambda loss, y, h: Pair(loss, (y, h))), loop=read, word=""),
    "loss first": Case(lambda: Net(lambda loss, y, h: (loss, (y, [h]))), loop=read),
    "loss alone": Case(lambda: Net(lambda loss, y, h: loss), loop=lambda m, g: [
        _step(m, m(**data(0))), m(**data(1)).item()]),
    "two losses": Case(lambda: Net(lambda loss, y, h: {"a": loss, "b": h.square().mean()}), loop=lambda m, g: [
        _step(m, _sum(m(**data(n)))) for n in range(2)], loss_fn=lambda out: out["a"] + 0.1 * out["b"], only=SEVERAL),
    "nested": Case(models.Nested, loops.nested, read), "nested number": Case(models.Nested, loops.nested_number, word="weight"),
    "nested turned": Case(models.Nested, loops.turned, word="order"),
    "stars turned": Case(models.Variadic, loops.turned_stars, word="order"),
    "nested longer": Case(models.Nested, loops.nested_longer, word="more"),
    "numbers": Case(Numbers, others_then(NUMBERS)), "scale changes": _grown("scale", 1.0, 2.0),
    "power changes": _grown("power", 2, 3), "switch changes": _grown("on", True, False),
    "text changes": _grown("how", "mean", "sum"),
    "whole becomes real": _grown("power", 2, 2.5), "none becomes number": _grown("mask", None, 0.5),
    "none becomes tensor": _grown("mask", None, torch.ones(D).double() * 0.3),
    "tensor becomes none": _grown("mask", torch.ones(D).double() * 0.3, None),
    "number becomes tensor": _grown("scale", 1.0, torch.tensor(2.0).double()),
    "tensor becomes number": _grown("scale", torch.tensor(2.0).double(), 1.0),
    "left out later": Case(Numbers, others_then({"scale": 2.0}, {}), word="scale"),
    "given later": Case(Numbers, others_then({}, {"scale": 2.0}), word="scale"),
    "not a number": Case(Numbers, others_then({"scale": float("nan")}), loop=lambda m, g: [
        float(loss_of(m(*g(n)[0], **g(n)[1])).isnan()) for n in range(2)]),
    "tensors change": Case(Numbers, others_then({"scale": torch.tensor(1.0).double()}, {"scale": torch.tensor(3.0).double()})),
    "stars": Case(models.Variadic, loops.stars, read),
    "batch encoding": Case(Net, lambda step: ((), dict(UserDict(data(step))))),
    "odd strides": Case(Net, loops.odd_strides), "words": Case(models.Words, loops.words, read, only=SEVERAL),
    "same twice": Case(Numbers, loops.same_twice), "aliases": Case(models.Aliases, loop=read), "named": Case(models.Named),
    "loss of one element": Case(lambda: Net(lambda loss, y, h: {"loss": loss.view(1), "y": y}), loop=lambda m, g: [
        _step(m, loss_of(m(**data(n))).mean()) for n in range(2)], word=""),
    "stored": Case(models.Stored), "patched": Case(models.patched),
    "called twice": Case(lambda: models.called_twice(Net()), loop=read),
    "compiled": Case(lambda: torch.compile(Net(), backend="eager"), word=""),  # type: ignore[arg-type, return-value]
    "evaluated first": Case(Net, loop=loops.evaluated_first), "both at once": Case(Net, loop=loops.both_at_once),
    "gradients given": Case(Net, loop=loops.gradients_given),
    "carried": Case(models.Carries, lambda step: ((), {**data(step), "state": torch.zeros(B, 1, D).double()}), loops.carried,
                    only=PIPES),
    "rivals": Case(models.Rivals, loop=loops.in_turn), "rivals in turns": Case(
        models.Rivals, lambda step: ((), {**data(step), "turn": torch.tensor(1.0).double()}), loops.taking_turns),
    "lazy": Case(models.Lazy, word=""), "counts": Case(models.Counts, word="calls"),
    "evaluated between": Case(Net, loop=loops.evaluated_between),
    "pseudo labels": Case(Net, loop=loops.pseudo),
    "centred gradients": Case(Net, loop=edited(loops.centred)), "rows held": Case(Net, loop=edited(loops.rows_held), word=""),
    "orthogonal gradients": Case(Net, loop=edited(loops.orthogonalized)), 
    "scaled by hand": Case(Net, loop=edited(loops.unscaled, 1024.0)),
    "along the weight": Case(Net, loop=edited(loops.along_the_weight)), "switched": Case(Net, loop=loops.switched),
    "default dtype": Case(lambda: models.Asks(lambda: torch.get_default_dtype() == torch.float64), loop=loops.default_dtype,
                          word=""),
    "thawed in between": Case(Net, loop=loops.thawed_in_between, word=""), "closure": Case(Net, loop=loops.closure),
    "thawed before backward": Case(Net, loop=loops.thawed_before_backward, word=""),
    "distributed": Case(Net, loop=loops.shared_among_ranks(nn.parallel.DistributedDataParallel), word="sums already"),
    "loss closed over": Case(Net, loop=loops.with_loss(loops.closed_over, lambda x: loops.ALPHA.__setitem__(0, x)),
                             loss_fn=loops.closed_over, word=""),
    "loss of an object": Case(Net, loop=loops.with_loss(loops.WEIGHED, lambda x: setattr(loops.WEIGHED, "alpha", x)),
                              loss_fn=loops.WEIGHED, word=""),
    "loss of a method": Case(Net, loop=loops.with_loss(loops.WEIGHED.again, lambda x: setattr(loops.WEIGHED, "alpha", x)),
                             loss_fn=loops.WEIGHED.again, word=""),
    "loss of a module": Case(Net, loop=loops.with_loss(loops.MODULE, lambda x: setattr(loops.MODULE, "alpha", x)),
                             loss_fn=loops.MODULE, word=""),
    "loss of a partial": Case(Net, loop=loops.with_loss(loops.PARTIAL, lambda x: loops.ALPHA.__setitem__(0, x)),
                              loss_fn=loops.PARTIAL, word=""),
    "loss of a buffer": Case(Net, loop=loops.with_loss(loops.MODULE, lambda x: loops.MODULE.weight.fill_(x)),
                             loss_fn=loops.MODULE, word=""),
    "loss of itself": Case(Net, loop=loops.with_loss(loops.closed_over), loss_fn=loops.closed_over),
    "loss with weights": Case(Net, loop=loops.with_loss(loops.learned_loss), loss_fn=loops.learned_loss, word=""),
    "hot out of range": Case(_picks(lambda m, h, y, k: (F.one_hot(k, 5) * y).sum() / 32), picking(5), word="index 5"),
    "gathered out of range": Case(_picks(lambda m, h, y, k: y.gather(-1, k.unsqueeze(-1)).mean()), picking(7), word="index 7"),
    "row out of range": Case(_picks(lambda m, h, y, k: (m.table[k + 1 - 1] * h).mean()), picking(-6), word="index -6"),
    "row from the end": Case(_picks(lambda m, h, y, k: (m.table[k] * h).mean()), picking(-2), read, word=""),
    "label below zero": Case(_picks(lambda m, h, y, k: F.cross_entropy(y.transpose(1, 2), k)), picking(-3), word="index -3"),
    "labels ignored": Case(_picks(lambda m, h, y, k: F.cross_entropy(y.transpose(1, 2), k, ignore_index=-7)), picking(-7)),
    "bags out of range": Case(_picks(lambda m, h, y, k: F.embedding_bag(k, m.table).square().mean()), picking(9),
                              word="index 9"),
    "in a dict": Case(models.Asked, asking(False), read), "takes a gradient": Case(models.Asked, asking(True), word="gradient"),
    "more of a scalar": Case(lambda: Net(lambda loss, y, h: {"loss": loss, "aux": h.square().mean()}),
                             loop=loops.with_more(lambda out: 0.1 * out["aux"]), only=dict.fromkeys(SEVERAL, "loss_fn=")),
    "more of a list": Case(lambda: Net(lambda loss, y, h: Out(loss, y, [h, y])), loop=loops.with_more(
        lambda out: 0.1 * sum(whole(x).abs().mean() for x in out.hidden)), only=dict.fromkeys(SEVERAL, "loss_fn=")),
    "more without gradient": Case(lambda: Net(lambda loss, y, h: {"loss": loss, "y": y}), loop=loops.with_more(
        lambda out: 0.1 * whole(out["y"]).detach().square().mean()), only=PIPES),
    "loss of each sample": Case(
        lambda: Net(lambda loss, y, h: {"loss": (y - h[..., :3]).square().mean((1, 2))}), only=SEVERAL,
        loop=lambda m, g: [_step(m, whole(m(**data(n))["loss"]).mean()) for n in range(2)]),
    "without a graph": Case(lambda: Net(lambda loss, y, h: {"loss": loss.detach()}), only=dict.fromkeys(PIPES, RUNS)),
}


def _sum(out: Any) -> Tensor:
    return out["a"] + 0.1 * out["b"] if isinstance(out, Mapping) else out  # type: ignore[no-any-return]


def _step(model: Any, loss: Tensor) -> float:
    optimizer = sgd(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trials(rank: int, way: str, names: Sequence[str] = tuple(CASES)) -> list[tuple[str, bool, str]]:
    """(case, whether it came out as it must, what came out) under a way."""
    torch.set_num_threads(1)
    return [(name, *_tried(CASES[name], way)) for name in names]


def _tried(case: Case, way: str) -> tuple[bool, str]:
    word = case.only.get(way, case.word)
    single, model = (_made(case) for _ in range(2))

    def together() -> tuple[Any, State]:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        parallel: Any = autoparallel(model, mesh, case.given(0), pins=dict(WAYS[way]), loss_fn=case.loss_fn, progress=False)
        said = case.loop(parallel, case.given)
        return said, parallel.full_state_dict()

    return judged(lambda: case.loop(single, case.given), together, single.state_dict, word, equal=not word, runs=word == RUNS)


def _made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make().double()


def main(arguments: Sequence[str]) -> int:
    """Print what did not come out as it must."""
    from tests import brought

    return report(__doc__, arguments, brought.trials, CASES, WAYS, usual=WAYS, four=FOUR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
