"""Pins close the loop: what a table prints can be pinned, a plan made from another's pins is that plan, and a plan is priced
again as its search priced it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshwright as mw
from benchmarks import refusals
from meshwright import PinError, Pins, Plan, PlanError
from meshwright.compiler.placement.pin_conflicts import check_agreement
from meshwright.compiler.placement.pinned import check_tensor_pins
from meshwright.compiler.solver import elimination
from meshwright.compiler.solver.solve import BlockModel, Chain, Kind, solve
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.serialize import plan_hash
from meshwright.ir.writing.names import choice_text, names_of
from meshwright.planner import capture_model, make_plan, reprice
from meshwright.programs import degrees_of
from meshwright.rules import rules_of
from meshwright.views import alternatives
from meshwright.views.alternatives import Alternatives
from meshwright.views.explain import explain
from meshwright.views.facts import facts_of
from meshwright.views.prices import Prices
from meshwright.views.report import render
from tests import mixtures, models
from tests.handmade import handmade_graph, handmade_plan

BATCH = 8


@cache
def graph(name: str, batch: int = BATCH) -> Graph:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        PreTrainedModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
             "max_position_embeddings": 16, "use_cache": False}
    model: PreTrainedModel
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, n_positions=16, use_cache=False,
                                           bos_token_id=1, eos_token_id=1))
    elif name in ("llama", "shallow", "deep"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers={"llama": 3, "shallow": 1, "deep": 5}[name], **sizes))
    elif name == "t5":
        model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=96,
                                                    use_cache=False, decoder_start_token_id=0, pad_token_id=0))
    else:
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
                                                 experts_implementation="grouped_mm", **sizes))
    tokens = torch.zeros((batch, 16), dtype=torch.int64)
    return capture_model(model, (), {"input_ids": tokens, "labels": tokens}, (), None, "fp32")


def as_dict(pins: Pins) -> dict[str, Any]:
    """As a person may write them."""
    return {f.name: getattr(pins, f.name) for f in fields(pins) if getattr(pins, f.name) not in (None, {})}


CASES: list[tuple[str, str, Mapping[str, Any]]] = [
    ("gpt2", "a100:2x4", {"dp": 2, "tp": 4, "zero": 3}),
    ("llama", "h100:1x4", {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True}),
    ("llama", "cpu:1x4", {"dp": 1, "tp": 4, "recompute": "full"}),
    ("llama", "h100:1x4", {"dp": 4, "shard": 2, "zero": 2}),
    ("llama", "h100:2x4", {"pp": 2, "dp": 4, "shard": 2, "zero": 3}),
    ("gpt2", "cpu:1x4", {"pp": 2, "dp": 2, "microbatches": 4, "recompute": "selective"}),
    ("llama", "cpu:1x4", {"pp": 2, "stage_cuts": ("model.layers.1.mlp",)}),
    ("gpt2", "cpu:1x2", {"pp": 2, "schedule": "zbv", "microbatches": 4}),
    ("llama", "h100:1x4", {"cp": 2, "tp": 2}),
    ("llama", "h100:1x4", {"cp": 2, "tp": 1, "attention": "ulysses", "zero": 3}),
    ("llama", "h100:1x8", {"cp": 2, "pp": 2, "tp": 1, "zero": 3, "attention": "ring"}),
    ("mixtral", "h100:1x4", {"dp": 4, "ep": 2, "zero": 3}),
    ("mixtral", "h100:1x4", {"dp": 2, "ep": 2, "pp": 2}),
    ("mixtral", "h100:1x8", {"dp": 4, "ep": 2, "shard": 2, "zero": 1, "pp": 2}),
    ("llama", "h100:1x4", {"cp": 4, "tp": 1, "ulysses": 2, "pp": 1}),
    ("llama", "cpu:1x2", {"axes": {"x": 2}}),
]


@pytest.mark.parametrize(
    ("model", "cluster", "pins", "linear"),
    [("llama", "h100:2x4", {"dp": 2, "tp": 4}, "mlp.up_proj:linear"),
     ("gpt2", "cpu:1x4", {"axes": {"x": 4}}, "mlp.c_fc:linear")],
)
def test_an_alternative_of_a_block_is_what_planning_with_its_pin_gives(
    model: str, cluster: str, pins: Mapping[str, Any], linear: str
) -> None:
    where = Cluster.parse(cluster)
    plan = make_plan(graph(model), where, Pins(**pins, microbatches=1))
    held = {key: value for key, value in as_dict(plan.to_pins()).items() if key not in ("operators", "values")}
    names = names_of(plan.graph)
    op = next(op for op in plan.graph.ops if names.ops[op.name].endswith(linear))
    pattern = names.ops[op.name].replace(".0.", ".*.")
    known = Alternatives(facts_of(plan)).of(op)
    assert len(known) > 1
    for one in known[:3]:
        again = make_plan(plan.graph, where, Pins.of({**held, "operators": {pattern: choice_text(one.assignment)}}))
        chosen = next(found for found in Alternatives(facts_of(again)).of(op) if found.chosen)
        assert chosen.assignment == one.assignment
        assert one.seconds == pytest.approx(chosen.seconds, rel=1e-6)


def test_what_several_blocks_share_is_free_in_an_alternative() -> None:
    """Of T5 positions, the embedding and what leaves the encoder: all their states together."""
    model, example = models.make("t5")
    where, pins = Cluster.parse("a100:2x2"), Pins(axes={"x": 2, "y": 2}, microbatches=1)
    plan = make_plan(capture_model(model, (), example, (), None, "bf16"), where, pins, precision="bf16")
    known = Alternatives(facts_of(plan))
    linears = [op for op in plan.graph.ops if op.target == "aten.linear.default"]
    for op in (linears[0], linears[-1]):
        found = known.of(op)
        assert found is not None
        assert len(found) > 3
        assert next(one for one in found if one.chosen).seconds <= min(one.seconds for one in found) * 1.001


def test_prices_that_are_bounded_have_the_best_between_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a block as wide as they are, and too wide to be made."""
    plan = make_plan(graph("llama"), Cluster.parse("h100:2x4"), Pins(axes={"x": 2, "y": 4}, microbatches=1))
    op = next(op for op in plan.graph.ops if names_of(plan.graph).ops[op.name].endswith("mlp.up_proj:linear"))
    best = {choice_text(one.assignment): one for one in Alternatives(facts_of(plan)).of(op)}
    assert all(one.least == one.seconds for one in best.values())
    assert "the best lies between" not in explain(plan, op.name)
    monkeypatch.setattr(elimination, "WIDTHS", (256,))
    found = Alternatives(facts_of(plan)).of(op)
    assert {choice_text(one.assignment) for one in found} == set(best)
    for one in found:
        known = best[choice_text(one.assignment)].seconds
        assert 0 < one.least <= known * (1 + 1e-6)
        assert known <= one.seconds * (1 + 1e-6)
    assert any(one.least < one.seconds for one in found)
    assert all("more shardings meet" in one.unproven for one in found if one.least < one.seconds)
    assert "more shardings meet in a block than can be tried: where a price has two ends" in explain(plan, op.name)


