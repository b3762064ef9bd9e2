"""Micro-batches as an axis in time: what is split, what is made once, and what cannot be accumulated."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.api import autoparallel
from meshwright.compiler.structure import structure
from meshwright.compiler.structure.microbatch import split_counts, split_time
from meshwright.errors import VerifyError
from meshwright.ir.graph import FILL, Graph
from meshwright.ir.plan import Plan, PlanError, Schedule
from meshwright.ir.writing.plans import plan_text
from meshwright.passes import rank_program
from meshwright.passes.verify import verify
from meshwright.planner import capture_model, rules_of
from meshwright.programs import checked_program
from tests.equality import differences


class Normed(nn.Module):
    """A batch norm between two linears, and a loss that is a mean."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(8, 8), norm, nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.out(self.norm(self.inside(x))), x[:, :1] * 2)


def split(norm: nn.Module, count: int = 2) -> tuple[Graph, Schedule]:
    graph = split_counts(capture_model(Normed(norm), (torch.randn(8, 8),), {}, (), None, "fp32"))
    return graph, split_time(graph, dict(rules_of(graph)[0]), count, {"x": 0})


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_statistics_need_the_whole_batch(tracked: bool) -> None:
    """With running statistics or without, and the error says where and what to do."""
    with pytest.raises(PlanError, match=r"batch_norm of norm .*microbatches=1"):
        split(nn.BatchNorm1d(8, track_running_stats=tracked))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8).eval(), nn.LayerNorm(8)], ids=["given statistics", "layer norm"])
def test_what_needs_no_batch_is_accumulated(norm: nn.Module) -> None:
    """The targets are made once per step, everything that reads a parameter once per micro-batch, the loss as a sum."""
    graph, schedule = split(norm)
    assert {op.name for op in graph.ops if op.target in ("aten.slice.Tensor", "aten.mul.Tensor")} == schedule.prologue
    assert set(schedule.time) == {op.name for op in graph.ops} - schedule.prologue


def test_what_changes_once_a_call_is_named() -> None:
    """Vectors of a spectral norm need no batch, and micro-batches would change them several times."""
    with pytest.raises(PlanError, match=r"changes buffer 'norm\.parametrizations\.weight\.0\._u' once a call.*microbatches=1"):
        split(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


def test_one_micro_batch_splits_nothing() -> None:
    assert split(nn.BatchNorm1d(8), 1)[1] == Schedule()


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"microbatches=3 does not divide the batch 8 of input 'x'"):
        split(nn.LayerNorm(8), 3)


