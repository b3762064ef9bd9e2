"""The page that a plan prints, against text written by hand, and the facts behind it."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Pins
from meshwright.cost.cluster import Cluster
from meshwright.cost.spread import apart
from meshwright.ir.graph import Graph, Op, Ref, Value
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.prediction import SeenCandidate
from meshwright.ir.writing.paths import fold_paths, unfold_paths
from meshwright.planner import capture_model, make_plan
from meshwright.views.bounds import _spent
from meshwright.views.facts import facts_of, sections
from meshwright.views.prices import Prices
from meshwright.views.report import WIDTH, page, render, show
from meshwright.views.words import assignment_words, axis_roles, not_told_apart
from tests.handmade import handmade_plan
from tests.test_pinning import graph

PAGE = """\
plan         dp=2 x tp=2 on cpu@host:1x4, 4 devices
axes         dp=2 (data + zero), tp=2 (tensor)
model        2,048 parameters in 4 tensors, 10 operators, 2 blocks
step         micro-batches 1, ZeRO 2, precision fp32, optimizer adamw
predicted    step 12.5 ms, 5,120 tokens/s
time         not told apart
memory       3 MiB per device of 12 MiB (25.0%) = activations 2 MiB + parameters 1 MiB
certificate  gap 0.80% (objective 12.5 ms, lower bound 12.4 ms, optimal)
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return handmade_plan()


def test_over_one_rank_nothing_moves() -> None:
    plan = make_plan(graph("mixtral"), Cluster.parse("h100:1x2"), Pins(dp=2, ep=2, tp=1, pp=1))
    assert plan.mesh.size("dp") == 1
    text = render(plan)
    assert "@ep" in text
    assert not re.search("[a-z]@dp", text)


def test_header(plan: Plan) -> None:
    assert render(plan).startswith(PAGE)


def test_blocks_show_placements_and_collectives(plan: Plan) -> None:
    first, second, outside = sections(facts_of(plan))
    assert [section.title for section in (first, second, outside)] == ["blocks.0", "blocks.1", "outside the blocks"]
    rows = [(row.module, row.weights, row.result, row.collectives) for row in second.rows]
    assert rows == [
        ("up", ("weight f32[32@tp, 16]",), "f32[8@dp, 32@tp]", ("bwd all-reduce@tp",)),
        (".", (), "f32[8@dp, 32@tp]", ()),
        ("down", ("weight f32[16, 32@tp]",), "f32[8@dp, 16] +tp", ("fwd all-reduce@tp",)),
        (".", (), "f32[8@dp, 16]", ()),
    ]
    # the first block reads the input, which takes no gradient: nothing to reduce in its backward
    assert first.rows[0].collectives == ()
    assert first.rows[1:] == second.rows[1:]
    assert outside.rows[-1].collectives == ("fwd all-reduce@dp",)


def test_equal_blocks_are_one_table(plan: Plan) -> None:
    # with the input taking a gradient the two blocks are the same
    values = {**plan.graph.values, "x": replace(plan.graph.values["x"], differentiable=True)}
    same = replace(plan, graph=replace(plan.graph, values=values))
    found = sections(facts_of(same))
    assert [section.title for section in found] == ["blocks.0..1 (2 equal blocks)", "outside the blocks"]
    assert render(same).count("down") == 1
    # and differ again when one of them is placed otherwise
    other = replace(same, assignments={**same.assignments, "relu1": {}})
    assert [section.title for section in sections(facts_of(other))][:2] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(("pins", "cluster"), [
    (Pins(tp=4), "h100:1x4"), (Pins(axes={"x": 2}), "h100:1x2"), (Pins(axes={"x": 2, "y": 3}), "h100:2x3"),
])
def test_collectives_that_are_listed_take_what_the_step_communicates(pins: Pins, cluster: str) -> None:
    """Of a tied weight whatever its first reader does, and of equal blocks each what comes before it."""
    where = Cluster.parse(cluster)
    plan = make_plan(tied(where.world * 2), where, pins)
    facts = facts_of(plan)
    assert plan.predicted is not None
    _, moved = _spent(facts, Prices(facts))
    assert sum(moved.values()) == pytest.approx(plan.predicted.communication_seconds, rel=0.02)


def tied(batch: int) -> Graph:
    """A GPT-2 whose head is its embedding, without values."""
    ids = torch.empty((batch, 32), dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=192, n_head=4, vocab_size=301, n_positions=64, use_cache=False))
    return capture_model(model, (ids,), {"labels": ids}, (), None, "bf16")


def test_groups_candidates_and_notes_are_listed(plan: Plan) -> None:
    groups = (replace(plan.groups[0], zero=0, recompute="full"), *plan.groups[1:])
    text = render(replace(plan, groups=groups))
    lines = [line.split() for line in text.splitlines()]
    assert ["blocks.0", "0", "dp", "-", "full"] in [line[:5] for line in lines]
    assert ["blocks.1", "2", "dp", "dp", "none"] in [line[:5] for line in lines]
    assert text.index("dp=2 x tp=2   1") < text.index("dp=4 x tp=1   1")  # best first
    assert "does not fit" in text
    assert text.endswith("note: no rule for aten.mystery.default (in blocks.0): replicated")
    assert "ZeRO 0/2" in text


