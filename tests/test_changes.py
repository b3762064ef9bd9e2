"""What would help a plan: changes of cluster and batch, planned and priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from meshwright import Pins
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.planner import capture_model, cluster_of, make_plan, reprice, reprice_batches
from meshwright.resized import of_batch, of_length
from meshwright.views.changes import changes, rebatched
from meshwright.views.explain import explain
from tests.mixtures import MAKERS
from tests.mixtures import make as mixture
from tests.models import make
from tests.test_pinning import BATCH, graph


@pytest.mark.parametrize(
    ("model", "cluster", "pins"),
    [("llama", "v100:1x2", {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2, "schedule": "1f1b", "recompute": "none"}),
     ("mixtral", "v100:1x4", {"dp": 4, "ep": 2, "zero": 3})],
    ids=str,
)
def test_changes_are_what_planning_them_gives(model: str, cluster: str, pins: Mapping[str, Any]) -> None:
    plan = make_plan(graph(model), Cluster.parse(cluster), Pins(**pins))
    step = reprice(plan).predicted.step_seconds
    found = {change.what: change for change in changes(plan)}
    assert all(change.gain >= 0.01 for change in found.values())
    faster = next(change for what, change in found.items() if what.startswith("as many"))
    where = cluster.replace("v100", faster.what.split()[-1])
    assert faster.step_seconds == pytest.approx(reprice(plan, where).predicted.step_seconds)
    assert faster.gain == pytest.approx(step / faster.step_seconds - 1)
    degrees = Pins(**{"pp": 1, "tp": 1, "cp": 1, **{name: pins[name] for name in ("pp", "dp", "tp", "ep") if name in pins}})
    for what, factor in (("twice the batch", 2), ("half the batch", 0.5)):
        larger = make_plan(graph(model, batch=int(factor * BATCH)), Cluster.parse(cluster), degrees).predicted.step_seconds
        gain = factor * step / larger - 1
        assert (what in found) == (gain >= 0.01)
        if what in found:
            assert found[what].step_seconds == pytest.approx(larger)
            assert found[what].gain == pytest.approx(gain)
    assert all(":2x" in change.what for change in found.values() if change.devices == 2)


def refusing(graph: Graph, factor: Fraction) -> Graph:
    """In the place of ``of_batch``, for a graph of which nothing follows at another batch."""
    raise PlanError("a graph inside")


def test_no_change_is_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.views.changes.of_batch", refusing)  # the plan in more micro-batches
    plan = make_plan(graph("mixtral"), Cluster.parse("v100:1x4"), Pins(dp=4, ep=2))
    where = Cluster.parse("v100:1x4")
    free = where.memory_bytes - where.capacity_bytes
    full = replace(where.islands[0].device, memory_bytes=free + 1.001 * plan.predicted.bytes_per_rank)
    tight = reprice(plan, Cluster((replace(where.islands[0], device=full),)))
    assert tight.predicted.fits
    assert not reprice_batches(tight, 2.0).predicted.fits
    assert not any("twice the batch" in change.what for change in changes(tight))


def test_another_batch_need_not_be_divided_by_what_the_old_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Cluster.parse("cpu:1x2")
    plan = make_plan(graph("llama"), where, Pins(pp=2, schedule="gpipe", microbatches=2))
    for factor in (3.0, 1.5):
        found = rebatched(plan, where, factor)
        again = make_plan(graph("llama", batch=int(factor * BATCH)), where,
                          Pins(pp=2, schedule="gpipe", microbatches=int(2 * factor))).predicted
        assert found.schedule.microbatches == 2 * factor
        assert found.predicted.step_seconds == pytest.approx(again.step_seconds, rel=0.01)
        assert found.predicted.tokens_per_second == pytest.approx(again.tokens_per_second, rel=0.01)
    twice = rebatched(plan, where, 2.0).predicted.tokens_per_second
    monkeypatch.setattr("meshwright.views.changes.of_batch", refusing)
    assert rebatched(plan, where, 2.0).predicted.tokens_per_second == pytest.approx(twice, rel=0.01)
    with pytest.raises(PlanError, match=r"3 times the batch on .*a graph inside.*plan again at that batch"):
        rebatched(plan, where, 3.0)


def test_another_batch_on_axes_that_may_split_anything_is_of_the_same_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Cluster.parse("cpu:1x4")
    plan = make_plan(graph("llama"), where, Pins(axes={"x": 4}, microbatches=1))
    assert rebatched(plan, where, 1.0).predicted.step_seconds == plan.predicted.step_seconds
    twice = rebatched(plan, where, 2.0).predicted
    again = make_plan(graph("llama", batch=2 * BATCH), where, replace(plan.to_pins(), microbatches=2)).predicted
    assert (twice.step_seconds, twice.bytes_per_rank) == (again.step_seconds, again.bytes_per_rank)
    assert twice.step_seconds < 2.01 * plan.predicted.step_seconds  # another plan, of its degrees, took 28 times as long
    assert not rebatched(plan, where.with_memory(int(0.99 * twice.bytes_per_rank)), 2.0).predicted.fits
    with pytest.raises(PlanError, match="no whole number of micro-batches"):
        rebatched(plan, where, 0.5)
    mixtral = make_plan(graph("mixtral"), where, Pins(axes={"x": 4}, microbatches=1))
    larger = make_plan(graph("mixtral", batch=2 * BATCH), where, replace(mixtral.to_pins(), microbatches=2)).predicted
    assert rebatched(mixtral, where, 2.0).predicted.step_seconds == larger.step_seconds
    monkeypatch.setattr("meshwright.views.changes.of_batch", refusing)
    with pytest.raises(PlanError, match="another batch on x=4 cannot be priced"):
        rebatched(mixtral, where, 2.0)


def test_they_stand_in_the_answer() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("a100:1x2"), Pins(axes={"x": 2}))
    lines = explain(plan).splitlines()
    verdict = " ".join(explain(plan, changes=False).split())
    assert "bound by compute" in verdict
    assert "waiting for the host" in verdict  # of so small a model kernels run in less than their start
    at = next(n for n, line in enumerate(lines) if line.startswith("changes "))
    assert any(" as many " in line for line in lines[at + 1:])
    assert not any("are not planned" in line for line in lines)
    assert max(map(len, lines)) <= 120
    assert "changes " not in explain(plan, changes=False)


def case(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    return mixture(name) if name in MAKERS else make(name)


def captured(name: str) -> Graph:
    model, batch = case(name)
    return capture_model(model, (), batch, (), None, "fp32")


@pytest.mark.parametrize(
    ("name", "factor"),  # of two sequences whose labels are shifted; of windows
    [(name, Fraction(2)) for name in ("llama", "gpt2", "t5", "Mistral", "OPT", "Bloom")]
    + [(name, Fraction(1, 2)) for name in ("llama", "t5")],
    ids=str,
)
def test_a_graph_of_another_length_is_the_one_captured_at_it(name: str, factor: Fraction) -> None:
    model, batch = case(name)
    longer = {key: x.new_zeros(x.shape[0], int(x.shape[1] * factor)) for key, x in batch.items()}
    found, wanted = of_length(captured(name), factor), capture_model(model, (), longer, (), None, "fp32")
    assert [value.shape for value in found.values.values()] == [value.shape for value in wanted.values.values()]
    for op, other in zip(found.ops, wanted.ops, strict=True):
        assert op.target.startswith("aten.arange.") or (op.target, op.args) == (other.target, other.args)


@pytest.mark.parametrize("name", ["vit", "masked_mean", "t5", "dropout", "heads", "mixtral", "deepseek", "gpt_oss", "Mistral"])
def test_a_graph_of_another_batch_is_the_one_captured_at_it(name: str) -> None:
    if name == "dropout":
        found, wanted = of_batch(graph("gpt2"), Fraction(2)), graph("gpt2", batch=2 * BATCH)
    else:
        model, batch = case(name)
        larger = {key: torch.cat([x, x]) for key, x in batch.items()}
        found, wanted = of_batch(captured(name), Fraction(2)), capture_model(model, (), larger, (), None, "fp32")
    assert [value.shape for value in found.values.values()] == [value.shape for value in wanted.values.values()]
    assert [(op.target, op.args, op.kwargs) for op in found.ops] == [(op.target, op.args, op.kwargs) for op in wanted.ops]


class _Positions(torch.nn.Module):
    """A row for every position, read without asking which."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = torch.nn.Embedding(32, 8), torch.nn.Parameter(torch.randn(6, 8))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.words(ids) + self.positions).square().mean()}


