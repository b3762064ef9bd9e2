"""A profile is a cluster file that reads, whose numbers are the prices of what it measured."""

from __future__ import annotations

import tomllib

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright.api import graph_of
from meshwright.cli import app
from meshwright.commands import profiling
from meshwright.cost import compute
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import Network
from meshwright.errors import InputError
from meshwright.ir.declared.operator import Work
from meshwright.ir.mesh import Mesh
from meshwright.rules import rules_of


class Attention(nn.Module):
    """A norm, a product, attention and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 48)
        self.head = nn.Linear(16, 24)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(hidden)).unflatten(-1, (3, 2, 8)).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), is_causal=True)
        return nn.functional.cross_entropy(self.head(mixed.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


def build():
    torch.manual_seed(0)
    return Attention(), (torch.randn(4, 8, 16), torch.randint(0, 24, (4, 8)))


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(profiling, "DEGREES", (1, 2))


def test_a_profile_is_a_cluster_whose_prices_are_what_was_measured(tmp_path, quickly):
    model, example = build()
    graph = graph_of(model, example)
    path = tmp_path / "mine.toml"
    found = profiling.write(path, graph, like="cpu", name="mine", nodes=1, seconds=60, report=lambda what, done: None)
    tables = tomllib.loads(path.read_text())["device"]["mine"]
    for shape in ([32, 24, 16], [16, 24, 16], [32, 12, 16], [32, 24, 8]):  # the head's whole, half of its rows, columns, inputs
        assert shape in tables["products"][0]["shapes"]
    assert {"norm", "loss"} <= {table["kind"] for table in tables["streams"]}
    assert found.measured > 20
    device = Cluster.from_toml(path).device
    operators = rules_of(graph)[0].operators
    head = next(op for op in graph.ops if op.module == "head")
    known = dict(found.rows(("products", "f32")))
    expected = known[32, 24, 16][0], known[32, 16, 24][0] + known[16, 24, 32][0]
    assert compute.seconds(operators[head.target], Work.of(head, graph), device) == pytest.approx(expected, rel=1e-4)
    attend = next(op for op in graph.ops if operators[op.target].kind == "attention")
    both = dict(found.rows(("attentions", "f32", True)))[4, 2, 8, 8, 8]
    assert compute.seconds(operators[attend.target], Work.of(attend, graph), device) == pytest.approx(both, rel=1e-4)
    plan = mw.plan(model, Cluster.from_toml(path), example, pins={"recompute": "none"})
    assert plan.predicted.step_seconds > 0
    assert not plan.notes
    notes = mw.plan(model, Cluster.from_toml(path), example, precision="bf16").notes
    assert [note.partition(":")[0] for note in notes] == ["products", "attention"]
    assert all("measured in f32 and computed in bf16" in note for note in notes)


def test_what_is_left_out_is_counted(quickly):
    model, example = build()
    found = profiling.profile(graph_of(model, example), "cpu", torch.device("cpu"), seconds=0.0)
    assert found.measured == 0
    assert found.left_out["for lack of time"] > 10


def test_a_profile_of_nothing_is_not_written(tmp_path, quickly, monkeypatch):
    path = tmp_path / "model.py"
    path.write_text(f"from {__name__} import build\n")
    monkeypatch.setattr(profiling, "REPEATED", 1e12)  # every call would take too long
    words = ["profile", f"{path}:build", "--out", str(tmp_path / "mine.toml"), "--seconds", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "nothing was measured within 1 s" in result.stderr
    assert "for lack of time; give it more --seconds" in result.stderr
    assert not (tmp_path / "mine.toml").exists()


def test_the_command_says_what_it_wrote(tmp_path, quickly):
    path = tmp_path / "model.py"
    path.write_text(f"from {__name__} import build\n")
    words = ["profile", f"{path}:build", "--out", str(tmp_path / "mine.toml"), "--seconds", "1", "--name", "office"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "mine.toml, for plans of --precision fp32" in result.output.replace("\n", "")
    assert Cluster.from_toml(tmp_path / "mine.toml").device.name == "office"
    result = CliRunner().invoke(app, [*words[:-1], "two words"])
    assert result.exit_code == 2
    assert "cannot be the name of a device" in result.output


def test_nodes_divide_the_processes():
    found = profiling.Profile("cpu", {("collectives", "all_reduce", 4, 2): {(1024,): [(1e-3,)]}})
    assert 'devices = "mine@mine:2x2"' in profiling.as_toml(found, "mine", "us", nodes=2)
    with pytest.raises(InputError, match="4 processes on 3 nodes"):
        profiling.as_toml(found, "mine", "us", nodes=3)


def measured(rank: int) -> str:
    found = profiling.Profile("cpu")
    profiling.collectives(found, torch.device("cpu"), nodes=2, messages=(4096, 65536))
    return profiling.as_toml(found, "mine", "us", nodes=2)


def test_collectives_are_prices_by_kind_group_and_message(pool, tmp_path):
    """Measured on four processes as two nodes: what the file gives comes out, for every kind, group and message size."""
    texts = pool(4).run(measured)
    assert len(set(texts)) == 1  # the slowest rank's, so that ranks agree
    path = tmp_path / "mine.toml"
    path.write_text(texts[0])
    tables = tomllib.loads(texts[0])["node"]["mine"]["collectives"]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert {(t["kind"], t["ranks"], t["nodes"]) for t in tables} == {(k, *g) for k in kinds for g in ((2, 1), (2, 2), (4, 2))}
    whole = Network(Cluster.from_toml(path), Mesh.of(out=2, near=2))
    axes = {(2, 1): ("near",), (4, 2): ("out", "near")}
    for table in tables:
        if (group := (table["ranks"], table["nodes"])) in axes:
            for bytes_, microseconds in zip(table["bytes"]["values"], table["seconds"]["values"], strict=True):
                assert whole.seconds(table["kind"], axes[group], bytes_) == pytest.approx(microseconds * 1e-6, rel=1e-3)
