"""A registered schedule is planned, simulated, replayed, verified and trained through as the built-in ones are; its name
decides nothing."""

from __future__ import annotations

import ast
import contextvars
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.compiler.search.candidates import candidates
from meshwright.compiler.search.plans import simulation_of
from meshwright.cost.cluster import Cluster
from meshwright.cost.memory import pipeline_rank
from meshwright.cost.memory.pipeline_rank import shortest
from meshwright.cost.timeline import lower_bound, simulate
from meshwright.footprint import footprints
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.schedules import illegal_combination, schedule_of, schedule_table, schedules
from meshwright.passes import cut_stages, rank_program
from meshwright.passes.verify import verify
from meshwright.planner import make_plan, rules_of
from tests.pipelines import as_dicts, inner_plan, pipelined
from tests.registered import (
    backwards,
    check_registered,
    check_strangers,
    eager,
    pairs_from_the_end,
    plain,
    registered,
)
from tests.schedules import SCHEDULES

ROOT = Path(mw.__file__).parent
NAMES = ("eager", "backwards")


def searched(**pins: Any) -> Plan:
    """The planner's choice for the small Llama on four devices of which some pins are given."""
    graph = inner_plan("llama", True, 1, (("dp", 1), ("microbatches", 4), ("tp", 1))).graph
    return make_plan(graph, Cluster.parse("cpu:1x4"), Pins(**pins))


