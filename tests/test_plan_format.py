"""Plan files, version 2: stable, folded, described by a schema; files of old versions load, newer ones say what to do."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
import meshwright as mw
from meshwright.compiler.rules.book import builtin_rules
from meshwright.cost.cluster import Cluster
from meshwright.ir import rule
from meshwright.ir.graph import Graph, map_refs
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.reading.unfold import LARGEST_TEXT, unfolded
from meshwright.ir.serialize import plan_hash, plan_to_dict, program_to_dict
from meshwright.ir.writing.canonical import canonical
from meshwright.ir.writing.plans import plan_text, plan_to_file
from meshwright.planner import cluster_in, described, reprice
from meshwright.programs import checked_program
from meshwright.rules import rules_of
from meshwright.views.report import render
from tests.backwards import CASES
from tests.backwards import make as custom
from tests.handmade import handmade_plan
from tests.mixtures import make as mixture
from tests.models import make as other
from tests.test_plan_files import EXAMPLE, Net

SAMPLES = Path(__file__).with_name("samples_of_files")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    pins: tuple[dict[str, Any], ...] = ({"dp": 2, "tp": 1, "zero": 3}, {"pp": 2, "microbatches": 2, "schedule": "1f1b"})
    return [handmade_plan(), *(mw.plan(Net(), "cpu:1x2", EXAMPLE, pins=one) for one in pins)]


def renamed(plan: Plan, seed: int) -> Plan:
    """The plan as another trace would have called everything but its inputs."""
    numbers = random.Random(seed)
    graph = plan.graph
    values = {name: name if name in graph.inputs else f"n{numbers.randrange(1 << 40)}" for name in graph.values}
    ops = {op.name: f"o{numbers.randrange(1 << 40)}" for op in graph.ops}

    blocks = tuple(replace(block, path=ops.get(block.path, block.path)) for block in graph.blocks)  # an operator may name one

    def tree(one: Any) -> Any:
        return map_refs(one, lambda ref: replace(ref, name=values[ref.name]))

    other = Graph(
        {values[name]: replace(value, name=values[name]) for name, value in graph.values.items()}, graph.inputs,
        tuple(replace(param, value=values[param.value]) for param in graph.params),
        tuple(replace(op, name=ops[op.name], args=tree(op.args), kwargs=tree(op.kwargs),
                      outputs=tuple(values[name] for name in op.outputs)) for op in graph.ops),
        tree(graph.output_tree), graph.loss and values[graph.loss],
        tuple((values[a], values[b]) for a, b in graph.mutations), blocks, graph.signature,
        {values[name]: one for name, one in graph.constants.items()}, graph.changes,
    )
    schedule = replace(plan.schedule, time={ops[name]: one for name, one in plan.schedule.time.items()},
                       prologue=frozenset(ops[name] for name in plan.schedule.prologue))
    groups = tuple(replace(group, path=ops.get(group.path, group.path)) for group in plan.groups)
    return replace(plan, graph=other, groups=groups, assignments={ops[name]: one for name, one in plan.assignments.items()},
                   copies={values[name]: one for name, one in plan.copies.items()}, schedule=schedule)


def test_a_file_is_the_same_for_the_same_plan_under_other_names(plans: list[Plan]) -> None:
    for plan in plans:
        assert len({plan_text(plan), plan_text(renamed(plan, 1)), plan_text(renamed(plan, 2))}) == 1
        assert plan_hash(plan) == plan_hash(renamed(plan, 3))
        read = Plan.from_dict(json.loads(plan_text(plan)))
        assert plan_text(read) == plan_text(plan)
        assert plan_hash(read) == plan_hash(plan)


def test_nothing_is_lost(plans: list[Plan]) -> None:
    for plan in plans:
        want = json.loads(json.dumps(plan_to_dict(canonical(plan))))
        have = unfolded(json.loads(json.dumps(plan_to_file(plan))))
        assert sorted(have["graph"].pop("values")) == sorted(want["graph"].pop("values"))
        assert have == want


def test_decisions_may_be_edited_the_graph_may_not(plans: list[Plan]) -> None:
    data = plan_to_file(plans[0])
    edited = copy.deepcopy(data)
    kept = data["decisions"]["blocks"]
    edited["decisions"]["blocks"] = {name: text.replace("ZeRO 2", "ZeRO 3") for name, text in kept.items()}
    assert {group.zero for group in Plan.from_dict(edited).groups} == {3}
    wider = json.loads(json.dumps(data).replace("[8, 32]", "[8, 64]"))
    with pytest.raises(mw.PlanError, match="its graph or its mesh was altered"):
        Plan.from_dict(wider)


def test_equal_blocks_are_written_once() -> None:
    few, many = stacked(4), stacked(14)
    more = [len(text(many)) - len(text(few)) for text in (plan_text, lambda plan: json.dumps(plan_to_dict(plan)))]
    assert more[0] < 10 * 300
    assert more[1] > 3 * more[0]
    assert plan_hash(Plan.from_dict(json.loads(plan_text(many)))) == plan_hash(many)


def stacked(count: int) -> Plan:
    """A model of many equal layers."""
    layers = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(count))
    return mw.plan(nn.Sequential(*layers), "cpu:1x2", (torch.zeros(4, 8),), pins={"dp": 2, "tp": 1, "zero": 0},
                   loss_fn=torch.Tensor.sum)


# ------------------------------------------------------------------------------------------------------------ old and new
class Layer(nn.Module):
    """A layer with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stages(nn.Module):
    """Layers in stages, as vision models have them: the paths of the second stage's differ in their second number."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(Layer(width) for _ in range(3)) for width in (8, 16)
        )
        self.wider = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = x if x.shape[-1] == stage[0].up.in_features else self.wider(x)
            for layer in stage:
                x = layer(x)
        return x.square().mean()


def test_layers_in_stages_are_written_and_read() -> None:
    plan = mw.plan(Stages(), "cpu:1x2", ((torch.zeros(4, 8),), {}), pins={"pp": 2, "microbatches": 2})
    text = plan_text(plan)
    assert '"stages.1.0..2"' in text
    read = Plan.from_dict(json.loads(text))
    assert plan_hash(read) == plan_hash(plan)
    assert read.to_pins() == plan.to_pins()
    rows = [line.split()[0] for line in render(plan).splitlines() if "  none " in line]
    assert "stages.1.0..2" in rows  # blocks of another kind are in another row


@pytest.mark.parametrize("names", [["0,1", "2,3", "5"], ["a, b", "c, d"]], ids=str)
def test_names_with_commas_are_no_folds(names: list[str]) -> None:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Sequential(Layer(8), Layer(8)))
    plan = mw.plan(model, "cpu:1x2", ((torch.zeros(4, 8),), {}), pins={"dp": 2})
    assert plan_hash(Plan.from_dict(json.loads(plan_text(plan)))) == plan_hash(plan)
    again = mw.plan(model, "cpu:1x2", ((torch.zeros(4, 8),), {}), pins=plan.to_pins())
    assert plan_hash(again) == plan_hash(plan)


def test_equal_blocks_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    real = rule._place
    monkeypatch.setattr(rule, "_place", lambda *given: placed.append(given) or real(*given))

    def times(count: int) -> int:
        plan = Plan.from_dict(json.loads(plan_text(stacked(count))))
        for one in rules_of(plan.graph)[0].values():
            one._placed.clear()
        placed.clear()
        checked_program(plan, 0)
        return len(placed)

    assert 0 < times(6) <= times(3)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_every_version_load(version: int) -> None:
    for path in sorted(SAMPLES.glob(f"*.v{version}.json")):
        plan = Plan.load(path)
        assert plan.mesh.world == 2
        assert plan_hash(Plan.from_dict(json.loads(plan_text(plan)))) == plan_hash(plan)
        again = meshwright.reprice(plan)
        assert again.predicted.step_seconds > 0
    assert len(list(SAMPLES.glob(f"*.v{version}.json"))) == 2


def test_loading_prices_again_what_is_stale(tmp_path: Path) -> None:
    plan = mw.plan(Net(), "cpu:1x2", EXAMPLE, pins={"dp": 2, "tp": 1, "zero": 3})
    path = tmp_path / "plan.json"
    plan.save(path)
    fresh = mw.load_plan(path)
    assert not fresh.stale
    assert fresh.certificate is not None
    text = path.read_text()
    data = json.loads(text)

    def loaded(data: Any) -> tuple[Plan, Plan]:
        path.write_text(json.dumps(data))
        return Plan.load(path), mw.load_plan(path)

    other = copy.deepcopy(data)
    other["predictions"]["predicted"] |= {"prices": "of another version", "step_seconds": 100.0}
    blocks = data["decisions"]["blocks"]
    kept = {name: words.replace("ZeRO 3", "ZeRO 0").partition(", state")[0] for name, words in blocks.items()}
    edited = {**data, "decisions": {**data["decisions"], "blocks": kept}}
    for one in (other, edited):
        raw, again = loaded(one)
        assert raw.stale
        assert "other prices" in str(raw)
        assert not again.stale
        assert again.certificate is None
        assert "priced when it was read" in again.notes[-1]
        again.save(path)
        assert mw.load_plan(path).notes == again.notes
    assert loaded(other)[1].predicted.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert loaded(edited)[1].predicted.bytes_per_rank > plan.predicted.bytes_per_rank
    other["decisions"]["cluster"] = "abacus@desk:1x2"
    raw, again = loaded(other)
    assert again.stale
    assert "not priced again" in again.notes[-1]
    assert again.predicted.step_seconds == 100.0


def test_a_pipeline_over_links_without_end_is_read_and_not_priced(tmp_path: Path) -> None:
    path, cluster = tmp_path / "plan.json", tmp_path / "mine.toml"
    cluster.write_text('[cluster]\ndevices = "mine:1x2"\n[device.mine]\nlike = "a100"\nmemory = '
                       '{value = 70, unit = "GB", source = "label"}\n')
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    plan = mw.plan(model, Cluster.from_toml(cluster), ((torch.randn(8, 8),), {}), loss_fn=torch.sum, pins={"pp": 2})
    plan.save(path)
    data = json.loads(path.read_text())
    data["decisions"]["devices"][0]["node"]["link_latency"] = 1e308
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="the plan cannot be priced"):
        reprice(Plan.load(path))
    assert "not priced again" in mw.load_plan(path).notes[-1]


@pytest.mark.parametrize(("part", "name", "value"), [
    ("predicted", "step_seconds", 0.0), ("predicted", "high_seconds", 0.0), ("predicted", "compute_seconds", 3.0),
    ("predicted", "bytes_by_kind", {"a": 1.0}), ("predicted", "capacity_bytes", 1), ("certificate", "bound_seconds", 3.0),
    ("certificate", "objective_seconds", 1e-9), ("certificate", "assumes", ["x"]), ("certificate", "solved", 7),
])
def test_altered_predictions_are_no_longer_shown_as_proven(
    plans: list[Plan], tmp_path: Path, part: str, name: str, value: Any
) -> None:
    path, data = tmp_path / "plan.json", json.loads(plan_text(plans[1]))
    path.write_text(json.dumps(data))
    assert not mw.load_plan(path).stale
    assert mw.load_plan(path).certificate is not None
    data["predictions"][part][name] = value
    path.write_text(json.dumps(data))
    assert Plan.load(path).stale
    assert Plan.load(path).certificate is None
    read = mw.load_plan(path)
    assert read.certificate is None
    assert "altered" in read.notes[-1]
    assert read.predicted.step_seconds == pytest.approx(plans[1].predicted.step_seconds)
    assert read.predicted.fits
    del data["fingerprint"]["predictions"]  # as files of earlier versions are
    path.write_text(json.dumps(data))
    assert Plan.load(path).stale
    assert mw.load_plan(path).certificate is None


@pytest.mark.parametrize(("part", "name", "value"), [
    ("certificate", "status", "aaa"), ("certificate", "bound_seconds", -3.0),
    ("certificate", "objective_seconds", float("nan")),
])
def test_what_no_certificate_says_is_refused(plans: list[Plan], part: str, name: str, value: Any) -> None:
    data = json.loads(plan_text(plans[1]))
    data["predictions"][part][name] = value
    with pytest.raises(mw.PlanError, match="the plan is damaged: certificate"):
        Plan.from_dict(data)


def test_a_pipeline_that_its_schedule_cannot_run_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    layers = (nn.Linear(8, 8) for _ in range(4))
    plan = mw.plan(nn.Sequential(*layers), "cpu:1x2", (torch.zeros(4, 8),), loss_fn=torch.Tensor.sum,
                   pins={"pp": 2, "schedule": "zbv", "microbatches": 2})
    for ranks in ([0, 0, 1, 1], [0, 1, 0, 1]):
        data = json.loads(plan_text(plan))
        data["decisions"]["pipeline"]["stage_rank"] = ranks
        (tmp_path / "plan.json").write_text(json.dumps(data))
        with pytest.raises(mw.PlanError, match=r"plan.json cannot be run: zbv with stages on ranks"):
            mw.load_plan(tmp_path / "plan.json")


OWN = """
[cluster]
devices = "a100@dgx-a100:1x2"
[device.a100-80g]
aliases = ["a100"]
like = "v100-32g"
memory = {value = 81251, unit = "MiB", source = "mine"}
[[device.a100-80g.products]]
dtype = "f32"
shapes = [[8, 16, 32], [8, 32, 16]]
seconds = {values = [3, 5], unit = "ms", source = "mine"}
[node.dgx-a100]
like = "pcie4"
link = {value = 3, unit = "GB/s", source = "mine"}
"""
"""A file of a user's, under names of the catalogue."""


