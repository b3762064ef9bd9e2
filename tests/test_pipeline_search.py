"""Pipelines that the search finds, run through ``autoparallel(model, mesh, example, pins=...)``, equal the single process.

``test_pipeline.py`` shows the runtime under plans made by hand; here the planner chooses cuts, micro-batches, schedules and
placements within the pins, and what it may not choose is refused with the nearest legal setting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import meshwright as mw
from meshwright.compiler.search.blockwise import OneDevice
from meshwright.compiler.search.sweep import Sweep
from meshwright.compiler.search.task import Task
from meshwright.compiler.structure.units import find_layers
from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.pins import RECOMPUTE, PinError, Pins
from meshwright.ir.plan import Plan
from meshwright.ir.schedules import illegal_combination
from meshwright.planner import capture_model, make_plan, rules_of
from tests.models import make
from tests.pipelines import batch_of, check_as_used, check_searched
from tests.schedules import SCHEDULES, SPLIT_BACKWARD

CLIP = 0.1
TWICE = 2
"""Forwards and backwards before each optimizer step."""
Cases = Sequence[Mapping[str, Any]]
ZERO = [{"pp": 2, "dp": 2, "zero": level, "microbatches": 2} for level in (0, 1, 2, 3)]
TENSOR = [{"pp": 2, "tp": 2, "microbatches": 2}, {"pp": 2, "tp": 2, "sequence_parallel": True}]
SCHEDULED = [{"pp": 2, "schedule": schedule, "microbatches": 4, "dp": 2, "tp": 1} for schedule in SCHEDULES]
MODELS: dict[str, list[Mapping[str, Any]]] = {
    "llama": [
        {}, {"pp": 4, "microbatches": 4}, TENSOR[0], SCHEDULED[0],  # the others: of the models below
        *({"pp": 2, "dp": 2, "recompute": kind, "microbatches": 2, "schedule": "1f1b"} for kind in ("selective", "full")),
        {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2, "schedule": "1f1b", "stage_cuts": ("model.layers.1.mlp",)},
    ],
    "gpt2": [{"pp": 4, "microbatches": 4, "schedule": "zb"}, TENSOR[1], *ZERO[:3], {**SCHEDULED[4], "zero": 1}],
    "t5": [{"pp": 4, "schedule": "zbv", "microbatches": 4}, TENSOR[0], ZERO[3], {**SCHEDULED[3], "virtual_stages": 2}],
    "vit": [{"pp": 4, "schedule": "1f1b"}, TENSOR[0], {**ZERO[3], "recompute": "full", "schedule": "interleaved1f1b"}],
    "bare": [{"pp": 4, "schedule": "gpipe", "microbatches": 4}, {**ZERO[3], "schedule": "1f1b"}, {**SCHEDULED[3], "zero": 1}],
    "bert": [{"pp": 4, "schedule": "gpipe", "microbatches": 2}, TENSOR[1], {**ZERO[2], "recompute": "selective"}, SCHEDULED[5]],
    "skips": [{"pp": 4, "schedule": "1f1b", "microbatches": 4}, TENSOR[0], {**SCHEDULED[2], "zero": 3}],
}


def differences(pool: Callable[[int], Any], world: int, name: str, cases: Cases, *how: Any) -> list[str]:
    """What ``check_searched`` finds, on all ranks."""
    named = {str(dict(pins)): dict(pins) for pins in cases}
    return [line for lines in pool(world).run(check_searched, name, named, *how) for line in lines]


@pytest.mark.parametrize("name", MODELS)
def test_pinned_pipelines(pool: Callable[[int], Any], name: str) -> None:
    """Four processes, as stages alone and with data and tensor parallel ranks, under every schedule, ZeRO level and
    recomputation, and what is found without a pin; clipped, two backwards a step."""
    assert differences(pool, 4, name, MODELS[name], CLIP, True, TWICE) == []


def test_what_only_a_pipeline_cuts_is_searched_with_stages_too() -> None:
    """One layer: with two stages it takes less than any plan without, and no bound of a search without that pin is above it. A
    recomputation that no layer can have is named."""
    sizes = {"n_embd": 384, "n_layer": 1, "n_head": 6, "vocab_size": 5003, "n_positions": 256}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, use_cache=False))
    tokens = torch.zeros((12, 48), dtype=torch.int64)
    example = {"input_ids": tokens, "labels": tokens}
    staged, alone, *some = (mw.plan(model, "h100@p5:2x1", example, precision="bf16", pins=pins) for pins in (
        {"pp": 2}, {"pp": 1, "recompute": "full"}, {}, {"pp": [1, 2]}, {"schedule": ["none", "gpipe", "zb"]}))
    step = staged.predicted.step_seconds
    assert step < alone.predicted.step_seconds
    assert ["recompute=full decides nothing" in note for note in alone.notes] == [True]
    for plan in some:
        proof = plan.certificate
        assert proof.bound_seconds <= step * (1 + 1e-9)
        assert plan.predicted.step_seconds <= step * (1 + 1e-9)
        assert proof.considered == proof.pruned + proof.infeasible + proof.solved
    for pins in ({"tp": 1, "dp": [2, 4]}, {"dp": 4, "tp": "<=1", "schedule": ["none", "1f1b"]}):  # which leave stages alone
        assert mw.plan(model, "h100:1x8", example, precision="bf16", pins=pins).pipeline is not None


@pytest.mark.parametrize(("name", "pins"), [("gpt2", {"zero": 3, "microbatches": 2}), ("t5", {"schedule": "zbv"})])
def test_as_used(pool: Callable[[int], Any], tmp_path: Path, name: str, pins: dict[str, Any]) -> None:
    """Named axes of a mesh, ``eval()``, plans and checkpoints on disk."""
    pool(4).run(check_as_used, name, pins, str(tmp_path))


def test_eight_processes(pool: Callable[[int], Any]) -> None:
    """Stages of data and tensor parallel ranks at once; replicas of shards; more stages than ranks."""
    cases = [
        {"pp": 2, "dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "microbatches": 2, "schedule": "1f1b"},
        {"pp": 2, "dp": 4, "shard": 2, "zero": 2, "tp": 1, "microbatches": 2, "schedule": "interleaved1f1b"},
        {"pp": 4, "tp": 2, "dp": 1, "schedule": "zb", "microbatches": 4},
    ]
    assert differences(pool, 8, "gpt2", cases, CLIP, True, TWICE) == []


# models whose layers share values


def test_stages_start_where_a_pin_says() -> None:
    """At a layer, a module inside of one, or an operator; the other halves of what is cut so stay of one kind."""
    layers = {block.path: block for block in graph().blocks}
    second = next(i for i, op in enumerate(graph().ops) if op.module.startswith("model.layers.1.mlp"))
    inner = graph().ops[layers["model.layers.0"].start + 3]
    for cuts, starts, kinds in (
        (("model.layers.1",), [layers["model.layers.1"].start], 1), (("model.layers.1.mlp",), [second], 3),
        (("model.layers.0.mlp", "model.layers.1", "model.layers.1.mlp"), [None, layers["model.layers.1"].start, second], 2),
        ((inner.name, "model.norm", "lm_head"), [graph().producers[inner.outputs[0]], None, None], 4),
    ):
        plan = planned(pp=len(cuts) + 1, schedule="gpipe", microbatches=2, stage_cuts=cuts)
        assert plan.pipeline is not None
        assert [a for a, b in zip(plan.pipeline.cuts[1:], starts, strict=False) if b not in (None, a)] == []
        assert len({block.kind for block in plan.graph.blocks}) == kinds
    with pytest.raises(PinError, match=r"'model.embed_tokens' is not where a stage can start"):
        planned(pp=2, stage_cuts=("model.embed_tokens",))


def test_biases_that_layers_share() -> None:
    """T5's layers read the position biases of the first and the encoder's output: with like layers it is planned alone and in
    stages of several data ranks, without any it is cut between the layers there are."""
    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=64, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, relative_attention_num_buckets=8,
    )
    batch = {"input_ids": torch.ones((8, 8), dtype=torch.int64), "labels": torch.ones((8, 6), dtype=torch.int64)}
    deep = capture_model(T5ForConditionalGeneration(config), (), batch, (), None, "fp32")
    for pins in (Pins(pp=1, dp=2, tp=2), Pins(pp=2, dp=2, schedule="1f1b")):
        plan = make_plan(deep, Cluster.parse("cpu:1x4"), pins)
        assert plan.mesh.size("dp") == 2
    shallow = capture_model(make("t5")[0], (), make("t5")[1], (), None, "fp32")
    assert not shallow.blocks
    assert [block.path for block in find_layers(shallow).blocks] == [
        *(f"encoder.block.{n}.layer.{k}" for n in range(2) for k in range(2)),
        *(f"decoder.block.{n}.layer.{k}" for n in range(2) for k in range(3)),
    ]
    assert find_layers(deep) is deep


# what the search may not choose


@cache
def graph() -> Graph:
    """Llama's."""
    model, batch = batch_of("llama", double=True)
    return capture_model(model.train(), (), batch, (), None, "fp32")


