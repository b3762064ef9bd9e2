"""Schedules against torch's own classes, the simulator against a plain event loop, closed forms and bounds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.cost.schedules import SCHEDULES, SPLIT_BACKWARD, V_SHAPED, illegal, schedule_table, waiting
from meshwright.cost.table import Action, ScheduleError, Table
from meshwright.cost.timeline import (
    chrome_trace,
    late_weights,
    lower_bound,
    lower_bounds,
    makespans,
    peak_bytes,
    render,
    simulate,
    times,
    turn_of,
    warmup_forwards,
)

MULTI = {
    "interleaved1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}


def virtual(name: str) -> tuple[int, ...]:
    return (1,) if name in SINGLE else (2,) if name in V_SHAPED else (1, 2, 3)


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(SCHEDULES))
    pp, v = draw(st.integers(1, 5)), draw(st.sampled_from(virtual(name)))
    return (
        name,
        pp,
        v,
        draw(
            st.integers(1, 14).filter(lambda m: illegal(name, pp, v, m) is None)
            if name != "dualpipev"
            else st.integers(2 * pp, 2 * pp + 6)
        ),
    )


# ------------------------------------------------------------------------------------------------- torch's own orders


class RecordingStage:
    """Stands where torch's schedule expects a stage, and writes down what it is asked to run."""

    has_backward, is_last, is_first, device = True, False, False, "cpu"

    def __init__(self, rank: int, pp: int) -> None:
        self.stage_index, self.group_rank, self.num_stages, self.group_size = rank, rank, pp, pp
        self.log: list[str] = []

    def forward_one_chunk(self, m: int, *args: object, **kwargs: object) -> None:
        self.log.append(f"{self.stage_index}F{m}")

    def backward_one_chunk(self, m: int, **kwargs: object) -> None:
        self.log.append(f"{self.stage_index}B{m}")

    def perform_reduce_grad(self, factor: int) -> None:
        """Nothing to reduce."""

    def _no_transfers(self, m: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers


def torch_single(name: str, rank: int, pp: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs torch's class on a recording stage: ``Schedule1F1B`` prints a table that is not what it runs."""
    stage = RecordingStage(rank, pp)
    schedule = SINGLE[name](stage, microbatches, loss_fn=lambda *args: None)
    monkeypatch.setattr(schedule, "_initialize_stage", lambda *args: None)
    monkeypatch.setattr(schedule, "_update_losses", lambda *args: None)
    schedule._step_microbatches(target_mbs=[None] * microbatches)
    return stage.log


def flatten(action: object) -> list[str]:
    if action is None:
        return []
    return [text for sub in action.sub_actions for text in flatten(sub)] if action.sub_actions else [str(action)]


@pytest.mark.parametrize("name", SINGLE)
def test_single_stage_orders_are_what_torch_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pp, microbatches in ((1, 1), (1, 3), (2, 2), (3, 7), (4, 4), (4, 9)):
        for rank, actions in enumerate(schedule_table(name, pp, 1, microbatches).ranks):
            assert [str(a) for a in actions] == torch_single(name, rank, pp, microbatches, monkeypatch)


@pytest.mark.parametrize("name", MULTI)
def test_multi_stage_orders_and_refusals_are_those_of_torch(name: str) -> None:
    compared = 0
    for pp, v, microbatches in itertools.product((1, 2, 3, 4, 6), virtual(name), range(1, 15)):
        stages = [SimpleNamespace(num_stages=pp * v, group_size=pp, group_rank=0, submod=None) for _ in range(v)]
        try:
            theirs = MULTI[name](stages, microbatches)
        except ValueError:
            assert illegal(name, pp, v, microbatches) is not None
            continue
        table = schedule_table(name, pp, v, microbatches)
        assert tuple(theirs.stage_index_to_group_rank[s] for s in range(pp * v)) == table.stage_rank
        for rank, actions in enumerate(table.ranks):
            assert [str(a) for a in actions] == [text for a in theirs.pipeline_order[rank] for text in flatten(a)]
        compared += 1
    assert compared >= 20


def waiting_in_torch(order: dict[int, list[object]], stage_rank: tuple[int, ...]) -> int:
    """The most receives of a rank that torch's order of communication posts before what reads them."""
    most = 0
    for rank, actions in torch_schedules._add_send_recv(order, lambda s: stage_rank[s], len(stage_rank)).items():
        now = 0
        for text in (text for action in actions for text in flatten(action)):
            stage, kind = re.fullmatch(r"(\d+)([A-Z_]+)\d+", text).groups()
            source = int(stage) + {"F": -1, "B": 1, "I": 1}.get(kind, len(stage_rank))
            now += kind.startswith("RECV")
            most = max(most, now)
            now -= 0 <= source < len(stage_rank) and stage_rank[source] != rank
    return most


@pytest.mark.parametrize("name", MULTI)
def test_what_torch_receives_early(name: str) -> None:
    least = set()
    for pp, v, rounds in itertools.product((2, 3, 4, 8), virtual(name), (2, 3)):
        stages = [SimpleNamespace(num_stages=pp * v, group_size=pp, group_rank=0, submod=None) for _ in range(v)]
        order = {r: [a for a in actions if a] for r, actions in MULTI[name](stages, rounds * pp).pipeline_order.items()}
        found = waiting_in_torch(order, schedule_table(name, pp, v, rounds * pp).stage_rank)
        assert found <= waiting(name, pp, v)
        least.add(waiting(name, pp, v) - found)
    assert 0 in least  # and no more than needed


# --------------------------------------------------------------------------------------------------------- legality


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("1f1b", 4, 1, 3), "microbatches=4"),
        (("1f1b", 4, 2, 8), "interleaved1f1b"),
        (("interleaved1f1b", 4, 2, 9), "microbatches=8 or 10"),
        (("zbv", 4, 3, 8), "virtual_stages=2"),
        (("dualpipev", 4, 2, 7), "microbatches=8"),
        (("2f2b", 4, 1, 8), "unknown"),
        (("gpipe", 0, 1, 8), "at least 1"),
    ],
)
def test_illegal_settings_name_the_nearest_legal_one(asked: tuple[str, int, int, int], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        schedule_table(*asked)


@given(settings_of())
@settings(max_examples=60, deadline=None)
def test_every_action_once_and_forward_first(setting: tuple[str, int, int, int]) -> None:
    name, pp, v, microbatches = setting
    table = schedule_table(*setting)
    actions = [a for rank in table.ranks for a in rank]
    assert len(actions) == len(set(actions))
    kinds: dict[tuple[int, int], list[str]] = {}
    for a in actions:
        kinds.setdefault((a.stage, a.microbatch), []).append(a.kind)
    assert len(kinds) == pp * v * microbatches
    assert {"".join(k) for k in kinds.values()} <= ({"FB", "FIW"} if name in SPLIT_BACKWARD else {"FB"})


def test_a_table_that_misses_an_action_is_refused() -> None:
    good = schedule_table("1f1b", 2, 1, 2)
    with pytest.raises(ScheduleError, match="never finishes micro-batch 1 of stage 1"):
        Table("mine", 2, (good.ranks[0], good.ranks[1][:-1]), good.stage_rank)
    with pytest.raises(ScheduleError, match="run twice"):
        Table("mine", 2, (good.ranks[0], good.ranks[1] + good.ranks[1][:1]), good.stage_rank)
    with pytest.raises(ScheduleError, match="rank 0 runs 0B0 where it cannot"):
        Table("mine", 1, ((Action(0, "B", 0), Action(0, "F", 0)),), (0,))


def test_a_deadlock_names_the_waiting_actions() -> None:
    first = tuple(map(Action.parse, ["0F0", "0B0", "0F1", "0B1"]))
    second = tuple(map(Action.parse, ["1F0", "1F1", "1B0", "1B1"]))
    with pytest.raises(ScheduleError, match=r"rank 0 at 0B0 waits for 1B0, rank 1 at 1F1 waits for 0F1"):
        simulate(Table("mine", 2, (first, second), (0, 1)), 1, 1, 1)


# ------------------------------------------------------------------------------------------------------- simulation


def event_loop(table: Table, f: np.ndarray, i: np.ndarray, w: np.ndarray, c: np.ndarray, g: np.ndarray, overlap: bool) -> float:
    """The recurrence of the module, in exact fractions, action by action in whatever order they become ready."""
    duration = {"F": f, "B": i + w, "I": i, "W": w}
    arrived: dict[tuple[int, str, int], Fraction] = {}
    free = [Fraction(0)] * table.pp
    link: dict[tuple[int, int], Fraction] = {}
    todo = [list(actions) for actions in table.ranks]
    latest = Fraction(0)
    while any(todo):
        for rank, actions in enumerate(todo):
            while actions:
                s, kind, m = actions[0]
                need = {"F": (s - 1, "F", m) if s else None, "W": None}.get(
                    kind, (s + 1, "B", m) if s + 1 < table.stages else None
                )
                if need is not None and need not in arrived:
                    break
                actions.pop(0)
                end = max(free[rank], arrived[need] if need else Fraction(0)) + Fraction(float(duration[kind][s]))
                latest = max(latest, end)
                to = s + 1 if kind == "F" else s - 1
                there = end
                if kind != "W" and 0 <= to < table.stages and table.stage_rank[to] != rank:
                    way = (rank, table.stage_rank[to])
                    there = max(end, link.get(way, Fraction(0))) + Fraction(float(c[s] if kind == "F" else g[to]))
                    link[way] = there
                if kind != "W":
                    arrived[s, "F" if kind == "F" else "B", m] = there
                free[rank] = end if overlap else there
    return float(latest)


@given(settings_of(), st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 1.0, 4.0]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_simulation_equals_the_event_loop_and_respects_the_bound(
    setting: tuple[str, int, int, int], seed: int, transfer: float, overlap: bool
) -> None:
    table = schedule_table(*setting)
    rng = np.random.default_rng(seed)
    f, i, w = rng.random((3, table.stages))
    c, g = transfer * rng.random((2, table.stages - 1))
    run = simulate(table, f, i, w, (c, g), overlap=overlap)
    assert run.makespan == pytest.approx(event_loop(table, f, i, w, c, g, overlap), rel=1e-12)
    assert lower_bound(*setting, f, i, w, (c, g)) <= run.makespan * (1 + 1e-12)
    assert np.all(run.bubble >= -1e-9)
    for start, end in zip(run.start, run.end, strict=True):
        assert np.all(start[1:] >= end[:-1] - 1e-12)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 4), (4, 8), (4, 32), (8, 16)])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (2.0, 5.0)])