def test_how_a_block_is_kept_may_be_pinned_by_its_name_as_a_weight_may() -> None:
    text, where = "ZeRO 3, recompute full, gradients summed over dp, state split over dp", Cluster.parse("h100:1x4")
    pins = {"pp": 1, "dp": 2, "tp": 2, "microbatches": 1, "model.layers.0..1": text}
    plan = make_plan(graph("llama"), where, Pins.of({**pins, "model.layers.*.mlp.up_proj.weight": "f32[64@tp, 32]"}))
    assert [(group.zero, group.recompute) for group in plan.groups[:2]] == [(3, "full")] * 2
    with pytest.raises(PinError, match=r"model\.layers\.0\.\.1.*does not say how a block is kept"):
        make_plan(graph("llama"), where, Pins.of({**pins, "model.layers.0..1": "ZeRO three"}))


def test_operators_of_equal_blocks_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is held for every block of a kind that is planned alike, wherever these stand, so that these have one price."""
    made, price = list[tuple[int, int]](), Alternatives._alternatives
    monkeypatch.setattr(Alternatives, "_alternatives", lambda self, *at: made.append(at[:2]) or price(self, *at))
    plan = make_plan(graph("deep"), Cluster.parse("cpu:1x4"), Pins(axes={"x": 4}, microbatches=1))
    names = names_of(plan.graph).ops
    first, *others = (op for op in plan.graph.ops if names[op.name].endswith("mlp.act_fn:silu"))
    wanted = next(one for one in Alternatives(facts_of(plan)).of(first) if one.assignment != plan.assignments[first.name])
    odd = others[1].name
    for one in (plan, replace(plan, assignments={**plan.assignments, odd: wanted.assignment})):
        made.clear()
        known = Alternatives(facts_of(one))
        kinds = {op.name: known.places[op.name][0] for op in others}
        assert len(set(kinds.values())) < len(kinds)
        found = {op.name: known.of(op) for op in (*others, *others)}
        assert len(made) == len({(kinds[op.name], str(one.assignments[op.name])) for op in others})
        for name, choices in found.items():
            assert [choice.assignment for choice in choices if choice.chosen] == [one.assignments[name]]


def test_of_equal_blocks_that_are_planned_otherwise_each_has_its_own_alternatives() -> None:
    """One of several equal layers splits a weight over the ranks that hold other data in the others: in these its choice cannot
    run, and theirs can be compared with it in the one."""
    split, whole = "ZeRO 0, recompute none", "ZeRO 2, recompute none, gradients summed over x, state split over x"
    pins = {"axes": {"x": 4}, "tensors": {"model.layers.2.mlp.up_proj.weight": "[_@x, _]"},
            "blocks": {"model.layers.0..1": whole, "model.layers.2": split, "model.layers.3..4": whole}}
    plan = make_plan(graph("deep"), Cluster.parse("a10g:1x4"), Pins.of(pins))
    known, names = Alternatives(facts_of(plan)), names_of(plan.graph).ops
    products = [op for op in plan.graph.ops if names[op.name].endswith("mlp.up_proj:linear")]
    for op in products:
        found = known.of(op)
        assert len(found) > 1
        assert [one.assignment for one in found if one.chosen] == [plan.assignments[op.name]]
    assert known.places[products[1].name] == known.places[products[2].name]
    assert plan.assignments[products[2].name] not in [one.assignment for one in known.of(products[1])]
    assert plan.assignments[products[1].name] in [one.assignment for one in known.of(products[2])]
    assert "model.layers.2.mlp.up_proj:linear" in explain(plan, "model.layers.2.mlp.up_proj")


def test_prices_lie_further_apart_where_effort_ends() -> None:
    """Means of sums are looked for as long as all operators together may take, and the ends stay proven after."""
    plan = make_plan(graph("gpt2"), Cluster.parse("cpu:1x4"), Pins(axes={"x": 4}))
    ops = [op for op in plan.graph.ops if op.name in ("linear", "cross_entropy_loss_sum")]
    full, none = Alternatives(facts_of(plan)), Alternatives(facts_of(plan))
    none._left = 0
    exact, wide = ([one for op in ops for one in sorted(known.of(op), key=lambda one: choice_text(one.assignment))]
                   for known in (full, none))
    assert full._left < alternatives._MIXED_OF_ALL
    assert none._left == 0
    assert any(two.least < two.seconds for two in wide)
    for one, two in zip(exact, wide, strict=True):
        assert one.assignment == two.assignment
        assert two.least <= one.least * (1 + 1e-6)
        assert one.seconds <= two.seconds * (1 + 1e-6)
        assert bool(two.unproven) == (two.least < two.seconds)


def test_prices_where_other_sums_bind_have_the_ends_of_the_solver() -> None:
    """A choice under which another sum of a block's resources is the longest than by itself: its price is proven too, and what
    the solver finds where nothing else is open lies at it."""
    plan = make_plan(graph("gpt2"), Cluster.parse("cpu:1x4"), Pins(axes={"x": 4}))
    known, several = Alternatives(facts_of(plan)), 0
    for op in (op for op in plan.graph.ops if op.name in ("linear", "cross_entropy_loss_sum")):
        kind, model, var = known.places[op.name]
        for one in known.of(op) or ():
            assert one.least == one.seconds
            assert not one.unproven
            solved = solve(_held(known, kind, var, model.op_choices[var].index(one.assignment)), gap=1e-6)
            assert solved.bound * (1 - 1e-6) <= one.seconds <= solved.time * (1 + 1e-6)
            several += 1
    assert several > 6


def _held(known: Alternatives, kind: int, var: int, choice: int) -> Chain:
    """The chain of a plan's blocks, kept as planned, with one choice of a variable."""
    chain, kinds, places = known.chain, [], list(dict.fromkeys(known._sequence))
    for number, variant in places:
        one = chain.kinds[number]
        block = one.variants[variant]
        if number == kind:
            only = np.where(np.arange(block.sizes[var]) == choice, 0.0, np.inf)[:, None]
            unary = [own + only if at == var else own for at, own in enumerate(block.unary)]
            block = BlockModel(block.sizes, tuple(unary), block.edges)
        kinds.append(Kind((block,), (np.zeros(len(chain.bytes_row)),), one.entry, one.exit, one.shared))
    return replace(chain, kinds=tuple(kinds), sequence=tuple(places.index(at) for at in known._sequence))


