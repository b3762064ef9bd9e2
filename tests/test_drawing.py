"""Random operators in parallel: a single process that is given the numbers that were drawn trains alike, so that what was drawn
is what the backward used, recomputed or not, and what every rank has."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.errors import CaptureError
from tests.drawing import WAYS, trained

FULL = [
    {"dp": 2, "microbatches": 2, "recompute": "full"}, {"tp": 2, "recompute": "selective"},
    {"dp": 2, "zero": 3, "recompute": "full"},
]
ALONE = ("unknown operator",)
RARE = ("gumbel softmax", "mixed up", "shuffled positions", "reparametrized", "gamma", "geometric, cauchy", "log normal",
        "truncated normal by its inverse", "random in place", "binomial", "some of the samples")
NAMES = [name for name in WAYS if name not in (*ALONE, *RARE)]
GROUPS = [NAMES[start::4] for start in range(4)]


@pytest.mark.parametrize("ways", GROUPS, ids=[group[0] for group in GROUPS])
def test_what_is_drawn_is_used(pool: Callable[[int], Any], ways: list[str]) -> None:
    """Under recomputation, micro-batches, data and tensor parallelism."""
    first = pool(2).run(trained, ways, FULL)
    assert [problems for problems, _ in first] == [[], []]


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3, "recompute": "full"}, {"tp": 2, "recompute": "full"}], ids=str)
def test_distributions_and_orders_are_drawn(pool: Callable[[int], Any], pins: dict[str, Any]) -> None:
    """Samples of distributions, and orders of samples and positions."""
    assert [problems for problems, _ in pool(2).run(trained, RARE, [pins])] == [[], []]


SPLIT = {
    2: [{"cp": 2, "attention": "ring"}, {"cp": 2, "attention": "ring", "recompute": "full", "zero": 3},
        {"cp": 2, "attention": "ulysses", "recompute": "selective"}, {"cp": 2, "attention": "all-gather", "microbatches": 2}],
    4: [{"cp": 4, "ulysses": 2, "attention": "ring", "recompute": "full"},
        {"cp": 2, "tp": 2, "attention": "all-gather", "sequence_parallel": True}],
}


@pytest.mark.parametrize("world", SPLIT)
def test_where_the_sequence_is_split(pool: Callable[[int], Any], world: int) -> None:
    """Attention drops by each of its forms what its backward knows and every replica has; no two pieces have the same."""
    problems, numbers = pool(world).run(trained, ("attention", "dropout"), SPLIT[world])[0]
    assert problems == []
    for drawn in numbers:
        kept = [layer.bool() for layer in drawn[::2]]
        pairs = [layer[:, :, row, key].flatten() for layer in kept for row in range(4) for key in range(row + 1)]
        heads = [head.flatten() for layer in kept for head in layer[:, :, 1:].unbind(1)]
        for pieces in (pairs, heads):
            assert len({tuple(piece.tolist()) for piece in pieces}) == len(pieces)
    if world == 2:
        assert all(torch.equal(a, b) for a, b in zip(*numbers[:2], strict=True)), "recomputation changes no number"


def test_a_run_is_repeated_by_its_seed(pool: Callable[[int], Any]) -> None:
    """The same seed draws the same numbers, recomputed or not; another one draws others."""
    ways = ["drop path, timm", "randn_like", "dropout", "one mask for all samples"]
    pins = [{"dp": 2}, {"dp": 2, "recompute": "full"}]
    runs = [pool(2).run(trained, ways, some, seed)[0] for some, seed in ((pins, 5), (pins[:1], 5), (pins[:1], 6))]
    assert [problems for problems, _ in runs] == [[]] * 3
    plain, full = runs[0][1]
    assert all(torch.equal(a, b) for a, b in zip(plain, full, strict=True)), "recomputation changes no number"
    assert all(torch.equal(a, b) for a, b in zip(plain, runs[1][1][0], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(plain, runs[2][1][0], strict=True) if a.numel() > 16)


def test_in_pipelines(pool: Callable[[int], Any]) -> None:
    """The forward that a stage recomputes, and one whose backward is split."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2}
    cases = [pins | {"schedule": "1f1b", "recompute": "full"}, pins | {"schedule": "zbv", "recompute": "none"}]
    ways = ["rrelu", "randn_like", "dropout", "one learned mask for all samples"]
    assert [problems for problems, _ in pool(2).run(trained, ways, cases, 5, 4)] == [[], []]


@pytest.mark.parametrize(("name", "pins"), [
    ("beit", {"dp": 2, "zero": 3, "recompute": "full", "microbatches": 2}), ("funnel", {"tp": 2, "recompute": "full"}),
])
def test_published_models(pool: Callable[[int], Any], name: str, pins: dict[str, Any]) -> None:
    """Dropout and drop path of two models whose losses are coarse in their weights, so that slopes of the loss say little."""
    found = pool(2).run(trained, name, [pins])
    assert [problems for problems, _ in found] == [[], []]
    assert len(found[0][1][0]) > 5, "dropouts and drop paths were found"