def planned(devices: int = 4, **pins: Any) -> Plan:
    """The plan of the small Llama."""
    return make_plan(graph(), Cluster.parse(f"cpu:1x{devices}"), Pins(**pins))


def test_pins_that_torch_runs_wrong_are_refused() -> None:
    """With the reason and the nearest legal setting, by ``plan`` itself."""
    model, batch = batch_of("llama", double=True)
    with pytest.raises(PinError, match=r"'zbv' with zero=3.*gradients would be dropped; nearest legal setting: .*zero=1"):
        mw.plan(model, "cpu:1x4", ((), batch), pins={"pp": 2, "dp": 2, "schedule": "zbv", "zero": 3})
    for schedule, zero, recompute in itertools.product(SPLIT_BACKWARD, (1, 2, 3), RECOMPUTE):
        reason = illegal_combination(schedule, zero=zero, recompute=recompute)
        if reason is None:
            continue
        with pytest.raises(PinError) as caught:
            planned(pp=2, dp=2, schedule=schedule, zero=zero, recompute=recompute)
        why, _, settings = str(caught.value).partition("; nearest legal setting: ")
        assert why == reason.partition("; nearest legal: ")[0]
        assert settings
    assert planned(pp=2, tp=2, schedule="zb", zero=3).pipeline is not None  # nothing is split over one data rank


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"pp": 4, "schedule": "zbv"}, "schedule='zbv' make 8 stages, but the model can be cut into 4 pieces"),
        ({"pp": 2, "dp": 2, "schedule": "dualpipev", "microbatches": 2}, "2 pp = 4; nearest legal setting: microbatches=4"),
        ({"pp": 2, "schedule": "1f1b", "microbatches": 1}, "pp = 2 micro-batches; nearest legal setting: microbatches=2"),
        ({"pp": 2, "dp": 2, "microbatches": 3}, "3 micro-batches; nearest legal setting: microbatches=4"),
        ({"pp": 3}, "3 devices, which does not divide the 4"),
    ],
)
def test_pins_that_cannot_be(pins: dict[str, Any], message: str) -> None:
    """Micro-batches that do not divide the batch, more stages than pieces, schedules that want more micro-batches."""
    with pytest.raises(PinError, match=message):
        planned(**pins)


