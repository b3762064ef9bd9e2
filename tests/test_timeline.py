"""Schedules against torch's own classes, the simulator against a plain event loop, closed forms and bounds."""

from __future__ import annotations

import contextvars
import itertools
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.compiler.pipeline.skeleton import Skeleton
from meshwright.cost.timeline import (
    Times,
    chrome_trace,
    forward_only,
    lower_bound,
    lower_bounds,
    makespans,
    peak_bytes,
    render,
    simulate,
    times,
)
from meshwright.ir.schedules import Action, ScheduleError, Table, illegal, register_schedule, schedule_of, schedule_table
from tests.schedules import SCHEDULES, SPLIT_BACKWARD

MULTI = {
    "interleaved1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}


def virtual(name: str) -> tuple[int, ...]:
    exactly = schedule_of(name).stages
    return (1, 2, 3) if exactly is None else (exactly,)


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_are_those_of_torch_or_come_when_they_are_read(name: str) -> None:
    """Where they start early they stand as torch puts them; else a rank holds one at a time that it has not read. As many
    wait as the closed form says."""
    least = set()
    for pp, v, microbatches in itertools.product((2, 3, 4, 8), virtual(name), range(2, 17)):
        if illegal(name, pp, v, microbatches) is not None:
            continue
        table, closed = schedule_table(name, pp, v, microbatches), schedule_of(name).closed
        assert closed is not None
        orders = {rank: [torch_schedules._Action.from_str(str(a)) for a in actions] for rank, actions in enumerate(table.ranks)}
        theirs = torch_schedules._add_send_recv(orders, lambda s, lies=table.stage_rank: lies[s], table.stages)
        if table.early:
            assert [list(map(str, theirs[rank])) for rank in range(pp)] == [list(map(str, steps)) for steps in table.steps]
        for rank, steps in enumerate(table.steps):
            assert sorted(map(str, steps)) == sorted(map(str, theirs[rank]))
            assert [step for step in steps if len(step.kind) == 1] == list(table.ranks[rank])
        assert table.waiting <= closed.waiting(pp, v, microbatches)
        least.add(closed.waiting(pp, v, microbatches) - table.waiting)
        assert table.early or table.waiting == 1
    assert 0 in least or name == "dualpipev"  # of which torch's class marks pairs that wait for each other: one more


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


@pytest.mark.parametrize("name", ["gpipe", "interleaved1f1b", "zbv"])
def test_a_pass_without_backwards_is_that_of_an_event_loop(name: str) -> None:
    """Rank by rank, the stages of each one after the other; with one stage a rank it is GPipe's first half."""
    virtual, rng = 1 if name == "gpipe" else 2, np.random.default_rng(3)
    table = schedule_table(name, 3, virtual, 6)
    f, c = rng.random(table.stages), rng.random(table.stages - 1)
    found = forward_only(table, f, c)
    zero, done, ready, link = Fraction(0), [Fraction(0)] * table.pp, [Fraction(0)] * 6, Fraction(0)
    for s, rank in enumerate(table.stage_rank):
        link = zero
        for m in range(6):
            done[rank] = ready[m] = max(done[rank], ready[m]) + Fraction(float(f[s]))
            if s + 1 < table.stages and table.stage_rank[s + 1] != rank:
                link = ready[m] = max(ready[m], link) + Fraction(float(c[s]))
    assert found == pytest.approx([float(end) for end in done])
    if virtual == 1:
        run = simulate(table, f, 0.0, 0.0, (c, 0.0))
        assert found == pytest.approx([end[5] for end in run.end])


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


def fused_exchanges(pp: int, microbatches: int, f: np.ndarray, b: np.ndarray, transfer: float) -> float:
    """Seconds of a 1F1B as torch runs it, with an event loop of its own: a rank posts what it sends and what it receives
    together, a transfer begins when both of its ranks have posted it, and a rank goes on when all that it posted is over."""
    def crossing(rank: int, kind: str, microbatch: int, to: int) -> list[tuple[int, str, int]]:
        return [(min(rank, to), kind, microbatch)] if 0 <= to < pp else []

    programs: list[list[tuple[str, list[tuple[int, str, int]]]]] = []
    for r in range(pp):
        warm, steps = min(microbatches, pp - r - 1), []
        for m in range(warm):
            steps += [("wait", crossing(r, "F", m, r - 1)), ("F", []), ("wait", crossing(r, "F", m, r + 1))]
        steps.append(("wait", crossing(r, "F", warm, r - 1) if warm < microbatches else []))
        for m in range(warm, microbatches):
            more = crossing(r, "F", m + 1, r - 1) if m + 1 < microbatches else []
            back = m - warm
            steps += [("F", []), ("wait", crossing(r, "F", m, r + 1) + crossing(r, "B", back, r + 1)), ("B", []),
                      ("wait", crossing(r, "B", back, r - 1) + more)]
        for m in range(microbatches - warm, microbatches):
            steps += [("wait", crossing(r, "B", m, r + 1)), ("B", []), ("wait", crossing(r, "B", m, r - 1))]
        programs.append(steps)
    at, now, posted = [0] * pp, [0.0] * pp, dict[tuple[int, str, int], dict[int, float]]()
    for _ in range(len(programs[0]) * pp * 4):
        for r, steps in enumerate(programs):
            while at[r] < len(steps):
                what, pairs = steps[at[r]]
                for pair in pairs:
                    posted.setdefault(pair, {}).setdefault(r, now[r])
                if any(len(posted[pair]) < 2 for pair in pairs):
                    break
                over = [max(posted[pair].values()) + transfer for pair in pairs]
                now[r] = max([now[r], *over]) + {"F": f[r], "B": b[r]}.get(what, 0.0)
                at[r] += 1
    assert at == [len(steps) for steps in programs]
    return max(now)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 8), (4, 32), (8, 16)])