def test_an_operator_without_a_rule(pool: Callable[[int], Any]) -> None:
    """Which draws unseen: every rank draws the same."""
    assert [problems for problems, _ in pool(2).run(trained, ALONE, [{"dp": 2, "recompute": "full"}])] == [[], []]


class _Inside(nn.Module):
    """Operators that drop out inside, where nobody sees the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inside(x).chunk(3, -1))
        h = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.gru(self.lstm(h)[0])[0]
        return {"loss": self.out(h).square().mean(), "out": h.detach()}


def _slopes(rank: int, cases: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """(loss, slope by the gradient, slope by differences) along one direction of all weights, the same numbers drawn."""
    found = []
    for pins in cases:
        torch.manual_seed(3)
        model, x = _Inside().double(), torch.randn(4, 3, 8, dtype=torch.float64)
        way = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        parallel: Any = autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)

        def loss(parallel: Any = parallel, x: torch.Tensor = x) -> torch.Tensor:
            parallel._calls = 0  # draw again what was drawn
            return parallel(x)["loss"]  # type: ignore[no-any-return]

        first = loss()
        first.backward()
        slope = sum(float((p.grad.full_tensor() * way[name]).sum()) for name, p in parallel.named_parameters())
        state, step, ends = model.state_dict(), 1e-5, []
        for sign in (1, -1):
            parallel.load_state_dict({name: p + sign * step * way[name] for name, p in state.items()})
            ends.append(float(loss().detach()))
        found.append((float(first.detach()), slope, (ends[0] - ends[1]) / (2 * step)))
        parallel.load_state_dict(state)
        assert float(parallel(x)["loss"].detach()) != found[-1][0], "another call draws anew"
    return found


def test_dropout_inside_attention_and_recurrent_layers(pool: Callable[[int], Any]) -> None:
    """The backward uses what the forward dropped, recomputed or not: the gradient is the slope of the loss at these numbers."""
    cases = [{"dp": 2, "tp": 1, "microbatches": 2, "recompute": kind} for kind in ("none", "selective", "full")]
    first, second = pool(2).run(_slopes, [*cases, {"tp": 2, "dp": 1, "recompute": "full"}])
    assert first == second
    for _, by_gradient, by_differences in first:
        assert by_gradient == pytest.approx(by_differences, rel=1e-6)
    assert len({loss for loss, _, _ in first[:3]}) == 1, "recomputation changes no number"


class _Branches(nn.Module):
    """Two products whose weights tensor ranks split along what they contract; what is dropped of both is added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.up(x).relu()
        return {"loss": (x + (F.dropout(self.a(h), 0.5) + F.dropout(self.b(h), 0.5))).tanh().square().mean()}


def _dropped(rank: int, all_pins: list[dict[str, Any]]) -> list[tuple[bool, float, dict[str, torch.Tensor]]]:
    """Whether pending sums pass dropouts, the loss, and gradients."""
    found, x = [], torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3))
    for pins in all_pins:
        torch.manual_seed(5)
        parallel = autoparallel(_Branches(), init_device_mesh("cpu", (2,)), ((), {"x": x}), pins=pins, progress=False)
        dropouts = [op.name for op in parallel.plan.graph.ops if op.target == "aten.dropout.default"]
        ways = [parallel.plan.assignments.get(name) for name in dropouts]
        loss = parallel(x=x)["loss"]
        loss.backward()
        grads = {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}
        found.append((ways == [{"tp": "+0"}] * 2, float(loss), grads))
    return found


def test_dropout_of_a_pending_sum_is_that_of_the_sum(pool: Callable[[int], Any]) -> None:
    """Every rank drops the same of its term."""
    tensors = {"up.weight": "[_@tp, _]", "a.weight": "[_, _@tp]", "b.weight": "[_, _@tp]"}
    pins: dict[str, Any] = {"dp": 1, "tp": 2, "sequence_parallel": False, "tensors": tensors}
    whole = {**pins, "operators": {"*:dropout*": "", "*:add*": ""}}
    for (passes, loss, grads), (passed, wanted, others) in pool(2).run(_dropped, [pins, whole]):
        assert passes
        assert not passed
        assert loss == pytest.approx(wanted, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, others[name], msg=name)


class _Asking(nn.Module):
    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inside, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inside(x) * self.ask(x)).sum()


