"""The command line, as a person calls it: text, JSON, errors and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from meshwright.cli import DIFFERENT, NOTHING_FITS, WRONG, app
from meshwright.plan import Plan
from tests.handmade import handmade_plan


def build() -> tuple[nn.Module, Any]:
    """What "tests.test_cli:build" names on the command line; parameters on meta."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), Loss())
        return model, ((torch.empty(16, 64),), {})


class Loss(nn.Module):
    """A scalar to differentiate."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": x.square().mean()}


def returns_nothing() -> None:
    """Not what a model function should do."""


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    handmade_plan().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path / "config.json"


def test_plan_from_a_transformers_config(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "llama.plan.json"
    result = run("plan", llama, "--cluster", "cpu:1x4", "--batch", 4, "--sequence", 8, "--dp", 2, "--tp", 2,
                 "--precision", "fp32", "--zero", 3, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["mesh"] == {"dp": 2, "tp": 2}
    assert {group["zero"] for group in answer["groups"]} == {3}
    assert answer["file"] == str(out)
    plan = Plan.load(out)
    assert plan.graph.values["input_ids"].shape == (4, 8)
    assert answer["predicted"]["step_seconds"] == plan.predicted["step_seconds"]
    titles = [section["title"] for section in answer["sections"]]
    assert any("model.layers" in title for title in titles)


def test_plan_from_a_function(tmp_path: Path) -> None:
    result = run("plan", "tests.test_cli:build", "--cluster", "cpu:1x4", "--precision", "fp32", "--tp", 4,
                 "--tensor", "0.weight=[_@tp, _]")
    assert result.exit_code == 0, result.output
    assert "weight f32[128@tp, 64]" in result.stdout
    assert "tp=4 (tensor)" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.json"], "no file or folder"),
        (["tests.test_cli:missing"], "cannot import"),
        (["tests.test_cli:returns_nothing"], "must return (model, example_inputs)"),
        (["tests.test_cli:build", "--dp", "3"], "does not divide the 4"),
        (["tests.test_cli:build", "--tensor", "no sharding"], "is not PATTERN=SHARDING"),
        (["tests.test_cli:build", "--tensor", "0.weight=[_@tp"], "cannot read '[_@tp'"),
        (["tests.test_cli:build", "--optimizer", "magic"], "optimizer 'magic' is unknown"),
        (["tests.test_cli:build", "--precision", "fp7"], "precision 'fp7' is unknown"),
    ],
)
def test_errors_have_a_message_and_a_code(words: list[str], message: str) -> None:
    result = run("plan", *words, "--cluster", "cpu:1x4")
    assert result.exit_code == WRONG
    assert message in result.stderr
    assert "Traceback" not in result.output
    as_json = run("plan", *words, "--cluster", "cpu:1x4", "--json")
    assert as_json.exit_code == WRONG
    assert message in json.loads(as_json.stdout)["message"]


def test_an_unknown_device_names_the_known() -> None:
    result = run("plan", "tests.test_cli:build", "--cluster", "h1000:1x8")
    assert result.exit_code == WRONG
    assert "nearest is 'h100'" in result.stderr


def test_what_does_not_fit_has_a_code_of_its_own(tmp_path: Path) -> None:
    cluster = tmp_path / "small.toml"
    cluster.write_text('[cluster]\ndevices = "small:1x2"\n[device.small]\nlike = "cpu"\nnode = "host"\n'
                       'memory = { value = 0.01, unit = "MB", source = "a test" }\n'
                       'reserve = { value = 0, unit = "MB", source = "a test" }\n')
    result = run("plan", "tests.test_cli:build", "--cluster", cluster, "--json")
    assert result.exit_code == NOTHING_FITS, result.output
    assert json.loads(result.stdout)["error"] == "OutOfMemoryError"


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    result = run("plan", tmp_path, "--cluster", "cpu:1x4")
    assert result.exit_code == WRONG
    assert "cannot build a causal language model" in result.stderr


def test_show(saved: Path, tmp_path: Path) -> None:
    result = run("show", saved)
    assert result.exit_code == 0
    assert result.stdout.rstrip() == str(handmade_plan())
    assert run("show", saved, "--html", tmp_path / "plan.html").exit_code == 0
    assert "f32[32@tp, 16]" in (tmp_path / "plan.html").read_text()
    answer = json.loads(run("show", saved, "--json").stdout)
    assert answer["sections"][1]["rows"][2]["collectives"] == ["fwd all-reduce@tp"]
    assert answer["notes"] == ["no rule for aten.mystery.default (in blocks.0): replicated"]


def test_show_refuses_what_is_no_plan(tmp_path: Path) -> None:
    assert run("show", tmp_path / "missing.json").exit_code == WRONG
    (tmp_path / "list.json").write_text("[]")
    result = run("show", tmp_path / "list.json", "--json")
    assert result.exit_code == WRONG
    assert json.loads(result.stdout)["error"] == "PlanError"


def test_explain(saved: Path) -> None:
    result = run("explain", saved, "blocks.1.down.weight")
    assert result.exit_code == 0
    assert result.stdout.rstrip() == handmade_plan().explain("blocks.1.down.weight")
    assert json.loads(run("explain", saved, "down1", "--json").stdout)["text"][0] == "operator down1: aten.linear.default"
    unknown = run("explain", saved, "down7")
    assert unknown.exit_code == WRONG
    assert "did you mean" in unknown.stderr


def test_diff(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    replace(handmade_plan(), optimizer="sgd").save(other)
    assert run("diff", saved, saved).exit_code == 0
    result = run("diff", saved, other)
    assert result.exit_code == DIFFERENT
    assert result.stdout.strip() == "optimizer: adamw -> sgd"
    answer = run("diff", saved, other, "--json")
    assert answer.exit_code == DIFFERENT
    assert json.loads(answer.stdout) == {"equal": False, "differences": ["optimizer: adamw -> sgd"]}


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("plan", "show", "explain", "diff"):
        assert command in result.stdout