@pytest.mark.parametrize("transfer", [0.0, 0.1, 0.5])
def test_a_1f1b_that_waits_for_what_it_sends_is_one_of_fused_exchanges(pp: int, microbatches: int, transfer: float) -> None:
    """Stages that are alike: equal to the event loop. It takes two transfers a micro-batch more than without any; one that does
    not wait hides a part 1 / pp of them, for so many micro-batches are in flight at the first rank."""
    table, one = schedule_table("1f1b", pp, 1, microbatches), np.ones(pp)
    waits = simulate(table, 1.0, 1.0, 1.0, transfer, overlap=False).makespan
    assert waits == pytest.approx(fused_exchanges(pp, microbatches, one, 2 * one, transfer))
    assert waits >= simulate(table, 1.0, 1.0, 1.0, transfer).makespan
    more = simulate(schedule_table("1f1b", pp, 1, microbatches + pp), 1.0, 1.0, 1.0, transfer, overlap=False).makespan
    crossings = 2 if pp > 2 else 1  # the two ranks at the ends have one neighbour each
    assert (more - waits) / pp == pytest.approx(3 + crossings * transfer)
    ahead = [simulate(schedule_table("1f1b", pp, 1, m), 1.0, 1.0, 1.0, transfer).makespan for m in (32, 32 + pp)]
    assert (ahead[1] - ahead[0]) / pp == pytest.approx(3 + 2 * transfer * (pp - 1) / pp)


def test_uneven_stages_of_a_1f1b_that_waits_take_at_most_a_percent_more() -> None:
    """A receiver that is late holds up its sender, which the recurrence does not count: by 0.4% at most of 200 runs."""
    rng, table = np.random.default_rng(0), schedule_table("1f1b", 4, 1, 16)
    for _ in range(200):
        f = 1 + rng.random(4)
        found = simulate(table, f, f, f, 0.3, overlap=False).makespan
        assert found <= fused_exchanges(4, 16, f, 2 * f, 0.3) * (1 + 1e-9) <= found * 1.01


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
    rng = np.random.default_rng(seed)
    saved, pending = np.sort(rng.random((2, table.stages)), axis=0)[::-1]
    summed, transient, reducing, final, come = rng.random((5, table.stages))
    early = final + come * summed
    run = simulate(table, 1, 1, 1)
    for rank, actions in enumerate(table.ranks):
        held, halved = dict.fromkeys(table.stages_of(rank), 0), {s for s, kind, _ in actions if kind == "W"}
        peak, bytes_, most, rank_peak = dict(held), 0.0, 0.0, 0
        there, beside = set[int](), 0.0  # whose gradients are there, and the most with them and with what runs
        for s, kind, _ in actions:
            first = sum(summed[one] + reducing[one] * (one != s) for one in there)
            others = sum(summed[one] for one in there - {s})
            runs = kind == "I" or (kind == "B" and s not in halved)
            beside = max(beside, bytes_ + first + transient[s] if runs else 0.0)
            if kind in "BW" and s in halved:
                beside = max(beside, bytes_ + others + (summed[s] + final[s] if s in there else early[s]))
            held[s] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
            bytes_ += {"F": saved[s], "B": -saved[s], "I": pending[s] - saved[s], "W": -pending[s]}[kind]
            peak[s], most, rank_peak = max(peak[s], held[s]), max(most, bytes_), max(rank_peak, sum(held.values()))
            if kind in "BW" and s not in there:
                there.add(s)
                beside = max(beside, bytes_ + first + summed[s] + transient[s] if runs else 0.0)
        assert peak == {s: run.peak_per_stage[s] for s in peak}
        assert rank_peak == run.peak_per_rank[rank]
        assert peak_bytes(table, saved, pending)[rank] == pytest.approx(most)
        sums = sum(summed[one] for one in there)
        last = [saved[s] + (final[s] + sums if table.microbatches > 1 else early[s]) for s in there - halved]
        whole = peak_bytes(table, saved, pending, summed, transient, reducing, final=final, early=early)
        assert whole[rank] == pytest.approx(max(beside, *last, 0.0))