@pytest.mark.parametrize(("model", "cluster", "pins"), CASES, ids=lambda case: str(case)[:60])
def test_a_plan_made_from_its_pins_is_that_plan(model: str, cluster: str, pins: Mapping[str, Any]) -> None:
    first = make_plan(graph(model), Cluster.parse(cluster), Pins(**pins))
    again = make_plan(graph(model), Cluster.parse(cluster), Pins.of(as_dict(first.to_pins())))
    assert again.to_pins() == first.to_pins()
    assert plan_hash(again) == plan_hash(first)
    assert again.certificate is not None
    assert again.certificate.considered == 1
    assert "stage_cuts" in pins or any(".." in name for name in first.to_pins().operators)
    assert again.predicted.step_seconds == pytest.approx(first.predicted.step_seconds, rel=1e-9)
    assert again.predicted.bytes_per_rank == first.predicted.bytes_per_rank


OTHERS: list[tuple[str, str, str, Mapping[str, Any]]] = [
    ("t5", "bf16", "a100:2x4", {"pp": 2, "dp": 2, "tp": 2}),
    ("vit", "bf16", "h100:1x4", {"dp": 2, "tp": 2, "zero": 3}),
    ("vit", "bf16", "h100:1x4", {"pp": 2, "dp": 2, "schedule": "interleaved1f1b", "virtual_stages": 2}),
    ("skips", "fp32", "cpu:1x4", {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2}),
    ("mixtral balanced", "bf16", "h100:2x4", {"pp": 2, "dp": 4, "ep": 2}),
    ("mixtral balanced", "bf16", "h100:1x8", {"cp": 2, "dp": 4, "ep": 2}),
]


@pytest.mark.parametrize(("name", "precision", "cluster", "pins"), OTHERS, ids=lambda case: str(case)[:40])
def test_plans_of_other_models_have_the_prices_of_their_pins(
    name: str, precision: str, cluster: str, pins: Mapping[str, Any]
) -> None:
    model, batch = mixtures.make(name) if name in mixtures.MAKERS else models.make(name)
    captured = capture_model(model, (), batch, (), None, precision)
    first = make_plan(captured, Cluster.parse(cluster), Pins(**pins), precision=precision)
    again = make_plan(captured, Cluster.parse(cluster), Pins.of(as_dict(first.to_pins())), precision=precision)
    assert plan_hash(again) == plan_hash(first)
    assert first.predicted is not None
    assert again.predicted is not None
    for one in ("step_seconds", "compute_seconds", "exposed_communication_seconds", "optimizer_seconds", "bytes_per_rank"):
        assert getattr(again.predicted, one) == pytest.approx(getattr(first.predicted, one), rel=1e-9)


UNLIKE: list[tuple[str, Mapping[str, Any]]] = [
    ("t5", {"schedule": "1f1b"}),
    ("shallow", {"schedule": "interleaved1f1b", "virtual_stages": 2}),
    ("shallow", {"schedule": "gpipe", "stage_cuts": ("model.layers.0.mlp.down_proj",)}),
]


@pytest.mark.parametrize(("model", "pins"), UNLIKE, ids=lambda case: str(case)[:60])
def test_layers_that_only_a_pipeline_is_cut_between_are_pinned(model: str, pins: Mapping[str, Any]) -> None:
    assert not graph(model).blocks
    where = Cluster.parse("cpu:1x2")
    first = make_plan(graph(model), where, Pins(pp=2, dp=1, tp=1, microbatches=2, **pins))
    again = make_plan(graph(model), where, Pins.of(as_dict(first.to_pins())))
    assert [block.path for block in again.graph.blocks] == [block.path for block in first.graph.blocks]
    assert len(first.groups) > 2
    assert plan_hash(again) == plan_hash(first)
    assert again.predicted == first.predicted
    assert again.certificate is not None
    assert again.certificate.considered == 1


def test_blocks_that_differ_are_pinned_apart() -> None:
    where = Cluster.parse("cpu:1x2")
    plan = make_plan(graph("llama"), where, Pins(dp=2, tp=1, zero=3))
    groups = (plan.groups[0], replace(plan.groups[1], recompute="full"), replace(plan.groups[2], zero=1), plan.groups[3])
    mixed = reprice(replace(plan, groups=groups))
    assert mixed.predicted.step_seconds != reprice(plan).predicted.step_seconds
    pins = as_dict(mixed.to_pins())
    assert set(pins["blocks"]) == {"model.layers.0", "outside the blocks", "model.layers.1", "model.layers.2"}
    again = make_plan(graph("llama"), where, Pins.of(pins))
    assert plan_hash(again) == plan_hash(mixed)
    assert again.predicted == mixed.predicted