def test_a_plan_keeps_the_numbers_of_a_cluster_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    pins = {"dp": 2, "tp": 1, "zero": 3}
    plan = mw.plan(Net(), mw.Cluster.from_toml(tmp_path / "own.toml"), EXAMPLE, pins=pins)
    named = mw.plan(Net(), "a100:1x2", EXAMPLE, pins=pins)
    assert plan.cluster == named.cluster
    assert not named.devices
    assert plan.predicted.step_seconds > 1.1 * named.predicted.step_seconds
    plan.save(tmp_path / "plan.json")
    read = mw.load_plan(tmp_path / "plan.json")
    assert not read.stale
    assert cluster_in(read) == cluster_in(plan)
    assert plan_hash(read) == plan_hash(plan) != plan_hash(named)
    assert mw.reprice(read).predicted.step_seconds == plan.predicted.step_seconds
    assert mw.reprice(named, cluster_in(plan)).devices == plan.devices
    assert mw.reprice(read, "a100:1x2").predicted.step_seconds == named.predicted.step_seconds
    text = mw.explain(read)
    assert "as many" in text
    assert "no prices" not in text
    assert "cluster: " in mw.diff(named, read)
    graph = mw.to_networkx(read)
    assert sum(data.get("forward_seconds", 0) for _, data in graph.nodes(data=True)) > 0.003