def _seeded(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.rand_like(x)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "python": (lambda x: random.uniform(0, 1), r"test_drawing\.py.*draws from Python's random"),
    "numpy": (lambda x: float(numpy.random.rand()), r"draws from Python's numpy\.random"),
    "seeded": (_seeded, r"test_drawing\.py.*sets the state of torch's generator \(torch\.manual_seed\)"),
    "generator": (lambda x: torch.rand(4, generator=torch.Generator()), r"test_drawing\.py.*torch\.Generator of its own"),
    "generator in place": (lambda x: torch.empty(4).normal_(generator=torch.Generator()), r"torch\.Generator of its own"),
    "generator of an overload": (lambda x: torch.ops.aten.rand.generator([4], generator=torch.Generator()),
                                 r"torch\.(_C\.)?Generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_could_draw_is_refused(name: str) -> None:
    """By module and line, with what to do; and the process goes on to draw what it would have drawn."""
    ask, message = REFUSED[name]
    model = _Asking(ask)
    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, (torch.ones(2, 4),), {})
    assert "torch.manual_seed before autoparallel" in str(caught.value)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_dropout_in_place_is_dropout() -> None:
    """One spelling, so that it is priced and split as such; one whose mask is read is kept with its mask."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25, inplace=True))
    found = [op for op in capture(model, (torch.ones(2, 4),), {}).ops if op.target != "aten.linear.default"]
    assert [(op.target, op.args[1:]) for op in found] == [("aten.dropout.default", (0.25, True))]
    masked = capture(_Asking(lambda x: torch.native_dropout(x, 0.5, True)[1]), (torch.ones(2, 4),), {})
    assert "aten.native_dropout.default" in {op.target for op in masked.ops}


class Walks(nn.Module):
    """Calls its modules twice, in an order that each process has for itself, as one that walks a set does."""

    def __init__(self, order: tuple[float, ...]) -> None:
        super().__init__()
        self.inside, self.drop, self.order = nn.Linear(8, 8), nn.Dropout(0.5), order

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        one, two = (found for _, found in sorted((size, self.drop(self.inside(x * size))) for size in self.order))
        return {"loss": (one - two.tanh()).square().mean(), "one": one, "two": two}


def _walked(rank: int, operators: dict[str, str]) -> list[Any]:
    torch.manual_seed(0)
    parallel: Any = autoparallel(
        Walks((1.0, 2.0)[::1 - 2 * rank]), init_device_mesh("cpu", (2,)), ((), {"x": torch.ones(4, 8)}), progress=False,
        pins={"axes": {"x": 2}, "zero": 0, "operators": operators})
    found = parallel(x=torch.ones(4, 8))
    return [found[name].redistribute(placements=[Replicate()]).to_local().tolist() for name in ("one", "two")]


@pytest.mark.parametrize("operators", [{"drop*:*": ""}, {"inside:*": "x=n", "inside@1:*": "", "drop*:*": ""}], ids=str)
def test_replicas_agree_whatever_order_each_process_walks_in(pool: Callable[[int], Any], operators: dict[str, str]) -> None:
    """Calls of a module are named by their turn, which is another one there."""
    here, there = pool(2).run(_walked, operators)
    assert here == there
    assert any(0.0 in row for row in here[0])


def _modules(rank: int) -> dict[str, list[float]]:
    """What each of the parallel modules of a process draws in its first calls."""
    torch.manual_seed(0)
    mesh, x, found = init_device_mesh("cpu", (2,)), torch.ones(4, 8), {}
    models = [Walks((1.0, 2.0)), Walks((1.0, 2.0))]

    def build(model: nn.Module) -> Any:
        return autoparallel(model, mesh, ((x,), {}), pins={"dp": 2}, progress=False)

    def said(parallel: Any) -> list[float]:
        with torch.no_grad():
            return [value for _ in range(2) for value in (parallel(x)["one"].full_tensor() != 0).flatten().tolist()]

    place = torch.get_rng_state()
    first, second = (build(model) for model in models)
    found["copied"], found["copied again"] = (said(copy.deepcopy(first)) for _ in range(2))
    found |= {"first": said(first), "second": said(second)}
    torch.rand(1)
    found["its model once more, later"] = said(build(models[0]))
    torch.set_rng_state(place)
    with torch.no_grad():
        for p in models[0].parameters():
            p.mul_(1.001)
    assert said(build(models[0])) == found["first"]  # torch's numbers do not depend on weights either
    assert said(build(models[1])) == found["second"]
    return found


def test_modules_of_one_process_draw_apart(pool: Callable[[int], Any]) -> None:
    """Twins, a copy that teaches, an ensemble: each has masks of its own, as in one process, and the same ones in every run."""
    found, there = pool(2).run(_modules)
    assert found == there == pool(2).run(_modules)[0]
    assert len({tuple(kept) for kept in found.values()}) == len(found)
