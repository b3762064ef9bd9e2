"""``eval()`` where it is another graph than training: what runs is the model's own, from the weights as they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.api import autoparallel
from meshwright.errors import InputError, RunError
from meshwright.exported import load
from tests.equality import captured_once

W = 8


class _DropPath(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape[0], 1, 1) < 0.5) / 0.5 if self.training else x


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.path = nn.LayerNorm(W), nn.Linear(W, 16), nn.Linear(16, W), _DropPath()
        self.attention = nn.MultiheadAttention(W, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.path(self.attention(x, x, x, need_weights=False)[0])
        return x + self.path(self.down(F.gelu(self.up(self.norm(x)))))


class _Net(nn.Module):
    """Stochastic depth and a loss in training alone; a head, an output and a buffer's update in evaluation alone; something
    else without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(), _Block())
        self.head, self.extra = nn.Linear(W, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.blocks(x) * self.scale
        out = self.head(h) if torch.is_grad_enabled() else self.head(h) * 2
        if self.training:
            return {"loss": F.mse_loss(out, y) + 0.1 * h.square().mean(), "out": out}
        out = self.extra(out)
        self.seen += out.mean((0, 1))
        return {"loss": F.mse_loss(out, y), "out": out, "all": self.seen * 2 + self.extra.weight.sum(0)}


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(8, 6, W, generator=generator), "y": torch.randn(8, 6, 5, generator=generator)}


def _whole(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in outputs.items()}


def _same(parallel: nn.Module, single: nn.Module) -> None:
    """Two calls, and the buffers after them."""
    for module in (parallel, single):
        module.eval()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(_whole(parallel(**_batch())), single(**_batch()), rtol=1e-5, atol=1e-6)
    state = parallel.full_state_dict()
    if torch.distributed.get_rank() == 0:
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=1e-5, atol=1e-6)


def _followed(pins: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """The module and the model it is of, after it was evaluated, trained, evaluated and copied."""
    torch.manual_seed(0)
    model = _Net()
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallel = autoparallel(model, mesh, ((), _batch()), pins=pins, progress=False)
    _same(parallel, single)
    with pytest.raises(RunError, match=r"call parallel.train\(\)"):
        parallel(**_batch())["loss"].backward()
    single(**_batch())
    parallel.train()
    parallel(**_batch())["loss"].backward()
    torch.optim.SGD(parallel.parameters(), 0.1).step()
    held = [parallel.full_state_dict()]
    torch.distributed.broadcast_object_list(held, 0)
    single.load_state_dict(held[0])
    _same(parallel, single)
    _same(copy.deepcopy(parallel), single)
    return parallel, model


def _other_graph(rank: int, several: list[dict[str, Any]]) -> None:
    with captured_once("another graph in eval"):
        for pins in several:
            parallel, model = _followed(pins)
    if torch.distributed.get_rank() == 1:  # what one rank notices every rank raises
        model.blocks[0].path = nn.Identity()
    with pytest.raises((InputError, RunError), match="was added, removed or replaced"):
        parallel(**_batch())


TWO = [{"dp": 2, "tp": 1, "zero": 1, "microbatches": 2, "recompute": "full"},
       {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2, "schedule": "1f1b"}]
FOUR = [{"dp": 2, "tp": 2, "zero": 3}]


@pytest.mark.parametrize(("world", "pins"), [(2, TWO), (4, FOUR)])
def test_another_graph_in_eval(pool: Callable[[int], Any], world: int, pins: list[dict[str, Any]]) -> None:
    """From weights that ZeRO, tensor parallelism and stages have spread; it updates what evaluation updates, has no gradient,
    follows the weights as they are trained, and copies have it too; a model that one rank changed is refused on all."""
    pool(world).run(_other_graph, pins)


class _Normed(nn.Module):
    """A batch norm that stays in eval(), and a dropout that does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(W, W), nn.Sequential(nn.BatchNorm1d(W), nn.Dropout(0.5)), nn.Linear(W, W)])
        self.layers[1].eval()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def _rest(module: nn.Module) -> nn.Module:
    """What loops that keep batch norms and dropouts out of training do in every epoch."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.Dropout) or part is module.layers[1]:
            part.eval()
    return module


def _by_sub_module(rank: int, several: list[dict[str, Any]], folder: str) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), torch.linspace(-1, 1, 8 * W).view(8, W)
    for pins in several:
        torch.manual_seed(0)
        single = _Normed()
        parallel = autoparallel(single, mesh, ({"x": x}), pins=pins, progress=False)
        want = _rest(single)(x)["loss"].item()
        parallel.export(f"{folder}/{len(pins)}")
        for found in (parallel, copy.deepcopy(parallel), _rest(parallel)):
            assert abs(found(x)["loss"].item() - want) < 1e-6
            assert not found.layers[1].training
        for other in (parallel, copy.deepcopy(parallel), load(f"{folder}/{len(pins)}", mesh)):
            other.train()  # as in one process: now the batch norm is in training too
            with pytest.raises(RunError, match=r"sub-module 'layers.1.*' is in train\(\)"):
                other(x)
            other.get_submodule("layers.1").eval()
            if other is not parallel:
                other.get_submodule("layers.1.0").train(rank == 0)  # on one rank only
                with pytest.raises((InputError, RunError), match=r"sub-module 'layers.1.0' is in train\(\)"):
                    other(x)
        parallel.eval()
        for part in parallel.modules():  # draws in evaluation
            if isinstance(part, nn.Dropout):
                part.train()
        with pytest.raises(RunError, match=r"sub-module 'layers.1.1' is in train\(\) while the parallel module is in eval"):
            parallel(x)
        with pytest.raises(RunError, match="holds the tensors of a BatchNorm1d"):
            parallel.layers[1][0].reset_running_stats()
        with pytest.raises(RunError, match=r"reset_parameters\(\) of sub-module"):
            hasattr(parallel.layers[1][0], "reset_parameters")
        assert not hasattr(parallel.layers[1], "p")
        assert isinstance(parallel.layers, nn.ModuleList)
        assert [len(parallel.layers), len(list(parallel.layers[1]))] == [3, 2]