@pytest.mark.parametrize(("path", "value", "says"), [
    (["device", "memory_bandwidth"], 0.0, "is 0"), (["node", "kind"], "rope", "is 0"), (["nodes"], 2, ":2x2"),
    (["node", "name"], "other", "@other"), (["device", "measured", 0, "seconds"], [1.0], "differ"),
    (["device", "peak"], {"bf16": -1.0}, "not negative"), (["torus"], [2, 2], "is 0"), (["device"], [], "object"),
    (["device", "units"], 1.5, "whole"), (["device", "measured", 0, "shapes"], [[1, 2], [3, 4]], "list of 3"),
], ids=str)
def test_numbers_that_are_none_are_refused(tmp_path: Path, path: list[Any], value: Any, says: str) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    devices = json.loads(json.dumps(described(mw.Cluster.from_toml(tmp_path / "own.toml"))))
    part = devices[0]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    plan = replace(handmade_plan(), cluster="a100-80g@dgx-a100:1x2", devices=tuple(devices))
    with pytest.raises(mw.ClusterError, match=says):
        cluster_in(plan)


def test_lists_in_outputs_are_written() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": self.inside(x).sum(), "all": [x, [x * 2]]}

    plan = mw.plan(Listed(), "cpu:1x2", (torch.zeros(4, 4),), pins={"dp": 2})
    assert plan_hash(Plan.from_dict(json.loads(plan_text(plan)))) == plan_hash(plan)