def test_candidates_that_are_not_told_apart_from_the_best() -> None:
    known = (1.2, 1.0, None, 1.0 + apart() / 2, 1.001 + apart())
    seen = [SeenCandidate(f"dp={n}", 1, seconds) for n, seconds in enumerate(known)]
    assert not_told_apart(seen) == [False, True, False, True, False]
    assert not_told_apart(seen[:1]) == [False]
    assert not_told_apart([]) == []


BRIEF = """\
plan       dp=2 x tp=2 on cpu@host:1x4, 4 devices, fp32, adamw
step       1 micro-batch, 12.5 ms predicted
memory     3 MiB of 12 MiB on the fullest device
gap        0.80% above the lower bound
2 blocks   ZeRO 2, recompute none, gradients summed over dp, state split over dp
"""


def test_a_plan_prints_itself_in_a_few_lines(plan: Plan) -> None:
    assert str(plan).startswith(BRIEF)
    other = replace(plan, groups=(replace(plan.groups[0], recompute="full"), *plan.groups[1:]))
    assert [line.split()[:2] for line in str(other).splitlines()[4:6]] == [["1", "block"], ["1", "block"]]


def test_the_page_keeps_its_width(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    show(plan)
    assert capsys.readouterr().out == render(plan) + "\n"
    assert max(map(len, render(plan).splitlines())) <= WIDTH
    narrow = render(plan, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert not [line for line in render(plan, 40).splitlines() if "…" in line and re.search(r"[\[\].@]|ZeRO 2", line)]
    console = Console(width=WIDTH, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - the console owns it
    console.print(page(plan))
    assert "f32[32@tp, 16]" in console.export_text()


def test_a_plan_without_predictions_prints() -> None:
    plan = replace(handmade_plan(), predicted=None, certificate=None, notes=(), cluster="")
    text = render(plan)
    lines = [line.split() for line in text.splitlines()]
    assert ["predicted", "unknown"] in lines
    assert ["memory", "unknown"] in lines
    assert "certificate" not in text


def test_roles_of_axes(plan: Plan) -> None:
    assert axis_roles(facts_of(plan)) == {"dp": ["data", "zero"], "tp": ["tensor"]}
    none = replace(plan, groups=tuple(GroupChoice(group.path) for group in plan.groups))
    assert axis_roles(facts_of(none))["dp"] == []


def test_an_operator_without_a_rule_is_shown_whole(plan: Plan) -> None:
    graph = plan.graph
    values = {**graph.values, "odd": Value("odd", (8, 16), graph.values["x"].dtype, True)}
    odd = Op("odd", "aten.mystery.default", (Ref("add1"),), (), ("odd",), "odd")
    ops = (*graph.ops[:8], odd, replace(graph.ops[8], args=(Ref("odd"), Ref("odd"))), graph.ops[9])
    changed = replace(plan, graph=replace(graph, values=values, ops=ops), copies={})
    row = next(row for section in sections(facts_of(changed)) for row in section.rows if row.module == "odd")
    assert row.result == "f32[8, 16]"
    assert any("all-gather@dp" in text for text in row.collectives)


def test_stacks_of_stacks_fold_and_unfold() -> None:
    """A second number that is folded stands behind a first one that is not; what is no count stays as it is."""
    generator = random.Random(0)
    forms = ["a.{}.b.{}", "a.{}.b.{}.c", "{}", "{}.x", "a.{}", "e.{}.f", "0{}.x", "q.{}{}.z.{}", "plain"]
    for _ in range(300):
        paths = [form.format(*generator.choices(range(4), k=3)) for form in generator.choices(forms, k=9)]
        assert sorted(unfold_paths(fold_paths(paths))) == sorted(set(paths))
    assert fold_paths([f"{side}.block.{n}" for side in ("encoder", "decoder") for n in range(3)]) == (
        "encoder.block.0..2, decoder.block.0..2")


def test_fold_paths() -> None:
    assert fold_paths(["h.0", "h.1", "h.3"]) == "h.0..1,3"
    assert fold_paths(["a.2.b.weight", "a.10.b.weight"]) == "a.2,10.b.weight"
    assert fold_paths(["a.0.b.0", "a.1.b.1"]) == "a.0.b.0, a.1.b.1"  # two numbers differ: nothing to fold
    assert fold_paths(["encoder.0", "decoder.0"]) == "encoder.0, decoder.0"
    assert fold_paths(["only"]) == "only"


def test_choices_in_words() -> None:
    """What an axis splits is named, whatever the choice is called."""
    assert assignment_words({"dp": "b0", "tp": "shared"}) == "dp splits b0, tp splits query heads, which share key heads"
    assert assignment_words({"cp": "ring", "tp": "+0"}) == "cp splits the sequence by ring, tp sums linear group 0 later"
    assert assignment_words({}) == "every rank does all of it"