def test_sub_modules_have_modes_of_their_own(pool: Callable[[int], Any], tmp_path: Path) -> None:
    pool(2).run(_by_sub_module, [{"dp": 2, "zero": 3}, {"pp": 2, "dp": 1, "tp": 1, "microbatches": 1}], str(tmp_path))


class _NormsRest(nn.Module):
    """Keeps its norm in eval() whatever the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(W, W), nn.BatchNorm1d(W)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inside(x))


class _AlwaysOn(nn.Dropout):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(True)


class _Stubborn(nn.Module):
    """What eval() does not switch off. A dropout of everything shows whether it is on, and draws nothing that could differ."""

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.drop, self.plain = _NormsRest(), _AlwaysOn(1.0), nn.BatchNorm1d(W, track_running_stats=False)
        self.register_buffer("mean", torch.zeros(W))
        self.register_buffer("var", torch.ones(W))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.plain(self.rest(x))
        h = h + self.drop(h) + 2 * F.dropout(h, 1.0) + F.instance_norm(h[:, None])[:, 0]
        h = F.batch_norm(h * 3, self.mean, self.var, training=True)
        return {"loss": h.square().sum(), "out": h}


def _stubborn(rank: int, several: list[dict[str, Any]]) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), torch.linspace(-1, 1, 8 * W).view(8, W).sin()
    for built_in_eval in (False, True):
        for pins in several:
            torch.manual_seed(0)
            model = _Stubborn().double().train(not built_in_eval)
            parallel = autoparallel(model, mesh, ({"x": x.double()}), pins=pins, progress=False)
            single = copy.deepcopy(model)
            for module in (single, parallel):
                module.train()
            for training in (True, False, False, True):
                found, wanted = (module.train(training)(x.double()) for module in (parallel, single))
                torch.testing.assert_close(_whole(found)["out"], wanted["out"])
                if training:
                    for module, result in ((single, wanted), (parallel, found)):
                        result["loss"].backward()
                        torch.optim.SGD(module.parameters(), 0.1).step()
            state = parallel.full_state_dict()
            if rank == 0:
                torch.testing.assert_close(state, dict(single.state_dict()))


def test_what_eval_does_not_switch_off(pool: Callable[[int], Any]) -> None:
    """Modules whose train() keeps parts in eval(), or themselves in training; norms of the batch's own statistics; functions
    that are always told to train."""
    pool(2).run(_stubborn, [{"dp": 2, "zero": 3, "recompute": "full"}, {"tp": 2}])


class Walks(nn.Module):
    """Calls a module three times, in an order that each process has for itself, as one that walks a set does; eval() computes
    something else."""

    def __init__(self, order: tuple[float, ...]) -> None:
        super().__init__()
        self.inside, self.order = nn.Linear(8, 8), order

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = {size: self.inside(x * size) for size in self.order}
        one, two, three = (y if self.training else y.cumsum(-1) for _, y in sorted(made.items(), key=lambda item: item[0]))
        return {"loss": (one - two.tanh() * three).square().mean(), "one": one}


def _evaluated(rank: int, operators: dict[str, str]) -> list[float]:
    x = torch.arange(32.0).view(4, 8) / 10
    torch.manual_seed(0)
    model = Walks((1.0, 2.0, 3.0)[::1 - 2 * rank])
    parallel: Any = autoparallel(model, init_device_mesh("cpu", (2,)), ((), {"x": x}), progress=False,
                                 pins={"axes": {"x": 2}, "zero": 0, "operators": operators})
    parallel.eval()
    return [float(parallel(x=x)["loss"]), float(model.eval()(x=x)["loss"])]


@pytest.mark.parametrize("operators", [
    {"inside*:*": "x=n"}, {"inside:*": "x=n", "inside@1:*": "x=b0", "inside@2:*": ""},
], ids=["alike", "each its own way"])
def test_eval_is_right_whatever_order_each_process_walks_in(pool: Callable[[int], Any], operators: dict[str, str]) -> None:
    """What ranks exchange is of the same call."""
    for found, alone in pool(2).run(_evaluated, operators):
        assert found == pytest.approx(alone)