def test_known_depths() -> None:
    assert simulate(schedule_table("gpipe", 4, 1, 8), 1, 1, 1).peak_per_stage.tolist() == [8] * 4
    assert simulate(schedule_table("1f1b", 4, 1, 8), 1, 1, 1).peak_per_stage.tolist() == [4, 3, 2, 1]
    # Zero bubble holds pp micro-batches on every rank, ZB-V one stage's worth of 2 pp half-size stages.
    assert simulate(schedule_table("zb", 4, 1, 8), 1, 1, 1).peak_per_rank.tolist() == [4] * 4
    assert simulate(schedule_table("zbv", 4, 2, 8), 1, 1, 1).peak_per_rank.tolist() == [8] * 4


@given(settings_of())
@settings(max_examples=100, deadline=None)
def test_what_is_done_and_left_in_closed_form_is_that_of_the_table(setting: tuple[str, int, int, int]) -> None:
    """What ranks have done by their first backward and by the first forward of their last stage, and have left after its last
    backward and after the last forward of all: by which the bound begins and ends."""
    name, *numbers = setting
    table, closed = schedule_table(*setting), schedule_of(name).margins(*numbers)
    counted = table.margins
    for rank, actions in enumerate(table.ranks):
        own, first = list(table.stages_of(rank)), [action.kind for action in actions].index("F")
        ahead = list(itertools.takewhile(lambda action: action.kind == "F", actions[first:]))
        assert [sum(action.stage == stage for action in ahead) for stage in own] == counted.warm[own].tolist()
    assert closed.warm.tolist() == counted.warm.tolist()
    if closed.turn is None:
        assert (closed.turned, closed.drained) == (None, None)
        return
    assert counted.turn is not None
    assert closed.turn.tolist() == counted.turn.tolist()
    for said, is_so in ((closed.turned, counted.turned), (closed.drained, counted.drained)):
        assert said is not None
        assert is_so is not None
        assert said.backward.tolist() == is_so.backward.tolist()
        assert (is_so.weight <= said.weight).all() or not schedule_of(name).split


def test_moments_of_a_table_by_hand() -> None:
    """Two ranks of two stages each, in a loop; the second splits one backward."""
    first = ["0F0", "2F0", "0F1", "2F1", "2B0", "2B1", "0B0", "0B1"]
    second = ["1F0", "3F0", "3I0", "1F1", "3F1", "3W0", "1B0", "3B1", "1B1"]
    table = Table("mine", 2, tuple(tuple(map(Action.parse, line)) for line in (first, second)), (0, 1, 0, 1))
    found = table.margins
    assert (found.warm.tolist(), found.turn.tolist()) == ([2, 1, 2, 1], [1, 1, 0, 0])
    assert (found.turned.backward.tolist(), found.turned.weight.tolist()) == ([2, 1, 0, 0], [2, 1, 0, 0])
    assert (found.drained.backward.tolist(), found.drained.weight.tolist()) == ([2, 2, 2, 1], [2, 2, 2, 2])