@pytest.mark.parametrize(("name", "virtual"), [("eager", 1), ("backwards", 2)])
def test_planned_simulated_replayed_and_verified(name: str, virtual: int) -> None:
    plan = registered(searched, pp=2, dp=2, tp=1, microbatches=4, schedule=name)
    pipeline = plan.pipeline
    assert (pipeline.schedule, pipeline.stages) == (name, 2 * virtual)
    assert pipeline.stage_rank == ((0, 1) if name == "eager" else (1, 1, 0, 0))

    def looked_at() -> None:
        run = simulation_of(plan)
        assert run.table == schedule_table(name, 2, virtual, 4)
        stages, rules = plan.predicted.stages, rules_of(plan.graph)[0]
        sent = stages.transfer, stages.transfer
        bound = lower_bound(name, 2, virtual, 4, stages.forward, stages.backward_input, stages.backward_weight, sent)
        assert 0.7 * run.makespan < bound <= run.makespan * (1 + 1e-9)
        found = footprints(plan, rules, 8.0)
        assert max(one.bytes for one in found.values()) == plan.predicted.bytes_per_rank
        for rank in range(4):
            program = rank_program(plan, rules, rank)
            verify(program, plan.graph, rules)
            part = cut_stages(program, pipeline)
            assert part.stages is not None
            assert part.stages.table is run.table
            assert {s.stage for s in part.segments if not s.prologue} <= set(run.table.stages_of(rank // 2))

    registered(looked_at)


def test_a_search_considers_them() -> None:
    """Where no schedule is pinned they are candidates as the others are; where none is registered there are none."""
    graph = inner_plan("llama", True, 1, (("dp", 1), ("microbatches", 4), ("tp", 1))).graph

    def names() -> set[str]:
        return {candidate.schedule for candidate in candidates(graph, Cluster.parse("cpu:1x4"), Pins(pp=2), 6)}

    assert registered(names) == names() | set(NAMES)
    plan = registered(searched, pp=2)
    assert plan.pipeline.schedule in (*SCHEDULES, *NAMES)
    assert plan.certificate.considered > searched(pp=2).certificate.considered


def test_what_it_refuses_is_refused_everywhere() -> None:
    """By its own reason, and by the property of a split backward, whatever it is called."""

    def scenario() -> None:
        with pytest.raises(mw.PinError, match="it takes at most six micro-batches; nearest legal setting: microbatches=4"):
            searched(pp=2, dp=1, tp=2, schedule="backwards", microbatches=8)
        with pytest.raises(mw.PinError, match=r"takes 2 stage.s. a rank; nearest legal setting: virtual_stages=2"):
            searched(pp=2, schedule="backwards", virtual_stages=1)
        for how in ({"zero": 2}, {"zero": 3}, {"recompute": "full"}, {"recompute": "selective"}, {"compiled": True}):
            assert illegal_combination("eager", **how) is None
            reason = illegal_combination("backwards", **how)
            assert reason is not None
            assert reason.endswith("or schedule 'interleaved1f1b'")
        with pytest.raises(mw.PinError, match=r"'backwards' with zero=3: it splits the backward.*would be dropped"):
            searched(pp=2, dp=2, schedule="backwards", zero=3)
        open_ = searched(pp=2, dp=2, tp=1, zero=3, recompute="full")
        assert not schedule_of(open_.pipeline.schedule).split

    registered(scenario)


def test_a_plan_says_what_it_misses(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    registered(lambda: pipelined("llama", "eager", 2).save(path))
    assert registered(Plan.load, path).pipeline.schedule == "eager"
    with pytest.raises(mw.PlanError, match=r"pipeline.schedule: schedule 'eager' is unknown.*register_schedule") as caught:
        Plan.load(path)
    assert "damaged" not in str(caught.value)
    with pytest.raises(mw.PinError, match="'eager' is unknown"):
        Pins(schedule="eager")
    assert not set(NAMES) & set(schedules())


def test_trained_through(pool: Callable[[int], Any]) -> None:
    """Losses, gradients and optimizer steps of two processes are those of one, whatever the order, the placement and the split;
    so are outputs, of which micro-batches may come last first."""
    plans = registered(lambda: {
        "eager": pipelined("llama", "eager", 2), "backwards": pipelined("llama", "backwards", 2, 2),
        "tied": pipelined("gpt2", "backwards", 2, 2),
    })
    llama = as_dicts({name: plans[name] for name in NAMES})
    gpt2 = as_dicts({name: plan for name, plan in plans.items() if name not in NAMES})
    assert pool(2).run(check_registered, "llama", llama, False, "backwards") == [[], []]
    assert pool(2).run(check_registered, "gpt2", gpt2, False, "") == [[], []]


def test_trained_through_with_other_parallelism(pool: Callable[[int], Any]) -> None:
    """On four ranks, with ZeRO as far as a split backward allows, and recomputation."""
    how: dict[str, Any] = {"world": 4, "double": True, "dp": 2}
    plans = registered(lambda: as_dicts({
        "eager, zero 3": pipelined("llama", "eager", 2, zero=3, recompute="full", **how),
        "backwards, zero 1": pipelined("llama", "backwards", 2, 2, zero=1, **how),
        "four ranks": pipelined("llama", "eager", 4, double=True),
    }))
    assert pool(4).run(check_registered, "llama", plans, True, "") == [[]] * 4


def test_processes_that_disagree_are_refused(pool: Callable[[int], Any], tmp_path: Path) -> None:
    """All of them, before anything runs: one that does not know the schedule, one that orders it otherwise."""
    path = tmp_path / "plan.json"
    registered(lambda: pipelined("llama", "eager", 2).save(path))
    pool(2).run(check_strangers, "llama", str(path))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"name": "zbv"}, "not 'zbv'; taken"),
        ({"name": "none"}, "taken"),
        ({"name": "two words"}, "letters, digits and underscores"),
        ({"stages": 0}, "stages=0 is no number"),
        ({"order": lambda pp, v, m: [line[:-1] for line in plain(pp, v, m)]}, "mine: rank 0 never finishes micro-batch 1 of"),
        ({"order": lambda pp, v, m: plain(pp, v, m)[:1]}, "1 ranks of actions"),
        ({"order": lambda pp, v, m: [line[::-1] for line in plain(pp, v, m)]}, "rank 0 runs 0B1 where it cannot"),
        ({"order": lambda pp, v, m: [["0F0", "nonsense"]]}, "'nonsense' is not an action"),
        ({"order": lambda pp, v, m: 1 // 0}, r"'mine': order\(2, 1, 2\) raised ZeroDivisionError"),
        ({"order": lambda pp, v, m: [[1, 2]]}, r"'mine': order\(2, 1, 2\) raised TypeError"),
        ({"order": backwards, "stages": 2, "placement": pairs_from_the_end}, "register it with split=True"),
        ({"order": backwards, "stages": 2, "split": True}, "where it cannot"),
        ({"placement": lambda pp, v: [0] * pp}, r"placement\(2, 1\) is \(0, 0\); expected the rank of each of 2 stages"),
        ({"refuses": lambda pp, v: None}, r"refuses\(2, 1, 2\) raised TypeError"),
        (
            {"order": lambda pp, v, m: [[a for k in range(m) for a in (f"{r}F{(r + k) % m}", f"{r}B{(r + k) % m}")]
                                        for r in range(pp)]},
            "never finishes .deadlock.: rank 0 at 0B0 waits for 1B0, rank 1 at 1F1 waits for 0F1",
        ),
    ],
)
def test_what_is_no_schedule_is_refused_at_once(how: dict[str, Any], message: str) -> None:
    def scenario() -> None:
        with pytest.raises(mw.ScheduleError, match=message):
            mw.register_schedule(**{"name": "mine", "order": plain, **how})
        assert "mine" not in schedules()

    contextvars.copy_context().run(scenario)


def test_a_shorter_step_holds_as_much() -> None:
    """Memory is replayed over fewer micro-batches only where every rank then holds as many at once."""

    def held(table: Any) -> Sequence[list[Any]]:
        return [counts.tolist() for counts in table.in_flight]

    def scenario() -> None:
        loops = ("interleaved1f1b", 4, 2, 10), ("zb", 3, 2, 33)
        for setting in (("eager", 3, 1, 40), ("1f1b", 4, 1, 64), ("zbv", 2, 2, 30), *loops):
            table = schedule_table(*setting)
            assert held(shortest(table)) == held(table)
        assert shortest(schedule_table("eager", 3, 1, 40)).microbatches == 5
        assert shortest(schedule_table("gpipe", 2, 1, 40)).microbatches == 40

    registered(scenario)


@pytest.mark.parametrize(("schedule", "stages", "zero"), [("1f1b", 1, 2), ("interleaved1f1b", 4, 3), ("zbv", 2, 1)])
def test_a_shorter_step_has_the_same_peak(schedule: str, stages: int, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay of all micro-batches is the oracle; with several stages and ZeRO 3 two rounds of them are too few."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(8)))
    pins = {"pp": 2, "dp": 2, "tp": 1, "schedule": schedule, "virtual_stages": stages, "microbatches": 16, "zero": zero}
    example = (torch.zeros(64, 16),), {}, torch.zeros(64, 16)
    plan = mw.plan(model, "h100:1x4", example, precision="bf16", pins=pins, loss_fn=F.mse_loss)
    short = footprints(plan, rules_of(plan.graph)[0], 8.0)
    monkeypatch.setattr(pipeline_rank, "shortest", lambda table: table)
    whole = footprints(plan, rules_of(plan.graph)[0], 8.0)
    assert {rank: peak.kinds for rank, peak in short.items()} == {rank: peak.kinds for rank, peak in whole.items()}


def test_more_ahead_is_more_held_and_no_slower() -> None:
    """The simulation is of the registered order: with transfers one more forward ahead hides them."""

    def scenario() -> None:
        runs = {name: simulate(schedule_table(name, 4, 1, 12), 1, 1, 1, 0.5) for name in ("1f1b", "eager")}
        assert runs["eager"].makespan < runs["1f1b"].makespan
        assert (np.array(runs["eager"].peak_per_rank) == np.array(runs["1f1b"].peak_per_rank) + 1).all()

    registered(scenario)


def test_simulated_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--import`` runs the module that registers a schedule."""
    (tmp_path / "my_schedules.py").write_text(
        "import meshwright as mw\nfrom tests.registered import eager\nmw.register_schedule('eager_of_mine', eager)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["simulate", "--schedule", "eager_of_mine", "--pp", "2", "--microbatches", "3"]

    def run(*words: str) -> Any:
        return contextvars.copy_context().run(CliRunner().invoke, app, list(words))

    found = run("--import", "my_schedules", *words)
    assert found.exit_code == 0, found.output
    assert "rank 0 stage 0 F0 F1 F2       B0" in found.output
    assert "micro-batches held by rank: [3, 2]" in found.output
    missing = run(*words)
    assert missing.exit_code == 2
    assert "schedule 'eager_of_mine' is unknown" in missing.output
    assert run("--import", "nothing_like_it", *words).exit_code == 2


def test_no_name_decides() -> None:
    """Outside the file that defines them built-in schedules are named in texts, and once as a default of the command line."""
    named = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in SCHEDULES]
        named += [path.relative_to(ROOT).as_posix() for _ in texts]
    assert set(named) == {"ir/schedules/builtin.py", "commands/simulating.py"}
    assert named.count("commands/simulating.py") == 1


def test_the_example_of_the_documentation_is_the_one_tested() -> None:
    text = (ROOT.parent / "docs" / "pipelines.md").read_text(encoding="utf-8")
    code = text.split("### A schedule of your own")[1].split("```python\n")[1].split("mw.register_schedule")[0]
    scope: dict[str, Any] = {}
    exec(code, scope)
    for setting in ((2, 1, 1), (2, 1, 7), (3, 1, 2), (3, 1, 9)):
        assert scope["eager"](*setting) == eager(*setting)
