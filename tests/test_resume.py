"""An interrupted run goes on exactly: learning rates, groups, dropout, statistics; under the same plan and under others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from meshwright.api import autoparallel
from meshwright.errors import CheckpointError
from meshwright.runtime.state.optimizer import NOTHING
from tests.equality import captured_once

PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-3": {"dp": 2, "zero": 3}, "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2}, "tp": {"tp": 2},
    "recomputed": {"dp": 2, "zero": 3, "recompute": "full", "microbatches": 2}, "cp": {"cp": 2, "dp": 1, "tp": 1},
    "zero-bubble": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2, "schedule": "zbv"},
}


class Dropped(nn.Module):
    """Dropout, a frozen layer, a number; if the batch is not cut in time, statistics (those of the second norm are in no state
    dict) and a counter."""

    def __init__(self, p: float, whole: bool) -> None:
        super().__init__()
        self.p, self.whole, self.inside = p, whole, nn.Linear(8, 12)
        self.norm, self.again = (nn.BatchNorm1d(12) if whole else nn.LayerNorm(12) for _ in range(2))
        self.again._non_persistent_buffers_set.update(self.again._buffers)  # of a LayerNorm: none
        self.fixed, self.out, self.gain = nn.Linear(12, 12), nn.Linear(12, 4), nn.Parameter(torch.tensor(1.1))
        self.fixed.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        if self.whole:
            self.calls.add_(1)
        x = F.dropout(F.relu(self.norm(self.inside(x))), self.p, self.training)
        x = F.dropout(self.again(F.relu(self.fixed(x))), self.p, self.training)
        return {"loss": F.mse_loss(self.out(x) * self.gain * (1 + 0.1 * self.calls), target)}


class Attending(nn.Module):
    """Two blocks of attention with dropout, which sequences and pipelines with two stages a rank can be cut of."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.norm = p, nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for inside, out in self.blocks:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in inside(x).chunk(3, -1))
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.dropout(out(heads.transpose(1, 2).flatten(2)), self.p, self.training)
        return {"loss": F.mse_loss(self.norm(x), target)}


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=torch.tensor(0.01), betas=(0.8, 0.9), eps=1e-3, foreach=False)


def adafactor(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=0.05)


def learning(model: nn.Module, make: Callable[..., Any]) -> tuple[Any, Any]:
    """An optimizer of two groups, and a schedule of its learning rates."""
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in named.items() if not (name.endswith("weight") and "norm" not in name)]
    optimizer = make([{"params": decayed, "weight_decay": 0.1, "mark": "decayed"}, {"params": others, "weight_decay": 0.0}])
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def prepare(pins: Mapping[str, Any], make: Callable[..., Any], p: float, seed: int) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(1)
    model: nn.Module
    model, batch = Dropped(p, "microbatches" not in pins), {"x": torch.randn(8, 8), "target": torch.randn(8, 4)}
    if "cp" in pins or "schedule" in pins:
        model, batch = Attending(p), {name: torch.randn(8, 8, 8) for name in batch}
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = autoparallel(model, mesh, ((), batch), pins=dict(pins), progress=False)
    optimizer, schedule = learning(parallel, make)
    return parallel, optimizer, schedule, batch