@pytest.mark.parametrize("pins", [{"zero": 3}, {"recompute": "full"}, {"zero": 2, "recompute": "selective"}])
def test_an_open_schedule_goes_with_the_pins(pins: dict[str, Any]) -> None:
    """What is pinned decides which schedules are considered."""
    plan = planned(pp=2, dp=2, **pins)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule not in SPLIT_BACKWARD
    assert {group.zero for group in plan.groups} == {pins.get("zero", plan.groups[0].zero)}


def test_nothing_refused_is_proposed() -> None:
    """Of everything that searches solved, of all schedules and of split backwards alone, memory plentiful and scarce."""
    seen, kinds = set(), set()
    for kib, schedules in itertools.product((1000.0, 280.0, 200.0), (None, SPLIT_BACKWARD)):
        where = Cluster.parse("cpu:1x4").with_memory(kib * 1024 + sum(graph().values[name].bytes_ for name in graph().inputs))
        pins = Pins.of({"pp": 2} if schedules is None else {"pp": 2, "schedule": list(schedules)})
        task = Task.of(graph(), where, rules_of(graph())[0], pins, precision="fp32", state_bytes=8.0, gap=0.005)
        run = Sweep(task, mock.Mock(), lambda count: OneDevice(0.0, crowded=False, binds=False), spent=lambda: 0.0, limit=30.0)
        run.begin()
        run.rest()
        for found in run.solved:
            seen.add(found.candidate.schedule)
            kinds |= set(found.recompute)
            for kind in set(found.recompute):
                assert illegal_combination(found.candidate.schedule, zero=found.zero, recompute=kind) is None
    assert seen & set(SPLIT_BACKWARD)
    assert seen - set(SPLIT_BACKWARD)
    assert len(kinds) > 1