def test_newer_files_say_what_to_do(plans: list[Plan]) -> None:
    with pytest.raises(mw.PlanError, match=r"of format 3, .* formats 1 and 2; a newer meshwright wrote it"):
        Plan.from_dict({**plan_to_file(plans[0]), "meshwright": 3})


# ------------------------------------------------------------------------------------------------------------------ bombs
def bomb(data: dict[str, Any], what: str) -> dict[str, Any]:
    """A small file that stands for a huge one."""
    data = copy.deepcopy(data)
    graph, decisions = data["graph"], data["decisions"]
    block = next(entry for entry in graph["operators"] if isinstance(entry, dict))
    if what == "rows":
        block["rows"] *= 3000
        graph["operators"] += [{"block": f"b{n}", "kind": 0, "like": 0, "outside": block["outside"]} for n in range(3000)]
    elif what == "name":
        graph["operators"].append({"block": "x" * 100_000, "kind": 0, "like": 0, "outside": block["outside"]})
    elif what == "arguments":
        block["rows"][0][1].append([{"%": "~.x"}] * 20_000)
        graph["operators"] += [{"block": "b" * 1000 + str(n), "kind": 0, "like": 0, "outside": block["outside"]}
                               for n in range(500)]
    elif what == "paths":
        decisions["operators"] = {"blocks.0..999999999.up:linear": "dp=b0"}
    elif what == "numbers":
        decisions["operators"] = {"blocks.0.." + "9" * 4000 + ".up:linear": "dp=b0"}
    elif what == "many paths":
        decisions["prologue"] = [", ".join(["blocks.0..1.up:linear"] * 20000)]
    else:
        block["rows"][0][1] = {"%": "$" + "9" * 5000}
    return data