@pytest.mark.parametrize("dp", [{"dp": 2}, {"dp": 4, "shard": 2}])
def test_blocks_of_a_pipeline_that_are_kept_apart_are_priced_and_pinned(dp: dict[str, int]) -> None:
    where = Cluster.parse(f"h100:1x{2 * dp['dp']}")
    plan = make_plan(graph("llama"), where, Pins(pp=2, tp=1, zero=1, microbatches=2, schedule="gpipe", **dp))
    first, second, third, root = plan.groups
    ways = [replace(plan, groups=groups) for groups in (
        (replace(first, zero=3), second, third, root), (first, replace(second, recompute="full", zero=2), third, root),
        (replace(first, zero=0, shard_axes=()), second, replace(third, zero=3, recompute="selective"), root),
    )]
    found = [reprice(one) for one in (plan, *ways)]
    assert len({one.predicted.step_seconds for one in found}) == len(found)
    alike = reprice(replace(plan, groups=tuple(replace(group, zero=3) for group in plan.groups)))
    low, mixed, high = sorted(one.predicted.step_seconds for one in (found[0], found[1], alike))
    assert found[1].predicted.step_seconds == pytest.approx(mixed, rel=1e-3)  # between none and all, up to latencies
    assert low < high
    for one in found[1:]:
        again = make_plan(graph("llama"), where, Pins.of(as_dict(one.to_pins())))
        assert plan_hash(again) == plan_hash(one)
        assert again.predicted == one.predicted


def test_what_is_dropped_is_searched_and_the_rest_is_held() -> None:
    where = Cluster.parse("h100:1x4")
    plan = make_plan(graph("llama"), where, Pins(dp=2, tp=2, zero=3))
    pins = as_dict(plan.to_pins())
    name = "model.layers.1.mlp.up_proj:linear"
    kept = "ZeRO 2, recompute full, gradients summed over dp, state split over dp"
    held = {"axes": pins["axes"], "operators": {name: "dp=b0"}, "blocks": {"model.layers.0": kept}}
    with pytest.raises(PinError, match="cannot run so over mesh dp=2 x tp=2; it has 'dp=b0, tp=n'"):
        make_plan(graph("llama"), where, Pins.of(held))
    found = make_plan(graph("llama"), where, Pins.of({**held, name: "dp=b0, tp=n"}))
    assert (found.groups[0].zero, found.groups[0].recompute) == (2, "full")
    assert found.groups[1].recompute == "none"
    assert found.mesh == plan.mesh


def test_what_a_table_prints_can_be_pinned() -> None:
    where = Cluster.parse("cpu:1x4")
    pins = {"dp": 2, "tp": 2, "model.layers.*.mlp.up_proj.weight": "f32[64@tp, 32]",
            "model.layers.*.mlp.down_proj.weight": "bf16[32, f@tp]"}
    plan = make_plan(graph("llama"), where, Pins.of(pins))
    facts = facts_of(plan)
    found = {param.fqn: facts.type_of(param.value) for param in plan.graph.params}
    assert {text for fqn, text in found.items() if "up_proj" in fqn} == {"f32[64@tp, 32]"}
    assert {text for fqn, text in found.items() if "down_proj" in fqn} == {"f32[32, 64@tp]"}


