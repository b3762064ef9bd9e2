"""The command line, as a person calls it: text, JSON, errors and exit codes."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner, Result

from meshwright import api, progress
from meshwright.api import graph_of
from meshwright.cli import app
from meshwright.commands.answers import BUG, CLOSED, DIFFERENT, NOTHING_FITS, WRONG, print_json
from meshwright.commands.models import from_config
from meshwright.commands.sizing import Size, front
from meshwright.commands.verifying import distinct_ranks
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError, VerifyError
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.planner import make_plan
from meshwright.views.explain import explain
from meshwright.views.report import render
from tests.handmade import handmade_plan
from tests.test_plan_files import mutant, refreshed
from tests.test_zoo import small


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


def runs_into() -> None:
    """Nor this."""
    raise KeyError("weights")


async def waits() -> tuple[nn.Module, Any]:
    """A pair, but only when it is awaited."""
    return build()


class Oddly(nn.Module):
    """Names that patterns and the keys of a trace have a use for."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("[x@dp]", "größe 1:2,3", "twice@1"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.children(), *self.children()):
            x = module(x)
        return x.sum()

    @staticmethod
    def made() -> tuple[nn.Module, Any]:
        """What "tests.test_cli:Oddly.made" names."""
        return Oddly(), {"x": torch.randn(4, 8)}


def no_model() -> tuple[Any, Any]:
    """A pair, but not of a model."""
    return 1, ((), {})


@cache
def command() -> object:
    """Of the app, which a runner makes anew for every call: that takes longer than most answers."""
    return get_command(app)


def run(*words: object) -> Result:
    with mock.patch("typer.testing._get_command", return_value=command()):
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
    assert answer["predicted"]["step_seconds"] == plan.predicted.step_seconds
    titles = [section["title"] for section in answer["sections"]]
    assert any("model.layers" in title for title in titles)


def test_plan_from_a_function(tmp_path: Path) -> None:
    result = run("plan", "tests.test_cli:build", "--cluster", "cpu:1x4", "--precision", "fp32", "--tp", 4,
                 "--tensor", "0.weight=[_@tp, _]")
    assert result.exit_code == 0, result.output
    assert "weight f32[128@tp, 64]" in result.stdout
    assert "tp=4 (tensor)" in result.stdout
    result = run("plan", "tests.test_cli:build", "--cluster", "cpu:1x4", "--tp", "2,4", "--schedule", "none,1f1b",
                 "--zero", "<=1", "--micro-batch", "<=1")
    assert result.exit_code == 0, result.output
    assert "tp=2 (tensor)" in result.stdout or "tp=4 (tensor)" in result.stdout


