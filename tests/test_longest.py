"""The longest sequence that trains."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.commands.reach import reaches
from meshwright.cost.cluster import Cluster
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.prediction import Prediction
from meshwright.lengths import by_heads
from meshwright.planner import GAP
from tests.models import make


def _fitting(monkeypatch: pytest.MonkeyPatch, limit: int, known: bool = False) -> list[tuple[int, float, int | None]]:
    """What is asked: tokens, gap and cp pinned. Plans are their tokens, with a prediction where it is ``known``."""
    asked: list[tuple[int, float, int | None]] = []

    def plan(tokens: int, cluster: object, pins: Pins, *, gap: float, remedies: bool, **_: object) -> Any:
        asked.append((tokens, gap, pins.cp))
        assert not remedies
        if tokens > limit:
            raise mw.OutOfMemoryError("too long", float(tokens), float(limit), {})
        said = Prediction(1.0, 100.0 + tokens, 100.0 + limit, bytes_by_kind={"parameters": 100.0, "activations": float(tokens)})
        return SimpleNamespace(tokens=tokens, gap=gap, predicted=said if known else None, mesh="")

    monkeypatch.setattr("meshwright.lengths.graph_of", lambda model, example, **_: int(example[1]["input_ids"].shape[1]))
    monkeypatch.setattr("meshwright.lengths.of_length", lambda tokens, factor: int(tokens * factor))
    monkeypatch.setattr("meshwright.lengths.make_plan", plan)
    return asked


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("limit", [1024, 5000, 70_000, 1 << 30])
def test_the_longest_is_found(monkeypatch: pytest.MonkeyPatch, limit: int, known: bool) -> None:
    """Within an eighth of what fits, by few plans, fewer where predictions say what fills memory; at most what was asked for.
    The longest alone is searched to its end."""
    asked = _fitting(monkeypatch, limit, known)
    found = mw.longest(object(), "cpu:1x1", 2, most=1 << 20)  # type: ignore[arg-type]
    assert found.tokens == found.plan.tokens <= limit  # type: ignore[attr-defined]
    assert found.too_long is None if limit > 1 << 20 else limit < found.too_long <= found.tokens * 9 / 8  # type: ignore[operator]
    assert len(asked) <= (5 if known else 16)
    assert [(tokens, gap) for tokens, gap, _ in asked if gap == GAP] == [(found.tokens, GAP)]


def test_what_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _fitting(monkeypatch, 10)
    with pytest.raises(mw.OutOfMemoryError):
        mw.longest(object(), "cpu:1x1", 1)  # type: ignore[arg-type]
    with pytest.raises(mw.InputError, match="batch=0"):
        mw.longest(object(), "cpu:1x1", 0)  # type: ignore[arg-type]


def test_all_to_all_alone_takes_as_many_ranks_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the heads refuse is tried with fewer ranks; where nothing fits there is none."""
    tried: list[int] = []

    def plan(tokens: int, cluster: object, pins: Pins, **_: object) -> Any:
        assert pins.cp is not None
        tried.append(pins.cp)
        assert (pins.zero, pins.recompute, pins.attention) == (3, "full", "ulysses" if pins.cp > 1 else None)
        if pins.cp > 2:
            raise PinError("too few heads")
        return SimpleNamespace(tokens=tokens, predicted=None)

    _fitting(monkeypatch, 10)
    assert by_heads(object(), "cpu:1x8", 1, most=2048) is None  # type: ignore[arg-type]
    monkeypatch.setattr("meshwright.lengths.make_plan", plan)
    found = by_heads(object(), "cpu:1x8", 1, most=2048)  # type: ignore[arg-type]
    assert found is not None
    assert (found.tokens, tried[:3], set(tried[3:])) == (2048, [8, 4, 2], {2})


@pytest.mark.parametrize(("limit", "alone"), [(5000, 4608), (10, None)])
def test_what_can_more_begins_where_the_other_ended(
    monkeypatch: pytest.MonkeyPatch, limit: int, alone: int | None
) -> None:
    """And from the start where that does not fit."""
    asked = _fitting(monkeypatch, limit)
    (row,) = reaches(object(), "cpu", [1], 1, inputs=None, optimizer="adamw", precision="fp32",  # type: ignore[arg-type]
                     shortest=1024, most=1 << 20, report=lambda *_: None)
    assert (row.alone, row.alone_loss_only, row.tokens) == (alone, alone, alone)
    assert [tokens for tokens, *_ in asked].count(1024) == (1 if alone else 3)


def test_the_command_prints_it_beside(tmp_path: Path) -> None:
    make("llama")[0].config.save_pretrained(tmp_path)
    words = ["size", str(tmp_path), "--device", "cpu", "--devices", "2", "--batch", "2", "--sequence", "8", "--most", "16"]
    run = CliRunner().invoke(app, [*words, "--longest", "--precision", "fp32", "--json"])
    assert run.exit_code == 0, run.output
    (row,) = json.loads(run.stdout)["longest"]
    assert (row["tokens"], row["alone"], row["times"], row["too_long"]) == (16, 16, 1.0, None)
    assert (row["alone_loss_only"], row["times_loss_only"]) == (16, 1.0)
    assert CliRunner().invoke(app, [*words, "--longest", "--tokens", "9"]).exit_code == 2


def test_a_model_has_a_longest() -> None:
    """Through the real planner."""
    found = mw.longest(make("llama")[0], "cpu:1x2", 1, shortest=8, most=16, precision="fp32", pins={"cp": 2})
    assert (found.tokens, found.too_long) == (16, None)
    assert found.plan.mesh.size("cp") == 2
    assert found.plan.predicted is not None
    assert found.plan.predicted.capacity_bytes == Cluster.parse("cpu:1x2").with_headroom().capacity_bytes
