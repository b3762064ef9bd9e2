"""The cache of plans: a second start searches nothing, another model or pin does; a bad entry costs a search and no more."""

from __future__ import annotations

import contextvars
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright import api, cache
from meshwright.cost.cluster import Cluster
from meshwright.ir.serialize import digest, graph_digest, plan_hash
from meshwright.planner import capture_model
from tests.test_plan_files import mutant

EXAMPLE = {"input": torch.zeros(4, 8)}


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every search."""
    found, search = [], api.make_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return search(*args, **kwargs)

    monkeypatch.setattr(api, "make_plan", counted)
    return found


def plan(folder: Path, width: int = 8, **given: Any) -> mw.Plan:
    return mw.plan(net(width), "cpu:1x2", EXAMPLE, **{"loss_fn": loss_of, "pins": {"dp": 2}, "cache": folder, **given})


def test_what_is_the_same_is_found(
    tmp_path: Path, searches: list[Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = plan(tmp_path / "new"), plan(tmp_path / "new", progress=True)
    assert len(searches) == 1
    assert plan_hash(first) == plan_hash(second)
    assert [note for note in second.notes if "taken from the cache" in note]
    assert "taken from the cache" in capsys.readouterr().err
    assert not [note for note in first.notes if "cache" in note]
    others: list[dict[str, Any]] = [{"width": 12}, {"pins": {"tp": 2}}, {"precision": "bf16"}, {"optimizer": "sgd"}]
    for count, other in enumerate(others, 2):
        plan(tmp_path / "new", **other)
        assert len(searches) == count

    def scenario() -> None:
        mw.register_rule("aten.relu.default", "... -> ...", cost="pointwise", saves="r0", recompute="costly")
        plan(tmp_path / "new")

    contextvars.copy_context().run(scenario)
    assert len(searches) == len(others) + 2
    monkeypatch.setattr(cache, "prices", lambda: "of another version")
    plan(tmp_path / "new")
    assert len(searches) == len(others) + 3


def test_bad_entries_are_planned_again(tmp_path: Path, searches: list[Any]) -> None:
    good = plan(tmp_path)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    data = json.loads(text)
    chosen = data["plan"]["decisions"]
    altered = {**data, "plan": {**data["plan"], "decisions": {**chosen, "operators": {}}}}
    forged = {**altered, "plan": {**data["plan"], "decisions": {**chosen, "mesh": {"dp": 3}}}}
    forged["digest"] = digest([forged["order"], forged["plan"]])
    wrong = [json.dumps(one).encode() for one in (altered, forged)]
    for bad in (b"", b"\xff", b"[" * 5000, text[:-200].encode(), b"{}", *wrong):
        file.write_bytes(bad)
        before = len(searches)
        with pytest.warns(UserWarning, match="planning again"):
            assert plan_hash(plan(tmp_path)) == plan_hash(good)
        assert len(searches) == before + 1
        assert json.loads(file.read_text())["plan"]["decisions"] == chosen  # in its place
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="planning again"):
        plan(tmp_path)
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        plan(nowhere)


def test_forged_entries_are_found_or_planned_again(tmp_path: Path) -> None:
    """Whatever an entry holds, with its checksum made right: a start finds the plan of its own graph, or none and says so."""
    plan(tmp_path)
    (file,) = tmp_path.iterdir()
    data, generator = json.loads(file.read_text()), random.Random(0)
    graph = capture_model(net(), (), EXAMPLE, (), loss_of, "fp32")
    found: Counter[str] = Counter()
    for number in range(250):
        entry = mutant(data, generator) if number % 5 == 0 else {**data, "plan": mutant(data["plan"], generator)}
        if isinstance(entry, dict):
            entry["digest"] = digest([entry.get("order"), entry.get("plan")])
        file.write_text(json.dumps(entry))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            one = cache._look(file, graph, Cluster.parse("cpu:1x2"))
        assert (one is None) == ("planning again" in str([str(warning.message) for warning in said]))
        found["legal" if one is not None else "refused"] += 1
        assert one is None or graph_digest(one.graph) == graph_digest(graph)
    assert found["refused"] > 150


def start(rank: int, folder: str) -> list[str]:
    """A start of all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = mw.autoparallel(net(), init_device_mesh("cpu", (2,)), ((torch.zeros(4, 8),), {}), loss_fn=loss_of,
                                   pins={"dp": 2}, progress=False, cache=folder)
    x = torch.ones(4, 8)
    parallel(x).backward()
    return [note for note in parallel.plan.notes if "cache" in note]


def test_all_ranks_start_at_once(pool: Callable, tmp_path: Path) -> None:
    assert pool(2).run(start, str(tmp_path)) == [[], []]
    first, second = pool(2).run(start, str(tmp_path))
    assert first == second
    assert "nothing was searched" in first[0]