MANY = "stand for more than"


@pytest.mark.parametrize(("what", "limit"), [
    ("rows", MANY), ("arguments", MANY), ("name", "names of at most"), ("paths", "stands for more than"),
    ("many paths", "stands for more than"), ("numbers", "a number that is too long"), ("ports", "a value is called"),
])
def test_small_files_do_not_become_huge(plans: list[Plan], what: str, limit: str) -> None:
    """What a fold stands for is counted, and refused by the limit that it goes over, before any of it is written out."""
    data = bomb(plan_to_file(plans[0]), what)
    assert len(json.dumps(data)) < LARGEST_TEXT // 8
    with pytest.raises(mw.PlanError, match=f"the plan is damaged: .*{limit}"):
        Plan.from_dict(data)


# ----------------------------------------------------------------------------------------------------------------- schema
SCHEMA = Path(meshwright.__file__).parent / "ir/reading/plan.schema.json"
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda one: isinstance(one, dict), "array": lambda one: isinstance(one, list),
    "string": lambda one: isinstance(one, str), "null": lambda one: one is None,
    "integer": lambda one: isinstance(one, int) and not isinstance(one, bool),
}


def conforms(data: Any, schema: dict[str, Any]) -> bool:
    """Whether data is as a schema says, as far as its words are used here."""
    known = {"$schema", "title", "description", "type", "enum", "anyOf", "required", "properties", "additionalProperties",
             "items", "minItems", "maxItems"}
    assert set(schema) <= known
    kinds = schema.get("type", list(TYPES))
    good = "type" not in schema or any(TYPES[kind](data) for kind in ([kinds] if isinstance(kinds, str) else kinds))
    good = good and ("enum" not in schema or data in schema["enum"])
    good = good and ("anyOf" not in schema or any(conforms(data, one) for one in schema["anyOf"]))
    if good and isinstance(data, dict):
        own, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        good = set(schema.get("required", ())) <= set(data) and (rest is not False or set(data) <= set(own))
        good = good and all(conforms(item, own.get(key, rest or {})) for key, item in data.items())
    if good and isinstance(data, list):
        good = schema.get("minItems", 0) <= len(data) <= schema.get("maxItems", len(data))
        good = good and all(conforms(item, schema.get("items", {})) for item in data)
    return good


def test_files_are_as_the_schema_says(plans: list[Plan]) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for plan in plans:
        data = json.loads(plan_text(plan))
        assert conforms(data, schema)
        assert not conforms({**data, "more": 1}, schema)
        assert not conforms({**data, "decisions": {**data["decisions"], "microbatches": "2"}}, schema)


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "steps", "activations rounded"])
def test_what_was_captured_before_does_not_show_in_programs(name: str) -> None:
    """The operators of a plan that was read are equal to captured ones, which have graphs under other names inside."""
    model, batch = (custom if name in CASES else mixture)(name)
    pins = {"tp": 2} if name in CASES else {"dp": 2, "ep": 2, "tp": 2}
    plan = mw.plan(model, f"cpu:1x{2 if name in CASES else 4}", ((), batch), pins=pins)
    checked_program(plan, 0)
    read = Plan.from_dict(json.loads(plan_text(plan)))
    warm = program_to_dict(checked_program(read, 1))
    builtin_rules.cache_clear()
    assert program_to_dict(checked_program(read, 1)) == warm


def searched(rank: int) -> tuple[int, dict[str, str]]:
    """A hash, and plans with nothing pinned, in their files' text."""
    found = {}
    for name, cluster, made in (("llama", "h100:2x4", other), ("mixtral", "h100:1x4", mixture)):
        model, batch = made(name)
        found[name] = plan_text(mw.plan(model, cluster, ((), batch)))
    return hash("a set"), found


def test_a_plan_is_the_same_bytes_in_another_process(pool: Callable[[int], Any]) -> None:
    """Whatever order Python's sets have there: the pool's first process hashes otherwise than the others."""
    (one, here), (two, there) = pool(2).run(searched)
    assert one != two
    assert here == there