class _Convolved(torch.nn.Module):
    """A causal convolution, cut to the length; and one that makes half as many positions, with a row for each if asked for."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.words, self.table = torch.nn.Embedding(32, 8), torch.nn.Parameter(torch.randn(rows, 8)) if rows else None
        self.causal, self.pairs = torch.nn.Conv1d(8, 8, 4, padding=3), torch.nn.Conv1d(8, 8, 2, stride=2)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(ids).mT
        x = x * self.causal(x)[..., : ids.shape[1]]
        x = self.pairs(x).mT
        return {"loss": (x if self.table is None else x + self.table).square().mean()}


def test_convolutions_follow_another_length() -> None:
    def at(length: int) -> Graph:
        return capture_model(_Convolved(), (), {"ids": torch.zeros(2, length, dtype=torch.int64)}, (), None, "fp32")

    found, wanted = of_length(at(8), Fraction(2)), at(16)
    assert [value.shape for value in found.values.values()] == [value.shape for value in wanted.values.values()]
    assert [(op.target, op.args) for op in found.ops] == [(op.target, op.args) for op in wanted.ops]


def test_lengths_that_are_not_planned_stand_in_the_answer() -> None:
    fixed = capture_model(_Convolved(4), (), {"ids": torch.zeros(2, 8, dtype=torch.int64)}, (), None, "fp32")
    text = " ".join(explain(make_plan(fixed, Cluster.parse("a100:1x2"), Pins(dp=2))).split())
    assert "sequences twice as long are not planned: aten.add.Tensor of the model does not run" in text
    assert "sequences half as long are not planned" in text
    assert "on [2, 8, 8] and [4, 8] (table)" in text


def test_what_does_not_follow_at_another_length_is_refused() -> None:
    with pytest.raises(PlanError, match="no input"):
        of_length(captured("vit"), Fraction(2))
    fixed = capture_model(_Positions(), (), {"ids": torch.zeros(2, 6, dtype=torch.int64)}, (), None, "fp32")
    with pytest.raises(PlanError, match="as long as the sequence"):
        of_length(fixed, Fraction(2))


def test_a_table_of_positions_is_not_read_beyond_its_end() -> None:
    twice = of_length(captured("gpt2"), Fraction(2))
    with pytest.raises(PlanError, match="positions"):
        of_length(twice, Fraction(8))


def test_a_batch_of_one_is_no_batch_that_grows() -> None:
    """Nothing tells its dims of 1 from those that are always 1, and the answer is to plan the larger batch."""
    plan = make_plan(graph("gpt2", 1), Cluster.parse("h100:1x1"), Pins())
    with pytest.raises(PlanError, match=r"the batch of input_ids is 1, and .* which grow with it\); plan again at that"):
        rebatched(plan, cluster_of(plan), 3)