def test_ranks_that_exchange_sequence_for_heads_are_pinned_by_an_option(llama: Path) -> None:
    result = run("plan", llama, "--cluster", "cpu:1x4", "--batch", 4, "--sequence", 16, "--precision", "fp32", "--cp", 4,
                 "--ulysses", 2, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["mesh"] == {"dp": 1, "cp": 2, "up": 2, "tp": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.json"], "no file or folder"),
        (["tests.test_cli:missing"], "; name a function that stands in it"),
        (["no.such.module:build"], "; give a module that Python finds (PYTHONPATH), or a file"),
        (["tests.test_cli:returns_nothing"], "must return (model, example_inputs)"),
        (["tests.test_cli:runs_into"], "failed at test_cli.py:"),
        (["tests.test_cli:waits"], "returned coroutine; it must return (model, example_inputs)"),
        (["tests.test_cli:no_model"], "the model is a int; give a torch.nn.Module"),
        (["tests.test_cli:build", "--out", "nowhere/plan.json"], "there is no folder nowhere that may be written to"),
        (["tests.test_cli:build", "--out", "."], "it is a folder; name a file"),
        (["tests.test_cli:build", "--dp", "3"], "does not divide the 4"),
        (["tests.test_cli:build", "--tp", "3,8"], "tp among 3, 8 leaves nothing"),
        (["tests.test_cli:build", "--tp", "few"], "tp='few' is not a positive integer"),
        (["tests.test_cli:build", "--schedule", "none,fast"], "'fast' is unknown"),
        (["tests.test_cli:build", "--tensor", "no sharding"], "is not PATTERN=SHARDING"),
        (["tests.test_cli:build", "--tensor", "0.weight=[_@tp"], "cannot read '[_@tp'"),
        (["tests.test_cli:build", "--optimizer", "magic"], "optimizer 'magic' is unknown"),
        (["tests.test_cli:build", "--optimizer", "nan"], "a number of 0 or more"),
        (["tests.test_cli:build", "--precision", "fp7"], "precision 'fp7' is unknown"),
        ([":build"], "no 'module:callable'"),
        (["tests/test_cli.py"], "give 'tests/test_cli.py:NAME'"),
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


def test_altered_files_are_answered_in_a_line(saved: Path, tmp_path: Path) -> None:
    """Whatever a plan file holds: an answer, or one line and the code of a wrong input; never an error inside."""
    generator, data, file = random.Random(0), json.loads(saved.read_text()), tmp_path / "altered.json"
    commands = [["show", file], ["show", file, "--json"], ["show", file, "--html", tmp_path / "page.html"],
                ["verify", file, "--programs-only"], ["explain", file, "blocks.0.up.weight"], ["diff", file, saved],
                ["diff", saved, file], ["simulate", file], ["simulate", file, "--what-if", "network=2"]]
    found: Counter[int] = Counter()
    raw = [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b"null", b"1e999", b'{"meshwright": 2, "meshwright": 2}',
           b"[" * 500 + b"]" * 500]
    for number in range(100):
        mutated = json.dumps(refreshed(mutant(data, generator))).encode()
        file.write_bytes(raw[number] if number < len(raw) else mutated)
        result = run(*generator.choice(commands))
        assert result.exit_code in (0, DIFFERENT, WRONG, NOTHING_FITS), result.output
        assert result.exit_code < WRONG or len(result.stderr.splitlines()) == 1, result.output
        found[result.exit_code] += 1
    assert found[WRONG] > 60


def test_an_unknown_device_names_the_known() -> None:
    result = run("plan", "tests.test_cli:build", "--cluster", "h1000:1x8")
    assert result.exit_code == WRONG
    assert "nearest is 'h100'" in result.stderr


@pytest.mark.parametrize("text", ["= 1", "\udcff", "device = 3", "cluster = [1]", "[cluster]\ndevices = 3", "sources = 1"])
def test_a_cluster_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.toml").write_bytes(text.encode(errors="surrogateescape"))
    result = run("plan", "tests.test_cli:build", "--cluster", tmp_path / "mine.toml")
    assert result.exit_code == WRONG
    assert "mine.toml" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_does_not_fit_has_a_code_of_its_own(tmp_path: Path) -> None:
    cluster = tmp_path / "small.toml"
    cluster.write_text('[cluster]\ndevices = "small:1x2"\n[device.small]\nlike = "cpu"\nnode = "host"\n'
                       'memory = { value = 0.01, unit = "MB", source = "a test" }\n'
                       'reserve = { value = 0, unit = "MB", source = "a test" }\n')
    result = run("plan", "tests.test_cli:build", "--cluster", cluster, "--json")
    assert result.exit_code == NOTHING_FITS, result.output
    assert json.loads(result.stdout)["error"] == "OutOfMemoryError"


def test_an_answer_that_nobody_reads_or_that_finds_no_room(tmp_path: Path) -> None:
    code = ("import typer; from meshwright.commands.answers import Commands, errors\n"
            "def say():\n  with errors(False):\n    for _ in range(40000): print('a line')\n"
            "app = typer.Typer(cls=Commands); app.command()(say); app.command('other')(say); app(['say'])")
    shown = f'{sys.executable} -c "$0"'
    full = f"ulimit -f 1; {shown} > {tmp_path}/full"
    for words, wanted, said in ((f"{shown} | head -1", CLOSED, ""), (full, WRONG, "File too")):
        for buffered in ("", "1"):
            done = subprocess.run(["bash", "-c", f"{words}; exit ${{PIPESTATUS[0]}}", code], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONUNBUFFERED": buffered})
            assert done.returncode == wanted, done.stderr
            assert said in done.stderr
            assert len(done.stderr.splitlines()) == bool(said)


def test_a_config_that_names_a_class_without_a_loss(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip", "architectures": ["CLIPTextModel"]}')
    result = run("plan", tmp_path, "--cluster", "cpu:1x4")
    assert result.exit_code == WRONG
    assert "CLIPTextModel" in result.stderr
    assert "no loss" in result.stderr
    assert "module:callable" in result.stderr


@pytest.mark.parametrize("text", [
    '{"model_type": "no-such-model"}', '{"model_type": "t5"}', '{"model_type": "llama", "num_hidden_layers": "two"}', "[1, 2]",
    '{"model_type": ',
])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    """T5's lists no class and is no causal model: transformers would list all that are."""
    (tmp_path / "config.json").write_text(text)
    result = run("plan", tmp_path, "--cluster", "cpu:1x4")
    assert result.exit_code == WRONG
    assert "cannot build a causal language model" in result.stderr
    assert '"architectures"' in result.stderr
    assert len(result.stderr.strip().splitlines()[-1]) < 800


def test_show(saved: Path, tmp_path: Path) -> None:
    result = run("show", saved)
    assert result.exit_code == 0
    assert result.stdout.rstrip() == render(handmade_plan())
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
    assert result.stdout.rstrip() == explain(Plan.load(saved), "blocks.1.down.weight")
    name = "blocks.1.down:linear"
    assert json.loads(run("explain", saved, name, "--json").stdout)["text"][0] == f"operator {name}: aten.linear.default"
    unknown = run("explain", saved, "down7")
    assert unknown.exit_code == WRONG
    assert "did you mean" in unknown.stderr
    assert len(run("explain", saved, "x" * 5000).stderr) < 400


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
    for command in ("plan", "show", "explain", "diff", "verify", "simulate", "zoo"):
        assert command in result.stdout


def test_verify(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    assert run("plan", "tests.test_cli:build", "--cluster", "cpu:1x4", "--dp", 2, "--tp", 2, "--out", path).exit_code == 0
    result = run("verify", path, "--programs-only")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("verified: 4 of 4 ranks")
    assert json.loads(run("verify", path, "--json", "--processes", 2).stdout)["ranks"] == [0, 1, 2, 3]
    assert run("verify", tmp_path / "missing.json").exit_code == WRONG


def test_verify_finds_a_wrong_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright.commands.verifying as checker

    path = tmp_path / "made.json"
    run("plan", "tests.test_cli:build", "--cluster", "cpu:1x4", "--dp", 2, "--tp", 2, "--out", path)

    def wrong(*_: object) -> None:
        raise VerifyError("linear", "0", "f32[8@dp, 128]", "f32[8@dp, 128] +tp")

    monkeypatch.setattr(checker, "verify", wrong)
    result = run("verify", path, "--programs-only")
    assert result.exit_code == WRONG
    assert "expected f32[8@dp, 128], found f32[8@dp, 128] +tp" in result.stderr


def test_verify_runs_the_degrees_on_processes(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.commands import verifying
    from meshwright.commands.running import Compared
    from tests.test_pinning import graph

    path = tmp_path / "large.json"
    asked = Pins(dp=2, tp=2, zero=2, recompute="none", microbatches=1, pp=1)
    plan = make_plan(graph("llama"), Cluster.parse("h100:1x4"), asked)
    plan.save(path)
    assert "too much for 2 CPU processes: give its model" in str(verifying.ran(plan, None, 2, (), lambda *_: None))
    monkeypatch.setattr(verifying, "verify_rank", lambda *_: None)  # other tests look at that
    found = run("verify", path, "--model", llama, "--processes", 2, "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)["run"]
    assert answer["equal"]
    assert answer["mesh"] in ("dp=2 x tp=1", "dp=1 x tp=2")
    assert max(answer["gradients"].values()) < 1e-5
    assert answer["loss"] == pytest.approx(answer["loss_alone"], rel=1e-5)
    wrong = Compared(2, "tp=2", 1.0, 1.0, (("a.weight", 0.5), ("b.weight", float("nan"))))
    monkeypatch.setattr(verifying, "ran", lambda *_: wrong)
    found = run("verify", path)
    assert found.exit_code == DIFFERENT
    assert "NOT EQUAL" in found.stdout
    assert "a.weight: gradient off by 0.5" in found.stdout
    monkeypatch.undo()
    with pytest.raises(InputError, match="is no file or folder"):
        verifying.ran(plan, str(tmp_path / "none"), 2, (), lambda *_: None)


def test_degrees_made_small_stay_what_they_are(llama: Path) -> None:
    from meshwright.commands.shrinking import left_out, shrunken, smaller
    from tests.test_pinning import graph

    asked = Pins(pp=2, dp=2, tp=2, zero=1, microbatches=4, recompute="full", schedule="1f1b")
    plan = make_plan(graph("llama"), Cluster.parse("h100:1x8"), asked)
    pins, world = smaller(plan, 8)
    assert world == 8
    assert (pins.pp, pins.dp, pins.tp, pins.zero, pins.recompute, pins.microbatches) == (2, 2, 2, 1, "full", 4)
    few, world = smaller(plan, 4)
    assert (few.pp, few.tp, few.dp, world) == (2, 2, 1, 4)  # stages stay longest
    assert left_out(plan, Mesh.of(pp=2, dp=1, tp=2)) == (["dp"], 8)
    assert smaller(plan, 1) == (Pins(pp=1, dp=1, tp=1, cp=1, recompute="full", microbatches=2), 1)
    whole = replace(plan, schedule=replace(plan.schedule, microbatches=1))  # of what has no more, as with a batch norm
    assert smaller(whole, 8)[0].microbatches == 1
    model, example = shrunken(llama, pins)
    assert model.config.num_attention_heads % 2 == 0
    assert example["input_ids"].shape == (16, 16)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("config", [
    {"model_type": "falcon", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8},
    {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    {"model_type": "gptj", "n_layer": 4, "n_embd": 64, "n_head": 4, "rotary_dim": 16},
    {"model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
     "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
], ids=lambda config: config["model_type"])
def test_what_hangs_together_in_a_config_does_in_a_small_one(config: dict[str, Any], tmp_path: Path) -> None:
    """Heads of an expanded width, widths that follow from others, rotated parts of heads, experts in groups."""
    from meshwright.commands.shrinking import shrunken

    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    model, example = shrunken(tmp_path, Pins(dp=2, tp=2, microbatches=2))
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e5
    assert graph_of(model, example).loss is not None


def narrow() -> tuple[nn.Module, Any]:
    """An example of a width that the model does not take."""
    return nn.Linear(4, 4), ((torch.zeros(8, 5),), {})


def test_what_a_trace_runs_into_is_said_once() -> None:
    said: list[str] = []
    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        result = run("plan", "tests.test_cli:narrow", "--cluster", "cpu:1x2")
    finally:
        log.removeHandler(handler)
    assert result.exit_code == WRONG
    assert "cannot be captured" in result.stderr
    assert not said


def test_ranks_that_may_differ() -> None:
    assert distinct_ranks(Mesh(("dp", "tp"), (4, 4))) == list(range(16))
    assert distinct_ranks(Mesh(("dp", "tp"), (8, 4))) == [0, 3, 28, 31]
    pipeline = distinct_ranks(Mesh(("pp", "dp"), (3, 16)))
    assert pipeline == [0, 15, 16, 31, 32, 47]


def test_simulate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run("simulate", "--pp", 4, "--microbatches", 8, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[4].startswith("rank 3 stage 3          F0 B0 == F1 B1")
    assert "33 s, bubble 27.3%, micro-batches held by rank: [4, 3, 2, 1]" in result.stdout
    wide = run("simulate", "--pp", 64, "--microbatches", 128).stdout.splitlines()
    assert max(map(len, wide)) <= 120
    assert len(json.loads(trace.read_text())["traceEvents"]) == 4 + 4 * 8 * 2
    answer = json.loads(run("simulate", "--pp", 2, "--microbatches", 2, "--schedule", "gpipe", "--forward", "1,2",
                            "--backward", "3", "--json").stdout)
    # 1 2 2 | 3 3 on the last stage, 3 more on the first
    assert answer["seconds"] == 1 + 2 * 2 + 2 * 3 + 3
    assert answer["busy_seconds"] == [8.0, 10.0]
    assert answer["in_flight"] == [2, 2]
    assert answer["actions"][0] == {"rank": 0, "action": "0F0", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1.0}
    interleaved = json.loads(run("simulate", "--pp", 2, "--microbatches", 4, "--schedule", "interleaved1f1b", "--json").stdout)
    assert interleaved["stages"] == 4


def test_simulate_a_plan(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    made = run("plan", llama, "--cluster", "cpu:1x2", "--batch", 8, "--sequence", 8, "--pp", 2, "--tp", 1, "--microbatches", 4,
               "--schedule", "1f1b", "--out", path)
    assert made.exit_code == 0, made.output
    result = run("simulate", path, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["schedule"], answer["pp"], answer["microbatches"]) == ("1f1b", 2, 4)
    step = Plan.load(path).predicted.step_seconds
    assert 0 < answer["seconds"] < answer["step_seconds"] == pytest.approx(step)
    said = run("simulate", path).stdout
    assert f"= step {step:.4g} s" in said
    assert "+ optimizer" in said
    assert run("verify", path).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a plan file, or --pp and --microbatches"),
        (["--pp", 4, "--microbatches", 2], "nearest legal: microbatches=4"),
        (["--pp", 2, "--microbatches", 2, "--forward", "x"], "--forward 'x'"),
        (["--pp", 2, "--microbatches", 2, "--forward", "1,2,3"], "expected a number or 2 of them"),
        (["--pp", 2, "--microbatches", 2, "--schedule", "none"], "schedule 'none' is unknown"),
        (["--pp", 2, "--microbatches", 2, "--forward", "1e308"], "at most 1e+100 s each"),
        (["--pp", 2, "--microbatches", 2, "--forward", "inf"], "non-negative numbers, got inf"),
        (["--pp", 100_000, "--microbatches", 800], "more than the 500,000 that are simulated action by action; give fewer"),
        (["--pp", 2, "--microbatches", 2, "--transfer", "inf"], "--transfer inf: give a number that is finite"),
        (["plan.json", "--schedule", "gpipe", "--pp", 4, "--forward", 100], "--schedule, --pp, --forward beside plan.json"),
        (["plan.json", "--what-if", "batch=2", "--tick", 1], "--tick beside --what-if"),
        (["--pp", 2, "--microbatches", 2, "--tick", "1e-9"], "more than 4096 columns of 9 s; give at least 0.0022"),
    ],
)
def test_simulate_errors(words: list[object], message: str) -> None:
    result = run("simulate", *words)
    assert result.exit_code == WRONG
    assert message in result.stderr


def test_simulate_refuses_a_plan_without_a_pipeline(saved: Path) -> None:
    result = run("simulate", saved, "--json")
    assert result.exit_code == WRONG
    assert re.search("no pipeline.*; plan with stages", json.loads(result.stdout)["message"])


def test_zoo_prints_what_is_published() -> None:
    result = run("zoo", "gemini", "--published")
    assert result.exit_code == 0
    assert "Gemini 1.0 Ultra" in result.stdout
    assert result.stderr == ""
    answer = json.loads(run("zoo", "--published", "--json").stdout)["systems"]
    assert len(answer) == 27
    assert all(system["source"] for system in answer)
    assert answer[0]["published"]["tflops"] == 137


def test_zoo_says_why_nothing_is_predicted() -> None:
    result = run("zoo", "PaLM 2")
    assert result.exit_code == 0
    assert "not disclosed: model, number of devices" in " ".join(result.stdout.replace("│", " ").split())
    assert "1/1 PaLM 2" in result.stderr
    assert run("zoo", "unheard of", "--json").exit_code == WRONG


# ------------------------------------------------------------------------------------------------------- sizes, errors, help
def fails() -> None:
    """A model function with an error of its own."""
    raise ZeroDivisionError("dear me\nthe rest")


def test_clusters_worth_having(llama: Path) -> None:
    words = ("size", llama.parent, "--device", "h100", "--tokens", 1e9, "--devices", "1,2", "--batch", 4, "--sequence", 8)
    answer = json.loads(run(*words, "--price", 2.5, "--json").stdout)
    assert [row["devices"] for row in answer["clusters"]] == [1, 2]
    for row in answer["clusters"]:
        assert row["days"] == pytest.approx(1e9 / row["tokens_per_second"] / 86400)
        assert row["cost"] == pytest.approx(2.5 * 24 * row["days"] * row["devices"])
        h100 = Cluster.parse("h100:1x1")
        assert row["free_bytes"] == h100.memory_bytes - h100.with_headroom().capacity_bytes
    table = run(*words)
    assert table.exit_code == 0, table.output
    assert "device-hours" in table.stdout
    assert "left free" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 120
    wrong = run(*words[:-6], "--devices", "1,12")
    assert wrong.exit_code == WRONG
    assert "no whole number of nodes" in wrong.stderr
    for option, number in (("--tokens", "inf"), ("--price", "inf")):
        endless = run(*words, option, number, "--json")
        assert endless.exit_code == WRONG
        assert f"{option} {number}" in json.loads(endless.stdout)["message"]


def test_json_has_no_number_without_end(capsys: Any) -> None:
    print_json({"loss": float("nan"), "rows": [{"off": (float("inf"), 1.5)}]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"loss": None, "rows": [{"off": [None, 1.5]}]}


def test_the_front_is_what_nobody_beats() -> None:
    found = [(8.0, 10), (4.0, 9), (3.0, 20), (3.0, 40)]
    rows = [*(Size(1, "", days=days, device_hours=hours) for days, hours in found), Size(16, "", reason="too small")]
    assert [row.worth_having for row in front(rows)] == [False, True, True, False, False]


def test_errors_are_a_line_and_debug_shows_the_trace(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("plan", "tests.test_cli:fails", "--cluster", "cpu:1x2")
    assert result.exit_code == WRONG
    (line,) = result.stderr.splitlines()
    assert "ZeroDivisionError: dear me the rest" in line
    shown = run("--debug", "plan", "tests.test_cli:fails", "--cluster", "cpu:1x2")
    assert shown.exit_code == WRONG  # and not Python's 1, which is "different"
    assert "in fails\n" in shown.stderr
    assert shown.stderr.splitlines()[-1] == line
    with monkeypatch.context() as patched:
        patched.setattr(api, "make_plan", lambda *args, **kwargs: fails())
        bug = run("plan", llama.parent, "--cluster", "cpu:1x2", "--batch", 4, "--sequence", 8)
    assert bug.exit_code == BUG
    assert "ZeroDivisionError: dear me the rest" in bug.stderr
    given = run("plan", "tests.test_cli:test_show", "--cluster", "cpu:1x2")
    assert given.exit_code == WRONG
    assert "cannot be called without arguments (missing a required argument: 'saved')" in given.stderr
    missing = run("plan", "nowhere.py:build", "--cluster", "cpu:1x2")
    assert missing.exit_code == WRONG
    assert "no file 'nowhere.py'" in missing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "Missing argument"),
        (["plan", "config.json"], "Missing option '--cluster'; see "),
        (["plan", "config.json", "--cluster", "cpu:1x4", "--batch", "few"], "Invalid value for '--batch'"),
        (["show", "plan.json", "more"], "unexpected extra argument"),
        (["simulate", "--pp", "0", "--microbatches", "8"], "Invalid value for '--pp'"),
        (["diff", "--nosuch"], "No such option: --nosuch"),
        (["nosuch"], "No such command 'nosuch'"),
    ],
)
def test_wrong_words_are_a_line_too(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == WRONG
    (line,) = result.stderr.splitlines()
    assert message in line
    assert line.endswith("--help")
    as_json = run(*words, "--json")
    assert as_json.exit_code == WRONG
    assert message in json.loads(as_json.stdout)["message"]


@pytest.mark.parametrize("where", ["    raise SystemExit(0)", "raise SystemExit(0)"])
def test_a_function_that_ends_the_process_is_no_answer(tmp_path: Path, where: str) -> None:
    (tmp_path / "ends.py").write_text(f"def build():\n    pass\n{where}\n")
    result = run("plan", f"{tmp_path}/ends.py:build", "--cluster", "cpu:1x2")
    assert result.exit_code == WRONG
    assert "ended with sys.exit(0)" in result.stderr


def test_a_function_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from tests.test_cli import build\n")
    (tmp_path / "mine.py").write_text("from beside import build\n")
    result = run("plan", f"{tmp_path}/mine.py:build", "--cluster", "cpu:1x2", "--precision", "fp32", "--tp", 2, "--json")
    assert result.exit_code == 0, result.output


def test_names_are_what_they_are(tmp_path: Path) -> None:
    """A name in brackets, with marks of the notation or of a second call is a name: pinned, written, explained."""
    file = tmp_path / "größe 1.json"
    result = run("plan", "tests.test_cli:Oddly.made", "--cluster", "cpu:1x2", "--tp", 2, "--out", file,
                 "--tensor", "[x@dp].weight=[8@tp, 8]", "--tensor", "größe 1:2,3.weight=[8@tp, 8]")
    assert result.exit_code == 0, result.output
    for name in ("[x@dp]", "größe 1:2,3", "twice@1", "[x@dp]@1", "twice@1@1"):
        assert run("explain", file, name).stdout.startswith(f"module {name}: ")
    assert "placed   bf16[8@tp, 8]" in run("explain", file, "[x@dp].weight").stdout
    assert run("diff", file, file).exit_code == 0


def test_a_config_names_its_class(tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, example = from_config(tmp_path, 4, 8)
    assert type(model).__name__ == "ViTForImageClassification"
    assert set(example) == {"pixel_values", "labels"}
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("config", [
    {"model_type": "bert", "architectures": ["BertForTokenClassification"]},
    {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]},
    {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "depths": [1], "hidden_sizes": [8],
     "embedding_size": 8},
    {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1,
     "num_heads": 4, "vocab_size": 64},  # it says nothing of how a decoder starts
    {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 32, "encoder_layers": 1,
     "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 20},
    {"model_type": "audio-spectrogram-transformer", "architectures": ["ASTForAudioClassification"], "max_length": 32,
     "num_mel_bins": 16},
    {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 16,
     "text_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
                     "vocab_size": 64},
     "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
                       "image_size": 16, "patch_size": 8}},
    {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForSequenceClassification"], "layerdrop": 0.0, "conv_stride": [4],
     "apply_spec_augment": False, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "conv_dim": [32],
     "conv_kernel": [5], "num_feat_extract_layers": 1},
    {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"],
     "encoder": {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                 "intermediate_size": 64, "image_size": 16, "patch_size": 8},
     "decoder": {"model_type": "mbart", "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4,
                 "decoder_ffn_dim": 64, "vocab_size": 64, "add_cross_attention": True, "is_decoder": True}},
], ids=lambda config: config["architectures"][0])
def test_models_of_other_kinds_are_called_as_they_take_it(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                                                      "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0} | config))
    model, example = from_config(tmp_path, 4, 8)
    graph = graph_of(model, example)
    assert graph.loss is not None
    assert graph.values[graph.loss].shape == ()


def test_what_cannot_be_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    """A model that fails where it is read shows that nothing was."""
    for words, message in [
        (["profile", "--out", tmp_path / "mine.json"], "a name that ends with .toml"),
        (["profile", "--out", tmp_path / "mine.toml", "--nodes", 3], "1 process on 3 nodes"),
        (["profile", "--out", tmp_path / "mine.toml", "--precision", "fp8"], "choose one of fp32, tf32, bf16"),
        (["size", "--device", "h100", "--tokens", 1e9, "--devices", "8,12"], "no whole number of nodes"),
    ]:
        result = run(words[0], "tests.test_cli:fails", *words[1:])
        assert result.exit_code == WRONG, result.output
        assert message in result.stderr
    nothing = run("size", "tests.test_cli:build", "--device", "h100", "--tokens", 1e9, "--devices", 1)
    assert nothing.exit_code == WRONG
    assert "no tokens to count" in nothing.stderr


def test_positions_that_a_model_has_not_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 32, "n_head": 4,
              "vocab_size": 64, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("plan", tmp_path, "--cluster", "cpu:1x2", "--batch", 2, "--sequence", 16).exit_code == 0
    result = run("plan", tmp_path, "--cluster", "cpu:1x2", "--batch", 2, "--sequence", 17)
    assert result.exit_code == WRONG
    assert "wpe" in result.stderr
    assert "has 16 positions, and the example reads row 16" in result.stderr


def test_help_is_at_hand() -> None:
    code = "import sys, meshwright.cli; print(sorted({'torch', 'numpy', 'ortools'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    for name in ("plan", "show", "explain", "diff", "verify", "simulate", "zoo", "size", "profile"):
        assert "Example" in run(name, "--help").stdout


def test_bars_come_before_what_takes_long_to_import() -> None:
    code = """
import sys
from meshwright import cli
from meshwright.commands import clusters
from meshwright.errors import InputError

def shown(*words, **options):
    raise InputError("torch is there" if "torch" in sys.modules else "at once")

cli.shown = clusters.shown = shown
for words in (["plan", "x", "--cluster", "cpu:1x2", "--tp", "2"], ["size", "x", "--device", "cpu", "--tokens", "1e9"],
              ["profile", "x", "--out", "x.toml"], ["zoo"], ["show", "x"], ["explain", "x"], ["diff", "x", "x"],
              ["verify", "x"], ["simulate", "x"]):
    try:
        cli.app(words)
    except SystemExit:
        pass
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines() == ["meshwright: at once"] * 9


def test_a_long_step_speaks_where_nobody_looks(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    with progress.progress(True, "planning") as report:
        report("dp=8", 0.25)
        time.sleep(0.2)
    assert "dp=8 (25%)" in capsys.readouterr().err
    with progress.progress(False) as report:
        report("dp=8", 0.25)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_system_of_the_zoo_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, float] = {}

    @contextmanager
    def recorded(on: bool, verb: str) -> Iterator[progress.Report]:
        assert on
        yield said.__setitem__

    monkeypatch.setattr("meshwright.commands.clusters.shown", recorded)
    monkeypatch.setattr("meshwright.published.zoo.systems", lambda name: [small(name="First", batch=None), small(name=name)])
    result = run("zoo", "Second", "--json")
    assert [row["predicted"] is None for row in json.loads(result.stdout)["systems"]] == [True, False]
    assert said["Second: capturing the model"] == said["Second: what operators may choose"] == 0.5
    assert "Second: dp=2 x tp=2, 1 micro-batch" in said


def test_what_if(tmp_path: Path) -> None:
    from meshwright.cost.cluster import Cluster
    from meshwright.ir.pins import Pins
    from meshwright.planner import make_plan
    from tests.handmade import handmade_graph

    path = tmp_path / "plan.json"
    make_plan(handmade_graph(), Cluster.parse("h100:2x2"), Pins(dp=2, tp=2)).save(path)
    result = run("simulate", path, "--what-if", "bandwidth=0.01", "--what-if", "memory=0.02", "--what-if", "network=0.01",
                 "--json")
    plain, slow, small, far = json.loads(result.stdout)["what_if"]
    assert plain["step_seconds"] < far["step_seconds"] <= slow["step_seconds"]
    assert (plain["fits"], small["step_seconds"]) == (True, plain["step_seconds"])
    assert small["capacity_bytes"] < plain["capacity_bytes"]
    assert "as it is: step" in run("simulate", path, "--what-if", "cluster=a100:2x2").stdout
    assert "batch=2: step" in run("simulate", path, "--what-if", "batch=2").stdout
    for change, words in (("batch=0.3", "makes them whole"), ("memory=-1", "give a factor"), ("batch=1e30", "give a factor"),
                          ("memory=1e-9", "a larger factor"), ("cluster=h100:1x8", "again for")):
        refused = run("simulate", path, "--what-if", change)
        assert refused.exit_code == 2
        assert words in refused.stderr