@pytest.mark.parametrize("degrees", [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 1, "tp": 4}])
@pytest.mark.parametrize("text", ["[64, 32@tp]", "[64, 32]"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_weight_of_one_layer_is_pinned_alone(degrees: Mapping[str, Any], text: str, layer: int) -> None:
    """Layers that are otherwise equal; the whole weight on every rank can always be had."""
    name = f"model.layers.{layer}.mlp.up_proj.weight"
    facts = facts_of(make_plan(graph("deep"), Cluster.parse("cpu:1x4"), Pins.of({**degrees, name: text})))
    found = {param.fqn: facts.type_of(param.value) for param in facts.plan.graph.params if "up_proj" in param.fqn}
    assert found.pop(name) == f"f32{text}"
    assert f"f32{text}" not in found.values()


def test_lines_of_the_printed_plan_are_pins() -> None:
    where = Cluster.parse("cpu:1x4")
    plan = make_plan(graph("llama"), where, Pins(dp=2, tp=2, zero=3))
    lines = render(plan).splitlines()
    row = next(line for line in reversed(lines) if "mlp.up_proj" in line)
    assert Pins.of(row).tensors == {"*mlp.up_proj.weight": "f32[64@tp, 32]"}
    title = next(n for n, line in enumerate(lines) if "equal blocks)" in line)
    kept = next(line for line in lines if line.strip().startswith("model.layers.0..2  "))
    pasted = Pins.of("\n".join([lines[0], lines[title], row, kept]))
    assert dict(pasted.axes or {}) == {"dp": 2, "tp": 2}
    assert pasted.tensors == {f"model.layers.{n}.mlp.up_proj.weight": "f32[64@tp, 32]" for n in (1, 2)}
    assert list(pasted.blocks.values()) == ["ZeRO 3, recompute none, gradients summed over dp, state split over dp"]
    again = make_plan(graph("llama"), where, pasted)
    assert again.groups[:-1] == plan.groups[:-1]
    shown = next(line for line in explain(plan, "model.layers.0.mlp.up_proj.weight").splitlines() if ":linear" in line)
    assert shown.strip() == "as a pin {'model.layers.0.mlp.up_proj:linear': 'dp=b0, tp=n'}"
    assert Pins.of("[red]x[/red].0\n  .   weight f32[64@tp, 32]").tensors == {"[red]x[/red].0.weight": "f32[64@tp, 32]"}
    with pytest.raises(PinError, match="no line of a plan's tables"):
        Pins.of("f32[64@tp,32]")
    with pytest.raises(PinError, match="no line of a plan's tables"):
        Pins.of("time       compute 3 ms + something")


def test_the_mesh_of_a_plan_with_an_exchange_is_pinned_beside_it() -> None:
    where = Cluster.parse("h100:1x2")
    plan = make_plan(graph("shallow"), where, Pins(cp=2, attention="ulysses"))
    assert str(plan.mesh) == "dp=1 x cp=2 x tp=1"
    pasted = Pins.of(str(plan.mesh))
    assert plan_hash(make_plan(graph("shallow"), where, replace(pasted, attention="ulysses"))) == plan_hash(plan)
    with pytest.raises(PinError, match=r"'cp\*': 2, 'tp': 1}, or attention='ulysses'"):
        make_plan(graph("shallow"), where, pasted)


@pytest.mark.parametrize(("model", "cluster", "pins"), [
    ("mixtral", "h100:1x4", {"dp": 4, "tp": 1, "microbatches": 1}),
    ("mixtral", "cpu:1x4", {"dp": 4, "ep": 2, "zero": 3, "microbatches": 2}),
    ("gpt2", "cpu:1x4", {"dp": 2, "tp": 2, "zero": 2, "recompute": "none", "microbatches": 2}),
    ("llama", "cpu:1x4", {"dp": 4, "tp": 1, "recompute": "full"}),
    ("deep", "h100:1x4", {"pp": 2, "dp": 2, "tp": 1, "microbatches": 1, "recompute": "none"}),
    ("llama", "a100:1x4", {"dp": 2, "cp": 2, "tp": 1}),
    ("llama", "cpu:1x4", {"dp": 1, "tp": 4, "recompute": "full", "sequence_parallel": True}),
    ("gpt2", "cpu:1x4", {"dp": 2, "tp": 2, "recompute": "selective"}),
    ("mixtral", "h100:1x4", {"dp": 1, "cp": 2, "tp": 2, "recompute": "full"}),
], ids=str)
def test_the_parts_of_compute_are_the_whole(model: str, cluster: str, pins: Mapping[str, Any]) -> None:
    """What operators take, gradients added up, what is waited for the host, and collectives that run again."""
    plan = make_plan(graph(model), Cluster.parse(cluster), Pins.of(pins))
    prices, predicted = Prices(facts_of(plan)), plan.predicted
    stages = 1 if plan.pipeline is None else plan.pipeline.degree
    work = [prices.op(op) for op in plan.graph.ops]
    moves = [move for one in work for move in one.inside]
    moves += [move for op in plan.graph.ops for edge in prices.edges(op) for move in edge.moves]
    parts = sum(one.compute_seconds for one in work) + prices.waiting() + sum(move.again_seconds for move in moves)
    assert parts / stages == pytest.approx(predicted.compute_seconds + (predicted.recomputation_seconds or 0.0), rel=1e-9)
    if plan.pipeline is None:  # of a pipeline the slowest rank's
        assert sum(one.optimizer_seconds for one in work) == pytest.approx(predicted.optimizer_seconds, rel=1e-9)


def test_gradients_that_are_added_up_in_a_pipeline_are_compute() -> None:
    """Of wide layers and few samples they take long; nothing of it is communication."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)))
        example = torch.zeros(64, 2048)
    one = capture_model(layers, (example,), {}, (), lambda y: y.square().mean(), "fp32")
    plan = make_plan(one, Cluster.parse("v100:1x2"), Pins(pp=2, tp=1, microbatches=4, schedule="1f1b", recompute="none"))
    prices = Prices(facts_of(plan))
    parts = sum(prices.op(op).compute_seconds for op in plan.graph.ops) + prices.waiting()
    assert parts / 2 == pytest.approx(plan.predicted.compute_seconds, rel=1e-9)
    assert sum(prices._parameters(op, prices.facts.placed[op.name], prices.group(op))[3] for op in plan.graph.ops) > parts / 20


def swin() -> models.Case:
    """Names as long as they come: layers in stages, tables of positions."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=16, patch_size=2, window_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 2], num_labels=5,
                        drop_path_rate=0.0)
    return SwinForImageClassification(config), {"pixel_values": torch.randn(BATCH, 3, 16, 16),
                                                "labels": torch.randint(0, 5, (BATCH,))}


class Borrowing(nn.Module):
    """Layers whose modules read parameters of others, with names of their own kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))
        names = "up-down", "a_layer_of_a_name_that_is_long" * 2
        self.layers = nn.ModuleList(nn.ModuleDict({name: nn.Linear(16, 16) for name in names}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            up, long = layer.values()
            x = x + long(up(x).relu() @ self.shared.weight) @ self.weight
        return x.square().mean()


def borrowing() -> models.Case:
    return Borrowing(), {"x": torch.randn(BATCH, 16)}


@pytest.mark.parametrize("model", ["t5", "vit", "swin", "borrowing"])
def test_every_row_of_weights_is_a_pin(model: str) -> None:
    """However long its names: it stands in one line, and says of which parameters it is."""
    module, batch = {"swin": swin, "borrowing": borrowing}[model]() if model in ("swin", "borrowing") else models.make(model)
    captured = capture_model(module, (), batch, (), None, "fp32")
    plan = make_plan(captured, Cluster.parse("cpu:1x4"), Pins(dp=2, tp=2))
    lines = render(plan).splitlines()
    assert max(map(len, lines)) <= 120
    titles = {at - 2 for at, line in enumerate(lines) if line.strip().startswith("module ")}
    rows = [line for at, line in enumerate(lines) if at in titles or re.match(r"  +(\S+ +)?\S+ f32\[.*\]( |$)", line)]
    pasted = Pins.of("\n".join([lines[0], *rows]))
    check_tensor_pins(pasted, captured)
    facts = facts_of(plan)
    read = {name for op in captured.ops for name in op.inputs}
    wanted = {param: facts.type_of(param.value) for param in captured.params if param.trainable and param.value in read}
    found = {param: {pasted.tensors[fqn] for fqn in param.fqns if fqn in pasted.tensors} for param in wanted}
    assert found == {param: {text} for param, text in wanted.items()}
    again = facts_of(make_plan(captured, Cluster.parse("cpu:1x4"), pasted))
    assert {param: again.type_of(param.value) for param in wanted} == wanted


WRONG: tuple[Any, ...] = (
    {"axes": 3}, {"axes": {}}, {"axes": torch.zeros(2)}, {"axes": {"x": True}}, {"axes": {"dp": 2, "dp*": 2}}, {"tensors": 3},
    {"operators": [1]}, {"tensors": 3, "*.weight": "[_]"}, {"values": {"x": None}}, {"tp": [[1]]}, {"tp": [2, None]},
    {"recompute": [None]}, {"tp": ["<=2", 4]}, {"tp": 2.0}, {"tp": torch.tensor([1, 2])}, {"tp": "<=" + "9" * 5000},
    {"tp": 10**400}, {"tp": 10**6000}, {"tp": range(10**30)}, {"zero": 1.0}, {"zero": torch.tensor([1, 2])},
    {"schedule": [["none"]]}, {"schedule": 3}, {"schedule": torch.tensor([1, 2])}, {"attention": {}}, {"recompute": [[]]},
    {"stage_cuts": [""]}, {"stage_cuts": ["a", "a"]}, {"among": 3}, {"among": {"tp": 2}}, {"most": {"tp": "x"}}, {1: 2},
    ["tp"], 3,
)


def test_no_value_of_a_pin_is_taken_for_another() -> None:
    for pins in WRONG:
        with pytest.raises(PinError) as caught:
            Pins.of(pins)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tp": 2, "model.layers.*.mlp.up.weight": "[_@tp, _]"}, "names no parameter of the model; did you mean 'model.layers"),
        ({"tp": 2, "*.up_proj.weight": "f32[32@tp, 64]"}, r"another shape than .*up_proj.weight, which is \[64, 32\]"),
        ({"tp": 2, "*.up_proj.weight": "[_, _] +tp"}, "a parameter is only split"),
        ({"tp": 2, "*.up_proj.weight": "64@tp"}, "is no sharding"),
        ({"tp": 2, "*.up_proj.weight": 3}, "must be two texts"),
        ({"dp": 2, "tp": 2, "model.layers.*.mlp.up_proj:linera": ""}, "is none of the model's"),
        ({"dp": 2, "tp": 2, "model.layers.0..9.mlp.up_proj:linear": ""}, "'model.layers.3.mlp.up_proj:linear' is none"),
        ({"dp": 2, "tp": 2, "operators": {"model.layers.*.mlp.up_proj:linear": "tp"}}, "is no choice, as in"),
        ({"dp": 2, "tp": 2, "operators": {"model.layers.*.mlp.up_proj:linear": "x=n"}}, "name axis 'x'"),
        ({"operators": {"model.layers.*.mlp.up_proj:linear": "tp=n"}}, "pin axes, or the degrees"),
        ({"dp": 2, "tp": 2, "pp": 1, "blocks": {"model.layers.0": "ZeRO 5"}}, "does not say how a block is kept"),
        ({"dp": 1, "tp": 2, "pp": 2, "blocks": {"model.layers.0": "ZeRO 0, recompute none"}}, "pin zero, shard and recompute"),
        ({"dp": 2, "tp": 2, "values": {"model.layers.1:add": "[_@dp]"}}, "has 1 dims, the value has 3"),
        ({"axes": {"x": 8}}, "makes 8 devices but there are 4"),
        ({"axes": {"x": 2, "dp": 2}}, "name all of them"),
        ({"axes": {"x": 4}, "tp": 2}, "contradict"),
        ({"axes": {"dp": 2, "tp": 2, "*.up_proj.weight": 3}}, "give {name: size}"),
        ({"axes": {}}, "axes={} names no axis"), ({"axes": {"foo*": 4}}, r"'cp' may have a \*.*name the axis 'foo'"),
        ({"stage_cuts": ["model.layers.1", "model.layers.1"]}, "'model.layers.1' is named twice"),
        ({"stage_cuts": ["model.layers.1", "model.layers.1.input_layernorm"]}, "begin with the same operator"),
    ],
)
def test_pins_that_name_nothing_are_refused(pins: Mapping[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        make_plan(graph("llama"), Cluster.parse("cpu:1x4"), Pins.of(pins))


def test_what_has_no_price_is_said() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("cpu:1x4"), Pins(pp=2, dp=2, zero=1))
    with pytest.raises(PlanError, match="nothing outside the blocks is recomputed"):
        reprice(replace(plan, groups=(*plan.groups[:-1], replace(plan.groups[-1], recompute="full"))))
    with pytest.raises(PlanError, match="plan again for these"):
        reprice(plan, Cluster.parse("cpu:1x8"))
    faster = reprice(plan, Cluster.parse("h100:1x4"))
    assert faster.predicted.capacity_bytes > plan.predicted.capacity_bytes
    assert faster.cluster.startswith("h100")


def test_pins_beside_the_plan_that_they_are_of() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("cpu:1x4"), Pins(dp=2, tp=2, zero=3))
    rules, pins = rules_of(plan.graph)[0], plan.to_pins()
    check_agreement(plan, pins, rules, degrees_of(plan))
    name = "model.layers.0..2.mlp.up_proj:linear"
    for other in ({"axes": {"dp": 4, "tp": 1}}, {"operators": {name: "dp=b0"}},
                  {"blocks": {"model.layers.1": "ZeRO 0, recompute none"}}):
        with pytest.raises(PlanError, match="pinned beside a plan, which has it otherwise"):
            check_agreement(plan, replace(pins, **other), rules, degrees_of(plan))


def test_pins_that_leave_values_open_beside_a_plan() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("cpu:1x4"), Pins(dp=2, tp=2, zero=3))
    rules = rules_of(plan.graph)[0]
    for pins in ({"tp": [1, 2]}, {"shard": "<=2", "zero": [2, 3]}, {"cp": [1, 2], "schedule": ["none", "1f1b"]},
                 {"sequence_parallel": [True, False], "stages": "<=1"}):
        check_agreement(plan, Pins.of(pins), rules, degrees_of(plan))
    for pins, words in (({"tp": [1, 4]}, "tp among 1, 4 contradicts"), ({"zero": "<=2"}, "zero <= 2 contradicts"),
                        ({"shard": [4, 8]}, "shard among 4, 8"), ({"schedule": ["gpipe", "1f1b"]}, "schedule=none"),
                        ({"cp": [2, 4], "attention": ["ring", "ulysses"]}, "contradict|nothing to split so")):
        with pytest.raises(PlanError, match=words):
            check_agreement(plan, Pins.of(pins), rules, degrees_of(plan))


def test_an_operator_that_is_pinned_over_an_axis_is_planned_on_meshes_that_have_it() -> None:
    """One that is open is taken up, though others would do without; one that none can have is refused."""
    where, name = Cluster.parse("h100:1x4"), "model.layers.*.mlp.experts:experts"
    plan = make_plan(graph("mixtral"), where, Pins.of({"dp": 2, "tp": 2, "operators": {name: "dp=t0, tp=f"}}))
    assert str(plan.mesh) == "dp=2 x tp=2"
    routed = {"operators": {name: "ep=t0&e, tp=f"}}
    for ep in (None, [1, 2]):
        plan = make_plan(graph("mixtral"), where, Pins.of({"dp": 2, "tp": 2, "ep": ep, **routed}))
        assert plan.mesh.size("ep") == 2
        experts = [one for op, one in plan.to_pins().operators.items() if op.endswith("experts:experts")]
        assert experts == ["ep=t0&e, tp=f"]
    for pins, words in (({"dp": 2, "tp": 2, "ep": 1, **routed}, "axis 'ep'; .* no more than dp, dp_replicate, dp_shard, tp"),
                        ({"axes": {"dp": 2, "tp": 2}, **routed}, "name axis 'ep'"), ({"axes": {"x": 4}, **routed}, "than x;"),
                        ({"dp": 2, "tp": 2, "operators": {name: "dp=t0, tp=f, cp=t1"}}, "axis 'cp'.*leave that axis out"),
                        ({"dp": 4, "tp": 1, "operators": {name: "dp=t0, pp=f"}}, "name axis 'pp'")):
        with pytest.raises(PinError, match=words):
            make_plan(graph("mixtral"), where, Pins.of(pins))


@pytest.mark.parametrize(("model", "cluster", "pins", "holds"), [
    ("llama", "h100:1x4", {"tensors": {"model.layers.*.mlp.up_proj.weight": "[_@tp, _]"}}, {"tp": (2, 4)}),
    ("llama", "h100:1x4", {"tensors": {"*.self_attn.k_proj.weight": "[_@tp, _]"}, "tp": [1, 2, 4]}, {"tp": (2, 4)}),
    ("llama", "h100:1x4", {"dp": 2, "tp": 1, "cp": [2, 1], "operators": {"model.layers.0.mlp.up_proj:linear": "dp=b0"}},
     {"pp": (2,)}),
    ("mixtral", "h100:1x4", {"tensors": {"model.layers.*.mlp.experts.gate_up_proj": "[_@ep, _, _]"}}, {"ep": (2, 4)}),
    ("mixtral", "h100:1x4", {"dp": 4, "tp": 1, "tensors": {"model.layers.*.mlp.experts.down_proj": "[_@ep, _, _]"}},
     {"ep": (2, 4)}),
])
def test_a_degree_that_cannot_obey_a_pin_leaves_those_that_can(
    model: str, cluster: str, pins: Mapping[str, Any], holds: Mapping[str, tuple[int, ...]]
) -> None:
    """A weight that is pinned over an axis is planned with what degrees have it, whatever others cannot."""
    plan = make_plan(graph(model), Cluster.parse(cluster), Pins.of(pins))
    assert all(plan.mesh.size(axis) in sizes for axis, sizes in holds.items())


def test_where_no_degree_can_obey_a_pin_it_is_refused() -> None:
    with pytest.raises(PinError, match=r"up_proj.weight': '\[_@dp, _\]' cannot be: aten.linear.default of model.layers.0.mlp"):
        make_plan(graph("llama"), Cluster.parse("h100:1x4"), Pins(tensors={"model.layers.*.mlp.up_proj.weight": "[_@dp, _]"}))


def test_a_pin_that_decides_nothing_is_noted() -> None:
    plan = make_plan(graph("llama"), Cluster.parse("cpu:1x2"), Pins(dp=1, tp=2, zero=3))
    assert [note for note in plan.notes if "zero=3 decides nothing" in note]
    plan = make_plan(graph("llama"), Cluster.parse("cpu:1x2"), Pins(dp=2, tp=1, zero=3, shard=2))
    assert not [note for note in plan.notes if "decides nothing" in note]


def test_names_are_those_of_modules() -> None:
    names = names_of(handmade_graph())
    assert (names.ops["down0"], names.ops["add1"], names.ops["loss"]) == ("blocks.0.down:linear", "blocks.1:add", ":sum")
    pins = handmade_plan().to_pins()
    assert pins.operators["blocks.0..1.down:linear"] == "dp=b0, tp=k"


def test_plans_print_themselves_as_pins() -> None:
    plan: Plan = make_plan(graph("llama"), Cluster.parse("cpu:1x4"), Pins(dp=2, tp=2))
    assert str(plan.to_pins()).startswith("microbatches=1; operators=")


REFUSED: list[tuple[str, int, str, Mapping[str, Any], str]] = [
    ("einsum", 4, "h100:1x2", {"ep": 2, "cp": 2, "dp": 1}, "not over cp=2 as well.*: ep=1, or dp=2 with cp=1"),
    ("einsum", 4, "h100:1x4", {"ep": 3}, "does not divide the 4 experts.*: ep=4"),
    ("mixtral", 4, "h100:1x4", {"ep": 2, "tp": 4}, "must divide dp=1.*: tp=2, or ep=1"),
    ("mixtral", 4, "h100:1x6", {"dp": 3, "tp": 1}, "does not divide the batch of 8 samples.*: dp=2"),
    ("mixtral", 4, "h100:1x8", {"pp": 8}, "can be cut into 4 pieces.*: pp=4"),
    ("mixtral", 4, "h100:1x3", {"mlp_rows": 8, "schedule": "zbv"}, "no linears of one value.*no pin mlp_rows"),
    ("llama4", 4, "h100:1x8", {"pp": 2, "microbatches": 4}, "needs the whole batch at once.*: microbatches=1"),
    ("llama4", 4, "h100:1x4", {"pp": 2, "schedule": "1f1b"}, "needs the whole batch at once.*: schedule="),
    ("Llama", 16, "h100:1x1", {"pp": 3, "tp": 4}, "make 12 devices.*: tp=1 with pp=1"),
    ("Llama", 16, "h100:1x4", {"dp": 3}, "which does not divide the 4.*: dp=4"),
    ("Llama", 16, "h100:1x6", {"attention": "ring"}, "needs pin cp.*: cp=2, or no pin attention"),
    ("GPT2", 16, "h100:1x4", {"axes": {"tp": 2, "dp": 2}}, "lays out axes as dp, tp, the outer.*: axes={'dp': 2, 'tp': 2}"),
    ("GPT2", 16, "h100:1x8", {"axes": {"tp": 2, "pp": 2, "dp": 2}}, "axes={'pp': 2, 'dp': 2, 'tp': 2}"),
    ("Llama", 16, "h100:1x4", {"axes": {"dp": 2, "cp": 2}}, r"lays .* out as dp=2 x cp\*=2.*: axes={'dp': 2, 'cp\*': 2}"),
    ("Llama", 16, "h100:1x8", {"cp": 4, "ulysses": 4}, "multiple of it.*: cp=8, or ulysses=2"),
    ("Llama", 16, "h100:1x4", {"cp": 4, "stages": 4}, "there is cp = 1, 2; nearest legal setting: cp=2, or stages=1"),
    ("GPT2", 16, "h100:1x4", {"dp": 4, "ep": 1, "microbatches": 4}, "into dp=4 ranks.*: dp=2, or microbatches=2"),
    ("GPT2", 16, "h100:1x4", {"tp": 4, "sequence_parallel": True, "schedule": "zb"}, "of 4 devices"),
    ("GPT2", 16, "h100:1x8", {"pp": 2, "dp": 2, "schedule": "dualpipev", "zero": 2, "recompute": "full"}, "whole backward"),
    ("Llama", 16, "h100:1x8", {"pp": 2, "dp": 4, "schedule": "dualpipev", "microbatches": 2}, "least one micro-batch a stage"),
]


@pytest.mark.parametrize(("model", "length", "cluster", "pins", "words"), REFUSED)
def test_what_a_refusal_names_is_planned(model: str, length: int, cluster: str, pins: Mapping[str, Any], words: str) -> None:
    """The nearest legal setting, and one that keeps the pin that this changes."""
    graph, where = refusals.graph_of(model, length), Cluster.parse(cluster)
    with pytest.raises(PlanError if "whole batch" in words else PinError, match=words) as caught:
        make_plan(graph, where, Pins.of(pins))
    settings = refusals.named(str(caught.value))
    assert settings
    for changes in settings:
        assert make_plan(graph, where, Pins.of({name: one for name, one in {**pins, **changes}.items() if one is not None}))


@pytest.mark.parametrize(("pins", "words"), [
    ({"attention": "ulysses", "cp": 3}, "cp=4 with attention='all-gather'"), ({"ulysses": 3, "cp": 4}, "ulysses=1"),
    ({"attention": "ulysses", "axes": {"dp": 2, "cp": 4}}, r"attention='all-gather' with axes={'dp': 2, 'cp\*': 4}"),
    ({"attention": "ulysses"}, "no pin attention"), ({"attention": "ring"}, "cp=2"),
    ({"attention": "ulysses", "cp": 4}, "attention='all-gather'"), ({"ulysses": 2, "cp": 4}, "ulysses=1"),
    ({"attention": "ulysses", "cp": "<=8", "tp": 3}, "tp=4"), ({"tp": 3}, "tp=4"),
    ({"cp": 3, "ulysses": 3}, "cp=4 with ulysses=1"), ({"attention": "ulysses", "cp": [2, 4]}, "attention='all-gather'"),
])
def test_what_a_refusal_names_is_planned_where_heads_leave_little(pins: Mapping[str, Any], words: str) -> None:
    """Of 12 heads and 3 of keys sequence can be exchanged over 3, 6 or 12 ranks, none of which divides the devices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=3,
        vocab_size=96, max_position_embeddings=64, use_cache=False))
    tokens = torch.zeros((4, 64), dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    with pytest.raises((PinError, PlanError), match=f"nearest legal setting: {words}") as caught:
        mw.plan(model, "h100:2x4", batch, pins=pins)
    for setting in refusals.named(str(caught.value)):
        mw.plan(model, "h100:2x4", batch, pins={name: one for name, one in {**pins, **setting}.items() if one is not None})


def test_a_pipeline_of_what_needs_the_whole_batch_has_one_micro_batch() -> None:
    """Four data ranks, and two in two micro-batches, hold as many samples and are priced by one placement. That the second
    cannot be the search learned too late to look at the rest."""
    plan = make_plan(refusals.graph_of("llama4", 4), Cluster.parse("h100:1x8"), Pins(pp=4))
    assert plan.pipeline is not None
    assert plan.schedule.microbatches == 1