def go_on(parallel: Any, optimizer: Any, schedule: Any, batch: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = parallel(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def interrupted(rank: int, folder: str, what: str, makes: list[Callable[..., Any]]) -> None:
    torch.set_num_threads(1)
    for make in makes:
        with captured_once(f"resume {what}"):
            first, again = (prepare(PLANS[what], make, 0.4, seed) for seed in (5, 6))
        torch.manual_seed(5)
        go_on(*first, 2)
        path = f"{folder}/{make.__name__}"
        first[0].save(path, first[1])
        kept = first[2].state_dict()
        wanted = go_on(*first, 2)
        state = first[0].full_state_dict()
        torch.manual_seed(6)
        if make is not adafactor:
            go_on(*again, 1)  # what it learned and drew is overwritten
        options = [group["lr"] for group in again[1].param_groups]
        again[0].load(path, again[1])
        again[2].load_state_dict(kept)
        assert again[1].param_groups[0]["mark"] == "decayed"
        assert all(old is new for old, new in zip(options, (g["lr"] for g in again[1].param_groups), strict=True)
                   if isinstance(old, Tensor))
        assert go_on(*again, 2) == wanted, make.__name__
        for name, tensor in again[0].full_state_dict().items():
            assert torch.equal(tensor, state[name]), (make.__name__, name)


@pytest.mark.parametrize("what", list(PLANS))
def test_goes_on_exactly(what: str, pool: Callable[[int], Any], tmp_path: Path) -> None:
    """Losses and weights after the interruption are those of the run that was not interrupted, to the bit."""
    pool(2).run(interrupted, str(tmp_path), what, [sgd, adamw, adafactor] if what == "ZeRO-3" else [sgd])


def elsewhere(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    wanted: list[float] = []
    for pins in ({"dp": 2, "zero": 3, "microbatches": 2}, PLANS["pp"], {"tp": 2, "microbatches": 2}):
        run = prepare(pins, sgd, 0.0, seed=len(wanted))
        if not wanted:
            go_on(*run, 2)
            run[0].save(folder, run[1])
            kept = run[2].state_dict()
            wanted = go_on(*run, 2)
            continue
        run[0].load(folder, run[1])
        run[2].load_state_dict(kept)
        torch.testing.assert_close(go_on(*run, 2), wanted, rtol=1e-5, atol=1e-6)
    everything = [p for group in run[1].param_groups for p in group["params"]]
    for groups in ([{"params": everything}], [{"params": everything[:1]}, {"params": everything[1:]}]):
        with pytest.raises(CheckpointError, match=r"parameter group 0 .*'.*Make the groups as in that run"):
            run[0].load(folder, sgd(groups))
    run[0].save(folder)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        run[0].load(folder, run[1])


def test_goes_on_under_another_plan(pool: Callable[[int], Any], tmp_path: Path) -> None:
    """Groups are known by names, whichever stage holds them; other groups are refused by name on every rank."""
    pool(2).run(elsewhere, str(tmp_path / "checkpoint"))


def on_some(rank: int, pins: Mapping[str, Any], p: float, before: str, after: str) -> list[float]:
    """Two steps: on from the folder ``before``, if there is one, and saved in ``after``."""
    torch.set_num_threads(1)
    run = prepare(pins, adamw, p, seed=5 if not before else len(pins))
    if before:
        run[0].load(before, run[1])
        run[2].load_state_dict(torch.load(f"{before}.scheduler"))
    losses = go_on(*run, 2)
    run[0].save(after, run[1])
    if rank == 0:
        torch.save(run[2].state_dict(), f"{after}.scheduler")
    return losses


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_goes_on_on_another_number_of_processes(pool: Callable[[int], Any], tmp_path: Path, p: float) -> None:
    """2, then 4, then one, then 2 processes: as one process that nobody interrupted. With dropout another plan draws other
    numbers, but which ones the checkpoint says: going on from it twice gives the same."""
    chain: list[tuple[int, Mapping[str, Any]]] = [
        (2, {"dp": 2, "zero": 3, "microbatches": 2}), (4, {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2, "zero": 1}),
        (1, {"microbatches": 4}), (2, {"tp": 2, "microbatches": 1})]
    found: list[float] = []
    before = ""
    for number, (world, pins) in enumerate(chain):
        after = str(tmp_path / str(number))
        losses = pool(world).run(on_some, pins, p, before, after)
        if p and number == 1:
            assert pool(world).run(on_some, pins, p, before, after) == losses
        found += losses[0]
        before = after
    if not p:
        (wanted,) = pool(1).run(uninterrupted, len(found))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def uninterrupted(rank: int, steps: int) -> list[float]:
    """The model itself, of the first plan's seed."""
    torch.manual_seed(1)
    model, batch = Dropped(0.0, False), {"x": torch.randn(8, 8), "target": torch.randn(8, 4)}
    return go_on(model, *learning(model, adamw), batch, steps)


def as_with_torch(rank: int, folder: str) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    torch.set_num_threads(1)
    first, again = (prepare(PLANS["ZeRO-3"], adamw, 0.0, seed=1) for _ in range(2))
    go_on(*first, 2)
    model, optimizer = dcp.get_state_dict(first[0], first[1])
    torch.save((model, optimizer), f"{folder}/{rank}.pt")
    torch.save((first[1].state_dict(), first[0].state_dict()), f"{folder}/{rank}-plain.pt")  # or both would be one memory
    model, optimizer = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    plain, weights = torch.load(f"{folder}/{rank}-plain.pt", weights_only=False)
    dcp.set_state_dict(again[0], again[1], model_state_dict=model, optim_state_dict=optimizer)
    third = prepare(PLANS["ZeRO-3"], adamw, 0.0, seed=1)
    third[0].load_state_dict(weights)
    third[1].load_state_dict(plain)
    for one in (first, again, third):
        for buffer in (*one[0].again.buffers(), one[0].calls):
            buffer.zero_()
        one[2].load_state_dict(first[2].state_dict())
    wanted = go_on(*first, 2)
    assert go_on(*again, 2) == wanted
    assert go_on(*third, 2) == wanted


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def tuned(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, batch = Layers(), {"x": torch.randn(32, 256)}
    schedule = SimpleNamespace(step=lambda: None)
    mesh, pins = init_device_mesh("cpu", (2,)), {"pp": 2, "microbatches": 2}
    plan = autoparallel(copy.deepcopy(model), mesh, ((), batch), progress=False, pins=pins).plan
    held: list[Any] = [None, None]
    runs = []
    for _ in range(2):
        parallel = autoparallel(copy.deepcopy(model), mesh, ((), batch), progress=False, plan=plan)
        dist.all_gather_object(held, [name for name, _ in parallel.named_parameters()])
        trained = set(held[0]) - set(held[1])
        for name, p in parallel.named_parameters():
            p.requires_grad_(name in trained)
        mine = {name: p for name, p in parallel.named_parameters() if p.requires_grad}
        assert set(mine) == (set() if rank else trained)
        assert NOTHING not in parallel.state_dict()
        runs.append((parallel, adamw(list(mine.values())), schedule, batch))
    first, again = runs
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    single = model, adamw([p for p in model.parameters() if p.requires_grad]), schedule, batch
    torch.testing.assert_close(go_on(*first, 2), go_on(*single, 2), rtol=1e-5, atol=1e-6)
    first[0].save(folder, first[1])
    again[0].load(folder, again[1])
    wanted = go_on(*single, 2)
    for run in runs:
        torch.testing.assert_close(go_on(*run, 2), wanted, rtol=1e-5, atol=1e-6)


def test_a_stage_of_frozen_layers_alone(pool: Callable[[int], Any], tmp_path: Path) -> None:
    """Frozen after the build: an optimizer can be made on every rank, and goes on after saving."""
    pool(2).run(tuned, str(tmp_path / "checkpoint"))


def test_state_dicts_as_torch_has_them(pool: Callable[[int], Any], tmp_path: Path) -> None:
    """``optimizer.state_dict()`` and DCP's ``get_state_dict`` work as with FSDP2."""
    pool(2).run(as_with_torch, str(tmp_path))