def test_bubble_of_uniform_stages_is_the_closed_form(pp: int, microbatches: int, forward: float, backward: float) -> None:
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2), ("interleaved1f1b", 4)):
        f, half = forward / v, backward / 2 / v
        run = simulate(schedule_table(name, pp, v, microbatches), f, half, half)
        ideal = microbatches * (forward + backward)
        assert (run.makespan - ideal) / ideal == pytest.approx((pp - 1) / (v * microbatches))
        assert run.bubble_fraction == pytest.approx((pp - 1) / (v * microbatches + pp - 1))
        assert lower_bound(name, pp, v, microbatches, f, half, half) == pytest.approx(run.makespan)


@pytest.mark.parametrize(
    ("name", "v", "expected"),
    [
        ("gpipe", 1, 33),
        ("1f1b", 1, 33),
        ("interleaved1f1b", 2, 28.5),
        ("zb", 2, 25.5),
        ("zbv", 2, 25.5),
        ("dualpipev", 2, 25.5),
    ],
)
def test_four_ranks_eight_microbatches(name: str, v: int, expected: float) -> None:
    """Measured with torch's own tables: ideal 24 (F = I = W = 1 for all stages of a rank together)."""
    run = simulate(schedule_table(name, 4, v, 8), 1 / v, 1 / v, 1 / v)
    assert run.makespan == pytest.approx(expected)
    assert lower_bound(name, 4, v, 8, 1 / v, 1 / v, 1 / v) == pytest.approx(expected)
    assert run.busy == pytest.approx(24)