class Carried(nn.Module):
    """Every layer writes into zeros that the layer before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y, made, target = x, torch.zeros_like(x), x * 2
        for first, second in self.layers:
            made = made.clone()
            made[:, :4] = first(y)[:, :4]
            y, made = y + second(torch.relu(made)), torch.zeros_like(y)
        return {"loss": nn.functional.mse_loss(y, target), "zeros": made}


def test_a_fill_is_made_where_it_is_read_a_piece_at_a_time() -> None:
    """Zeros that one operator of the micro-batches reads are as large as a micro-batch; what leaves the model is whole."""
    graph = split_counts(capture_model(Carried(), (torch.randn(8, 8),), {}, (), None, "fp32"))
    schedule = split_time(graph, dict(rules_of(graph)[0]), 2, {"x": 0})
    *read, last = (op.name for op in graph.ops if op.target == FILL)
    assert len(read) == 3
    assert all(schedule.time[name] == "dim0" for name in read)
    assert last in schedule.prologue
    assert schedule.prologue.isdisjoint(read)


def _carried(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, batch = Carried(), {"x": torch.randn(8, 8)}

    def build(pins: dict[str, Any]) -> nn.Module:
        pins = {"tp": 1, "microbatches": 2, "recompute": "none", **pins}
        return autoparallel(model, init_device_mesh("cpu", (2,)), ((), batch), pins=pins, progress=False)

    cases: list[dict[str, Any]] = [{"pp": 2, "schedule": "1f1b"}, {"dp": 2, "zero": 1}]
    return differences(rank, model, batch, {str(pins): partial(build, pins) for pins in cases})


def test_a_fill_that_a_later_stage_reads(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_carried) == [[], []]


OPERATORS: Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = (
    lambda a, b: a * b, lambda a, b: a + b, lambda a, b: a - 2 * b, lambda a, b: a / (b * b + 1), lambda a, b: a.detach() * b,
    lambda a, b: torch.log1p(a * a) + b, lambda a, b: torch.sqrt(a * a + 0.1), lambda a, b: torch.where(a > b, a, b * b),
)
"""Of two values; some are linear in one, in both or in none."""


class Drawn(nn.Module):
    """A loss drawn from a seed: sums over the batch, of ``layers`` too, and what is made of them, in no particular form."""

    def __init__(self, seed: int, layers: int = 0) -> None:
        super().__init__()
        self.seed, self.inside, self.out = seed, nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        draw, y, sums = random.Random(self.seed), torch.tanh(self.inside(x)), list[torch.Tensor]()
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
            sums += [draw.choice((torch.sum, torch.std))(y[:, 0]), (y[:, 1] > 0).float().mean()]
        y = self.out(y)
        columns = [y[:, 0], y[:, 1] * x[:, 0], y[:, 2] ** 2]
        sums += [draw.choice((torch.sum, torch.mean, torch.std))(column) for column in columns]
        sums.append((y > 0).float().mean())
        for _ in range(5):
            sums.append(draw.choice(OPERATORS)(draw.choice(sums), draw.choice(sums)))
        return {"loss": sum(sums[4:], start=sums[0]), "of the batch": sums[-1], "rows": y}


def _drawn(rank: int, cases: Sequence[Mapping[str, Any]], layers: int = 0) -> list[str]:
    """By the number of a case its seed."""
    found = []
    for seed, more in enumerate(cases):
        torch.manual_seed(seed)
        model, batch = Drawn(seed, layers), {"x": torch.randn(8, 6)}
        pins = {"dp": 1, "tp": 1, "microbatches": 4, "recompute": "none", **more}

        def build(
            model: nn.Module = model, batch: dict[str, torch.Tensor] = batch, pins: Mapping[str, Any] = pins
        ) -> nn.Module:
            return autoparallel(model, init_device_mesh("cpu", (2,)), ((), batch), pins=pins, progress=False)

        found += differences(rank, model, batch, {f"seed {seed}": build})
        if not seed:
            with torch.no_grad():
                single, parallel = model.eval()(**batch), build().eval()(**batch)
            whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in parallel.items()}
            found += [f"outputs: {name}" for name in single if not torch.allclose(single[name], whole[name], rtol=1e-4)]
    return found


def test_any_loss_of_the_whole_batch(pool: Callable[[int], Any]) -> None:
    """Gradients are those of one process whichever operators stand between sums over the batch and the loss."""
    assert pool(2).run(_drawn, [{"dp": 2, "pp": 1}] * 5) == [[], []]


STAGED: Sequence[Mapping[str, Any]] = (
    {"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "interleaved1f1b", "virtual_stages": 2}, {"pp": 2, "schedule": "zb"},
    {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"pp": 2, "schedule": "gpipe", "recompute": "full"},
)


def test_any_loss_of_the_whole_batch_in_a_pipeline(pool: Callable[[int], Any]) -> None:
    """The same where sums are made in several stages, whatever the order of their micro-batches."""
    assert pool(2).run(_drawn, STAGED, 4) == [[], []]


class Apart(nn.Module):
    """A mean over samples, beside one that is squared and a norm of a weight."""

    def __init__(self, squared: bool, norm: bool) -> None:
        super().__init__()
        self.squared, self.norm, self.inside, self.out = squared, norm, nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(x)
        loss = nn.functional.mse_loss(self.out(torch.relu(y)), x[:, :1])
        loss = loss + y.mean() ** 2 if self.squared else loss
        return loss + 0.1 * (self.out.weight**2).sum() if self.norm else loss


@pytest.mark.parametrize(("squared", "norm", "again"), [(False, True, 0), (True, False, 2), (True, True, 2), (False, False, 0)])
def test_only_what_gradients_depend_on_runs_ahead(squared: bool, norm: bool, again: int) -> None:
    """Nothing for a sum that is only added to others; for a squared one what makes it, not the rest of the forward."""
    graph = capture_model(Apart(squared, norm), (torch.randn(8, 8),), {}, (), None, "fp32")
    schedule = split_time(graph, dict(rules_of(graph)[0]), 2, {"x": 0})
    assert bool(schedule.epilogue) == (squared or norm)
    assert len(schedule.ahead) == again
    assert schedule.epilogue.isdisjoint(schedule.time)


def test_what_runs_ahead_is_priced_and_said() -> None:
    def planned(squared: bool, count: int, pp: int = 1) -> Plan:
        pins = {"dp": 2 // pp, "tp": 1, "pp": pp, "microbatches": count, "recompute": "none"}
        return mw.plan(Apart(squared, True), "h100:1x2", (torch.randn(4096, 8),), pins=pins, progress=False)

    plans = {(squared, count): planned(squared, count) for squared in (False, True) for count in (1, 2)}
    again = {key: plan.predicted.recomputation_seconds for key, plan in plans.items() if plan.predicted is not None}
    assert again[False, 1] == again[True, 1] == again[False, 2] == 0.0 < again[True, 2]
    assert any("one more forward of 2 of" in note for note in plans[True, 2].notes)
    assert any("run once a step" in note for note in plans[False, 2].notes)
    staged = [planned(squared, 2, pp=2) for squared in (False, True)]
    without, with_it = (plan.predicted for plan in staged)
    assert without is not None
    assert with_it is not None
    assert with_it.step_seconds > without.step_seconds
    assert any("one more forward through the stages" in note for note in staged[True].notes)


def test_an_epilogue_is_read_from_a_file_as_it_was_written() -> None:
    pins = {"tp": 1, "pp": 1, "microbatches": 2}
    plan = mw.plan(Apart(True, True), "cpu:1x2", (torch.randn(8, 8),), pins=pins, progress=False)
    data = json.loads(plan_text(plan))
    read = Plan.from_dict(data)
    assert plan_text(read) == plan_text(plan)
    assert (len(read.schedule.epilogue), len(read.schedule.ahead)) == (len(plan.schedule.epilogue), len(plan.schedule.ahead))
    checked_program(read, 1)
    data["decisions"]["ahead"] = []
    with pytest.raises(PlanError, match=r"damaged: schedule\.ahead"):
        checked_program(Plan.from_dict(data), 0)
    data["decisions"]["ahead"] = ["none such"]
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_dict(data)


@pytest.mark.parametrize("change", ["known late", "summed otherwise", "read at once"])
def test_a_program_whose_epilogue_is_wrong_is_refused(change: str) -> None:
    pins = {"dp": 2, "microbatches": 2, "pp": 1}
    plan = mw.plan(Apart(True, False), "cpu:1x2", (torch.randn(8, 8),), pins=pins, progress=False)
    rules, _ = rules_of(plan.graph)
    program = rank_program(plan, rules, 0)
    verify(program, plan.graph, rules)
    collected = program.collected
    if change == "known late":
        collected = tuple(replace(one, ahead=False) for one in collected)
    elif change == "summed otherwise":
        collected = tuple(replace(one, time=None) for one in collected)
    else:
        collected = tuple(replace(one, value=program.inputs[0].name) for one in collected)
    with pytest.raises(VerifyError):
        verify(replace(program, collected=collected), plan.graph, rules)


class Grouped(nn.Module):
    """A loss over groups of samples that lie next to each other."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.inside, self.out, self.groups = nn.Linear(8, 8), nn.Linear(8, 3), groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(self.inside(x).tanh())
        return nn.functional.softplus(y.view(self.groups, len(x) // self.groups, -1).mean(-1).diff(dim=1)).mean()


def _grouped(groups: int, cluster: str, **pins: Any) -> Plan:
    return mw.plan(Grouped(groups), cluster, (torch.randn(16, 4, 8),), pins=pins)


@pytest.mark.parametrize("model", [Normed(nn.LayerNorm(8)), Apart(True, True), Grouped(4), Carried()],
                         ids=["normed", "apart", "grouped", "carried"])
def test_other_counts_are_split_alike(model: nn.Module) -> None:
    """What is known of one number of micro-batches serves the others, but for what they do not divide."""
    batch = torch.randn(16, 4, 8) if isinstance(model, Grouped) else torch.randn(16, 8)
    graph = split_counts(capture_model(model, (batch,), {}, (), None, "fp32"))
    rules = rules_of(graph)[0]
    known = structure.Structure(graph, rules)

    def either(of: Callable[[int], Schedule], count: int) -> Schedule | str:
        try:
            return of(count)
        except PlanError as error:
            return str(error)

    for count in (2, 3, 4, 8, 16):
        alone = either(lambda one: split_time(graph, rules, one, known.batch_inputs), count)
        assert either(known.schedule, count) == alone
    assert isinstance(known.schedule(4), Schedule)


@pytest.mark.parametrize("data", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_micro_batches_of_data_ranks_part_no_groups(groups: int, count: int, data: int, monkeypatch: Any) -> None:
    """A micro-batch has its rows from every rank's share: both must hold whole groups at once, or it is refused before it is
    planned, and where a plan says so all the same, before it runs."""
    whole = count == 1 or groups % (data * count) == 0
    if whole:
        for rank in range(data):
            checked_program(_grouped(groups, f"cpu:1x{data}", dp=data, tp=1, microbatches=count), rank)
        return
    with pytest.raises(PlanError, match="groups" if groups % count == 0 else "cannot split"):
        _grouped(groups, f"cpu:1x{data}", dp=data, tp=1, microbatches=count)
    monkeypatch.setattr(structure, "check_groups", lambda *_: None)
    if groups % count == 0:
        plan = _grouped(groups, f"cpu:1x{data}", dp=data, tp=1, microbatches=count)
        with pytest.raises(VerifyError, match="whole groups"):
            checked_program(plan, 0)


@pytest.mark.parametrize("groups", [2, 4])
def test_the_search_parts_no_groups(groups: int) -> None:
    for count in (2, 4):
        if groups % count == 0:
            plan = _grouped(groups, "h100:1x4", microbatches=count)
            assert {checked_program(plan, rank).microbatches for rank in range(4)} == {count}


class Mixed(nn.Module):
    """Two linears and a loss between all samples; what goes into the loss goes out too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(self.inside(x).tanh())
        z = nn.functional.normalize(y, dim=-1)
        return {"loss": (y - t).square().mean() + nn.functional.cross_entropy(z @ z.t() * 3, torch.arange(len(x))), "y": y}


ROWS_AND_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "rows late": {"inside:linear": "x=n", ":tanh": "x=dim1", "out:linear": "x=k", ":sub": "x=dim0", ":div": "x=dim0"},
    "rows early": {"inside:linear": "x=b0", ":tanh": "x=dim1", "out:linear": "x=k", ":sub": "x=dim1"},
    "rows out": {"inside:linear": "x=n", "out:linear": "x=b0", ":sub": "x=dim1", ":div": "x=dim1"},
    "columns out": {"inside:linear": "x=b0", ":tanh": "x=dim0", "out:linear": "x=n", ":sub": "x=dim0", ":div": "x=dim1"},
}
"""Operators that have rows of their own on each device beside others that have all rows of a micro-batch, columns of which
may go out, or into the loss of all samples."""


def _mixed(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, batch = Mixed().double(), {"x": torch.randn(8, 8).double(), "t": torch.randn(8, 4).double()}
    whole = model(**batch)["y"]
    problems = []
    for name, operators in ROWS_AND_COLUMNS.items():
        made = partial(autoparallel, mesh=init_device_mesh("cpu", (2,)), example_inputs=((), batch), progress=False,
                       pins={"axes": {"x": 2}, "microbatches": 2, "zero": 0, "operators": operators})
        problems += [f"{name}: {one}" for one in differences(rank, model, batch, {"": lambda made=made: made(deepcopy(model))})]
        out = made(deepcopy(model))(**batch)["y"].full_tensor()
        problems += [] if torch.allclose(out, whole) else [f"{name}: other outputs"]
    return problems


def test_micro_batches_are_of_the_same_rows(pool: Callable[[int], Any]) -> None:
    """Where some operators split the rows over devices and others do not, all micro-batches are cut before they are split."""
    assert pool(2).run(_mixed) == [[], []]