@given(settings_of(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_bounds_from_the_table_hold_as_well(setting: tuple[str, int, int, int], seed: int) -> None:
    """Without its closed forms a schedule's bound is no larger than what any order takes, and no smaller than with them."""
    name, pp, v, m = setting
    numbers = np.random.default_rng(seed).random((5, pp * v, 3))
    given_times = Times(*numbers[:3], *numbers[3:, 1:])
    open_ = replace(schedule_of(name), name="bare", closed=None)

    def scenario() -> np.ndarray:
        register_schedule("bare", open_.orders, stages=open_.stages, placement=open_.placement, split=open_.split,
                          refuses=open_.refuses)
        return lower_bounds("bare", pp, v, m, given_times)

    found = contextvars.copy_context().run(scenario)
    assert (found <= makespans(schedule_table(*setting), given_times) * (1 + 1e-9)).all()
    assert (found >= lower_bounds(*setting, given_times) * (1 - 1e-9)).all()


def in_few_sums(table: Table, given_times: Times) -> float:
    """Seconds of the last place of a table's skeleton, each no sooner than its steps say."""
    skeleton = Skeleton.of(table)
    seconds = np.stack([given_times.forward, given_times.backward_input, given_times.backward_weight])
    crossing = np.stack([given_times.value, given_times.gradient])
    at, before = np.zeros(skeleton.places), np.full(skeleton.places, -1.0)
    while (at > before).any():
        before = at.copy()
        for step in skeleton.steps:
            ran = step.counts @ seconds[step.columns, step.stages, 0] + step.sent @ crossing[step.ways, step.boundaries, 0]
            at[step.place] = max(at[step.place], at[step.after] + ran)
    return float(at[list(skeleton.last)].max())


@given(settings_of(), st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=100, deadline=None)
def test_a_table_in_few_sums_takes_no_longer(setting: tuple[str, int, int, int], seed: int, transfer: float) -> None:
    """Than it does, and no less than its ranks work; all of it where nothing repeats itself, and where all stages are alike."""
    table = schedule_table(*setting)
    numbers = np.random.default_rng(seed).random((5, table.stages, 1))
    each = Times(*numbers[:3], *(transfer * numbers[3:, 1:]))
    alike = Times(*(np.ones((table.stages, 1)) for _ in range(3)), *(np.zeros((table.stages - 1, 1)) for _ in range(2)))
    found, run = in_few_sums(table, each), simulate(table, *(one[:, 0] for one in numbers[:3]), (each.value, each.gradient))
    assert run.busy.max() * (1 - 1e-12) <= found <= run.makespan * (1 + 1e-12)
    if table.microbatches < 3:
        assert found == pytest.approx(run.makespan)
    assert in_few_sums(table, alike) == pytest.approx(makespans(table, alike)[0])


@pytest.mark.parametrize(("setting", "steps", "transfer"), [
    (("1f1b", 8, 1, 256), 120, 0.0), (("zb", 4, 2, 64), 400, 0.0), (("interleaved1f1b", 8, 5, 8), 620, 0.3),
    (("interleaved1f1b", 4, 3, 48), 500, 0.0),
])
def test_what_repeats_itself_is_told_once(setting: tuple[str, int, int, int], steps: int, transfer: float) -> None:
    """Of uneven stages few sums say nearly all; where transfers make ranks wait in every round they say less."""
    table = schedule_table(*setting)
    assert len(Skeleton.of(table).steps) <= steps
    numbers = 0.8 + 0.4 * np.random.default_rng(1).random((5, table.stages, 1))
    each = Times(*numbers[:3], *(transfer * numbers[3:, 1:]))
    assert 0.98 <= in_few_sums(table, each) / makespans(table, each)[0] <= 1 + 1e-12


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
        assert picture == render(schedule_table(name, *map(int, numbers)), width=200)


def test_a_wide_clock_is_shown_in_windows() -> None:
    whole = render(schedule_table("1f1b", 2, 1, 3), width=40).splitlines()
    assert [line.split()[1] for line in whole if line.startswith("clock")] == ["0", "8"]
    text = render(schedule_table("interleaved1f1b", 4, 4, 32))
    assert max(map(len, text.splitlines())) <= 120
    left_out = [int(line.split()[1]) for line in text.splitlines() if line.startswith("...")]
    assert len(left_out) == 2
    clocks = [line.split()[1:] for line in text.splitlines() if line.startswith("clock")]
    assert sum(map(len, clocks)) + sum(left_out) == int(clocks[-1][-1]) + 1