def test_gpipe_bound_is_exact_for_any_stages() -> None:
    rng = np.random.default_rng(0)
    f, i, w = rng.random((3, 4))
    c, g = 2 * rng.random((2, 3))
    assert lower_bound("gpipe", 4, 1, 9, f, i, w, (c, g)) == pytest.approx(
        simulate(schedule_table("gpipe", 4, 1, 9), f, i, w, (c, g)).makespan
    )


def test_many_cases_at_once_are_the_cases_one_by_one() -> None:
    rng = np.random.default_rng(1)
    table = schedule_table("zbv", 3, 2, 5)
    f, i, w = rng.random((3, 6, 7))
    c = rng.random((5, 7))
    together = makespans(table, times(6, f, i, w, c))
    bounds = lower_bounds("zbv", 3, 2, 5, times(6, f, i, w, c))
    for k in range(7):
        assert together[k] == simulate(table, f[:, k], i[:, k], w[:, k], c[:, k]).makespan
        assert bounds[k] == pytest.approx(lower_bound("zbv", 3, 2, 5, f[:, k], i[:, k], w[:, k], c[:, k]))


def test_transfers_between_stages_of_one_rank_are_free() -> None:
    table = schedule_table("zbv", 2, 2, 4)  # stages 1 and 2 lie on rank 1
    assert simulate(table, 1, 1, 1, [0, 9, 0]).makespan == simulate(table, 1, 1, 1).makespan
    assert simulate(table, 1, 1, 1, [9, 0, 0]).makespan > simulate(table, 1, 1, 1).makespan


def test_blocking_sends_cost_and_a_slow_link_is_the_bottleneck() -> None:
    table = schedule_table("1f1b", 2, 1, 20)
    assert simulate(table, 1, 1, 1, 0.5, overlap=False).makespan > simulate(table, 1, 1, 1, 0.5).makespan
    assert simulate(table, 1, 1, 1, (50, 0)).makespan >= 20 * 50


def test_wrong_numbers_are_refused() -> None:
    table = schedule_table("1f1b", 4, 1, 4)
    with pytest.raises(ValueError, match="forward: expected a number or 4"):
        simulate(table, [1, 2], 1, 1)
    with pytest.raises(ValueError, match="p2p value: seconds must be non-negative"):
        simulate(table, 1, 1, 1, -1)


# ----------------------------------------------------------------------------------------------------------- memory


@given(settings_of(), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_peaks_equal_a_replay(setting: tuple[str, int, int, int], seed: int) -> None:
    table = schedule_table(*setting)
    saved, pending = np.sort(np.random.default_rng(seed).random((2, table.stages)), axis=0)[::-1]
    run = simulate(table, 1, 1, 1)
    for rank, actions in enumerate(table.ranks):
        held = dict.fromkeys(table.stages_of(rank), 0)
        peak, bytes_, most, rank_peak = dict(held), 0.0, 0.0, 0
        for s, kind, _ in actions:
            held[s] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
            bytes_ += {"F": saved[s], "B": -saved[s], "I": pending[s] - saved[s], "W": -pending[s]}[kind]
            peak[s], most, rank_peak = max(peak[s], held[s]), max(most, bytes_), max(rank_peak, sum(held.values()))
        assert peak == {s: run.peak_per_stage[s] for s in peak}
        assert rank_peak == run.peak_per_rank[rank]
        assert peak_bytes(table, saved, pending)[rank] == pytest.approx(most)


def test_known_depths() -> None:
    assert simulate(schedule_table("gpipe", 4, 1, 8), 1, 1, 1).peak_per_stage.tolist() == [8] * 4
    assert simulate(schedule_table("1f1b", 4, 1, 8), 1, 1, 1).peak_per_stage.tolist() == [4, 3, 2, 1]
    # Zero bubble holds pp micro-batches on every rank, ZB-V one stage's worth of 2 pp half-size stages.
    assert simulate(schedule_table("zb", 4, 1, 8), 1, 1, 1).peak_per_rank.tolist() == [4] * 4
    assert simulate(schedule_table("zbv", 4, 2, 8), 1, 1, 1).peak_per_rank.tolist() == [8] * 4


@given(settings_of())
@settings(max_examples=60, deadline=None)
def test_warmup_in_closed_form_is_that_of_the_table(setting: tuple[str, int, int, int]) -> None:
    table = schedule_table(*setting)
    counted = {s: n for rank in range(table.pp) for s, n in table.warmup(rank).items()}
    assert warmup_forwards(*setting).tolist() == [counted[s] for s in range(table.stages)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b", "zb"])
def test_begin_and_end_in_closed_form_are_those_of_the_table(name: str) -> None:
    """What ranks have done by the first forward of their last stage, and have left after its last backward and after the last
    forward of all: by which the bound begins and ends."""
    for pp, v, m in itertools.product((1, 2, 3, 4), virtual(name), (1, 2, 4, 6, 8, 12)):
        if illegal(name, pp, v, m) is not None:
            continue
        table, warmup, turn = schedule_table(name, pp, v, m), warmup_forwards(name, pp, v, m), turn_of(name, pp, v, m)
        assert turn is not None
        for rank, actions in enumerate(table.ranks):
            own = list(table.stages_of(rank))

            def counted(part: Sequence[Action], kinds: str, own: list[int] = own) -> list[int]:
                return [sum(a.stage == stage and a.kind in kinds for a in part) for stage in own]

            kinds = [(a.kind if a.kind in "FW" else "B", a.stage == own[-1]) for a in actions]
            first, back = kinds.index(("F", True)), len(kinds) - kinds[::-1].index(("B", True))
            drained = len(kinds) - [kind for kind, _ in kinds[::-1]].index("F")
            assert counted(actions[:first], "FBIW") == turn[own].tolist()
            assert counted(actions[back:], "BI") == turn[own].tolist()
            assert counted(actions[drained:], "BI") == warmup[own].tolist()
            for left, after in ((turn[own], back), (warmup[own], drained)):
                assert (np.array(counted(actions[after:], "W")) <= late_weights(left, rank, m)).all()
    for name_ in V_SHAPED:
        assert turn_of(name_, 4, 2, 8) is None


# --------------------------------------------------------------------------------------------------------- pictures


def test_render_draws_every_action_at_its_clock() -> None:
    table = schedule_table("zbv", 2, 2, 3)
    rows = render(table).splitlines()
    assert rows[1].startswith("rank 0 stage 0")
    assert rows[4].startswith("rank 0 stage 3")
    margin = len("rank 0 stage 0 ")
    for _, action, start, _ in simulate(table, 1, 1, 1).spans():
        cell = rows[1 + action.stage][margin + 3 * round(start) :].split()[0]
        assert cell == f"{action.kind}{action.microbatch}"


def test_chrome_trace_holds_every_action_once() -> None:
    run = simulate(schedule_table("1f1b", 2, 1, 3), 0.25, 0.125, 0.125)
    trace = json.loads(json.dumps(chrome_trace(run)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(e["name"] for e in spans) == sorted(str(a) for rank in run.table.ranks for a in rank)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(run.makespan * 1e6)
    assert all(e["tid"] == run.table.stage_rank[e["args"]["stage"]] for e in spans)


def test_the_pictures_of_the_documentation_are_the_tables() -> None:
    text = (Path(__file__).parents[1] / "docs" / "pipelines.md").read_text()
    pictures = re.findall(r"```schedule (\w+) pp=(\d+) virtual_stages=(\d+) microbatches=(\d+)\n(.*?)\n```", text, re.DOTALL)
    assert {name for name, *_ in pictures} == set(SCHEDULES)
    for name, *numbers, picture in pictures:
        assert picture == render(schedule_table(name, *map(int, numbers)))
